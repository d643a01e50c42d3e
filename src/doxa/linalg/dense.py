"""Dense, diagonal and embedded covariances.

`Dense` correlates all parameters. It stores a Cholesky factor of Σ, or of Σ⁻¹:

    from a covariance  Σ = L Lᵀ:      R = L
    from a precision   Σ⁻¹ = L Lᵀ:    R = L⁻ᵀ, and Σ is never formed

`Diagonal` has independent parameters, Σ = diag(v).

`Embedded` is a covariance of a few parameters, while the others are known: Σ = E Σ_S Eᵀ. E maps the
chosen elements, which may differ between members, to their positions, and is zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.errors import NumericalError, ShapeError
from doxa.linalg.base import Structure, cholesky, per_member, refuse, refuse_variances


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """Variances [K, P]. A zero variance is a known parameter: `solve` and `logdet` refuse it."""

    name = "diagonal"

    variance: Tensor

    def __post_init__(self) -> None:
        if self.variance.ndim != 2:
            raise ShapeError(f"the variance must be [K, P], got {list(self.variance.shape)}")
        refuse_variances(self.variance, "the variance")

    @property
    def shape(self) -> tuple[int, int]:
        return self.variance.shape[0], self.variance.shape[1]

    def diagonal(self) -> Tensor:
        return self.variance

    def logdet(self) -> Tensor:
        return self._positive().log().sum(-1)

    def scaled(self, t: float | Tensor) -> Diagonal:
        return Diagonal(self.variance * per_member(t, self.variance, "the scale")[:, None])

    def _root(self, rows: Tensor) -> Tensor:
        return rows * self.variance.sqrt()[:, None]

    def _half(self, rows: Tensor) -> Tensor:
        return self._root(rows)

    def _matmul(self, rows: Tensor) -> Tensor:
        return rows * self.variance[:, None]

    def _solve(self, rows: Tensor) -> Tensor:
        return rows / self._positive()[:, None]

    def _positive(self) -> Tensor:
        refuse((self.variance.detach() == 0).any(-1), "a variance is zero, so Σ is singular")
        return self.variance

    def state(self) -> dict[str, Tensor]:
        return {"variance": self.variance}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Diagonal:
        return cls(state["variance"])


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
        """From a root of the precision, Σ⁻¹ = AᵀA, by A = QR.

        The product AᵀA, whose condition number is that of A squared, is not formed. The rows of A
        are ordered from small to large; they are reversed for QR, which keeps more digits.
        """
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


@dataclass(frozen=True, eq=False)
class Embedded(Structure):
    """The covariance Σ_S of the elements `index` [K, S] of `total` parameters."""

    name = "embedded"

    inner: Dense
    index: Tensor
    total: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.members, self.total

    @property
    def numbers(self) -> int:
        return self.inner.size

    def sample(self, eps: Tensor) -> Tensor:
        """Draws from one number per chosen element, or from one number per parameter."""
        if eps.shape[-1] != self.inner.size:
            return super().sample(eps)
        return self.put(self.inner.sample(eps))

    def diagonal(self) -> Tensor:
        return self.put(self.inner.diagonal())

    def logdet(self) -> Tensor:
        """log |Σ_S|, of the chosen elements only."""
        return self.inner.logdet()

    def scaled(self, t: float | Tensor) -> Embedded:
        return Embedded(self.inner.scaled(t), self.index, self.total)

    def picked(self, values: Tensor) -> Tensor:
        """The chosen elements of [K, P]."""
        return values.gather(1, self.index)

    def _pick(self, rows: Tensor) -> Tensor:
        """[K, T, P] to [K, T, S]."""
        return rows.gather(2, self.index.unsqueeze(1).expand(-1, rows.shape[1], -1))

    def put(self, values: Tensor) -> Tensor:
        """[..., K, S] to [..., K, P]."""
        index = self.index.expand(*values.shape[:-1], -1)
        return values.new_zeros(*values.shape[:-1], self.total).scatter(-1, index, values)

    def _put_rows(self, rows: Tensor) -> Tensor:
        """[K, T, S] to [K, T, P]."""
        return self.put(rows.transpose(0, 1)).transpose(0, 1)

    def _root(self, rows: Tensor) -> Tensor:
        return self._put_rows(self.inner._root(self._pick(rows)))

    def _half(self, rows: Tensor) -> Tensor:
        return self.inner._half(self._pick(rows))

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._put_rows(self.inner._matmul(self._pick(rows)))

    def _solve(self, rows: Tensor) -> Tensor:
        raise NumericalError("parameters outside the chosen ones have no variance to divide by")

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Embedded:
        return Embedded(self.inner.to(device, dtype), self.index.to(device), self.total)

    def state(self) -> dict[str, Tensor]:
        total = torch.full((self.inner.members,), self.total)
        return {**self.inner.state(), "index": self.index, "total": total}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Embedded:
        return cls(Dense.from_state(state), state["index"], int(state["total"][0]))
