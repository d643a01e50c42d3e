"""Covariances over flat parameters in usable shapes, stacked over members.

Shared by Laplace, variational inference, SWAG and Gaussian processes: choose a `Structure` by
what can be afforded, `Diagonal`, `LowRankPlusDiagonal`, `Kronecker` or `Dense`, and use them alike.
"""

from doxa.linalg.base import Structure, structure
from doxa.linalg.dense import Dense
from doxa.linalg.diagonal import Diagonal
from doxa.linalg.kronecker import Kronecker, KroneckerBlock
from doxa.linalg.low_rank import LowRankPlusDiagonal

__all__ = [
    "Dense",
    "Diagonal",
    "Kronecker",
    "KroneckerBlock",
    "LowRankPlusDiagonal",
    "Structure",
    "structure",
]
