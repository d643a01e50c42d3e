"""Draws from any differentiable log density over a dict of tensors."""

from doxa.density.draws import Draws
from doxa.density.estimates import GradientNoise, RowSum
from doxa.density.sample import sample
from doxa.density.transitions import Transition, Transitions, transitions

__all__ = [
    "Draws", "GradientNoise", "RowSum", "Transition", "Transitions", "sample", "transitions",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
