"""Runs: cross-validation splits, grids and seeds as one stacked fit.

Predictions are averaged over members, but never over runs. `fit(..., runs=Runs(...))` returns a
`Sweep`, and `sweep[r]` is an ordinary posterior.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa import describe
from doxa.data import as_tensor
from doxa.errors import DataError, MethodError, Unavailable

if TYPE_CHECKING:
    from doxa.method import Method


@dataclass(frozen=True)
class RunSpec:
    """One run: its rows (None means all), its hyper-parameters and its seed."""

    rows: Tensor | None = None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    split: int = 0
    mask: int | None = None  # the length of the mask, if the rows were given as a mask


@dataclass(frozen=True)
class Runs:
    """Every combination of row sets, grid points and seeds.

    Parameters
    ----------
    rows : sequence of array-like, default None
        The training rows of each split, as row numbers or as a mask. Splits may differ in length.
        None means one split with all rows.
    grid : dict of str to sequence, default None
        The values of each field. A field is a setting of the method, "lr", "prior" (priors of one
        family) or "likelihood" (`Gaussian` with different given noise levels).
    seeds : sequence of int, default None
        The seeds, each used for all splits. By default the split of number i has the seed of `fit`
        plus i, so that the spread over splits includes the random variation of the fits.
    per_split : dict of str to sequence, default None
        One value of a field per split, such as a setting that was chosen for each split before.
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
                raise MethodError(f"{name} of runs must be a list of values, not {value!r}")
        values = [*grid.values(), splits, [seed] if self.seeds is None else self.seeds]
        if any(len(v) == 0 for v in values):
            raise MethodError(
                "runs are empty: give at least one split, one value per field and one seed"
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

    def for_method(self, method: Method) -> Runs:
        """The same runs, with current names for settings of the method that were renamed."""
        grid = None if self.grid is None else method.current_settings(self.grid)
        per_split = None if self.per_split is None else method.current_settings(self.per_split)
        return replace(self, grid=grid, per_split=per_split)

    def _row_sets(self) -> Sequence[Any]:
        if not hasattr(self.rows, "__len__"):
            raise DataError(f"rows of runs must be a list of row sets, not {self.rows!r}")
        return self.rows or ()

    def _own(self, splits: int, grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """The values of `per_split` for each split."""
        given = self.per_split or {}
        for name, values in given.items():
            if name in grid:
                raise MethodError(f"{name} is given twice: in the grid and for each split")
            if len(values) != splits:
                raise MethodError(f"{name} has {len(values)} values for {splits} splits")
        return [{name: values[i] for name, values in given.items()} for i in range(splits)]


def _numbers(rows: Any) -> tuple[Tensor, int | None]:
    """Row numbers from numbers or a mask, and the length of the mask."""
    given = as_tensor(rows, "a run's rows")
    if given.ndim != 1:
        raise DataError(
            f"a run's rows must be a list of numbers or a mask, not of shape {list(given.shape)}"
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
        """A sweep has no attributes of a posterior, because runs are never averaged."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise Unavailable(
            f"a Sweep has no {name!r}: it holds one posterior per run, and runs are never "
            "averaged; use one run, sweep[0], or the best, sweep.select(by=...)"
        )

    def described(self) -> describe.Words:
        return describe.sweep(self)

    @property
    def hyper(self) -> list[dict[str, Any]]:
        return [dict(spec.hyper) for spec in self.specs]

    def score(self, by: str = "validation") -> list[float]:
        """The score of each run, by which `select` ranks the runs.

        Parameters
        ----------
        by : {"validation", "evidence", "elbo", "objective"}, default "validation"
            "validation" is the mean log predictive density of the held-out rows. "objective" is
            the objective of MC dropout, which lacks the terms that depend on the prior's scale.

        Returns
        -------
        list of float
            One score per run.
        """
        names = {
            "validation": "validation", "evidence": "log_evidence", "elbo": "elbo",
            "objective": "objective",
        }  # fmt: skip
        if by not in names:
            raise MethodError(f"select by one of {sorted(names)}, not {by!r}")
        if by == "objective" and any("prior" in spec.hyper for spec in self.specs):
            raise MethodError(
                "the objective lacks the terms that depend on the prior's scale, so it cannot "
                "choose a prior: select by validation"
            )
        scores: list[Any] = [getattr(posterior, names[by]) for posterior in self]
        if any(score is None for score in scores):
            hint = "; pass validation=0.2 to fit" if by == "validation" else ""
            raise Unavailable(f"these runs have no {by}{hint}")
        return [float(score) for score in scores]

    def select(self, by: str = "validation") -> Any:
        """The posterior of the best run, or with several splits a `Sweep` of the best run of each.

        Parameters
        ----------
        by : {"validation", "evidence", "elbo", "objective"}, default "validation"
            The score, as in `score`.
        """
        chosen = self._best(self.score(by))
        if len(chosen) == 1:
            return self[chosen[0]]
        return Sweep([self[r] for r in chosen], [self.specs[r] for r in chosen])

    def table(self, by: str = "validation") -> list[dict[str, Any]]:
        """One row per run: its hyper-parameters, its split and seed if there are several, its
        score, and whether `select` chooses it.

        Parameters
        ----------
        by : {"validation", "evidence", "elbo", "objective"}, default "validation"
            The score, as in `score`.
        """
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
        """The best run of each split. A run whose score is NaN is never better than another."""
        best: dict[int, int] = {}
        for r, spec in enumerate(self.specs):
            before = best.get(spec.split)
            if before is None or scores[r] > scores[before] or math.isnan(scores[before]):
                best[spec.split] = r
        return [best[split] for split in sorted(best)]
