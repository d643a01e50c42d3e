"""An architecture's kernel for gpytorch: in `doxa.GP(kernel=...)`, and outside."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from doxa.function.kernels import register_kernel
from doxa.function.wide.architecture import Architecture


class WideKernel(Kernel):
    """K ("nngp") or Θ ("ntk") of an architecture; σ_w and σ_b are parameters of the kernel."""

    is_stationary = False

    def __init__(
        self, architecture: Architecture, kind: str = "nngp", weight_std: float = 1.5,
        bias_std: float = 0.3, **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kw)
        self.architecture, self.kind = architecture, kind
        for name, value in (("raw_weight_std", weight_std), ("raw_bias_std", bias_std)):
            self.register_parameter(name, nn.Parameter(torch.zeros(*self.batch_shape, 1)))
            self.register_constraint(name, Positive())
            raw = getattr(self, f"{name}_constraint").inverse_transform(torch.tensor([value]))
            self.initialize(**{name: raw})

    @property
    def weight_std(self) -> Tensor:
        found: Tensor = self.raw_weight_std_constraint.transform(self.raw_weight_std)
        return found

    @property
    def bias_std(self) -> Tensor:
        found: Tensor = self.raw_bias_std_constraint.transform(self.raw_bias_std)
        return found

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        scales, lead = (self.weight_std[..., 0], self.bias_std[..., 0]), x1.ndim - 2
        if not diag:
            return self.architecture.matrix(x1, x2, *scales, self.kind, lead)
        if self.kind == "nngp" and torch.equal(x1, x2):
            return self.architecture.diagonal(x1, *scales, lead)
        one, two = x1.unsqueeze(-2), x2.unsqueeze(-2)  # each row a batch of its own
        w, b = (s.unsqueeze(-1) if s.ndim else s for s in scales)
        return self.architecture.matrix(one, two, w, b, self.kind, lead + 1)[..., 0, 0]


@register_kernel("infinite-width")
def wide_kernel(
    depth: int = 2, activation: str = "relu", kind: str = "nngp", weight_std: float = 1.5,
    bias_std: float = 0.3,
) -> Kernel:  # fmt: skip
    """The kernel of a fully connected network, in a form that can be saved."""
    architecture = Architecture.fully_connected(depth, activation)
    return WideKernel(architecture, kind, weight_std, bias_std)
