"""Every method with every default, on tables that no rule was settled on.

    python benchmarks/default_methods.py [--tables diabetes,wine] [--methods fbnn,vip] [--splits 5]
        [--processes 16] [--minutes 8] [--out benchmarks/results/default_methods]

Numbers: scikit-learn's diabetes (342 rows of 442), and Friedman's three simulated functions with
their usual noise (1991; 200 rows, and 1,000 to test on). Classes: breast cancer and wine, four
rows of five. `doxa.nets.mlp` of 50 hidden units where a method takes a network. A split has its own
seed, for the rows and the fit. Each table, method and split is a JSON file in --out; all that are
there are added to the file --out.json (what is there already is not run again), of which the page
--out.md is made.

Real tables are read from scikit-learn, or, where it is not installed, from the file --real, which
`--real FILE --tables none` writes where it is.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import doxa
from doxa import evaluate
from doxa.registry import get_method

LEVEL = 0.9
ROWS, TEST = 200, 1000
NOISE = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}
REAL = ("diabetes", "breast_cancer", "wine")
NUMBERS = ("diabetes", *NOISE)
CLASSES = ("breast_cancer", "wine")
LONG = ("hmc", "nuts", "metropolis", "minibatch-mh")  # they come last


HEAD = """# Every method, every default

`python benchmarks/default_methods.py`: what a person gets who changes nothing. Numbers: scikit-
learn's diabetes (342 rows to learn from) and Friedman's three functions (200 rows; noise of 1,
125 and 0.1). Classes: breast cancer (455 rows) and wine (142). Networks are `doxa.nets.mlp` of 50
hidden units. Mean over splits ± its standard error; how much of the test rows 90 % intervals
hold, or the calibration error (on 114 and 36 test rows: much of it is chance); and what the
status said. On Friedman's functions the true noise has log-likelihoods of -1.42, -6.25 and 0.88.

