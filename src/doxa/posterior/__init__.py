"""What comes back from a fit."""

from doxa.posterior.base import Posterior, Record, Status
from doxa.posterior.centred import CentredPosterior
from doxa.posterior.function_draws import FunctionDraws
from doxa.posterior.gaussian import GaussianPosterior
from doxa.posterior.implicit import ImplicitPosterior
from doxa.posterior.kinds import register_posterior
from doxa.posterior.mixture import MixturePosterior
from doxa.posterior.prior_scales import prior_scales
from doxa.posterior.process import ProcessPosterior
from doxa.posterior.samples import SamplePosterior
from doxa.posterior.saving import load
from doxa.posterior.transformed import PredictiveTransform, TransformedPosterior
from doxa.posterior.weights import WeightPosterior

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
