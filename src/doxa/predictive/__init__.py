"""Predictive distributions of y at given inputs x."""

from doxa.predictive.predictive import Moments, Predictive

__all__ = ["Moments", "Predictive"]
