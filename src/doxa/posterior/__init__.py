"""What comes back from a fit."""

from doxa.posterior.base import Posterior, Record, Status, register_posterior
from doxa.posterior.gaussian import GaussianPosterior
from doxa.posterior.implicit import ImplicitPosterior
from doxa.posterior.mixture import MixturePosterior
from doxa.posterior.process import ProcessPosterior
from doxa.posterior.samples import SamplePosterior
from doxa.posterior.saving import load
from doxa.posterior.transformed import Transform, TransformedPosterior
from doxa.posterior.weights import Draws, WeightPosterior

__all__ = [
    "Draws",
    "GaussianPosterior",
    "ImplicitPosterior",
    "MixturePosterior",
    "Posterior",
    "ProcessPosterior",
    "Record",
    "SamplePosterior",
    "Status",
    "Transform",
    "TransformedPosterior",
    "WeightPosterior",
    "load",
    "register_posterior",
]
