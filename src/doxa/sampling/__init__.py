"""Draws from any differentiable log density over a dict of tensors."""

from doxa.sampling.draws import Draws
from doxa.sampling.sample import sample

__all__ = ["Draws", "sample"]
