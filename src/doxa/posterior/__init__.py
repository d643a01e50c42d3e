"""Posteriors: the results of a fit."""

from doxa.posterior.base import Posterior, PredictiveTransform, Record, Status, register_posterior
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
    "FunctionDraws",
    "GaussianPosterior",
    "ImplicitPosterior",
    "MixturePosterior",
    "Posterior",
    "PredictiveTransform",
    "ProcessPosterior",
    "Record",
    "SamplePosterior",
    "Status",
    "TransformedPosterior",
    "WeightPosterior",
    "load",
    "prior_scales",
    "register_posterior",
]
