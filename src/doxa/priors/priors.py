"""Priors over weights, elementwise on the flat parameter vector.

A prior is a frozen dataclass of settings. `bind(prior, layout)` turns it into tensors with one
value per element, so that one expression covers all tensors of all members:

    log p(w) = sum_j log p_j(w_j - m_j)

with m_j the centre of the entry: 1 for normalisation scales, else 0. The elements of a tensor
depend on each other where they share an unknown scale (`hierarchical.py`). Likelihood parameters
(entries "likelihood.*", log scales) always have the prior N(0, 1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from doxa.errors import ModelError
from doxa.linalg.layout import Entry, Layout
from doxa.priors.families import (
    BoundPrior,
    Family,
    FlowFamily,
    GaussianFamily,
    LaplaceFamily,
    Part,
    ScaleMixtureFamily,
    StudentTFamily,
)
from doxa.priors.hierarchical import HalfCauchyScale, InverseGammaScale, LogNormalScale

if TYPE_CHECKING:
    from doxa.priors.families import BoundPrior


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


PRIORS: dict[str, type[Prior]] = {
    kind.name: kind
    for kind in (
        Normal, FanInNormal, LaplacePrior, StudentTPrior, FlowPrior, ScaleMixture, Hierarchical,
    )
}  # fmt: skip
PriorSpec = str | Prior | Mapping[str, Prior]


def prior(spec: PriorSpec | None) -> Prior | Mapping[str, Prior]:
    """A prior from its name or an object; None is Normal(1.0). A mapping of patterns is returned
    unchanged."""
    if spec is None:
        return Normal()
    if isinstance(spec, str):
        if spec not in PRIORS:
            known = ", ".join(sorted(PRIORS))
            raise ModelError(f"no prior is called {spec!r}; there are {known}")
        return PRIORS[spec]()
    if isinstance(spec, Prior):
        return spec
    if isinstance(spec, Mapping) and all(isinstance(part, Prior) for part in spec.values()):
        return spec
    if isinstance(spec, type) and issubclass(spec, Prior):
        raise ModelError(f"a prior is a name or an object: {spec.__name__}(), not its class")
    raise ModelError(
        "a prior is a name, an object, or {name pattern: object}, got " + type(spec).__name__
    )


def bind(spec: PriorSpec | None, layout: Layout) -> BoundPrior:
    """The prior of every element of a layout.

    The patterns of a mapping {pattern: Prior} are compared with the names of the entries. They are
    shell patterns; the first match is used, and "*" is tried last. Entries without a match have
    Normal(1.0). A pattern that matches no name is an error.
    """
    chosen = each_prior(spec, layout)
    groups: dict[type[Family], list[tuple[Entry, Prior]]] = {}
    for entry, its_prior in zip(layout.entries, chosen, strict=True):
        groups.setdefault(its_prior.density, []).append((entry, its_prior))
    if not groups:
        groups = {GaussianFamily: []}  # no parameters: log p = 0
    parts = [_part(family, members, layout) for family, members in groups.items()]
    return BoundPrior(parts, layout.size)


def each_prior(spec: PriorSpec | None, layout: Layout) -> list[Prior]:
    """The prior of each entry of a layout."""
    named = prior(spec)
    table = {"*": named} if isinstance(named, Prior) else named
    patterns = sorted(table, key=lambda pattern: pattern == "*")
    unused = set(patterns) - {"*"}
    chosen: list[Prior] = []
    for name in layout.names:
        matches = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unused.difference_update(matches)
        if name.startswith("likelihood."):
            chosen.append(Normal(1.0))
        else:
            chosen.append(table[matches[0]] if matches else Normal(1.0))
    if unused:
        raise ModelError(
            f"prior pattern {min(unused)!r} matches no parameter; there are "
            + ", ".join(layout.names)
        )
    return chosen


def _part(family: type[Family], members: list[tuple[Entry, Prior]], layout: Layout) -> Part:
    entries = [entry for entry, _ in members]
    sizes = torch.tensor([entry.size for entry in entries], dtype=torch.long)

    def spread(values: list[float]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=torch.float64), sizes)

    settings = [its_prior.settings(entry) for entry, its_prior in members]
    names = settings[0] if settings else Normal().settings(Entry("", ()))
    exact = {name: spread([values[name] for values in settings]) for name in names}
    if family.grouped:
        exact["group"] = spread([float(g) for g in range(len(entries))])
    loc = spread([entry.centre for entry in entries])
    return Part(
        slice(None) if len(entries) == len(layout.entries) else _place(entries, layout),
        loc if bool(loc.any()) else None,
        family(exact, torch.device("cpu"), torch.float64),
    )


def _place(entries: list[Entry], layout: Layout) -> slice | Tensor:
    """A slice where the entries are contiguous, else their positions."""
    positions = layout.index(entry.name for entry in entries)
    if positions.numel() == 0:
        return slice(0, 0)
    first = int(positions[0])
    if int(positions[-1]) - first + 1 == positions.numel():
        return slice(first, first + positions.numel())
    return positions
