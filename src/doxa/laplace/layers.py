"""Layers whose curvature has Kronecker factors, and how a weight's gradient is made in them.

At each position t of a row (a pixel of a convolution, a token of a sequence, each call of a layer
that is called again) a layer maps an input a_t to z_t = W a_t + b, so that

    ∂f/∂W = Σ_t g_t a_tᵀ,    ∂f/∂b = Σ_t g_t,    g_t = ∂f/∂z_t

A convolution's a_t is the patch under its window, unfolded (Grosse & Martens 2016); an embedding's
weight is transposed, and its a_t the unit vector of a token, kept as a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from doxa.errors import MethodError
from doxa.model import Model

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FACTORED: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS, nn.Embedding)
_LEFT = 0.1  # of the weights: scales and shifts


@dataclass(frozen=True)
class Layer:
    """One weight and bias; several paths where modules share them.

    weight, bias: their names, None where they are not uncertain (or there is no bias).
    inputs, outputs: the sizes of a_t and z_t; of an embedding, of the dictionary and of a vector.
    """

    module: Any
    weight: str | None
    bias: str | None
    inputs: int
    outputs: int
    paths: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def key(self) -> str:
        return self.names[0]

    @property
    def embeds(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    def positions(self, a: Tensor) -> Tensor:
        """The layer's input for one row as a_t, [T, inputs]; tokens [T] for an embedding."""
        if self.embeds:
            return a.reshape(-1)
        if isinstance(self.module, _CONVOLUTIONS):
            return unfold(self.module, a)
        return a.reshape(-1, self.inputs)

    def gradients(self, g: Tensor, lead: int) -> Tensor:
        """Gradients in the layer's output, [*lead, *z], as g_t: [*lead, T, outputs]."""
        if isinstance(self.module, _CONVOLUTIONS):  # a view: what follows reads it as it lies
            return g.reshape(*g.shape[:lead], self.outputs, -1).mT
        return g.reshape(*g.shape[:lead], -1, self.outputs)


def unfold(module: Any, a: Tensor) -> Tensor:
    """Patches of a convolution's input [..., C, *pixels] as [T, C · window], in any dimension."""
    sizes, strides, gaps = module.kernel_size, module.stride, module.dilation
    count = len(sizes)
    a = a.reshape(-1, *a.shape[-count - 1 :])
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, padding, mode=mode)
    for axis, (size, stride, gap) in enumerate(zip(sizes, strides, gaps, strict=True)):
        a = a.unfold(axis + 2, gap * (size - 1) + 1, stride)[..., ::gap]
    a = a.movedim(1, count + 1)  # [1, *pixels, C, *window]
    return a.reshape(-1, math.prod(a.shape[count + 1 :]))


def of(model: Model, names: Sequence[str]) -> tuple[list[Layer], tuple[str, ...]]:
    """The layers of the named weights, and the names that are left: scales and shifts of norm
    layers, parameters of a person's own modules, grouped convolutions and weights that layers of
    different kinds share. A layer of torch with other matrices of weights is an error."""
    called = {id(p): name for name, p in model.net.named_parameters()}
    wanted = set(names)
    found: dict[str, Layer] = {}
    refused: set[str] = set()
    for path, module in model.net.named_modules():
        layer = _layer(module, called, wanted)
        if layer is None:
            continue
        known = found.setdefault(layer.key, layer)
        same = type(known.module) is type(module) and known.names == layer.names
        if not same or (isinstance(module, _CONVOLUTIONS) and known.paths):
            refused |= {*known.names, *layer.names}
        known.paths.append(path)
    layers = [layer for layer in found.values() if not refused & set(layer.names)]
    factored = {name for layer in layers for name in layer.names}
    rest = tuple(name for name in names if name not in factored)
    _check(model, rest, refused)
    return layers, rest


def factored(model: Model, names: Sequence[str]) -> bool:
    """Whether nine in ten of the named weights have factors, all in layers that are called."""
    try:
        found, rest = of(model, names)
    except MethodError:
        return False
    called = {path for path, _ in model.widths}
    left = model.layout.select(rest).size / model.layout.select(names).size
    return left <= _LEFT and all(called.intersection(layer.paths) for layer in found)


def _layer(module: Any, called: dict[int, str], wanted: set[str]) -> Layer | None:
    kind = next((kind for kind in _FACTORED if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or getattr(module, "groups", 1) > 1:
        return None
    own = {leaf: called.get(id(p)) for leaf, p in module.named_parameters(recurse=False)}
    weight, bias = (own[n] if own.get(n) in wanted else None for n in ("weight", "bias"))
    if weight is None and bias is None:
        return None
    if isinstance(module, nn.Embedding):
        return Layer(module, weight, None, module.num_embeddings, module.embedding_dim)
    outputs = module.weight.shape[0]
    return Layer(module, weight, bias, module.weight[0].numel(), outputs)


def _check(model: Model, rest: Sequence[str], shared: set[str]) -> None:
    owners = {
        name: (path, module)
        for path, module in model.net.named_modules()
        for name in _names_of(path, module)
    }
    for name in rest:
        path, module = owners[name]
        grouped = getattr(module, "groups", 1) > 1 and isinstance(module, _CONVOLUTIONS)
        vector = len(model.layout.select([name]).entries[0].shape) < 2
        if vector or grouped or name in shared or not type(module).__module__.startswith("torch."):
            continue
        raise MethodError(
            f"structure='kronecker': layer {path or 'the network'!r} ({type(module).__name__}) has "
            f"no Kronecker factors for {name!r}; use structure='diagonal' or 'low-rank', a subset "
            "without it (subset='last_layer'), or write it with Linear layers"
        )


def _names_of(path: str, module: nn.Module) -> list[str]:
    prefix = f"{path}." if path else ""
    return [prefix + leaf for leaf, _ in module.named_parameters(recurse=False)]