"""

Results = dict[str, dict[str, Any]]  # of "table-method-split"


class Table(NamedTuple):
    x: Any
    y: Any
    test_x: Any
    test_y: Any
    classes: int  # 0: a number


def friedman(name: str, rows: int, rng: Any) -> tuple[Any, Any]:
    """Friedman (1991), eqs. 61 to 63; five columns of the first function do nothing."""
    if name == "friedman1":
        x = rng.uniform(size=(rows, 10))
        f = 10 * np.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        f = f + 10 * x[:, 3] + 5 * x[:, 4]
    else:
        low, high = np.array([0, 40 * math.pi, 0, 1]), np.array([100, 560 * math.pi, 1, 11])
        x = rng.uniform(low, high, size=(rows, 4))
        part = x[:, 1] * x[:, 2] - 1 / (x[:, 1] * x[:, 3])
        f = np.hypot(x[:, 0], part) if name == "friedman2" else np.arctan(part / x[:, 0])
    return x, f + NOISE[name] * rng.standard_normal(rows)


def real(name: str, file: Path) -> tuple[Any, Any]:
    try:
        import sklearn.datasets as found
    except ImportError:
        kept = np.load(file)
        return kept[f"{name}_x"], kept[f"{name}_y"]
    return getattr(found, f"load_{name}")(return_X_y=True)  # type: ignore[no-any-return]


def table(name: str, split: int, file: Path) -> Table:
    rng = np.random.default_rng(split)
    if name in NOISE:
        x, y = friedman(name, ROWS + TEST, rng)
        return Table(x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], 0)
    x, y = real(name, file)
    order = rng.permutation(len(y))
    cut = 342 if name == "diabetes" else len(y) * 4 // 5
    classes = 0 if name in NUMBERS else int(y.max()) + 1
    return Table(x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]], classes)


def cell(name: str, method: str, split: int, file: Path) -> dict[str, Any]:
    x, y, test_x, test_y, classes = table(name, split, file)
    net = None
    if get_method(method).needs_network:
        net = doxa.nets.mlp(x.shape[1], classes or 1, (50,))
    x, test_x = x.astype(np.float32), test_x.astype(np.float32)
    y = y.astype(int) if classes else y.astype(np.float32)[:, None]
    start = time.process_time()
    posterior = doxa.fit(
        net, (x, y), method, standardize=True, seed=split, progress=False,
        likelihood="categorical" if classes else None,  # what numbers are is said by nobody
    )  # fmt: skip
    found = {"seconds": time.process_time() - start, "status": str(posterior.status)}
    p = posterior.predict(test_x)
    truth = torch.as_tensor(test_y.astype(int) if classes else test_y.astype(np.float32)[:, None])
    found |= {"log_prob": float(p.log_prob(truth).mean()), "rows": len(truth)}
    if classes:
        right = p.probs.argmax(1) == truth
        return found | {"accuracy": float(right.double().mean()), "ece": evaluate.ece(p, truth)}
    low, high = p.interval(LEVEL)
    truth = truth.reshape(low.shape)
    inside = ((truth >= low) & (truth <= high)).double().mean()
    return found | {"coverage": float(inside), "held_out": _held_out(posterior)}


def _held_out(posterior: Any) -> float | None:
    """What the fit itself saw its intervals hold."""
    found = posterior.diagnostics.get("held_out", {}).get("coverage")
    return None if found is None else float(found)


def work(cells: Any, until: float, out: Path, file: Path) -> None:
    """Take cells until there are none, or no time."""
    torch.set_num_threads(1)
    while time.time() < until:
        asked = cells.get()
        if asked is None:
            return
        name, method, split = asked
        try:
            found = cell(name, method, split, file)
        except Exception as error:  # a method that fails is a finding
            found = {"error": f"{type(error).__name__}: {error}"}
        if "MissingExtra" in found.get("error", ""):
            continue
        (out / f"{name}-{method}-{split}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, method, split, json.dumps(found), flush=True)


def collected(out: Path) -> Results:
    """All cells, those of the folder in place of those of the file: also written to the file."""
    file = out.with_suffix(".json")
    found = json.loads(file.read_text()) if file.exists() else {}
    found |= {cell.stem: json.loads(cell.read_text()) for cell in out.glob("*.json")}
    file.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")
    return found


def page(found: Results) -> str:
    """Two tables, of numbers and of classes, means over splits."""
    texts = []
    for names, share, word in (
        (NUMBERS, "coverage", "90 % hold"), (CLASSES, "ece", "ECE")
    ):  # fmt: skip
        head = ["method"]
        for name in names:
            head += [f"{name}: log-likelihood", word, "status"]
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in doxa.methods():
            parts = [_summary(found, name, row.name, share) for name in names]
            if any(parts):
                each = [text for part in parts for text in part or ("", "", "")]
                lines.append("| " + " | ".join([row.name, *each]) + " |")
        texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _summary(cells: Results, name: str, method: str, share: str) -> tuple[str, str, str] | None:
    found = [cells[key] for key in (f"{name}-{method}-{k}" for k in range(10)) if key in cells]
    if not found:
        return None
    fine = [one for one in found if "error" not in one]
    said = [one.get("status", "error") for one in found]
    counts = ", ".join(f"{said.count(s)} {s}" for s in dict.fromkeys(said))
    if not fine:
        return "", "", counts
    score = np.array([one["log_prob"] for one in fine])
    said_score = f"{score.mean():.3f}"
    if len(score) > 1:
        said_score += f" ± {score.std(ddof=1) / math.sqrt(len(score)):.3f}"
    return said_score, f"{np.mean([one[share] for one in fine]):.2f}", counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(NUMBERS + CLASSES))
    parser.add_argument("--methods", default="")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first split")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--real", type=Path, default=Path("tables.npz"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/default_methods"))
    asked = parser.parse_args()
    until = time.time() + 60 * asked.minutes
    if asked.tables == "none":
        both = {f"{n}_{k}": v for n in REAL for k, v in zip("xy", real(n, asked.real), strict=True)}
        np.savez_compressed(asked.real, **both)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = asked.methods.split(",") if asked.methods else [r.name for r in doxa.methods()]
    tables = asked.tables.split(",")
    done = collected(asked.out)
    context = multiprocessing.get_context("spawn")
    cells: Any = context.Queue()
    rows = [row for row in doxa.methods() if row.name in wanted]
    order = [(row, split) for split in range(asked.first, asked.splits) for row in rows]
    for row, split in sorted(order, key=lambda one: one[0].name in LONG):
        for name in tables:
            kind = "regression" if name in NUMBERS else "classification"
            if kind in row.tasks and f"{name}-{row.name}-{split}" not in done:
                cells.put((name, row.name, split))
    workers = [
        context.Process(target=work, args=(cells, until, asked.out, asked.real))
        for _ in range(asked.processes)
    ]
    for worker in workers:
        cells.put(None)
        worker.start()
    for worker in workers:
        worker.join(max(0.0, until - time.time()))
        if worker.is_alive():
            worker.terminate()
    text, file = page(collected(asked.out)), asked.out.with_suffix(".md")
    above = file.read_text().split("| method |")[0] if file.exists() else HEAD  # notes stay
    file.write_text(above + text + "\n")
    print(text)


if __name__ == "__main__":
    main()
