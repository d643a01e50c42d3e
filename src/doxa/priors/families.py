"""The densities of priors: centred, elementwise, with scores and curvatures in closed form.

The score is the gradient of log p; the curvature is minus its second derivative. `FlowFamily` is an
elementwise flow of standard normals, in closed form (Johnson, 1949: "SU"):

    w = (s/t) sinh(t ε),  ε ~ N(0, 1);    ε = asinh(r)/t with r = t w/s

    log p(w) = −ε²/2 − log s − log(2π)/2 − log(1 + r²)/2

t → 0 is N(0, s²). The larger t, the heavier the tails: most weights are small, and a few are large.

A prior bound to a layout: tensors with one value per element of the flat parameter vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import MethodError

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
Values = dict[str, Tensor]


class Family(ABC):
    """A centred density of each element.

    `exact` holds the settings in float64, [*runs, p]. The working tensors in `at` are derived from
    them, so that no precision is lost.
    """

    widens: ClassVar[bool] = False  # whether `widening` has a closed form
    grouped: ClassVar[bool] = False  # whether it needs the tensor of each element: "group"

    def __init__(self, exact: Values, device: torch.device, dtype: torch.dtype) -> None:
        self.exact = exact
        derived = self.derive(**exact)
        self.at = {name: v.to(device=device, dtype=dtype) for name, v in derived.items()}

    @abstractmethod
    def derive(self, **exact: Tensor) -> Values:
        """Precomputed tensors of the closed forms; "norm" [*runs] is the constant."""

    @abstractmethod
    def log_prob(self, x: Tensor) -> Tensor:
        """[..., p] to [...]."""

    @abstractmethod
    def score(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def curvature(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def sample(self, n: int, generator: Generator) -> Tensor:
        """[n, *runs, p]"""

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        """E log p(x + std ε) − log p(x) for standard normal ε, [..., p] to [...]."""
        raise NotImplementedError

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `widening` by x and by std."""
        raise NotImplementedError


def uniform(n: int, like: Tensor, generator: Generator) -> Tensor:
    shape = (n, *like.shape)
    draws = torch.rand(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.clamp_min_(torch.finfo(like.dtype).tiny).to(like.device)


def normal(n: int, like: Tensor, generator: Generator) -> Tensor:
    shape = (n, *like.shape)
    draws = torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device)
    return draws.to(like.device)


