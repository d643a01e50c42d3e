"""Runs: cross-validation splits, grids and seeds as one stacked fit.

Members are averaged in prediction; runs never are. `fit(..., runs=Runs(...))` gives a `Sweep`, and
`sweep[r]` an ordinary posterior.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from doxa import describe
from doxa.data import as_tensor
from doxa.errors import DataError, MethodError, Unavailable


@dataclass(frozen=True)
class RunSpec:
    """One run: its rows (None for all), its hyper-parameters and its seed."""

    rows: Tensor | None = None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    split: int = 0
    mask: int | None = None  # how long the mask was that gave the rows, where one did


@dataclass(frozen=True)
class Runs:
    """Every combination of row sets, grid points and seeds.

    Parameters
    ----------
    rows: a list of row numbers or masks (training rows of each split), which may differ in length.
    grid: {field: values}; a field of the method, "lr", "prior" (of one family) or "likelihood"
        (the given noise levels of a `Gaussian`).
    seeds: the seeds to repeat with; default: the seed given to `fit`, plus the split's number, so
        that a spread over splits holds the fits' own noise. Seeds that are given are every split's.
    per_split: {field: one value for each row set}: what was chosen for each split before.
    """

    rows: Sequence[Any] | None = None
    grid: Mapping[str, Sequence[Any]] | None = None
    seeds: Sequence[int] | None = None
    per_split: Mapping[str, Sequence[Any]] | None = None

    def expand(self, seed: int) -> list[RunSpec]:
        splits = [(None, None)] if self.rows is None else [_numbers(r) for r in self._row_sets()]
        grid = self.grid or {}
        for name, value in [*grid.items(), ("seeds", self.seeds)]:
            if value is not None and (not hasattr(value, "__len__") or isinstance(value, str)):
                raise MethodError(f"{name} of runs is a list of values, not {value!r}")
        values = [*grid.values(), splits, [seed] if self.seeds is None else self.seeds]
        if any(len(v) == 0 for v in values):
            raise MethodError(
                "runs are empty: give at least one split, one value a field, one seed"
            )
        points = [dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values())]
        own = self._own(len(splits), grid)
        return [
            RunSpec(rows, own[i] | point, s, i, mask)
            for i, (rows, mask) in enumerate(splits)
            for point, s in itertools.product(
                points, [seed + i] if self.seeds is None else self.seeds
            )
        ]

    def _row_sets(self) -> Sequence[Any]:
        if not hasattr(self.rows, "__len__"):
            raise DataError(f"rows of runs is a list of row sets, not {self.rows!r}")
        return self.rows or ()

    def _own(self, splits: int, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """What each split has for itself."""
        given = self.per_split or {}
        for name, values in given.items():
            if name in grid:
                raise MethodError(f"{name} is given twice: in the grid and for each split")
            if len(values) != splits:
                raise MethodError(f"{name} has {len(values)} values for {splits} splits")
        return [{name: values[i] for name, values in given.items()} for i in range(splits)]


def _numbers(rows: Any) -> tuple[Tensor, int | None]:
    """Row numbers from numbers or a mask, and how long the mask is."""
    given = as_tensor(rows, "a run's rows")
    if given.ndim != 1:
        raise DataError(
            f"a run's rows are a list of numbers or a mask, not of shape {list(given.shape)}"
        )
    if given.dtype == torch.bool:
        return given.nonzero()[:, 0], len(given)
    if given.is_floating_point() and bool((given != given.round()).any()):
        raise DataError("a run's rows must be whole numbers, or a mask of True and False")
    return given.long(), None


class Sweep(describe.Described):
    """The posteriors of several runs, in the order splits × grid × seeds."""

    def __init__(self, posteriors: Sequence[Any], specs: Sequence[RunSpec]) -> None:
        self._posteriors = list(posteriors)
        self.specs = list(specs)

    def __len__(self) -> int:
        return len(self._posteriors)

    def __getitem__(self, r: int) -> Any:
        return self._posteriors[r]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._posteriors)

    def __getattr__(self, name: str) -> Any:
        """What a posterior has, a sweep has not: runs are never averaged."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise Unavailable(
            f"a Sweep has no {name!r} of its own: it holds one posterior a run, which are never "
            "averaged; take one, sweep[0], or the best, sweep.select(by=...)"
        )

    def described(self) -> describe.Words:
        return describe.sweep(self)

    @property
    def hyper(self) -> list[dict[str, Any]]:
        return [dict(spec.hyper) for spec in self.specs]

    def score(self, by: str = "validation") -> list[float]:
        """What `select` ranks: "validation" (mean log predictive), "evidence", "elbo", or
        "objective" (what MC dropout ascends; it leaves out what depends on the prior's scale)."""
        names = {
            "validation": "validation", "evidence": "log_evidence", "elbo": "elbo",
            "objective": "objective",
        }  # fmt: skip
        if by not in names:
            raise MethodError(f"select by one of {sorted(names)}, not {by!r}")
        if by == "objective" and any("prior" in spec.hyper for spec in self.specs):
            raise MethodError(
                "the objective leaves out what depends on the prior's scale, so that it cannot "
                "choose a prior: select by validation"
            )
        scores: list[Any] = [getattr(posterior, names[by], None) for posterior in self]
        if any(score is None for score in scores):
            hint = "; pass validation=0.2 to fit" if by == "validation" else ""
            raise Unavailable(f"these runs have no {by}{hint}")
        return [float(score) for score in scores]

    def select(self, by: str = "validation") -> Any:
        """The best run; with several row sets, a `Sweep` of the best run of each."""
        chosen = self._best(self.score(by))
        if len(chosen) == 1:
            return self[chosen[0]]
        return Sweep([self[r] for r in chosen], [self.specs[r] for r in chosen])

    def table(self, by: str = "validation") -> list[dict[str, Any]]:
        """A row a run: its hyper-parameters, split and seed where there are several, its score, and
        whether `select` takes it."""
        scores = self.score(by)
        chosen = self._best(scores)
        several = [
            name for name in ("split", "seed")
            if len({getattr(spec, name) for spec in self.specs}) > 1
        ]  # fmt: skip
        return [
            {**spec.hyper, **{name: getattr(spec, name) for name in several},
             by: scores[r], "chosen": r in chosen}
            for r, spec in enumerate(self.specs)
        ]  # fmt: skip

    def _best(self, scores: list[float]) -> list[int]:
        """The best run of each split; one whose score is not a number is never better."""
        best: dict[int, int] = {}
        for r, spec in enumerate(self.specs):
            before = best.get(spec.split)
            if before is None or scores[r] > scores[before] or math.isnan(scores[before]):
                best[spec.split] = r
        return [best[split] for split in sorted(best)]
