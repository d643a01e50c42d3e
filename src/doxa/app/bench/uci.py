"""UCI regression: the data, the two ways of splitting it, and the cells of the tables.

`standard` splits are those of Hernández-Lobato & Adams (2015): 20 random ones (5 for protein).
`gap` splits (Foong et al., 2019) test between the data: for every feature, the middle third of the
rows sorted by it is held out.

A cell is one method on one set: all splits in one stacked fit, a row of scores for each split.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.app.bench.cells import Result
from doxa.app.bench.protocols import PROTOCOLS, Answer, Problem
from doxa.app.bench.work import Task
from doxa.errors import DataError, did_you_mean
from doxa.evaluate import log_likelihood, mae, metrics, rmse

SETS = (
    "boston_housing", "concrete", "energy", "wine_quality_red", "yacht", "kin8nm",
    "naval_propulsion", "power_plant", "protein",
)  # fmt: skip
SPLITS = ("standard", "gap")
FEW = 500  # samples that are enough for everything but a log-likelihood


@dataclass(frozen=True)
class DataSet:
    """Raw rows, and the row numbers of each split."""

    name: str
    x: Tensor
    y: Tensor
    train: list[Tensor]
    test: list[Tensor]


def data_folder(given: str | Path | None) -> Path:
    """The folder that holds the data sets: given, or named by DOXA_DATA."""
    named = given or os.environ.get("DOXA_DATA")
    if not named:
        raise DataError("where are the data sets? Pass --data FOLDER, or set DOXA_DATA")
    folder = Path(named)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    return folder


def load(folder: Path, name: str, splits: str = "standard") -> DataSet:
    path = folder / "uci" / f"{name}.npz"
    if not path.exists():
        raise DataError(f"{path} is not there: the UCI tables need uci/NAME.npz")
    with np.load(path, allow_pickle=False) as stored:
        x, y = torch.tensor(stored["X"]), torch.tensor(stored["y"])
        if splits == "gap":
            train, test = gap_splits(x)
        else:
            train, test = (
                [torch.tensor(rows).long() for rows in stored[f"{part}_index"]]
                for part in ("train", "test")
            )
    return DataSet(name, x, y, train, test)


def gap_splits(x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For each feature that varies: outer thirds to train on, the middle third to test on."""
    train, test = [], []
    third = len(x) // 3
    for column in x.t():
        if bool((column == column[0]).all()):
            continue
        order = column.argsort(stable=True)
        train.append(torch.cat([order[:third], order[2 * third :]]).sort().values)
        test.append(order[third : 2 * third].sort().values)
    return train, test


def tasks(
    folder: Path,
    splits: str,
    sets: Sequence[str],
    methods: Sequence[str],
    seed: int = 0,
    device: str = "cpu",
) -> list[Task]:
    """The cells of a table, the quick ones first."""
    for name in sets:
        if name not in SETS:
            raise DataError(f"no UCI set {name!r}{did_you_mean(name, SETS)}")
    for method in methods:
        if method not in PROTOCOLS:
            hint = did_you_mean(method, list(PROTOCOLS))
            raise DataError(f"no UCI protocol for {method!r}{hint}")
    table = "uci" if splits == "standard" else "gap"
    where = {"folder": folder, "splits": splits, "seed": seed, "device": device}
    return [
        Task(
            {"table": table, "set": name, "method": method, "seed": seed},
            cell,
            where | {"name": name, "method": method},
        )
        for method in methods
        for name in sets
    ]


def cell(
    folder: Path, splits: str, name: str, method: str, seed: int, device: str = "cpu"
) -> Result:
    """Fit a method to all splits of a set and score it on the held-out rows of each."""
    data = load(folder, name, splits)
    data = replace(data, x=data.x.to(device), y=data.y.to(device))
    problem = Problem(
        data.x, data.y, data.train, hidden=100 if name == "protein" else 50, seed=seed
    )
    protocol = PROTOCOLS[method]
    start = time.perf_counter()
    answer = protocol.fit(problem, name)
    fitted = time.perf_counter() - start
    scores = [score(answer, r, data.x[rows], data.y[rows]) for r, rows in enumerate(data.test)]
    each = {key: [row[key] for row in scores] for key in scores[0]}
    return {
        "protocol": protocol.words,
        "device": torch.device(device).type,
        "splits": len(scores),
        "rows": [len(data.train[0]), len(data.test[0])],
        "scores": {key: summary(values) | {"each": values} for key, values in each.items()},
        "fit_seconds": fitted,
        "last_fit_seconds": problem.seconds[-1],  # with the settings that were chosen
        "predict_seconds": time.perf_counter() - start - fitted,
        "status": answer.statuses(),
        **answer.facts,
    }


def score(answer: Answer, split: int, x: Tensor, y: Tensor) -> dict[str, float]:
    """The scores of one split, in units of y; the log-likelihood of the mixture itself and of
    the Gaussian with its moments, which some papers report."""
    p = answer.predict(split, x)
    matched = p.moment_matched().log_prob(y)
    if len(p.weights) > FEW:
        # The rest (CRPS, intervals) is as good from fewer samples, and takes their number squared.
        values = metrics(answer.predict(split, x, FEW), y)
        values |= {"log_likelihood": log_likelihood(p, y), "rmse": rmse(p, y), "mae": mae(p, y)}
    else:
        values = metrics(p, y)
    return values | {"log_likelihood_matched": float(matched.mean())}


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean over splits and its standard error."""
    array = np.asarray(values, dtype=float)
    error = array.std(ddof=1) / np.sqrt(len(array)) if len(array) > 1 else None
    return {"mean": float(array.mean()), "error": None if error is None else float(error)}
