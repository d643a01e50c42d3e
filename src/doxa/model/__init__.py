"""The model: a network with its likelihood and prior, and other problems that can be fitted."""

from doxa.model.functional import Functional
from doxa.model.layers import MethodLayer, Site
from doxa.model.model import (
    Applied,
    Inputs,
    LogDensity,
    Model,
    Network,
    NoNetwork,
    Problem,
    Subset,
    likelihood_parameters,
)

__all__ = [
    "Applied",
    "Functional",
    "Inputs",
    "LogDensity",
    "MethodLayer",
    "Model",
    "Network",
    "NoNetwork",
    "Problem",
    "Site",
    "Subset",
    "likelihood_parameters",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
