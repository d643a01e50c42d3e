"""A prior bound to a layout: tensors with one value per element of the flat parameter vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from doxa.errors import MethodError
from doxa.priors.families import Family, GaussianFamily


@dataclass(frozen=True, eq=False)
class Part:
    """The elements that share a family: a slice where they are contiguous, else positions."""

    where: slice | Tensor
    loc: Tensor | None  # [p]; None where all are 0, which saves one subtraction per step
    family: Family

    def centred(self, flat: Tensor) -> Tensor:
        x = flat[..., self.where]
        return x if self.loc is None else x - self.loc


class BoundPrior:
    """log p(w), its score, curvature and draws on flat vectors [..., P].

    A stack of R priors (`stack_bound`) has a run axis: vectors are then [..., R, P] and
    log-probabilities [..., R].
    """

    def __init__(self, parts: Sequence[Part], size: int) -> None:
        self.parts = tuple(parts)
        self.size = size
        self.runs = tuple(next(iter(parts[0].family.exact.values())).shape[:-1])  # () or (R,)
        self._order = _inverse_order(self.parts, size) if len(parts) > 1 else None

    @property
    def is_gaussian(self) -> bool:
        return all(isinstance(part.family, GaussianFamily) for part in self.parts)

    def __getitem__(self, rows: Any) -> BoundPrior:
        """The priors of some runs of a stack; a number gives one without a run axis."""
        if not self.runs:
            raise MethodError("this prior is not a stack: all runs share it")
        index = rows.cpu() if isinstance(rows, Tensor) else rows
        parts = []
        for part in self.parts:
            like = next(iter(part.family.at.values()))
            exact = {name: value[index] for name, value in part.family.exact.items()}
            family = type(part.family)(exact, like.device, like.dtype)
            parts.append(Part(part.where, part.loc, family))
        return BoundPrior(parts, self.size)

    def of(self, index: Tensor) -> BoundPrior:
        """The prior of some elements, given by their positions; for flat vectors [..., p]."""
        place = torch.full((self.size,), -1)
        place[index.cpu()] = torch.arange(len(index))
        parts = []
        for part in self.parts:
            places = place[part.where.cpu() if isinstance(part.where, Tensor) else part.where]
            kept = places >= 0
            if not bool(kept.any()):
                continue
            like = next(iter(part.family.at.values()))
            loc = None if part.loc is None else part.loc[kept.to(part.loc.device)]
            exact = {name: value[..., kept] for name, value in part.family.exact.items()}
            family = type(part.family)(exact, like.device, like.dtype)
            parts.append(Part(_span(places[kept], like.device), loc, family))
        return BoundPrior(parts, len(index))

    def log_prob(self, flat: Tensor) -> Tensor:
        """[..., P] to [...], constants included."""
        total = self.parts[0].family.log_prob(self.parts[0].centred(flat))
        for part in self.parts[1:]:
            total = total + part.family.log_prob(part.centred(flat))
        return total

    def score(self, flat: Tensor) -> Tensor:
        """The gradient of `log_prob`: [..., P]."""
        return self._join([part.family.score(part.centred(flat)) for part in self.parts])

    def add_score(self, grad: Tensor, flat: Tensor) -> Tensor:
        """grad + score(flat), in one pass where all elements share a Gaussian centred at 0."""
        first = self.parts[0]
        if len(self.parts) == 1 and isinstance(first.family, GaussianFamily) and first.loc is None:
            if first.family.same is not None:
                return torch.add(grad, flat, alpha=first.family.same)
            return torch.addcmul(grad, flat, first.family.at["minus_precision"])
        return grad + self.score(flat)

    @cached_property
    def widens(self) -> bool:
        """Whether E log p under normal weights has a closed form."""
        return all(part.family.widens for part in self.parts)

    def widening(self, flat: Tensor, std: Tensor) -> Tensor:
        """E log p(flat + std ∘ ε) − log p(flat) for standard normal ε: [..., P] to [...]."""
        each = [p.family.widening(p.centred(flat), std[..., p.where]) for p in self.parts]
        return sum(each[1:], each[0])

    def widening_score(self, flat: Tensor, std: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradients of `widening` by flat (None: 0, for a Gaussian) and by std, [..., P]."""
        parts = self.parts
        each = [p.family.widening_score(p.centred(flat), std[..., p.where]) for p in parts]
        by_std = self._join([own for _, own in each])
        if self.is_gaussian:
            return None, by_std
        return self._join([own.expand_as(other) for own, other in each]), by_std

    def add_widening_score(self, grad: Tensor, flat: Tensor, std: Tensor) -> Tensor:
        """grad + the gradient of `widening` by log std, in one pass where all elements share a
        Gaussian."""
        first = self.parts[0].family
        if len(self.parts) == 1 and isinstance(first, GaussianFamily) and first.same is not None:
            return torch.addcmul(grad, std, std, value=first.same)
        return torch.addcmul(grad, self.widening_score(flat, std)[1], std)

    def curvature(self, flat: Tensor) -> Tensor:
        """Minus the second derivative of `log_prob`, elementwise: [..., P]."""
        return self._join([part.family.curvature(part.centred(flat)) for part in self.parts])

    def sample(self, n: int, generator: Generator) -> Tensor:
        """[n, P], or [n, R, P] for a stack."""
        draws = []
        for part in self.parts:
            x = part.family.sample(n, generator)
            draws.append(x if part.loc is None else x + part.loc)
        return self._join(draws)

    @property
    def mean(self) -> Tensor:
        """[P]"""
        means = []
        for part in self.parts:
            like = next(iter(part.family.at.values()))  # [*runs, p]
            zero = torch.zeros_like(like)
            means.append(zero if part.loc is None else zero + part.loc)
        return self._join(means)

    @cached_property
    def precision(self) -> Tensor | None:
        """[P] where every element is Gaussian, else None."""
        if not self.is_gaussian:
            return None
        return self._join([-part.family.at["minus_precision"] for part in self.parts])

    @cached_property
    def shared_precision(self) -> float | None:
        """The precision, where all elements have Gaussians of the same precision; else None. A
        number is faster than a vector."""
        first = self.parts[0].family
        if len(self.parts) > 1 or not isinstance(first, GaussianFamily) or first.same is None:
            return None
        return -first.same

    def to(self, device: torch.device | str, dtype: torch.dtype) -> BoundPrior:
        device = torch.device(device)
        parts = []
        for part in self.parts:
            where = part.where if isinstance(part.where, slice) else part.where.to(device)
            loc = None if part.loc is None else part.loc.to(device=device, dtype=dtype)
            family = type(part.family)(part.family.exact, device, dtype)
            parts.append(Part(where, loc, family))
        return BoundPrior(parts, self.size)

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        joined = torch.cat(list(pieces), dim=-1)
        return joined if self._order is None else joined[..., self._order]


