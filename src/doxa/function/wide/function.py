"""An architecture's kernel as a function of hyper-parameters: log σ_w and log σ_b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa.function.wide.architecture import Architecture
from doxa.linalg.layout import Entry, Layout


@dataclass(frozen=True)
class WideFunction:
    """k(a, b) of rows [..., N, D], which are images of this shape where the network convolves."""

    architecture: Architecture
    shape: tuple[int, ...]
    kind: str = "nngp"
    layout: ClassVar[Layout] = Layout((Entry("weight_std", (1,)), Entry("bias_std", (1,))))

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """flat [..., 2] to [..., N, N'], or K(a_i, a_i) [..., N]."""
        weight_std, bias_std = flat.exp().unbind(-1)
        left, lead = self._rows(a), a.ndim - 2
        if diag:
            return self.architecture.diagonal(left, weight_std, bias_std, lead)
        right = None if a is b else self._rows(b)
        return self.architecture.matrix(left, right, weight_std, bias_std, self.kind, lead)

    def _rows(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.shape) if self.architecture.space else x

    def to(self, device: torch.device) -> WideFunction:
        return self

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name: flat [..., 2]."""
        return {name: flat[..., i].exp().tolist() for i, name in enumerate(self.layout.names)}
