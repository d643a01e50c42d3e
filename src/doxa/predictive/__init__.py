"""The answer at x: a distribution over y that everything downstream consumes."""

from doxa.predictive.predictive import Moments, Predictive

__all__ = ["Moments", "Predictive"]
