"""Covariances over flat parameters, in structures of different size, stacked over members.

They are shared by Laplace, variational inference, SWAG and Gaussian processes. A `Structure` is
`Diagonal`, `LowRankPlusDiagonal` (or `LowRankPrecision`, for its inverse), `Kronecker`,
`BlockDiagonal`, `Dense`, or `Embedded` for a few of the parameters. All have the same operations.
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
