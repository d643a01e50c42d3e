"""Covariances over flat parameters in usable shapes, stacked over members.

Shared by Laplace, variational inference, SWAG and Gaussian processes: choose a `Structure` by
what can be afforded, `Diagonal`, `LowRankPlusDiagonal` (or `LowRankPrecision`, of its inverse),
`Kronecker`, `BlockDiagonal`, `Dense`, or `Embedded`, of a few parameters, and use them alike.
"""

from doxa.linalg.base import Structure, structure
from doxa.linalg.dense import BlockDiagonal, Dense, Diagonal, Embedded
from doxa.linalg.kronecker import Kronecker, KroneckerBlock
from doxa.linalg.low_rank import LowRankPlusDiagonal, LowRankPrecision

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Embedded",
    "Kronecker",
    "KroneckerBlock",
    "LowRankPlusDiagonal",
    "LowRankPrecision",
    "Structure",
    "structure",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
