"""UCI regression: the data, the two ways of splitting it, and what a protocol of a method sees.

`standard` splits are those of Hernández-Lobato & Adams (2015): 20 random ones (5 for protein).
`gap` splits (Foong et al., 2019) test between the data: for every feature, the middle third of the
rows sorted by it is held out.

Every method has one hidden ReLU layer of 50 units (100 for protein), inputs and targets
standardised on the training rows of each split, and all splits in one stacked fit (`Problem`). A
`Protocol` says how a method is run on a problem and returns an `Answer`: one posterior per split.
`best` chooses settings on rows held out of the training rows, never on test rows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import doxa
from doxa.errors import DataError
from doxa.predictive import Predictive

SETS = (
    "boston_housing", "concrete", "energy", "wine_quality_red", "yacht", "kin8nm",
    "naval_propulsion", "power_plant", "protein",
)  # fmt: skip
SPLITS = ("standard", "gap")
SMALL = 2000  # training rows: sets with fewer are small

Grid = Mapping[str, Sequence[Any]]
Train = Callable[[Sequence[Tensor], Any, Grid], Any]


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
    """Read `folder/uci/NAME.npz` and split it."""
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


@dataclass(frozen=True)
class Problem:
    """All rows, and those each split trains on. "Small" sets have fewer than 2,000 of them."""

    x: Tensor
    y: Tensor
    train: Sequence[Tensor]
    hidden: int
    seed: int
    seconds: list[float] = field(default_factory=list)  # of each fit so far

    @property
    def rows(self) -> int:
        return max(len(rows) for rows in self.train)

    @property
    def small(self) -> bool:
        return self.rows < SMALL

    def validation(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each split's training rows without their last fifth, and that fifth."""
        cuts = [int(0.8 * len(rows)) for rows in self.train]
        kept = [rows[:cut] for rows, cut in zip(self.train, cuts, strict=True)]
        return kept, [rows[cut:] for rows, cut in zip(self.train, cuts, strict=True)]

    def score(self, posterior: Any, rows: Tensor, samples: int | None = None) -> float:
        """The mean log predictive density of some rows."""
        p = posterior.predict(self.x[rows], samples)
        return float(p.log_prob(self.y[rows]).mean())

    def stable_score(self, posterior: Any, rows: Tensor, samples: int | None = None) -> float:
        """The score of a fit that did not run away: one draw with an infinite noise has no weight
        in the density of a mixture and does not change its score, but its variance is infinite."""
        p = posterior.predict(self.x[rows], samples)
        score = float(p.log_prob(self.y[rows]).mean())
        return score if math.isfinite(score) and bool(p.std.isfinite().all()) else -math.inf

    def fit(
        self,
        method: Any,
        outputs: int = 1,
        hidden: tuple[int, ...] = (),
        activation: str = "relu",
        **options: Any,
    ) -> Any:
        """All splits in one fit; no network where there are no outputs."""
        net = None
        if outputs:
            layers = hidden or (self.hidden,)
            net = doxa.nets.mlp(self.x.shape[1], outputs, hidden=layers, activation=activation)
        settings: dict[str, Any] = {
            "runs": doxa.Runs(rows=self.train), "schedule": "constant", "validation": None,
            "device": self.x.device,
        }  # fmt: skip
        settings |= options
        start = time.perf_counter()
        sweep = doxa.fit(
            net, (self.x, self.y), method, seed=self.seed, standardize=True, progress=False,
            **settings,
        )  # fmt: skip
        self.seconds.append(time.perf_counter() - start)
        return sweep


@dataclass
class Answer:
    """One posterior per split, and how many samples its predictions take."""

    posteriors: Sequence[Any]
    samples: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def predict(self, split: int, x: Tensor, samples: int | None = None) -> Predictive:
        p: Predictive = self.posteriors[split].predict(x, samples or self.samples)
        return p

    def statuses(self) -> dict[str, int]:
        """{status: how many splits ended with it}."""
        names = [str(posterior.status) for posterior in self.posteriors]
        return {name: names.count(name) for name in sorted(set(names))}


Fit = Callable[[Problem, str], Answer]


@dataclass(frozen=True)
class Protocol:
    """How a method is run: the description that stands under the table, and the function; `of` is
    the method, where the row has another name."""

    description: str
    fit: Fit
    of: str | None = None


def best(
    problem: Problem,
    train: Train,
    tried: Sequence[Any],
    grid: Grid,
    samples: int | None = None,
    splits: int | None = None,
) -> tuple[Any, dict[str, Any]]:
    """One of `tried` and one point of the grid for the whole set: where fits without the last fifth
    of each training split, or of the first so many, predict it best, by the mean over splits.
    `train(rows, one, grid)` fits all splits and points of a grid at once."""
    kept, held = (part[:splits] for part in problem.validation())
    total: dict[Any, float] = {}
    choices: dict[Any, tuple[Any, dict[str, Any]]] = {}
    for i, one in enumerate(tried):
        sweep = train(kept, one, grid)
        for posterior, spec in zip(sweep, sweep.specs, strict=True):
            key = (i, *(spec.hyper[name] for name in grid))
            score = problem.stable_score(posterior, held[spec.split], samples)
            total[key] = total.get(key, 0.0) + score
            choices[key] = (one, {name: spec.hyper[name] for name in grid})
    return choices[max(total, key=lambda key: total[key])]


def only(point: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The grid of one point."""
    return {name: [value] for name, value in point.items()}


def described(point: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a point as numbers: a prior by its standard deviation."""
    return {
        name: value.std if isinstance(value, doxa.Normal) else value
        for name, value in point.items()
    }
