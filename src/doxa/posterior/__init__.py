"""What comes back from a fit."""

from doxa.posterior.base import Posterior, Record, Status, register_posterior
from doxa.posterior.mixture import MixturePosterior
from doxa.posterior.saving import load
from doxa.posterior.weights import (
    Draws,
    GaussianPosterior,
    ImplicitPosterior,
    SamplePosterior,
    WeightPosterior,
)

__all__ = [
    "Draws",
    "GaussianPosterior",
    "ImplicitPosterior",
    "MixturePosterior",
    "Posterior",
    "Record",
    "SamplePosterior",
    "Status",
    "WeightPosterior",
    "load",
    "register_posterior",
]
