"""What the doctor looks at: a posterior, the rows it was fitted to, and rows it has not seen.

Everything here is made from `Posterior.predict` and the data; nothing is remembered from the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import check_finite, parse, rows_of
from doxa.diagnose.scored import Scored
from doxa.errors import DataError, ShapeError, Unavailable
from doxa.likelihoods import Heads
from doxa.noise import generator
from doxa.posterior import Posterior, SamplePosterior, TransformedPosterior

MOST_ROWS = 500  # of each set, for what needs predictions
MOST_DATA = 20_000  # of each set, for what looks at the rows themselves


@dataclass(frozen=True)
class Sample:
    """Rows as given, and where they come from."""

    name: str
    x: Any
    y: Any

    def __len__(self) -> int:
        return rows_of(self.x, f"{self.name} x")

    def thinned(self, most: int, seed: int) -> Sample:
        """At most so many rows, drawn without replacement, in their order."""
        if len(self) <= most:
            return self
        order = torch.randperm(len(self), generator=generator(seed, "doctor", self.name))
        index = order[:most].sort().values
        x, y = (tree_map(lambda t: t[index.to(t.device)], part) for part in (self.x, self.y))
        return Sample(self.name, x, y)

    @cached_property
    def columns(self) -> Tensor:
        """Float inputs as a table in double precision: [N, D]."""
        if not isinstance(self.x, Tensor) or not self.x.is_floating_point():
            raise Unavailable("x is not one table of floating-point numbers")
        return self.x.double().cpu().reshape(len(self), -1)


@dataclass(frozen=True)
class Head:
    """One output of the model with its own likelihood: on the training rows, on the test rows."""

    label: str
    train: Scored
    test: Scored | None

    @property
    def unseen(self) -> Scored:
        """The test rows where there are any, else those of the fit."""
        return self.train if self.test is None else self.test


class Patient:
    """A posterior and its data, checked; predictions are made once."""

    def __init__(self, posterior: Posterior, data: Any, test: Any, level: float, seed: int) -> None:
        self.posterior, self.level, self.seed = posterior, level, seed
        self.train = _sample("train", posterior.ordered_pair(data), seed)
        self.test = None if test is None else _sample("test", posterior.ordered_pair(test), seed)
        self.base = posterior
        while isinstance(self.base, TransformedPosterior):
            self.base = self.base.base

    @property
    def rows(self) -> int:
        """How many rows the fit saw, as its record says, else as given."""
        return int(self.posterior.diagnostics.get("rows", len(self.train)))

    @cached_property
    def few(self) -> Sample:
        """Training rows for what needs predictions."""
        return self.train.thinned(MOST_ROWS, self.seed)

    @cached_property
    def heads(self) -> list[Head]:
        train = self._scored(self.few)
        test = None
        if self.test is not None:
            test = self._scored(self.test.thinned(MOST_ROWS, self.seed))
        label = (lambda i: f" (head {i})") if len(train) > 1 else (lambda i: "")
        return [
            Head(label(i), own, None if test is None else test[i]) for i, own in enumerate(train)
        ]

    def _scored(self, sample: Sample) -> list[Scored]:
        p = self.posterior.predict(sample.x)
        if isinstance(p.likelihood, Heads):
            pairs = zip(p.heads, sample.y, strict=True)
            return [Scored(head, y, self.seed + i) for i, (head, y) in enumerate(pairs)]
        closed = p.likelihood.is_normal and not hasattr(p, "samples")
        if not closed or self.base is not self.posterior:
            return [Scored(p, sample.y, self.seed)]
        return [Scored(p, sample.y, self.seed, lambda n: self.base.functions(sample.x, n))]

    @property
    def kept(self) -> tuple[int, int] | None:
        """(members, draws each) of kept draws; None where draws are not kept."""
        if not isinstance(self.base, SamplePosterior):
            return None
        return self.base.samples.shape[0], self.base.samples.shape[1]

    @property
    def is_chain(self) -> bool:
        """Kept draws that follow each other: those of particles and of ensembles do not."""
        return isinstance(self.base, SamplePosterior) and self.base.chain

    @property
    def is_point(self) -> bool:
        """One function by construction: there is no epistemic part to judge."""
        return self.kept == (1, 1)


def _sample(name: str, data: Any, seed: int) -> Sample:
    x, y, source = parse(data)
    if source is not None:
        order = torch.randperm(len(source), generator=generator(seed, "doctor", name))
        x, y = source.take(order[:MOST_ROWS].sort().values)
    sample = Sample(name, x, y)
    if len(sample) == 0:
        raise DataError(f"the {name} data has no rows (N = 0)")
    if rows_of(y, f"{name} y") != len(sample):
        raise ShapeError(f"{name}: {len(sample)} rows of x, {rows_of(y, 'y')} of y")
    check_finite(x, f"{name} x")
    check_finite(y, f"{name} y")
    return sample.thinned(MOST_DATA, seed)
