"""Everything correlated with everything: a Cholesky factor of Σ, or of Σ⁻¹.

from a covariance  Σ = L Lᵀ:      R = L
from a precision   Σ⁻¹ = L Lᵀ:    R = L⁻ᵀ, and Σ is never formed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.linalg.base import Structure, cholesky, per_member


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """A lower Cholesky factor [K, P, P] of the covariance, or of the precision.

    Build it with `from_covariance` or `from_precision`.
    """

    name = "dense"

    factor: Tensor
    of_precision: bool

    @classmethod
    def from_covariance(cls, covariance: Tensor) -> Dense:
        return cls(cholesky(covariance, "the covariance"), of_precision=False)

    @classmethod
    def from_precision(cls, precision: Tensor) -> Dense:
        return cls(cholesky(precision, "the precision"), of_precision=True)

    @classmethod
    def from_precision_root(cls, root: Tensor) -> Dense:
        """Of Σ⁻¹ = AᵀA, by A = QR: the product, whose condition is that of A squared, is not
        formed. Rows of A go from small to large; QR keeps more digits the other way round."""
        upper = torch.linalg.qr(root.flip(-2), mode="r").R
        sign = upper.diagonal(dim1=-2, dim2=-1).sign()
        return cls((sign[..., None] * upper).mT.contiguous(), of_precision=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.factor.shape[0], self.factor.shape[1]

    def diagonal(self) -> Tensor:
        if not self.of_precision:
            return self.factor.square().sum(-1)
        eye = torch.eye(self.size, dtype=self.factor.dtype, device=self.factor.device)
        return _lower_solve(self.factor, eye).square().sum(-2)

    def logdet(self) -> Tensor:
        logdet = 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -logdet if self.of_precision else logdet

    def scaled(self, t: float | Tensor) -> Dense:
        root = per_member(t, self.factor, "the scale").sqrt()[:, None, None]
        factor = self.factor / root if self.of_precision else self.factor * root
        return Dense(factor, self.of_precision)

    def _root(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return _lower_solve(self.factor, rows, left=False)
        return rows @ self.factor.mT

    def _half(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return _lower_solve(self.factor, rows.mT).mT
        return rows @ self.factor

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._root(self._half(rows))

    def _solve(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return rows @ self.factor @ self.factor.mT
        return torch.cholesky_solve(rows.mT, self.factor).mT

    def state(self) -> dict[str, Tensor]:
        return {"precision" if self.of_precision else "covariance": self.factor}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Dense:
        of_precision = "precision" in state
        return cls(state["precision" if of_precision else "covariance"], of_precision)


def _lower_solve(factor: Tensor, right: Tensor, left: bool = True) -> Tensor:
    """L⁻¹ X, or X L⁻¹."""
    solution: Tensor = torch.linalg.solve_triangular(factor, right, upper=False, left=left)
    return solution
