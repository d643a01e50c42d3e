"""The same architectures at finite width, and modules that `nn.Sequential` lacks.

Weights are N(0, 1) and scaled in the forward pass, σ_w/√n Wφ + σ_b b: the parametrisation in which
gradients, and so Θ, have a limit (Jacot et al. 2018). In PyTorch's own, where the scale is in the
initial weights, the functions at the start are the same and K is too; the gradients of hidden
weights differ by a factor of the width.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.errors import ModelError
from doxa.function.wide import layers as wide
from doxa.function.wide.architecture import Architecture


class Erf(nn.Module):
    """The error function as an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class Sin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Skip(nn.Module):
    """x + block(x), or shortcut(x) + block(x): a residual sum."""

    def __init__(self, block: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.shortcut = block, shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.block(x)
        return out


class ScaledLinear(nn.Module):
    """A dense layer with standard normal weights and the scales in front of them."""

    def __init__(self, inputs: int, outputs: int, weight_std: float, bias_std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.weight_std, self.bias_std = weight_std, bias_std
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight_std / math.sqrt(self.weight.shape[1])
        return F.linear(x, scale * self.weight, self.bias_std * self.bias)


def finite_network(
    architecture: Architecture, inputs: int, outputs: int = 1, width: int = 512,
    weight_std: float = 1.0, bias_std: float = 0.0,
) -> nn.Sequential:  # fmt: skip
    """A fully connected architecture with layers of this width, its weights newly drawn."""
    known = (wide.Dense, wide.Activation)
    odd = [layer for layer in architecture.layers if not isinstance(layer, known)]
    if odd:
        raise ModelError(f"finite_network draws fully connected networks; it has no {odd[0]}")
    dense = [layer for layer in architecture.layers if isinstance(layer, wide.Dense)]
    widths = iter(pairwise([inputs, *[width] * (len(dense) - 1), outputs]))
    made: list[nn.Module] = []
    for layer in architecture.layers:
        if isinstance(layer, wide.Dense):
            scales = wide.scales(layer, weight_std, bias_std)
            made.append(ScaledLinear(*next(widths), float(scales[0]), float(scales[1])))
        elif isinstance(layer, wide.Activation):
            made.append(_module(layer))
    return nn.Sequential(*made)


_MODULES: dict[str, type[nn.Module]] = {
    "erf": Erf, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus, "sin": Sin,
}  # fmt: skip


def _module(layer: wide.Activation) -> nn.Module:
    if layer.name == "relu":
        return nn.LeakyReLU(layer.slope) if layer.slope else nn.ReLU()
    return nn.GELU("tanh") if layer.name == "gelu-tanh" else _MODULES[layer.name]()
