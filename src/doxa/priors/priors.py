"""The public priors: frozen dataclasses of settings, whose density is a `Family`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

from doxa.errors import ModelError
from doxa.linalg.layout import Entry, Layout
from doxa.priors.families import (
    Family,
    FlowFamily,
    GaussianFamily,
    LaplaceFamily,
    ScaleMixtureFamily,
    StudentTFamily,
)
from doxa.priors.hierarchical import HalfCauchyScale, InverseGammaScale, LogNormalScale

if TYPE_CHECKING:
    from doxa.priors.bound import BoundPrior


@dataclass(frozen=True)
class Prior(ABC):
    """An elementwise prior, centred at the centre of each entry."""

    name: ClassVar[str]
    family: ClassVar[type[Family]]

    def __post_init__(self) -> None:
        check_positive(self, vars(self))

    @abstractmethod
    def settings(self, entry: Entry) -> dict[str, float]:
        """The settings of the family for the elements of one entry."""

    @property
    def density(self) -> type[Family]:
        """The family of its elements; it may depend on the settings."""
        return self.family

    def bind(self, layout: Layout) -> BoundPrior:
        from doxa.priors import bind

        return bind(self, layout)


def check_positive(prior: Prior, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(prior, name)
        number = float(value) if isinstance(value, Real) else math.nan
        if not 0.0 < number < math.inf:
            raise ModelError(f"{type(prior).__name__}: {name} must be positive, got {value!r}")


@dataclass(frozen=True)
class Normal(Prior):
    """N(centre, std^2) on every element."""

    name: ClassVar[str] = "normal"
    family: ClassVar[type[Family]] = GaussianFamily

    std: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.std}


@dataclass(frozen=True)
class FanInNormal(Prior):
    """N(centre, scale^2 / fan_in): the input of a unit has the same variance at any width (Neal,
    1996).

    Biases and normalisation parameters have fan_in 1, hence the standard deviation `scale`.
    """

    name: ClassVar[str] = "fan-in-normal"
    family: ClassVar[type[Family]] = GaussianFamily

    scale: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.scale / math.sqrt(entry.fan_in)}


@dataclass(frozen=True)
class LaplacePrior(Prior):
    """Density exp(-|w - centre| / scale) / (2 scale)."""

    name: ClassVar[str] = "laplace-prior"
    family: ClassVar[type[Family]] = LaplaceFamily

    scale: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.scale}


@dataclass(frozen=True)
class StudentTPrior(Prior):
    """Student-t with df degrees of freedom: most weights small, a few large."""

    name: ClassVar[str] = "student-t-prior"
    family: ClassVar[type[Family]] = StudentTFamily

    df: float = 3.0
    scale: float = 1.0

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.scale, "df": self.df}


@dataclass(frozen=True)
class FlowPrior(Prior):
    """(scale/tail) sinh(tail ε) of a standard normal ε for every element, the flow of Johnson
    (1949).

    For `tail` near 0 it is N(0, scale²). The larger `tail`, the heavier the tails.
    """

    name: ClassVar[str] = "flow-prior"
    family: ClassVar[type[Family]] = FlowFamily

    scale: float = 1.0
    tail: float = 0.5

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"scale": self.scale, "tail": self.tail}


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """weight N(0, std1^2) + (1 - weight) N(0, std2^2), of Blundell et al. (2015)."""

    name: ClassVar[str] = "scale-mixture"
    family: ClassVar[type[Family]] = ScaleMixtureFamily

    weight: float = 0.5
    std1: float = 1.0
    std2: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight >= 1.0:
            raise ModelError(f"ScaleMixture: weight must lie between 0 and 1, got {self.weight}")

    def settings(self, entry: Entry) -> dict[str, float]:
        return {"weight": self.weight, "std1": self.std1, "std2": self.std2}


HYPER: dict[str, type[Family]] = {
    "half-cauchy": HalfCauchyScale,
    "inverse-gamma": InverseGammaScale,
    "log-normal": LogNormalScale,
}


@dataclass(frozen=True)
class Hierarchical(Prior):
    """N(centre, σ²) on every element of a tensor, with one unknown σ for each tensor:

        "half-cauchy"     σ ~ C⁺(0, scale)                      shape is not used
        "inverse-gamma"   σ² ~ InvGamma(shape, shape · scale²)  a Student-t with 2 · shape degrees
        "log-normal"      log σ ~ N(log scale, shape²)

    σ is integrated out, so that every method supports it without additional parameters. MCMC
    samples the weights under all σ at once, without the funnel of the joint density of weights and
    σ (Neal, 2003). `doxa.prior_scales(posterior)` draws σ given the weights. Half-Cauchy: Gelman
    (2006).

    Parameters
    ----------
    scale : float
        The typical size of σ; divided by √fan_in if `fan_in` is True.
    """

    name: ClassVar[str] = "hierarchical"

    hyper: str = "half-cauchy"
    scale: float = 1.0
    shape: float = 1.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        if self.hyper not in HYPER:
            raise ModelError(f"Hierarchical: hyper is one of {', '.join(HYPER)}: {self.hyper!r}")
        if not isinstance(self.fan_in, bool):
            raise ModelError(f"Hierarchical: fan_in is True or False, got {self.fan_in!r}")
        check_positive(self, ("scale", "shape"))

    @property
    def density(self) -> type[Family]:
        return HYPER[self.hyper]

    def settings(self, entry: Entry) -> dict[str, float]:
        width = self.scale / math.sqrt(entry.fan_in) if self.fan_in else self.scale
        return {"scale": width, "shape": self.shape}
