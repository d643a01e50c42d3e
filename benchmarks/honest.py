"""Are reported scores those of new rows? Simulated tables of 60, 100 and 300 rows.

    python -m benchmarks.honest [--tables 33] [--methods deep-ensemble,mc-dropout] [--quick]
        [--table]

A fit reports its mean score and the coverage of its 90 % intervals, estimated by held-out rows
(`posterior.diagnostics["held_out"]`). Here both are compared with those of the posterior that is
returned, on 2,000 new rows of the same process. The tables are `few_rows.simulated`'s: a line and
an additive curve (numbers), and two classes; six columns, every default.

The result is the mean of reported − true with its 95 % interval, over tables, and the share of
tables whose difference is within two reported standard errors. Each fit is added to
benchmarks/results/honest.jsonl as soon as it is known, so that a run can be continued. --quick: one
table of 60 rows of each kind. --table: only the tables.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.few_rows import NEW, RESULTS, fitted, new_scores, simulated
from doxa.app.bench import Store

METHODS = ("deep-ensemble", "mc-dropout")
TARGETS = ("linear", "curve", "classes")
ROWS = (60, 100, 300)
FIRST_SEED = 1000  # other tables than those of `few_rows`


def one(target: str, rows: int, method: str, seed: int) -> dict[str, Any]:
    table = simulated(target, rows, FIRST_SEED + seed)
    posterior = fitted(table, method, seed)
    return {
        "status": str(posterior.status), "true": new_scores(posterior, table),
        "reported": dict(posterior.diagnostics["held_out"]),
    }  # fmt: skip


def _interval(values: list[float], unit: float) -> str:
    each = unit * np.array(values)
    half = 1.96 * each.std(ddof=1) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return f"{each.mean():+.3f} ± {half:.3f}" if unit == 1 else f"{each.mean():+.1f} ± {half:.1f}"


def page(cells: list[dict[str, Any]]) -> str:
    head = (
        "method", "kind", "rows", "tables", "score, nats per row", "coverage, points",
        "score within 2 standard errors", "coverage within 2",
    )  # fmt: skip
    lines = [
        "# Are reported scores those of new rows?", "",
        "`python -m benchmarks.honest`: the mean of reported − true with its 95 % interval over "
        f"tables; true is on {NEW:,}", "new rows, for the posterior that is returned. Last: how "
        "many of the differences are within two reported", "standard errors.", "",
        "| " + " | ".join(head) + " |", "|" + "---|" * len(head),
    ]  # fmt: skip
    for method in dict.fromkeys(cell["method"] for cell in cells):
        for kind in ("numbers", "classes"):
            for rows in ROWS:
                own = [
                    c for c in cells
                    if c["method"] == method and c["rows"] == rows
                    and (c["target"] == "classes") == (kind == "classes")
                ]  # fmt: skip
                if own:
                    lines.append(_line(method, kind, rows, own))
    return "\n".join(lines) + "\n"


def _line(method: str, kind: str, rows: int, own: list[dict[str, Any]]) -> str:
    entries = [method, kind, str(rows), str(len(own))]
    within = []
    for name, unit in (("log_prob", 1), ("coverage", 100)):
        if name not in own[0]["true"]:
            entries.append("")
            within.append("")
            continue
        away = [c["reported"][name] - c["true"][name] for c in own]
        errors = [c["reported"][f"{name}_error"] for c in own]
        entries.append(_interval(away, unit))
        inside = np.mean([abs(a) <= 2 * e for a, e in zip(away, errors, strict=True)])
        within.append(f"{inside:.0%}")
    return "| " + " | ".join([*entries, *within]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", type=int, default=33, help="of each target and number of rows")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS / "honest.jsonl")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    logging.getLogger("doxa").setLevel(logging.ERROR)
    store = Store(args.out)
    for seed in range(0 if args.table else 1 if args.quick else args.tables):
        for method in args.methods.split(","):
            for rows in (60,) if args.quick else ROWS:
                for target in TARGETS:
                    key = {"rows": rows, "target": target, "method": method, "seed": seed}
                    store.cell(key, lambda: one(target, rows, method, seed))  # noqa: B023
        print(f"table {seed}", flush=True)
    text = page([{**cell["key"], **cell["result"]} for cell in store.cells()])
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
