"""The architecture of a network that is built from `nn.Sequential`, and networks of finite width.

**Reading** (`read`). Widths and weights are ignored; kernel sizes, strides and padding are kept. A
linear layer without bias has none in the limit. Dropout is ignored, as in prediction. The gain and
offset of a LayerNorm are taken as fixed. PyTorch's initial weights, U(−1/√n, 1/√n), have variance
1/(3n), so σ_w = 1/√3; its biases have variance 1/(3n) and vanish as layers grow.

**Finite networks** (`finite_network`). The same architectures at finite width, and modules that
`nn.Sequential` lacks. Weights are N(0, 1) and scaled in the forward pass, σ_w/√n Wφ + σ_b b. In
this parametrisation gradients, and so Θ, have a limit (Jacot et al. 2018). In PyTorch's
parametrisation, with the scale in the initial weights, the functions at the start are the same, and
so is K; the gradients of hidden weights differ by a factor of the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.errors import ModelError
from doxa.function.wide import layers as wide
from doxa.function.wide.architecture import Architecture
from doxa.function.wide.layers import (
    Activation,
    Average,
    Conv,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Residual,
)
from doxa.model.layers import MaskedDropout


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
    """A fully connected architecture with layers of this width and newly drawn weights."""
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


_NAMES: dict[type[nn.Module], str] = {
    nn.Tanh: "tanh", nn.SiLU: "silu", nn.Sigmoid: "sigmoid", Erf: "erf", Sin: "sin",
}  # fmt: skip
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, MaskedDropout)


def read(net: nn.Module) -> Architecture:
    """The architecture of a network made of `nn.Sequential`s of layers that have a limit."""
    return Architecture(_layers("", net))


@dataclass(frozen=True)
class _Misfit:
    """The reason why a layer has no limit here."""

    reason: str


def _layers(name: str, module: nn.Module) -> tuple[Layer, ...]:
    if isinstance(module, nn.Sequential):
        inner = [
            _layers(f"{name}.{key}" if name else key, part)
            for key, part in module._modules.items()
            if part
        ]
        return tuple(layer for part in inner for layer in part)
    if isinstance(module, Skip):
        block = _layers(f"{name}.block", module.block)
        return (Residual(block, _layers(f"{name}.shortcut", module.shortcut)),)
    if isinstance(module, _NOTHING):
        return ()
    found: Any = _Misfit("its type is not supported")
    if type(module) in _NAMES:
        found = Activation(_NAMES[type(module)])
    for kind, reader in _READERS.items():
        if isinstance(module, kind):
            found = reader(module)
    if isinstance(found, _Misfit):
        raise ModelError(
            f"layer {name or 'the network itself'}, {type(module).__name__}, has no kernel of "
            f"infinite width: {found.reason}; doxa.NTK(kernel='empirical') takes any network"
        )
    return (found,)


def _linear(layer: Any) -> Layer:
    return Dense(bias_std=None if layer.bias is not None else 0.0)


def _scaled(layer: Any) -> Layer:
    return Dense(layer.weight_std, layer.bias_std)


def _conv(layer: Any) -> Layer | _Misfit:
    if layer.groups != 1:
        return _Misfit(f"it has {layer.groups} groups of channels")
    if layer.padding_mode not in ("zeros", "circular"):
        return _Misfit(f"its padding is {layer.padding_mode!r}, not 'zeros' or 'circular'")
    padding = layer.padding
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if any(r % 2 for r in reach):
            return _Misfit("'same' padding of an even size is not the same on both sides")
        padding = tuple(r // 2 for r in reach)
    elif padding == "valid":
        padding = ()
    return Conv(
        tuple(layer.kernel_size), tuple(layer.stride), tuple(padding), tuple(layer.dilation),
        layer.padding_mode == "circular", bias_std=None if layer.bias is not None else 0.0,
    )  # fmt: skip


def _layer_norm(layer: Any) -> Layer:
    return LayerNorm(layer.eps, over_pixels=len(layer.normalized_shape) > 1)


def _group_norm(layer: Any) -> Layer | _Misfit:
    if layer.num_groups != 1:
        return _Misfit(f"it has {layer.num_groups} groups; one group is a LayerNorm")
    return LayerNorm(layer.eps, over_pixels=True)


def _pool(layer: Any) -> Layer | _Misfit:
    if _several(layer.padding, 1) != (0,) or layer.ceil_mode:
        return _Misfit("it pads")
    axes = 2 if isinstance(layer, nn.AvgPool2d) else 1
    return Average(_several(layer.kernel_size, axes), _several(layer.stride, axes))


def _adaptive(layer: Any) -> Layer | _Misfit:
    if set(_several(layer.output_size, 1)) != {1}:
        return _Misfit(f"it pools to {layer.output_size} pixels and not to one")
    return Average()


def _softplus(layer: Any) -> Layer | _Misfit:
    return Activation("softplus") if layer.beta == 1 else _Misfit(f"its beta is {layer.beta}")


def _gelu(layer: Any) -> Layer:
    return Activation("gelu-tanh" if layer.approximate == "tanh" else "gelu")


def _flatten(layer: Any) -> Layer | _Misfit:
    whole = layer.start_dim == 1 and layer.end_dim == -1
    return Flatten() if whole else _Misfit("it does not flatten whole rows")


def _several(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (
        (value,) * axes
        if isinstance(value, int)
        else tuple(dict.fromkeys(value))
        if axes == 1
        else tuple(value)
    )


_READERS: dict[Any, Callable[[Any], Layer | _Misfit]] = {
    nn.Linear: _linear,
    ScaledLinear: _scaled,
    (nn.Conv1d, nn.Conv2d): _conv,
    nn.ReLU: lambda layer: Activation("relu"),
    nn.LeakyReLU: lambda layer: Activation("relu", layer.negative_slope),
    nn.GELU: _gelu,
    nn.Softplus: _softplus,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    (nn.AvgPool1d, nn.AvgPool2d): _pool,
    (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d): _adaptive,
    nn.Flatten: _flatten,
}
