"""A UCI set as a protocol sees it, what it answers, and how settings are chosen.

Every method has one hidden ReLU layer of 50 units (100 for protein), inputs and targets
standardised on each split's training rows, and all splits in one stacked fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import doxa
from doxa.predictive import Predictive

SMALL = 2000

Grid = Mapping[str, Sequence[Any]]
Train = Callable[[Sequence[Tensor], Any, Grid], Any]


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
        in the density of a mixture, and so no say in its score, but there is no variance then."""
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
        asked: dict[str, Any] = {
            "runs": doxa.Runs(rows=self.train), "schedule": "constant", "validation": None,
            "device": self.x.device,
        }  # fmt: skip
        asked |= options
        start = time.perf_counter()
        sweep = doxa.fit(
            net, (self.x, self.y), method, seed=self.seed, standardize=True, progress=False, **asked
        )
        self.seconds.append(time.perf_counter() - start)
        return sweep


@dataclass
class Answer:
    """A posterior for each split, and how many samples its predictions take."""

    posteriors: Sequence[Any]
    samples: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def predict(self, split: int, x: Tensor, samples: int | None = None) -> Predictive:
        p: Predictive = self.posteriors[split].predict(x, samples or self.samples)
        return p

    def statuses(self) -> dict[str, int]:
        """How many splits ended how."""
        names = [str(posterior.status) for posterior in self.posteriors]
        return {name: names.count(name) for name in sorted(set(names))}


Fit = Callable[[Problem, str], Answer]


@dataclass(frozen=True)
class Protocol:
    """What is done, in words that stand under the table, and the doing; `of` is the method, where
    the row has another name."""

    words: str
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


def said(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point in numbers: a prior by its width."""
    return {name: getattr(value, "std", value) for name, value in point.items()}
