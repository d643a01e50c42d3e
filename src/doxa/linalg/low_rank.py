"""Low-rank covariances and precisions: a diagonal plus a matrix of low rank.

`LowRankPlusDiagonal` is Σ = D + F Fᵀ. With G = D^{-1/2} F and the R × R matrix
C = I + Gᵀ G = I + V diag(s) Vᵀ:

    Σ⁻¹   = D^{-1/2} (I − G C⁻¹ Gᵀ) D^{-1/2}                              (Woodbury)
    log|Σ| = log|D| + log|C|
    Σ     = R Rᵀ,  R = D^{1/2} (I + G V diag(1 / (1 + √(1 + s))) Vᵀ Gᵀ)

R contains the square root of I + G Gᵀ. It is written without a division by s, because s may be 0.

`LowRankPrecision` is Σ⁻¹ = D + F Fᵀ. It is used where the data determine a few directions, and the
prior the others. With G = D^{-1/2} F = U diag(√s) Vᵀ, U orthonormal:

    Σ      = D^{-1/2} (I − U diag(s / (1 + s)) Uᵀ) D^{-1/2}                (Woodbury)
    log|Σ| = −log|D| − Σ log(1 + s)
    Σ      = R Rᵀ,  R = D^{-1/2} (I − U diag(1 − 1/√(1 + s)) Uᵀ)

s is computed in double precision, because the precision of a direction may exceed what single
precision can represent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from doxa.errors import ShapeError
from doxa.linalg.base import Structure, cholesky, per_member, refuse, refuse_variances


@dataclass(frozen=True, eq=False)
class LowRankPlusDiagonal(Structure):
    """The covariance D + F Fᵀ.

    D may contain zeros, such as those of SWAG for weights that never moved. Then `solve`, `logdet`,
    and `sample` from P numbers raise an error. All other operations work, also `sample` from P + R
    numbers.

    Parameters
    ----------
    variance : Tensor of shape [K, P]
        The diagonal D.
    factor : Tensor of shape [K, P, R]
        The factor F.
    """

    name = "low-rank"

    variance: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        if self.factor.ndim != 3 or self.factor.shape[:2] != self.variance.shape:
            raise ShapeError(
                f"expected a diagonal [K, P] and a factor [K, P, R], got "
                f"{list(self.variance.shape)} and {list(self.factor.shape)}"
            )
        refuse_variances(self.variance, "the diagonal")
        refuse(~self.factor.detach().isfinite().flatten(1).all(-1), "the factor is not finite")

    @property
    def shape(self) -> tuple[int, int]:
        return self.factor.shape[0], self.factor.shape[1]

    @property
    def rank(self) -> int:
        return self.factor.shape[2]

    @property
    def numbers(self) -> int:
        return self.size + self.rank

    def sample(self, eps: Tensor) -> Tensor:
        """Draws from N(0, Σ), [..., K, P], from normal numbers [..., K, P] or [..., K, P + R].

        With P + R numbers, a draw is D^{1/2} ε₁ + F ε₂, which needs no decomposition. This is
        faster for a few draws, allows zeros in D, and has a gradient everywhere.
        """
        if self.rank == 0 or eps.shape[-1] != self.size + self.rank:
            return super().sample(eps)
        own, common = torch.split(eps, [self.size, self.rank], dim=-1)
        low_rank: Tensor = torch.einsum("kpr,...kr->...kp", self.factor, common)
        return own * self.variance.sqrt() + low_rank

    def diagonal(self) -> Tensor:
        return self.variance + self.factor.square().sum(-1)

    def logdet(self) -> Tensor:
        capacity = self._capacity.diagonal(dim1=-2, dim2=-1)
        return self.variance.log().sum(-1) + 2 * capacity.log().sum(-1)

    def scaled(self, t: float | Tensor) -> LowRankPlusDiagonal:
        t = per_member(t, self.variance, "the scale")
        return LowRankPlusDiagonal(
            self.variance * t[:, None], self.factor * t.sqrt()[:, None, None]
        )

    def _root(self, rows: Tensor) -> Tensor:
        scores, vectors = torch.linalg.eigh(self._whitened.mT @ self._whitened)
        shrink = 1 / (1 + (1 + scores.clamp(min=0)).sqrt())
        basis = self._whitened @ vectors  # [K, P, R]
        bent: Tensor = rows + (rows @ basis * shrink[:, None]) @ basis.mT
        return bent * self.variance.sqrt()[:, None]

    def _half(self, rows: Tensor) -> Tensor:
        return torch.cat([rows * self.variance.sqrt()[:, None], rows @ self.factor], dim=-1)

    def _matmul(self, rows: Tensor) -> Tensor:
        return rows * self.variance[:, None] + rows @ self.factor @ self.factor.mT

    def _solve(self, rows: Tensor) -> Tensor:
        scale = self.variance.sqrt()[:, None]
        white = rows / scale
        inner = torch.cholesky_solve((white @ self._whitened).mT, self._capacity)  # [K, R, T]
        return (white - inner.mT @ self._whitened.mT) / scale

    @cached_property
    def _whitened(self) -> Tensor:
        """G = D^{-1/2} F."""
        refuse((self.variance.detach() == 0).any(-1), "the diagonal has a zero: not invertible")
        return self.factor / self.variance.sqrt()[..., None]

    @cached_property
    def _capacity(self) -> Tensor:
        """The Cholesky factor of C."""
        eye = torch.eye(self.rank, dtype=self.factor.dtype, device=self.factor.device)
        return cholesky(eye + self._whitened.mT @ self._whitened, "I + Fᵀ D⁻¹ F")

    def state(self) -> dict[str, Tensor]:
        return {"variance": self.variance, "factor": self.factor}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> LowRankPlusDiagonal:
        return cls(state["variance"], state["factor"])


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Structure):
    """The covariance (D + F Fᵀ)⁻¹.

    Parameters
    ----------
    precision : Tensor of shape [K, P]
        The diagonal D, which must be positive.
    factor : Tensor of shape [K, P, R]
        The factor F.
    """

    name = "low-rank-precision"

    precision: Tensor
    factor: Tensor

    def __post_init__(self) -> None:
        if self.factor.ndim != 3 or self.factor.shape[:2] != self.precision.shape:
            raise ShapeError(
                f"expected a diagonal [K, P] and a factor [K, P, R], got "
                f"{list(self.precision.shape)} and {list(self.factor.shape)}"
            )
        refuse_variances(self.precision, "the diagonal of the precision")
        refuse((self.precision.detach() == 0).any(-1), "the diagonal of the precision has a zero")
        refuse(~self.factor.detach().isfinite().flatten(1).all(-1), "the factor is not finite")

    @property
    def shape(self) -> tuple[int, int]:
        return self.factor.shape[0], self.factor.shape[1]

    @property
    def rank(self) -> int:
        return self.factor.shape[2]

    def diagonal(self) -> Tensor:
        share = self._scores / (1 + self._scores)
        left = 1 - (self._basis.double().square() * share[:, None]).sum(-1)
        return left.clamp(min=0).to(self.precision.dtype) / self.precision

    def logdet(self) -> Tensor:
        return -self.precision.log().sum(-1) - self._scores.log1p().sum(-1).to(self.precision.dtype)

    def scaled(self, t: float | Tensor) -> LowRankPrecision:
        t = per_member(t, self.precision, "the scale")
        return LowRankPrecision(self.precision / t[:, None], self.factor / t.sqrt()[:, None, None])

    def _root(self, rows: Tensor) -> Tensor:
        return self._shrunk(rows) / self.precision.sqrt()[:, None]

    def _half(self, rows: Tensor) -> Tensor:
        return self._shrunk(rows / self.precision.sqrt()[:, None])

    def _shrunk(self, rows: Tensor) -> Tensor:
        """(I + G Gᵀ)^{-1/2} v."""
        return self._minus_projection(rows, 1 - (1 + self._scores).rsqrt())

    def _matmul(self, rows: Tensor) -> Tensor:
        scale = self.precision.sqrt()[:, None]
        return self._minus_projection(rows / scale, self._scores / (1 + self._scores)) / scale

    def _minus_projection(self, rows: Tensor, share: Tensor) -> Tensor:
        """v − U diag(share) Uᵀ v."""
        return rows - (rows @ self._basis * share.to(rows.dtype)[:, None]) @ self._basis.mT

    def _solve(self, rows: Tensor) -> Tensor:
        return rows * self.precision[:, None] + rows @ self.factor @ self.factor.mT

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        whitened = self.factor.double() / self.precision.double().sqrt()[..., None]
        scores, vectors = torch.linalg.eigh(whitened.mT @ whitened)
        scores = scores.clamp(min=0)
        basis = (
            whitened @ vectors / scores.clamp(min=torch.finfo(scores.dtype).tiny).sqrt()[:, None]
        )
        # directions that are only round-off have no unit vector in U, and are set to zero
        counts = scores > torch.finfo(scores.dtype).eps * scores.amax(-1, keepdim=True)
        return scores * counts, (basis * counts[:, None]).to(self.factor.dtype)

    @property
    def _scores(self) -> Tensor:
        """s [K, R], in double precision."""
        return self._spectrum[0]

    @property
    def _basis(self) -> Tensor:
        """U [K, P, R]."""
        return self._spectrum[1]

    def state(self) -> dict[str, Tensor]:
        return {"precision": self.precision, "factor": self.factor}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> LowRankPrecision:
        return cls(state["precision"], state["factor"])
