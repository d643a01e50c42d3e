"""What a person gets who changes nothing: tables, every default, beside boosting at its own.

    DOXA_DATA=... python benchmarks/defaults.py [--sets yacht,banana] [--methods deep-ensemble]
                                                [--splits 5] [--out benchmarks/results/defaults]

The nine UCI sets by their own splits, the classification tables by five-fold cross-validation, and
`doxa.nets.mlp` of 50 hidden units, which is what `doxa fit` takes. Nothing is chosen for a set. The
table has the mean log-likelihood (± its standard error over splits), the share of test rows that
90 % intervals hold, or the accuracy and calibration error over all test rows, seconds of processor
a split on one thread, and in how many splits the status said what.

Peers: NGBoost (if it is installed), and scikit-learn's histogram boosting, whose Gaussian noise is
the mean squared error of five-fold cross-validation on the training rows. Each set and method is a
JSON file in --out, so that a run can be taken up again; the table is made of all that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import doxa
from doxa import evaluate

REGRESSION = ("boston_housing", "concrete", "energy", "kin8nm", "naval_propulsion", "power_plant",
              "protein", "wine_quality_red", "yacht")  # fmt: skip
CLASSES = ("australian_credit", "banana", "german_credit", "heart_statlog", "pima_diabetes")
OURS = ("linear", "deep-ensemble", "mc-dropout", "laplace", "mean-field")
PEERS = ("ngboost", "hist-boosting")
LEVEL = 0.9
WIDTH = 1.6448536269514722  # of the 90 % interval of a normal, in standard deviations

Result = dict[str, Any]


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
        likelihood="categorical" if table.classes else None,  # what numbers are is said by nobody
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


def cell(name: str, method: str, splits: int) -> Result | None:
    table = read(name, splits)
    if method == "ngboost":
        try:
            return peer(table, ngboost)
        except ImportError:
            print("ngboost is not installed: left out")
            return None
    if method == "hist-boosting":
        return peer(table, hist_boosting)
    if method == "linear" and table.classes:
        return None
    return ours(table, method)


def shown(found: dict[tuple[str, str], Result], names: Sequence[str], regression: bool) -> str:
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
            said = {s: status.count(s) for s in dict.fromkeys(status)}
            row += [f"{one['seconds']:.1f}", ", ".join(f"{n} {s}" for s, n in said.items())]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(REGRESSION + CLASSES))
    parser.add_argument("--methods", default=",".join(OURS + PEERS))
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/defaults"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.sets.split(","):
        for method in asked.methods.split(","):
            file = asked.out / f"{name}-{method}.json"
            if file.exists():
                continue
            found = cell(name, method, asked.splits)
            if found is not None:
                file.write_text(json.dumps(found, indent=1) + "\n")
                print(name, method, json.dumps(found), flush=True)
    files = sorted(asked.out.glob("*.json"))
    cells = {
        (name, method): json.loads((asked.out / f"{name}-{method}.json").read_text())
        for name in REGRESSION + CLASSES
        for method in OURS + PEERS
        if asked.out / f"{name}-{method}.json" in files
    }
    text = "\n\n".join([shown(cells, REGRESSION, True), shown(cells, CLASSES, False)])
    print(text)


if __name__ == "__main__":
    main()
