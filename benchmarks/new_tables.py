"""What a person gets who changes nothing, on 98 tables that were looked at afterwards.

    python benchmarks/new_tables.py FOLDER [--methods deep-ensemble,laplace] [--part 0/2]
                                           [--out benchmarks/results/new_tables]

FOLDER is what `table_sets.py` made. Each table is cut into fifths, and fitted as in `defaults.py`,
whose cells these are. Each table and method is a JSON file in --out; all that are there are added
to the file --out.json (what is there already is not run again), of which the page is made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import defaults
import numpy as np
import torch
from defaults import OURS, Table

OF_NUMBERS = (
    "method", "tables", "90 % intervals hold, mean", "below 0.87 by two errors",
    "above 0.93 by two errors", "log-likelihood over linear's, median", "above linear",
    "status not ok",
)  # fmt: skip
OF_CLASSES = (
    "method", "tables", "log-likelihood, median", "ECE, mean (by chance alone)", "ECE above 0.05",
    "and its interval above 0", "status not ok",
)  # fmt: skip


def read(file: Path) -> Table:
    found = np.load(file)
    x, y = found["x"], found["y"]
    order = np.random.default_rng(0).permutation(len(y))
    test = [order[k::5] for k in range(5)]
    classes = int(y.max()) + 1 if y.dtype.kind == "i" else 0
    return Table(x, y, [np.setdiff1d(order, rows) for rows in test], test, classes)


def cell(file: Path, method: str) -> dict[str, Any] | None:
    table = read(file)
    if method == "hist-boosting":
        return defaults.peer(table, defaults.hist_boosting)
    if method == "linear" and table.classes:
        return None
    shape = {"columns": table.x.shape[1], "rows_in_all": len(table.y)}
    return defaults.ours(table, method) | shape


def page(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """The two tables of `defaults.py`, and before them what they say together."""
    names = sorted({name for name, _ in cells}, key=str.lower)
    numbers = [n for n in names if "coverage" in cells[n, "deep-ensemble"]]
    classes = [n for n in names if n not in numbers]
    lines = ["| " + " | ".join(OF_NUMBERS) + " |", "|" + "---|" * len(OF_NUMBERS)]
    for method in (*OURS, "hist-boosting"):
        own = [(cells[n, method], cells[n, "linear"]) for n in numbers if (n, method) in cells]
        if not own:
            continue
        held = np.array([one["coverage"] for one, _ in own])
        error = 2 * np.sqrt(held * (1 - held) / np.array([one["rows"] for one, _ in own]))
        over = np.array([one["log_prob"] - other["log_prob"] for one, other in own])
        lines.append(
            f"| {method} | {len(own)} | {held.mean():.3f} | {(held < 0.87 - error).sum()} | "
            f"{(held > 0.93 + error).sum()} | {np.median(over):+.3f} | {(over > 0).sum()} | "
            f"{_said([one for one, _ in own])} |"
        )
    lines += ["", "| " + " | ".join(OF_CLASSES) + " |", "|" + "---|" * len(OF_CLASSES)]
    for method in (*OURS, "hist-boosting"):
        found = [cells[n, method] for n in classes if (n, method) in cells]
        if not found:
            continue
        ece, chance = (np.array([one[k] for one in found]) for k in ("ece", "ece_by_chance"))
        low = np.array([one["ece_interval"][0] for one in found])
        scores = [one["log_prob"] for one in found]
        lines.append(
            f"| {method} | {len(found)} | {np.median(scores):.3f} | {ece.mean():.3f} "
            f"({chance.mean():.3f}) | {(ece > 0.05).sum()} | {((ece > 0.05) & (low > 0)).sum()} | "
            f"{_said(found)} |"
        )
    both = [defaults.shown(cells, numbers, True), defaults.shown(cells, classes, False)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(both) + "\n"


def _said(found: list[dict[str, Any]]) -> str:
    status = [s for one in found for s in one.get("status", [])]
    return f"{sum(s != 'ok' for s in status)} of {len(status)}" if status else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", default=",".join((*OURS, "hist-boosting")))
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/new_tables"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, asked.part.split("/"))
    known = collected(asked.out)
    for file in sorted(asked.folder.glob("*.npz"))[part::parts]:
        for method in asked.methods.split(","):
            found = None if (file.stem, method) in known else cell(file, method)
            if found is not None:
                (asked.out / f"{file.stem}+{method}.json").write_text(json.dumps(found) + "\n")
                print(file.stem, method, json.dumps(found), flush=True)
    print(page(collected(asked.out)))


def collected(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """All cells, those of the folder in place of those of the file: also written to the file."""
    file = out.with_suffix(".json")
    found = json.loads(file.read_text()) if file.exists() else {}
    found |= {cell.stem: json.loads(cell.read_text()) for cell in out.glob("*.json")}
    file.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")
    return {tuple(name.split("+")): one for name, one in found.items()}


if __name__ == "__main__":
    main()
