"""The answer at x: a distribution over y that everything downstream consumes."""

from doxa.predictive.base import Predictive
from doxa.predictive.mixture import Mixture
from doxa.predictive.moments import Moments
from doxa.predictive.summary import (
    HeadsPredictive,
    MomentPredictive,
    NormalPredictive,
    concatenate,
)

__all__ = [
    "HeadsPredictive",
    "Mixture",
    "MomentPredictive",
    "Moments",
    "NormalPredictive",
    "Predictive",
    "concatenate",
]
