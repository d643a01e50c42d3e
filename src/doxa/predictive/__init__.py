"""Predictive distributions of y at given inputs x."""

from doxa.predictive.predictive import Moments, Predictive

__all__ = ["Moments", "Predictive"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
