"""Results of the default settings of every method, on three collections of tables.

    DOXA_DATA=... python -m benchmarks.defaults sets [--sets yacht,banana] [--methods laplace]
        [--splits 5]
    python -m benchmarks.defaults new FOLDER [--methods deep-ensemble,laplace] [--part 0/2]
    python -m benchmarks.defaults methods [--tables diabetes,wine] [--methods fbnn,vip]
        [--splits 5] [--processes 16] [--minutes 8]

`sets`: the nine UCI sets by their own splits, the classification tables by five-fold
cross-validation, and `doxa.nets.mlp` of 50 hidden units, which is what `doxa fit` takes. Nothing is
chosen for a set. The table has the mean log-likelihood (± its standard error over splits), the
share of test rows inside 90 % intervals, or the accuracy and calibration error over all test
rows, seconds of processor per split on one thread, and how many splits ended with which status.
Peers: NGBoost (if it is installed), and scikit-learn's histogram boosting, whose Gaussian noise is
the mean squared error of five-fold cross-validation on the training rows.

`new`: the same methods on 98 tables that were looked at afterwards; FOLDER is what `python -m
benchmarks.table_sets FOLDER` made. Each table is cut into fifths.

`methods`: every method, on tables that no rule was settled on. Numbers: scikit-learn's diabetes
(342 rows of 442), and Friedman's three simulated functions with their usual noise (1991; 200 rows,
and 1,000 to test on). Classes: breast cancer and wine, four rows of five. A split has its own seed,
for the rows and the fit. Real tables are read from scikit-learn, or, where it is not installed,
from the file --real, which `--real FILE --tables none` writes where it is.

Each cell is added to the file --out (benchmarks/results/defaults.jsonl, new_tables.jsonl,
default_methods.jsonl) as soon as it is known, so that a run can be continued and several can write
to it; the table is made of all that are there and printed, that of `methods` also to a page beside
the file.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import doxa
from doxa import evaluate
from doxa.app.bench import Store
from doxa.registry import get_method

RESULTS = Path(__file__).parent / "results"
REGRESSION = ("boston_housing", "concrete", "energy", "kin8nm", "naval_propulsion", "power_plant",
              "protein", "wine_quality_red", "yacht")  # fmt: skip
CLASSES = ("australian_credit", "banana", "german_credit", "heart_statlog", "pima_diabetes")
OURS = ("linear", "deep-ensemble", "mc-dropout", "laplace", "mean-field")
PEERS = ("ngboost", "hist-boosting")
LEVEL = 0.9
WIDTH = 1.6448536269514722  # of the 90 % interval of a normal, in standard deviations

# of `methods`
ROWS, TEST = 200, 1000
NOISE = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}
REAL = ("diabetes", "breast_cancer", "wine")
METHOD_NUMBERS = ("diabetes", *NOISE)
METHOD_CLASSES = ("breast_cancer", "wine")
LONG = ("hmc", "nuts", "metropolis", "minibatch-mh")  # they come last
HEAD = """# Every method, every default

`python -m benchmarks.defaults methods`: what a person gets who changes nothing. Numbers: scikit-
learn's diabetes (342 rows to learn from) and Friedman's three functions (200 rows; noise of 1,
125 and 0.1). Classes: breast cancer (455 rows) and wine (142). Networks are `doxa.nets.mlp` of 50
hidden units. Mean over splits ± its standard error; how much of the test rows 90 % intervals
hold, or the calibration error (on 114 and 36 test rows: much of it is chance); and the status.
On Friedman's functions the true noise has log-likelihoods of -1.42, -6.25 and 0.88.

