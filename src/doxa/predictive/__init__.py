"""The answer at x: a distribution over y that everything downstream consumes."""

from doxa.predictive.moments import Moments
from doxa.predictive.predictive import Predictive

__all__ = ["Moments", "Predictive"]
