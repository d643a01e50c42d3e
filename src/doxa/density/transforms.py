"""Transforms from unconstrained (free) parameters to constrained ones, for samplers on ℝᴾ.

A transform maps free values u to natural ones x = f(u). A density p(x) of the natural values is the
density p(f(u)) |det ∂f/∂u| of the free values. So log |det| is added to the log density; draws of u
that are mapped to x are then draws of x.

    positive     x = exp u                            log|J| = u
    softplus     x = log(1 + exp u)                   log|J| = log σ(u)
    interval     x = a + (b − a) σ(u)                 log|J| = log(b − a) + log σ(u) + log σ(−u)
    simplex      x_k = z_k (1 − Σ_{j<k} x_j)          log|J| = Σ_k log x_k + log(1 − z_k)
                 with z_k = σ(u_k − log(K − k)): a stick, broken K − 1 times
    ordered      x_1 = u_1, x_k = x_{k−1} + exp u_k   log|J| = Σ_{k>1} u_k

For a simplex, the density is that of its first K − 1 entries. Stan Development Team, Reference
Manual, "Constraint transforms".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from doxa import store
from doxa.errors import MethodError, ShapeError, did_you_mean

__all__ = [
    "Interval",
    "Lower",
    "Ordered",
    "Positive",
    "Real",
    "Simplex",
    "Transform",
    "Upper",
    "transform",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


Shape = tuple[int, ...]


class Transform(ABC):
    """A smooth one-to-one map from free values to constrained ones.

    Elementwise, or along the last axis (`vector`); leading axes are batches.
    """

    vector: ClassVar[bool] = False
    says: ClassVar[str]  # the constraint as text, for error messages

    @abstractmethod
    def forward(self, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """x, and log |det ∂x/∂u| of each element (or each vector); None where it is 0."""

    @abstractmethod
    def inverse(self, x: Tensor) -> Tensor:
        """The free values; not finite where x violates the constraint."""

    @abstractmethod
    def holds(self, x: Tensor) -> bool:
        """Whether x satisfies the constraint strictly."""

    def free_shape(self, shape: Shape) -> Shape:
        """The shape of the free values, for natural values of this shape."""
        return shape


@store.register("transform-real")
@dataclass(frozen=True)
class Real(Transform):
    """No constraint."""

    says: ClassVar[str] = "finite"

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor | None]:
        return u, None

    def inverse(self, x: Tensor) -> Tensor:
        return x

    def holds(self, x: Tensor) -> bool:
        return bool(torch.isfinite(x).all())


@store.register("transform-positive")
@dataclass(frozen=True)
class Positive(Transform):
    """x > 0, as exp u; or as softplus, log(1 + exp u), which approaches u for large u."""

    says: ClassVar[str] = "above 0"

    soft: bool = False

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return (F.softplus(u), F.logsigmoid(u)) if self.soft else (u.exp(), u)

    def inverse(self, x: Tensor) -> Tensor:
        return x + torch.log(-torch.expm1(-x)) if self.soft else x.log()

    def holds(self, x: Tensor) -> bool:
        return bool(((x > 0) & torch.isfinite(x)).all())


@store.register("transform-lower")
@dataclass(frozen=True)
class Lower(Transform):
    """x > bound."""

    says: ClassVar[str] = "above its lower bound"

    bound: float

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.bound + u.exp(), u

    def inverse(self, x: Tensor) -> Tensor:
        return (x - self.bound).log()

    def holds(self, x: Tensor) -> bool:
        return bool(((x > self.bound) & torch.isfinite(x)).all())


@store.register("transform-upper")
@dataclass(frozen=True)
class Upper(Transform):
    """x < bound."""

    says: ClassVar[str] = "below its upper bound"

    bound: float

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.bound - u.exp(), u

    def inverse(self, x: Tensor) -> Tensor:
        return (self.bound - x).log()

    def holds(self, x: Tensor) -> bool:
        return bool(((x < self.bound) & torch.isfinite(x)).all())


@store.register("transform-interval")
@dataclass(frozen=True)
class Interval(Transform):
    """low < x < high."""

    says: ClassVar[str] = "strictly between its bounds"

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise MethodError(
                f"an interval needs finite bounds low < high, not {self.low} and {self.high}; "
                "for one bound use Lower or Upper"
            )

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        width = self.high - self.low
        x = self.low + width * u.sigmoid()
        return x, math.log(width) + F.logsigmoid(u) + F.logsigmoid(-u)

    def inverse(self, x: Tensor) -> Tensor:
        return (x - self.low).log() - (self.high - x).log()

    def holds(self, x: Tensor) -> bool:
        return bool(((x > self.low) & (x < self.high)).all())


@store.register("transform-simplex")
@dataclass(frozen=True)
class Simplex(Transform):
    """Positive entries that add up to 1 along the last axis; u = 0 is the centre."""

    vector: ClassVar[bool] = True
    says: ClassVar[str] = "positive with sum 1 along the last axis"

    def _offset(self, u: Tensor) -> Tensor:
        return torch.arange(u.shape[-1], 0, -1, device=u.device, dtype=u.dtype).log()

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        u = u - self._offset(u)
        broken, stays = F.logsigmoid(u), F.logsigmoid(-u)  # log z_k, log(1 − z_k)
        rest = F.pad(stays.cumsum(-1), (1, 0))  # the log length of what is left, [..., K]
        x = (F.pad(broken, (0, 1)) + rest).exp()
        return x, (broken + stays + rest[..., :-1]).sum(-1)

    def inverse(self, x: Tensor) -> Tensor:
        rest = x.flip(-1).cumsum(-1).flip(-1)[..., 1:]  # Σ_{j>k} x_j: no cancellation in 1 − Σ
        u = x[..., :-1].log() - rest.log()
        return u + self._offset(u)

    def holds(self, x: Tensor) -> bool:
        close = (x.double().sum(-1) - 1).abs() < 1e-6 + 8 * torch.finfo(x.dtype).eps
        return bool((x > 0).all()) and bool(close.all())

    def free_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] < 2:
            raise ShapeError(f"a simplex has a last axis of 2 entries or more, not {list(shape)}")
        return (*shape[:-1], shape[-1] - 1)


@store.register("transform-ordered")
@dataclass(frozen=True)
class Ordered(Transform):
    """Increasing along the last axis; with positive=True, all entries are positive."""

    vector: ClassVar[bool] = True
    says: ClassVar[str] = "increasing along the last axis (and above 0 where positive=True)"

    positive: bool = False

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        if self.positive:
            return u.exp().cumsum(-1), u.sum(-1)
        steps = torch.cat([u[..., :1], u[..., 1:].exp()], -1)
        return steps.cumsum(-1), u[..., 1:].sum(-1)

    def inverse(self, x: Tensor) -> Tensor:
        first = x[..., :1].log() if self.positive else x[..., :1]
        return torch.cat([first, x.diff(dim=-1).log()], -1)

    def holds(self, x: Tensor) -> bool:
        inside = bool((x.diff(dim=-1) > 0).all()) and bool(torch.isfinite(x).all())
        return inside and (not self.positive or bool((x > 0).all()))

    def free_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] < 1:
            raise ShapeError(f"ordered entries need a last axis, not the shape {list(shape)}")
        return shape


NAMES: dict[str, Callable[[], Transform]] = {
    "real": Real,
    "positive": Positive,
    "softplus": lambda: Positive(soft=True),
    "unit": Interval,
    "simplex": Simplex,
    "ordered": Ordered,
    "positive-ordered": lambda: Ordered(positive=True),
}


def transform(spec: Any) -> Transform:
    """A transform from its name, its class or an object."""
    if isinstance(spec, Transform):
        return spec
    if isinstance(spec, str):
        if spec not in NAMES:
            raise MethodError(f"unknown constraint {spec!r}{did_you_mean(spec, NAMES)}")
        return NAMES[spec]()
    raise MethodError(
        f"a constraint is a name ({', '.join(NAMES)}) or a transform such as "
        f"doxa.transforms.Interval(0, 1), not {spec!r}"
    )
