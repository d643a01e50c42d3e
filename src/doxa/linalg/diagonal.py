"""Independent parameters: Σ = diag(v)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from doxa.errors import ShapeError
from doxa.linalg.base import Structure, per_member, refuse, refuse_variances


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