class GaussianFamily(Family):
    """log p = -x^2 / (2 s^2) - log s - log(2 pi)/2"""

    widens = True

    def derive(self, *, scale: Tensor) -> Values:  # type: ignore[override]
        norm = -(scale.log() + HALF_LOG_2PI).sum(-1)
        return {"scale": scale, "minus_precision": -(scale**-2), "norm": norm}

    def __init__(self, exact: Values, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(exact, device, dtype)
        scale = exact["scale"]
        alike = scale.ndim == 1 and scale.numel() > 0 and bool((scale == scale[0]).all())
        # Minus the precision where all elements share one: a number is faster than a vector.
        self.same = -float(scale[0] ** -2) if alike else None

    def log_prob(self, x: Tensor) -> Tensor:
        if self.same is not None:
            squares: Tensor = torch.linalg.vector_norm(x, dim=-1).square()
            return (0.5 * self.same) * squares + self.at["norm"]
        return 0.5 * (x.square() * self.at["minus_precision"]).sum(-1) + self.at["norm"]

    def score(self, x: Tensor) -> Tensor:
        return x * (self.at["minus_precision"] if self.same is None else self.same)

    def curvature(self, x: Tensor) -> Tensor:
        return (-self.at["minus_precision"]).expand(x.shape)

    def sample(self, n: int, generator: Generator) -> Tensor:
        return self.at["scale"] * normal(n, self.at["scale"], generator)

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        return self.log_prob(std) - self.at["norm"]  # −std²/2s², for any x

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(()), self.score(std)


class LaplaceFamily(Family):
    """log p = -|x| / s - log 2s. The score at 0 is 0; the curvature is 0 everywhere else.

    E|x + std ε| = |x| erf z + std √(2/π) exp(-z^2) with z = |x| / (√2 std).
    """

    widens = True

    def derive(self, *, scale: Tensor) -> Values:  # type: ignore[override]
        return {"scale": scale, "rate": 1.0 / scale, "norm": -(2.0 * scale).log().sum(-1)}

    def log_prob(self, x: Tensor) -> Tensor:
        return self.at["norm"] - (x.abs() * self.at["rate"]).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -x.sign() * self.at["rate"]

    def curvature(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def sample(self, n: int, generator: Generator) -> Tensor:
        # The sign and the size of one uniform on (-1, 1) are independent.
        u = 2.0 * uniform(n, self.at["scale"], generator) - 1.0
        return -self.at["scale"] * u.sign() * torch.log1p(-u.abs())

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        size, z = x.abs(), self._ratio(x, std)
        lost = std * math.sqrt(2.0 / math.pi) * (-z.square()).exp() - size * torch.erfc(z)
        return -(lost * self.at["rate"]).sum(-1)

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        z, rate = self._ratio(x, std), self.at["rate"]
        by_std = -math.sqrt(2.0 / math.pi) * (-z.square()).exp() * rate
        return x.sign() * torch.erfc(z) * rate, by_std

    def _ratio(self, x: Tensor, std: Tensor) -> Tensor:
        return x.abs() / std.clamp_min(torch.finfo(std.dtype).tiny) * math.sqrt(0.5)


class StudentTFamily(Family):
    """log p = -(v+1)/2 log(1 + x^2 / (v s^2)) + constants"""

    def derive(self, *, scale: Tensor, df: Tensor) -> Values:  # type: ignore[override]
        half = 0.5 * (df + 1.0)
        norm = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * (df * math.pi).log()
        return {
            "scale": scale,
            "df": df,
            "half": half,
            "width": df * scale.square(),
            "norm": (norm - scale.log()).sum(-1),
        }

    def log_prob(self, x: Tensor) -> Tensor:
        decay = self.at["half"] * torch.log1p(x.square() / self.at["width"])
        return self.at["norm"] - decay.sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -2.0 * self.at["half"] * x / (self.at["width"] + x.square())

    def curvature(self, x: Tensor) -> Tensor:
        square, width = x.square(), self.at["width"]
        return 2.0 * self.at["half"] * (width - square) / (width + square).square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        # Bailey (1994): sqrt(v (U^(-2/v) - 1)) cos(2 pi V) is Student-t for uniform U and V.
        df, scale = self.at["df"], self.at["scale"]
        radius = (df * torch.expm1(-2.0 / df * uniform(n, df, generator).log())).sqrt()
        return scale * radius * torch.cos(2.0 * math.pi * uniform(n, df, generator))


class ScaleMixtureFamily(Family):
    """log p = log(w N(x; 0, s1^2) + (1 - w) N(x; 0, s2^2)); r is the share of the first term."""

    def derive(self, *, weight: Tensor, std1: Tensor, std2: Tensor) -> Values:  # type: ignore[override]
        return {
            "weight": weight,
            "std1": std1,
            "std2": std2,
            "precision1": std1**-2,
            "precision2": std2**-2,
            "log1": weight.log() - std1.log() - HALF_LOG_2PI,
            "log2": (1.0 - weight).log() - std2.log() - HALF_LOG_2PI,
        }

    def _logs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = 0.5 * x.square()
        first = self.at["log1"] - half * self.at["precision1"]
        return first, self.at["log2"] - half * self.at["precision2"]

    def _mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r, and the precision averaged over r."""
        first, second = self._logs(x)
        share = torch.sigmoid(first - second)
        return share, torch.lerp(self.at["precision2"], self.at["precision1"], share)

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.logaddexp(*self._logs(x)).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -x * self._mixed(x)[1]

    def curvature(self, x: Tensor) -> Tensor:
        share, precision = self._mixed(x)
        gap = x * (self.at["precision1"] - self.at["precision2"])
        return precision - share * (1.0 - share) * gap.square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        first = uniform(n, self.at["weight"], generator) < self.at["weight"]
        std = torch.where(first, self.at["std1"], self.at["std2"])
        return std * normal(n, self.at["weight"], generator)


class FlowFamily(Family):
    """The density of w in the docstring of this module."""

    def derive(self, *, scale: Tensor, tail: Tensor) -> Values:  # type: ignore[override]
        norm = -(scale.log() + HALF_LOG_2PI).sum(-1)
        return {"scale": scale, "tail": tail, "slope": tail / scale, "norm": norm}

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ε, r and 1/(1 + r²)."""
        r = x * self.at["slope"]
        return torch.asinh(r) / self.at["tail"], r, 1.0 / (1.0 + r.square())

    def log_prob(self, x: Tensor) -> Tensor:
        eps, r, _ = self._back(x)
        return self.at["norm"] - 0.5 * (eps.square() + torch.log1p(r.square())).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        return -(eps * share.sqrt() + self.at["tail"] * r * share) / self.at["scale"]

    def curvature(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        tail = self.at["tail"]
        turned = 1.0 - eps * tail * r * share.sqrt() + tail.square() * (1.0 - r.square()) * share
        return turned * share / self.at["scale"].square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        scale, tail = self.at["scale"], self.at["tail"]
        return scale * torch.sinh(tail * normal(n, scale, generator)) / tail


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
