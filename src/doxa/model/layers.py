"""Layers with noise as an input, additional outputs (terms), or parameters that are not weights.

A method puts such layers into a copy of the network (`Model.rewrite`). A layer draws no random
numbers and keeps no state: its noise and its terms are *buffers*, set and read by
`functional_call`.

    noise   declared by `noise(x)`, drawn by the run, and put into the buffer of that name: one draw
            per row in training, one draw per function in prediction; None means no noise
    terms   named in `gives`; the forward pass sets the buffer, and the caller reads it (a KL, an
            activation)
    own     names of parameters that belong to the layer and not to the weights: they are not in
            the layout of the weights, have no prior, and are initialised for each member
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
    """The noise of a layer: its distribution and shape.

    `shape` excludes the axis of rows. `rows` is the number of entries of that axis per row of x
    (more than 1 after a reshape [B, T, d] to [B·T, d]); 0 if the noise does not depend on rows.
    `use` is "training" or "prediction" if it is drawn only there, else "both".
    """

    kind: str  # "normal" or "uniform"
    shape: Shape
    rows: int = 1
    use: str = "both"

    def drawn(self, rows: int | None) -> Shape:
        """The shape of one draw for a number of rows of x; None: one draw for a whole function."""
        if self.rows == 0:
            return self.shape
        return (1 if rows is None else rows * self.rows, *self.shape)


class Slots:
    """The tensors that the batched form of a layer reads and writes, by the layer's own names.

    `path` is the name of the layer, `tensors` are all tensors of the network, and `stacked` tells
    whether a tensor has a member axis. The terms of the layer, [M, ...], are put into `terms`.
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
    """Mixin of layers with noise, terms, or parameters that are not weights."""

    own: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    in_training: ClassVar[tuple[str, ...]] = ()  # noise that is drawn in training alone
    in_prediction: ClassVar[tuple[str, ...]] = ()  # noise that is drawn in prediction alone
    inner: ClassVar[type[nn.Module] | None] = None  # the plain layer that `batched` calls, if any

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        """{buffer: (kind, shape)} for the input x. A shape that grows with the rows of x is noise
        per row, and its first axis is the rows. If the noise differs between training and
        prediction (on outputs, or on weights), `in_training` and `in_prediction` have the names of
        the buffers of each; the others stay None."""
        return {}

    def use(self, buffer: str) -> str:
        """When the noise of that buffer is drawn: `Site.use`."""
        if buffer in self.in_training:
            return "training"
        return "prediction" if buffer in self.in_prediction else "both"

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights with which the plain layer computes the same, from stacked tensors by the
        layer's own names; empty if they are the layer's weights."""
        return {}

    # A layer may have a form for all members at once, which is faster than vmap:
    #     batched(self, h, has_axis, slots, inner) -> (out, whether it has the member axis)
    # `inner(h, has_axis)` runs the plain layer of type `inner` on stacked parameters.
    batched: ClassVar[Any] = None


def plain_weights(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with which the network's plain layers compute the same, if they differ."""
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
    """softplus(ρ), bounded below so that its square is not zero."""
    return softplus(rho).clamp_min(torch.finfo(rho.dtype).tiny ** 0.5)


def mask(uniform: Tensor, p: Tensor) -> Tensor:
    """1[u > p] / (1 − p)."""
    return (uniform > p) / (1.0 - p).to(uniform.dtype)


class InputDropout(MethodLayer):
    """Mixin of layers with masked input, W(x ∘ m). The layer of the mask is the child `dropout`;
    weights keep their names."""

    dropout: MaskedDropout

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))  # type: ignore[misc]

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        return inner(*self.dropout.batched(h, has_axis, slots.child("dropout"), None))


_extended: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def extended(layer: nn.Module, mixin: type, **facts: Any) -> Any:
    """A layer with the same tensors under the same names, whose class extends a mixin."""
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
    """Replace dropout layers, in place, by layers with noise as an input."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if kind in _DROPOUTS:
                setattr(parent, name, MaskedDropout(float(child.p), _DROPOUTS[kind]))  # type: ignore[arg-type]


def unfuse_attention(net: nn.Module) -> None:
    """Make attention layers run, in place, as separate operations.

    Outside training, torch runs encoder layers as one fused kernel, on nested tensors if there is
    padding. The kernel has no derivative and no batching rule. Torch uses it if no weight requires
    a gradient, and weights under `functional_call` need not require one.

    Models of transformers use torch's fused attention, and leave out the mask where no token is
    padding, a decision by the values of a tensor. Here they use plain attention with a mask.
    """
    for module in net.modules():
        if _has_fused_attention(module) and _register_plain_attention():
            module.set_attn_implementation(_PLAIN)  # type: ignore[operator]
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        elif isinstance(module, nn.MultiheadAttention):
            module.register_forward_pre_hook(_apart, with_kwargs=True)


def without_cache(net: nn.Module) -> None:
    """Make models of transformers run, in place, without a cache of keys and values. A block adds
    to it at each call, and a block that is computed again is called twice."""
    for module in net.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr]


def without_checkpointing(net: nn.Module) -> tuple[str, ...]:
    """Switch the gradient checkpointing of transformers off, in place. Returns the names of the
    layers that had it. They would be computed again with the network's own weights."""
    found = []
    for name, module in net.named_modules():
        if vars(module).get("gradient_checkpointing") is True:
            module.gradient_checkpointing = False
            if any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__):
                found.append(name)
    return tuple(found)


_PLAIN = "doxa"  # the name of plain attention in transformers' registry


def _has_fused_attention(module: nn.Module) -> bool:
    """Whether a layer is a model of transformers with torch's fused attention, the default."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    return chosen == "sdpa" and callable(getattr(module, "set_attn_implementation", None))


def _register_plain_attention() -> bool:
    """Add plain attention to transformers' registry, under a name that only doxa uses. False where
    the version of transformers has no registry: such networks run one member at a time."""
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        return False

    def mask(*args: Any, **options: Any) -> Tensor | None:
        always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        found: Tensor | None = sdpa_mask(*args, **{**options, **always})
        return found

    AttentionInterface.register(_PLAIN, attention)
    AttentionMaskInterface.register(_PLAIN, mask)
    return True


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(Q Kᵀ/√d + mask) V as separate operations, called as transformers calls attention.

    Returns the outputs [N, T, heads, d] and the weights [N, heads, T, T]. The mask is True where
    a token is seen, or is added to the scores."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:  # several heads of queries share one of keys
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.mT * scale  # [N, heads, T, S]
    if position_bias is not None:
        scores = scores + position_bias
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    least = torch.finfo(scores.dtype).min
    if attention_mask is None and causal and query.shape[-2] > 1:
        size = scores.shape[-2:]
        attention_mask = torch.ones(size, dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = torch.where(attention_mask, scores, least)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights.to(query.dtype)
    if not _never_drops(module, dropout):
        weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(-3, -2).contiguous(), weights


def _never_drops(module: nn.Module, dropout: Any) -> bool:
    """Whether this probability is that of a dropout layer of the module whose rate is 0. It is a
    tensor then, and torch would wait for its value."""
    return isinstance(dropout, Tensor) and any(
        isinstance(child, MaskedDropout) and child.p is dropout and child.rate == 0.0
        for child in module.children()
    )


def _apart(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that prevents fusion: attention is fused if query and key are one object, and its
    parent layer if it has no hooks."""
    if module.training:
        return args, kwargs
    if args:
        return (args[0].view_as(args[0]), *args[1:]), kwargs
    return args, kwargs | {"query": kwargs["query"].view_as(kwargs["query"])}
