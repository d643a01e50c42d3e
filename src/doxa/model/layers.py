"""Layers that take their noise as an argument, give terms, or have trainables of their own.

A method puts such layers into a copy of the network (`Model.rewrite`). A layer draws nothing and
keeps nothing: its noise and its terms are *buffers*, swapped in and read out by `functional_call`.

    noise   declared by `noise(x)`, drawn by the run, found in the buffer of that name: a draw a row
            in training, one draw a function in prediction; None means that there is none
    terms   named in `gives`; the forward pass sets the buffer, and the caller reads it (a KL, an
            activation)
    own     names of trainables that belong to the layer and not to the weights: they are not in
            the weights' layout, have no weight prior, and start anew for each member
            (`reset_parameters`)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """Where noise goes in: what it is drawn from, and its shape.

    shape: without the axis of rows. rows: entries of that axis for each row of x (more than 1 after
    a reshape [B, T, d] to [B·T, d]); 0 where the noise does not depend on the rows. use: whether it
    is drawn in "training" or "prediction" alone, or in "both".
    """

    kind: str  # "normal" or "uniform"
    shape: Shape
    rows: int = 1
    use: str = "both"

    def drawn(self, rows: int | None) -> Shape:
        """The shape of one draw, for so many rows of x; None: once for a whole function."""
        if self.rows == 0:
            return self.shape
        return (1 if rows is None else rows * self.rows, *self.shape)


class Slots:
    """What a layer's batched form reads and writes: tensors by the layer's own names.

    Parameters
    ----------
    path: the layer's name. tensors: all of the network's. stacked: whether one has a member axis.
    terms: where what the layer gives is put, [M, ...].
    """

    def __init__(
        self,
        path: str,
        tensors: Mapping[str, Tensor],
        stacked: Callable[[str], bool],
        terms: dict[str, Tensor],
    ) -> None:
        self._prefix = f"{path}." if path else ""
        self._tensors, self._stacked, self._terms = tensors, stacked, terms

    def take(self, name: str) -> Tensor | None:
        return self._tensors.get(self._prefix + name)

    def has_axis(self, name: str) -> bool:
        return self._stacked(self._prefix + name)

    def give(self, name: str, value: Tensor) -> None:
        self._terms[self._prefix + name] = value

    def child(self, name: str) -> Slots:
        return Slots(self._prefix + name, self._tensors, self._stacked, self._terms)


Value = tuple[Any, bool]  # an activation, and whether it has the member axis


class MethodLayer:
    """Mixin of layers that take noise, give terms, or have trainables of their own."""

    own: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    in_training: ClassVar[tuple[str, ...]] = ()  # noise that is drawn in training alone
    in_prediction: ClassVar[tuple[str, ...]] = ()  # noise that is drawn in prediction alone
    inner: ClassVar[type[nn.Module] | None] = None  # the plain layer that `batched` calls, if any

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        """{buffer: (kind, shape)} for the input x; a shape that grows with x's rows is noise a
        row, and its first axis is theirs. A layer that is another function of its noise in
        training than in prediction (noise on what it gives, or on its weights) names the buffers
        of each in `in_training` and `in_prediction`: the others stay None."""
        return {}

    def use(self, buffer: str) -> str:
        """When the noise of that buffer is drawn: `Site.use`."""
        if buffer in self.in_training:
            return "training"
        return "prediction" if buffer in self.in_prediction else "both"

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights with which the plain layer does the same, of stacked tensors by the layer's
        own names; nothing where they are the same."""
        return {}

    # A layer may bring a form for all members at once, which is faster than vmap:
    #     batched(self, h, has_axis, slots, inner) -> (out, whether it has the member axis)
    # `inner(h, has_axis)` runs the plain layer of type `inner` on stacked parameters.
    batched: ClassVar[Any] = None


def plain_weights(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with which the network's plain layers do the same, where they are others."""
    found: dict[str, Tensor] = {}
    for path, layer in net.named_modules():
        if isinstance(layer, MethodLayer):
            prefix = f"{path}." if path else ""
            own = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
            found |= {prefix + name: value for name, value in layer.plain(own).items()}
    return found


class MaskedDropout(MethodLayer, nn.Module):
    """Dropout by given uniforms u: x ∘ 1[u > p] / (1 − p), and the identity without them.

    p is the probability to drop, a buffer, so that members may differ in it. `channels` masks whole
    channels (Dropout2d).
    """

    p: Tensor
    uniform: Tensor | None

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.rate = float(p)
        self.register_buffer("p", torch.tensor(p, dtype=torch.float64))
        self.register_buffer("uniform", None)

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        if self.rate == 0.0:
            return {}
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if self.channels else tuple(x.shape)
        return {"uniform": ("uniform", shape)}

    def forward(self, x: Tensor) -> Tensor:
        return x if self.uniform is None else x * mask(self.uniform, self.p)

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        u = slots.take("uniform")
        if u is None:
            return h, has_axis
        p = slots.take("p")
        assert p is not None
        if slots.has_axis("p"):
            p = p.reshape(-1, *(1,) * (u.ndim - 1))
        return h * mask(u, p), True  # noise always has the member axis


def deviation(rho: Tensor) -> Tensor:
    """softplus(ρ), never so small that its square would vanish."""
    return softplus(rho).clamp_min(torch.finfo(rho.dtype).tiny ** 0.5)


def mask(uniform: Tensor, p: Tensor) -> Tensor:
    """1[u > p] / (1 − p)."""
    return (uniform > p) / (1.0 - p).to(uniform.dtype)


class InputDropout(MethodLayer):
    """Mixin of layers whose input is masked: W(x ∘ m), with the mask's layer as the child
    `dropout`; weights keep their names."""

    dropout: MaskedDropout

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))  # type: ignore[misc]

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        return inner(*self.dropout.batched(h, has_axis, slots.child("dropout"), None))


_extended: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def extended(layer: nn.Module, mixin: type, **facts: Any) -> Any:
    """A layer with the same tensors under the same names, and a mixin's ways before its own."""
    key = (mixin, type(layer))
    if key not in _extended:
        name = f"{mixin.__name__}{key[1].__name__}"
        _extended[key] = type(name, key, facts)
    new = _extended[key].__new__(_extended[key])
    new.__dict__ = {
        k: copy.copy(v) if isinstance(v, dict) else v for k, v in layer.__dict__.items()
    }
    return new


def with_input_dropout(layer: nn.Module, dropout: MaskedDropout) -> nn.Module:
    """A layer with the same tensors under the same names, whose input is masked."""
    new = extended(layer, InputDropout, inner=type(layer))
    new.dropout = dropout
    return new


_DROPOUTS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}


def swap_dropout(net: nn.Module) -> None:
    """Replace dropout layers, in place, by ones that take their noise."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if kind in _DROPOUTS:
                setattr(parent, name, MaskedDropout(float(child.p), _DROPOUTS[kind]))  # type: ignore[arg-type]


def unfuse_attention(net: nn.Module) -> None:
    """Have attention run, in place, as the operations it is made of.

    Outside training torch runs encoder layers as one fused kernel, on nested tensors where there is
    padding: it has no derivative and no batching rule, and takes requires_grad, which weights under
    `functional_call` need not have, for the sign that none is asked for.
    """
    for module in net.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        elif isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(_apart, with_kwargs=True)


def _apart(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Attention is fused where query and key are one object, and a layer that holds it where it
    has no hooks: with this one it is neither."""
    if module.training:
        return args, kwargs
    if args:
        return (args[0].view_as(args[0]), *args[1:]), kwargs
    return args, kwargs | {"query": kwargs["query"].view_as(kwargs["query"])}
