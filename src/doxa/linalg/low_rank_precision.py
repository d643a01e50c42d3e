"""A few directions that data have pinned down, on top of independent ones: Σ⁻¹ = D + F Fᵀ.

With G = D^{-1/2} F, Gᵀ G = V diag(s) Vᵀ and B = G V:

    Σ      = D^{-1/2} (I − B diag(1 / (1 + s)) Bᵀ) D^{-1/2}                (Woodbury)
    log|Σ| = −log|D| − Σ log(1 + s)
    Σ      = R Rᵀ,  R = D^{-1/2} (I − B diag(1 / (1 + s + √(1 + s))) Bᵀ)

The last is the inverse square root of I + G Gᵀ written without dividing by s, which may be zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from doxa.errors import ShapeError
from doxa.linalg.base import Structure, per_member, refuse, refuse_variances


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Structure):
    """Precisions D [K, P], all positive, and factor F [K, P, R]."""

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
        scores, basis = self._spectrum
        return (1 - (basis.square() / (1 + scores)[:, None]).sum(-1)) / self.precision

    def logdet(self) -> Tensor:
        return -self.precision.log().sum(-1) - self._spectrum[0].log1p().sum(-1)

    def scaled(self, t: float | Tensor) -> LowRankPrecision:
        t = per_member(t, self.precision, "the scale")
        return LowRankPrecision(self.precision / t[:, None], self.factor / t.sqrt()[:, None, None])

    def _root(self, rows: Tensor) -> Tensor:
        return self._bent(rows) / self.precision.sqrt()[:, None]

    def _half(self, rows: Tensor) -> Tensor:
        return self._bent(rows / self.precision.sqrt()[:, None])

    def _bent(self, rows: Tensor) -> Tensor:
        """(I + G Gᵀ)^{-1/2} v."""
        scores, basis = self._spectrum
        grown = 1 + scores
        return rows - (rows @ basis / (grown + grown.sqrt())[:, None]) @ basis.mT

    def _matmul(self, rows: Tensor) -> Tensor:
        scores, basis = self._spectrum
        scale = self.precision.sqrt()[:, None]
        white = rows / scale
        return (white - (white @ basis / (1 + scores)[:, None]) @ basis.mT) / scale

    def _solve(self, rows: Tensor) -> Tensor:
        return rows * self.precision[:, None] + rows @ self.factor @ self.factor.mT

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """s [K, R] and B [K, P, R]."""
        whitened = self.factor / self.precision.sqrt()[..., None]
        scores, vectors = torch.linalg.eigh(whitened.mT @ whitened)
        return scores.clamp(min=0), whitened @ vectors

    def state(self) -> dict[str, Tensor]:
        return {"precision": self.precision, "factor": self.factor}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> LowRankPrecision:
        return cls(state["precision"], state["factor"])
