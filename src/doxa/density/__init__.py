"""Draws from any differentiable log density over a dict of tensors."""

from doxa.density.draws import Draws
from doxa.density.sample import sample

__all__ = ["Draws", "sample"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
