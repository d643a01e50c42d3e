"""Posteriors: the results of a fit."""

from doxa.posterior.base import (
    Compared,
    Diagnostics,
    HeldOut,
    HeldOutCalibration,
    Posterior,
    PredictiveTransform,
    Record,
    Status,
    Stopping,
    register_posterior,
)
from doxa.posterior.certificate import Certificate, Estimate
from doxa.posterior.implicit import ImplicitPosterior
from doxa.posterior.mixture import MixturePosterior, TransformedPosterior
from doxa.posterior.process import ProcessPosterior
from doxa.posterior.saving import load
from doxa.posterior.weights import (
    CentredPosterior,
    FunctionDraws,
    GaussianPosterior,
    SamplePosterior,
    WeightPosterior,
    prior_scales,
)

__all__ = [
    "CentredPosterior",
    "Certificate",
    "Compared",
    "Diagnostics",
    "Estimate",
    "FunctionDraws",
    "GaussianPosterior",
    "HeldOut",
    "HeldOutCalibration",
    "ImplicitPosterior",
    "MixturePosterior",
    "Posterior",
    "PredictiveTransform",
    "ProcessPosterior",
    "Record",
    "SamplePosterior",
    "Status",
    "Stopping",
    "TransformedPosterior",
    "WeightPosterior",
    "load",
    "prior_scales",
    "register_posterior",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