"""

OF_NUMBERS = (
    "method", "tables", "90 % intervals hold, mean", "below 0.87 by two errors",
    "above 0.93 by two errors", "log-likelihood over linear's, median", "above linear",
    "status not ok",
)  # fmt: skip
OF_CLASSES = (
    "method", "tables", "log-likelihood, median", "ECE, mean (by chance alone)", "ECE above 0.05",
    "and its interval above 0", "status not ok",
)  # fmt: skip

Result = dict[str, Any]
Cells = Mapping[tuple[str, str], Result]  # of (table, method)
SplitCells = Mapping[tuple[str, str, int], Result]  # of (table, method, split)


class Table(NamedTuple):
    x: Any
    y: Any
    train: Sequence[Any]
    test: Sequence[Any]
    classes: int  # 0: a number


class Normal(NamedTuple):
    """What a peer says of the test rows."""

    mean: Any
    std: Any

    def score(self, y: Any) -> tuple[Any, Any]:
        """log p and whether the interval holds y, of each row."""
        z = (y - self.mean) / self.std
        return -0.5 * z**2 - np.log(self.std) - 0.5 * math.log(2 * math.pi), np.abs(z) <= WIDTH


def read(name: str, splits: int) -> Table:
    folder = Path(os.environ["DOXA_DATA"])
    if name in REGRESSION:
        found = np.load(folder / "uci" / f"{name}.npz")
        train, test = (list(found[k][:splits]) for k in ("train_index", "test_index"))
        return Table(found["X"], found["y"], train, test, 0)
    found = np.load(folder / "tabular" / f"{name}.npz")
    order = np.random.default_rng(0).permutation(len(found["y"]))
    test = [order[k::5] for k in range(5)][:splits]
    train = [np.setdiff1d(order, rows) for rows in test]
    y = found["y"].astype(int)
    return Table(found["X"], y, train, test, int(y.max()) + 1)


def ours(table: Table, method: str) -> Result:
    x = table.x.astype(np.float32)
    y = table.y if table.classes else table.y.astype(np.float32)
    net = doxa.nets.mlp(x.shape[1], table.classes or 1, (50,))
    start = time.process_time()
    sweep = doxa.fit(
        None if method == "linear" else net, (x, y), method, standardize=True, progress=False,
        likelihood="categorical" if table.classes else None,  # of numbers: the default
        runs=doxa.Runs(rows=table.train),
    )  # fmt: skip
    seconds = (time.process_time() - start) / len(table.train)
    scores, held, probs = [], [], []
    for posterior, rows in zip(sweep, table.test, strict=True):
        p = posterior.predict(x[rows])
        truth = torch.as_tensor(table.y[rows])
        if table.classes:
            scores.append(p.log_prob(truth).double().numpy())
            probs.append(p.probs.double().numpy())
        else:
            truth = truth.reshape(p.mean.shape)
            low, high = p.interval(LEVEL)
            scores.append(p.log_prob(truth).double().numpy())
            held.append(((truth >= low) & (truth <= high)).numpy().ravel())
    statuses = [str(posterior.status) for posterior in sweep]
    return summary(table, scores, held, probs) | {"seconds": seconds, "status": statuses}


def summary(table: Table, scores: Any, held: Any, probs: Any) -> Result:
    each = [float(np.mean(s)) for s in scores]
    error = float(np.std(each, ddof=1) / math.sqrt(len(each))) if len(each) > 1 else 0.0
    found: Result = {"log_prob": float(np.mean(each)), "log_prob_error": error}
    if table.classes:
        y = torch.as_tensor(np.concatenate([table.y[rows] for rows in table.test]))
        p = doxa.Predictive.from_probs(torch.as_tensor(np.concatenate(probs)))
        ece, chance = evaluate.ece(p, y), _chance(p, y)
        debiased, interval = evaluate.ece(p, y, "debiased"), evaluate.ece_interval(p, y)
        return found | {"ece": ece, "ece_by_chance": chance, "ece_debiased": debiased,
                        "ece_interval": [interval.low, interval.high], "rows": len(y),
                        "accuracy": float((p.probs.argmax(1) == y).double().mean())}  # fmt: skip
    inside = np.concatenate(held)
    return found | {"coverage": float(inside.mean()), "rows": len(inside)}


def _chance(p: Any, y: Any) -> float:
    """The ECE of these probabilities if they were right: the mean over 200 draws of y."""
    g = torch.Generator().manual_seed(0)
    drawn = (torch.multinomial(p.probs, 1, generator=g)[:, 0] for _ in range(200))
    return float(np.mean([evaluate.ece(p, one) for one in drawn]))


def peer(table: Table, fit: Callable[..., Any]) -> Result:
    start = time.process_time()
    answers = [
        fit(table.x[a], table.y[a], table.x[b], table.classes)
        for a, b in zip(table.train, table.test, strict=True)
    ]
    seconds = (time.process_time() - start) / len(answers)
    scores, held, probs = [], [], []
    for answer, rows in zip(answers, table.test, strict=True):
        y = table.y[rows]
        if table.classes:
            probs.append(answer)
            scores.append(np.log(np.clip(answer[np.arange(len(y)), y], 1e-15, None)))
        else:
            score, inside = answer.score(y)
            scores.append(score)
            held.append(inside)
    return summary(table, scores, held, probs) | {"seconds": seconds}


def hist_boosting(x: Any, y: Any, new: Any, classes: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    if classes:
        return HistGradientBoostingClassifier(random_state=0).fit(x, y).predict_proba(new)
    model = HistGradientBoostingRegressor(random_state=0)
    noise = np.sqrt(np.mean((cross_val_predict(model, x, y, cv=5) - y) ** 2))
    mean = model.fit(x, y).predict(new)
    return Normal(mean, np.full(len(new), noise))


def ngboost(x: Any, y: Any, new: Any, classes: int) -> Any:
    from ngboost import NGBClassifier, NGBRegressor

    if classes:
        return NGBClassifier(random_state=0, verbose=False).fit(x, y).predict_proba(new)
    found = NGBRegressor(random_state=0, verbose=False).fit(x, y).pred_dist(new)
    return Normal(found.params["loc"], found.params["scale"])


def set_cell(name: str, method: str, splits: int) -> Result | None:
    table = read(name, splits)
    if method == "ngboost":
        try:
            return peer(table, ngboost)
        except ImportError:
            print("ngboost is not installed: skipped")
            return None
    if method == "hist-boosting":
        return peer(table, hist_boosting)
    if method == "linear" and table.classes:
        return None
    return ours(table, method)


def shown(found: Cells, names: Sequence[str], regression: bool) -> str:
    columns = [
        "set",
        "method",
        "log-likelihood",
        "90 % intervals hold" if regression else "accuracy",
    ]
    columns += [] if regression else ["ECE (by chance alone)", "95 % interval", "debiased"]
    columns += ["seconds", "status"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name in names:
        for method in (*OURS, *PEERS):
            one = found.get((name, method))
            if one is None:
                continue
            share = one["coverage"] if regression else one["accuracy"]
            error = math.sqrt(share * (1 - share) / one["rows"])
            row = [name, method, f"{one['log_prob']:.3f} ± {one['log_prob_error']:.3f}"]
            row.append(f"{share:.3f} ± {error:.3f}")
            if not regression:
                row.append(f"{one['ece']:.3f} ({one['ece_by_chance']:.3f})")
                ends = one.get("ece_interval")
                row.append(f"{ends[0]:.3f} to {ends[1]:.3f}" if ends else "")
                row.append(f"{one['ece_debiased']:.3f}" if "ece_debiased" in one else "")
            status = one.get("status", [])
            counts = {s: status.count(s) for s in dict.fromkeys(status)}
            row += [f"{one['seconds']:.1f}", ", ".join(f"{n} {s}" for s, n in counts.items())]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def stored(store: Store) -> dict[tuple[str, str], Result]:
    """{(table, method): result}."""
    return {(c["key"]["set"], c["key"]["method"]): c["result"] for c in store.cells()}


def add(store: Store, key: dict[str, Any], make: Callable[[], Result | None]) -> None:
    """Compute a cell that is not known; None is a method that the table is not for."""
    if store.get(key) is not None:
        return
    start = time.perf_counter()
    found = make()
    if found is not None:
        store.put(key, found, time.perf_counter() - start)
        print(*key.values(), json.dumps(found), flush=True)


def run_sets(args: argparse.Namespace) -> None:
    store = Store(args.out)
    for name in args.sets.split(","):
        for method in args.methods.split(","):
            key = {"table": "defaults", "set": name, "method": method}
            add(store, key, lambda name=name, method=method: set_cell(name, method, args.splits))
    cells = stored(store)
    print("\n\n".join([shown(cells, REGRESSION, True), shown(cells, CLASSES, False)]))


def read_new(file: Path) -> Table:
    found = np.load(file)
    x, y = found["x"], found["y"]
    order = np.random.default_rng(0).permutation(len(y))
    test = [order[k::5] for k in range(5)]
    classes = int(y.max()) + 1 if y.dtype.kind == "i" else 0
    return Table(x, y, [np.setdiff1d(order, rows) for rows in test], test, classes)


def new_cell(file: Path, method: str) -> Result | None:
    table = read_new(file)
    if method == "hist-boosting":
        return peer(table, hist_boosting)
    if method == "linear" and table.classes:
        return None
    shape = {"columns": table.x.shape[1], "rows_in_all": len(table.y)}
    return ours(table, method) | shape


def new_page(cells: Cells) -> str:
    """The two tables of `shown`, and before them their summary."""
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
            f"{_not_ok([one for one, _ in own])} |"
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
            f"{_not_ok(found)} |"
        )
    both = [shown(cells, numbers, True), shown(cells, classes, False)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(both) + "\n"


def _not_ok(found: list[Result]) -> str:
    status = [s for one in found for s in one.get("status", [])]
    return f"{sum(s != 'ok' for s in status)} of {len(status)}" if status else ""


def run_new(args: argparse.Namespace) -> None:
    store = Store(args.out)
    part, parts = map(int, args.part.split("/"))
    for file in sorted(args.folder.glob("*.npz"))[part::parts]:
        for method in args.methods.split(","):
            key = {"table": "new_tables", "set": file.stem, "method": method}
            add(store, key, lambda file=file, method=method: new_cell(file, method))
    print(new_page(stored(store)))


class Split(NamedTuple):
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


def real_table(name: str, file: Path) -> tuple[Any, Any]:
    try:
        import sklearn.datasets as found
    except ImportError:
        kept = np.load(file)
        return kept[f"{name}_x"], kept[f"{name}_y"]
    return getattr(found, f"load_{name}")(return_X_y=True)  # type: ignore[no-any-return]


def split_of(name: str, split: int, file: Path) -> Split:
    rng = np.random.default_rng(split)
    if name in NOISE:
        x, y = friedman(name, ROWS + TEST, rng)
        return Split(x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], 0)
    x, y = real_table(name, file)
    order = rng.permutation(len(y))
    cut = 342 if name == "diabetes" else len(y) * 4 // 5
    classes = 0 if name in METHOD_NUMBERS else int(y.max()) + 1
    return Split(x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]], classes)


def method_cell(name: str, method: str, split: int, file: Path) -> Result:
    x, y, test_x, test_y, classes = split_of(name, split, file)
    net = None
    if get_method(method).needs_network:
        net = doxa.nets.mlp(x.shape[1], classes or 1, (50,))
    x, test_x = x.astype(np.float32), test_x.astype(np.float32)
    y = y.astype(int) if classes else y.astype(np.float32)[:, None]
    start = time.process_time()
    posterior = doxa.fit(
        net, (x, y), method, standardize=True, seed=split, progress=False,
        likelihood="categorical" if classes else None,  # of numbers: the default
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


def work(queue: Any, until: float, out: Path, file: Path) -> None:
    """Take cells until there are none, or no time."""
    torch.set_num_threads(1)
    store = Store(out)
    while time.time() < until:
        wanted = queue.get()
        if wanted is None:
            return
        name, method, split = wanted
        start = time.perf_counter()
        try:
            found = method_cell(name, method, split, file)
        except Exception as error:  # a method that fails is a finding
            found = {"error": f"{type(error).__name__}: {error}"}
        if "MissingExtra" in found.get("error", ""):
            continue
        store.put(method_key(name, method, split), found, time.perf_counter() - start)
        print(name, method, split, json.dumps(found), flush=True)


def method_key(name: str, method: str, split: int) -> dict[str, Any]:
    return {"table": "default_methods", "set": name, "method": method, "split": split}


def split_cells(store: Store) -> dict[tuple[str, str, int], Result]:
    """{(table, method, split): result}."""
    keys = ("set", "method", "split")
    return {tuple(c["key"][k] for k in keys): c["result"] for c in store.cells()}  # type: ignore[misc]


def methods_page(found: SplitCells) -> str:
    """Two tables, of numbers and of classes, means over splits."""
    texts = []
    for names, share, word in (
        (METHOD_NUMBERS, "coverage", "90 % hold"), (METHOD_CLASSES, "ece", "ECE")
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


def _summary(cells: SplitCells, name: str, method: str, share: str) -> tuple[str, str, str] | None:
    found = [cells[key] for key in ((name, method, k) for k in range(10)) if key in cells]
    if not found:
        return None
    fine = [one for one in found if "error" not in one]
    statuses = [one.get("status", "error") for one in found]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    if not fine:
        return "", "", counts
    score = np.array([one["log_prob"] for one in fine])
    text = f"{score.mean():.3f}"
    if len(score) > 1:
        text += f" ± {score.std(ddof=1) / math.sqrt(len(score)):.3f}"
    return text, f"{np.mean([one[share] for one in fine]):.2f}", counts


def run_methods(args: argparse.Namespace) -> None:
    until = time.time() + 60 * args.minutes
    if args.tables == "none":
        both = {
            f"{name}_{k}": values
            for name in REAL
            for k, values in zip("xy", real_table(name, args.real), strict=True)
        }
        np.savez_compressed(args.real, **both)
        return
    wanted = args.methods.split(",") if args.methods else [row.name for row in doxa.methods()]
    store, tables = Store(args.out), args.tables.split(",")
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    rows = [row for row in doxa.methods() if row.name in wanted]
    order = [(row, split) for split in range(args.first, args.splits) for row in rows]
    for row, split in sorted(order, key=lambda one: one[0].name in LONG):
        for name in tables:
            kind = "regression" if name in METHOD_NUMBERS else "classification"
            if kind in row.tasks and store.get(method_key(name, row.name, split)) is None:
                queue.put((name, row.name, split))
    workers = [
        context.Process(target=work, args=(queue, until, args.out, args.real))
        for _ in range(args.processes)
    ]
    for worker in workers:
        queue.put(None)
        worker.start()
    for worker in workers:
        worker.join(max(0.0, until - time.time()))
        if worker.is_alive():
            worker.terminate()
    text, page = methods_page(split_cells(store)), args.out.with_suffix(".md")
    above = page.read_text().split("| method |")[0] if page.exists() else HEAD  # notes stay
    page.write_text(above + text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    sets = kinds.add_parser("sets")
    sets.add_argument("--sets", default=",".join(REGRESSION + CLASSES))
    sets.add_argument("--methods", default=",".join(OURS + PEERS))
    sets.add_argument("--splits", type=int, default=5)
    sets.add_argument("--out", type=Path, default=RESULTS / "defaults.jsonl")
    sets.set_defaults(run=run_sets)
    new = kinds.add_parser("new")
    new.add_argument("folder", type=Path)
    new.add_argument("--methods", default=",".join((*OURS, "hist-boosting")))
    new.add_argument("--part", default="0/1")
    new.add_argument("--out", type=Path, default=RESULTS / "new_tables.jsonl")
    new.set_defaults(run=run_new)
    methods = kinds.add_parser("methods")
    methods.add_argument("--tables", default=",".join(METHOD_NUMBERS + METHOD_CLASSES))
    methods.add_argument("--methods", default="")
    methods.add_argument("--splits", type=int, default=5)
    methods.add_argument("--first", type=int, default=0, help="the first split")
    methods.add_argument("--processes", type=int, default=1)
    methods.add_argument("--minutes", type=float, default=60.0)
    methods.add_argument("--real", type=Path, default=Path("tables.npz"))
    methods.add_argument("--out", type=Path, default=RESULTS / "default_methods.jsonl")
    methods.set_defaults(run=run_methods)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