def stack_bound(priors: Sequence[BoundPrior]) -> BoundPrior:
    """Priors of several runs as one with a leading run axis; their families must agree."""
    if not priors:
        raise MethodError("there are no priors to stack")
    first = priors[0]
    if any(prior.runs for prior in priors):
        raise MethodError("a stack of priors cannot be stacked again")
    parts = []
    for part in first.parts:
        values = next(iter(part.family.at.values()))
        same = [_counterpart(part, prior) for prior in priors]
        exact = {
            name: torch.stack([other.family.exact[name] for other in same])
            for name in part.family.exact
        }
        family = type(part.family)(exact, values.device, values.dtype)
        parts.append(Part(part.where, part.loc, family))
    return BoundPrior(parts, first.size)


def _counterpart(part: Part, prior: BoundPrior) -> Part:
    for other in prior.parts:
        if type(other.family) is type(part.family) and _same_place(part.where, other.where):
            return other
    raise MethodError(
        "runs of one stack must have priors of the same families on the same parameters; only "
        "their scales may differ"
    )


def _span(places: Tensor, device: torch.device) -> slice | Tensor:
    """Positions as a slice where they are contiguous, because a slice needs no copy."""
    start = int(places[0])
    together = torch.equal(places, torch.arange(start, start + len(places)))
    return slice(start, start + len(places)) if together else places.to(device)


def _same_place(a: slice | Tensor, b: slice | Tensor) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return isinstance(a, slice) and isinstance(b, slice) and a == b


def _inverse_order(parts: Sequence[Part], size: int) -> Tensor | None:
    """The position of each element of the flat vector in the concatenated parts; None where the
    order is the same."""
    places = torch.arange(size)
    order = torch.cat([places[part.where].cpu() for part in parts])
    if torch.equal(order, places):
        return None
    device = next(iter(parts[0].family.at.values())).device
    return torch.argsort(order).to(device)
