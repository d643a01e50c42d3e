"""A covariance of a few parameters, while the others are known: Σ = E Σ_S Eᵀ.

E puts the chosen elements, others for each member, into their places; elsewhere it has zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.errors import NumericalError
from doxa.linalg.base import Structure
from doxa.linalg.dense import Dense


@dataclass(frozen=True, eq=False)
class Embedded(Structure):
    """Σ_S over the elements `index` [K, S] of `total` ones."""

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
        """From as many numbers as there are chosen elements, or from one for every parameter."""
        if eps.shape[-1] != self.inner.size:
            return super().sample(eps)
        return self.put(self.inner.sample(eps))

    def diagonal(self) -> Tensor:
        return self.put(self.inner.diagonal())

    def logdet(self) -> Tensor:
        """Of the chosen elements alone."""
        return self.inner.logdet()

    def scaled(self, t: float | Tensor) -> Embedded:
        return Embedded(self.inner.scaled(t), self.index, self.total)

    def picked(self, values: Tensor) -> Tensor:
        """The chosen ones of [K, P]."""
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
