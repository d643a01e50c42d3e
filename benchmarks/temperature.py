"""The gain of a temperature chosen by held-out rows, on small classification tables.

    DOXA_DATA=... python -m benchmarks.temperature [--tables heart_statlog,wine] [--cuts 6]
                                                   [--method deep-ensemble]

Five-fold cross-validation of each table, cut anew for every seed: mean test log-likelihood of every
default, less that of the same fits at a temperature of 1, in thousandths of a nat, of each cut.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import doxa
from benchmarks.defaults import CLASSES, Table, read

LEARN = ("breast_cancer", "wine")  # scikit-learn's


def cut(name: str, seed: int) -> Table:
    if name in LEARN:
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    else:
        x, y = read(name, 1)[:2]
    order = np.random.default_rng(seed).permutation(len(y))
    test = [order[k::5] for k in range(5)]
    train = [np.setdiff1d(order, rows) for rows in test]
    return Table(x, y, train, test, int(y.max()) + 1)


def score(table: Table, method: str, likelihood: Any, seed: int) -> float:
    x = table.x.astype(np.float32)
    net = doxa.nets.mlp(x.shape[1], table.classes, (50,))
    sweep = doxa.fit(
        net, (x, table.y), method, likelihood=likelihood, standardize=True, seed=seed,
        progress=False, runs=doxa.Runs(rows=table.train),
    )  # fmt: skip
    each = [
        posterior.predict(x[rows]).log_prob(torch.as_tensor(table.y[rows]))
        for posterior, rows in zip(sweep, table.test, strict=True)
    ]
    return float(torch.cat(each).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    small = [name for name in CLASSES if name != "banana"]
    parser.add_argument("--tables", default=",".join([*small, *LEARN]))
    parser.add_argument("--cuts", type=int, default=6)
    parser.add_argument("--method", default="deep-ensemble")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.tables.split(","):
        gains = []
        for seed in range(asked.cuts):
            table = cut(name, seed)
            fixed = score(table, asked.method, doxa.Categorical(temperature=1.0), seed)
            gains.append(1000 * (score(table, asked.method, "categorical", seed) - fixed))
        error = np.std(gains, ddof=1) / np.sqrt(len(gains))
        shown = ", ".join(f"{gain:.1f}" for gain in gains)
        print(f"| {name} | {np.mean(gains):.1f} ± {error:.1f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
