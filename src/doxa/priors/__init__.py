"""Priors over weights and over functions. `PRIORS` names those over weights."""

from __future__ import annotations

from collections.abc import Mapping

from doxa.errors import ModelError
from doxa.linalg.layout import Layout
from doxa.priors import base
from doxa.priors.base import BoundPrior, FanInNormal, Normal, Prior, stack_bound
from doxa.priors.elementwise import FlowPrior, LaplacePrior, ScaleMixture, StudentTPrior
from doxa.priors.hierarchical import Hierarchical

__all__ = [
    "PRIORS",
    "BoundPrior",
    "FanInNormal",
    "FlowPrior",
    "Hierarchical",
    "LaplacePrior",
    "Normal",
    "Prior",
    "ScaleMixture",
    "StudentTPrior",
    "bind",
    "each_prior",
    "prior",
    "stack_bound",
]

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


def bind(spec: PriorSpec | None, layout: Layout, merge: bool = True) -> BoundPrior:
    """The prior of every element of a layout: `doxa.priors.base.bind`."""
    return base.bind(prior(spec), layout, merge)


def each_prior(spec: PriorSpec | None, layout: Layout) -> list[Prior]:
    """The prior of each entry of a layout."""
    return base.each_prior(prior(spec), layout)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
