"""Priors over weights and over functions."""

from __future__ import annotations

from doxa.priors.families import BoundPrior, stack_bound
from doxa.priors.priors import (
    PRIORS,
    FanInNormal,
    FlowPrior,
    Hierarchical,
    LaplacePrior,
    Normal,
    Prior,
    ScaleMixture,
    StudentTPrior,
    bind,
    each_prior,
    prior,
)

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


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
