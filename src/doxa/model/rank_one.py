"""Linear and convolutional layers whose weights are scaled by a rank-one factor: W ∘ (r sᵀ).

    y = ((x ∘ s) Wᵀ) ∘ r + b

r has an entry for each output (channel), s for each input (channel). Both are the layer's own: many
layers of this kind can share one W, which is what batch ensembles and rank-1 Bayesian networks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.errors import ModelError
from doxa.model.layers import Noisy, Slots, Value, extended
from doxa.model.plan import stacked_linear

SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class RankOne(Noisy):
    """Mixin of layers with the factors r and s, which start at random signs, or around one."""

    own = ("r", "s")
    weight: Tensor
    bias: Tensor | None
    r: nn.Parameter
    s: nn.Parameter
    spread: float  # of the factors around one at the start; 0: random signs

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        for factor in (self.r, self.s):
            if self.spread:
                nn.init.normal_(factor, 1.0, self.spread)
            else:
                with torch.no_grad():
                    factor.copy_(torch.randint(0, 2, factor.shape) * 2.0 - 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, nn.Linear):
            out = F.linear(x * self.s, self.weight) * self.r
            return out if self.bias is None else out + self.bias
        axes = (1,) * (self.weight.ndim - 2)  # of space
        wide = lambda v: v.reshape(-1, *axes)  # noqa: E731
        out = self._conv_forward(x * wide(self.s), self.weight, None) * wide(self.r)  # type: ignore[attr-defined]
        return out if self.bias is None else out + wide(self.bias)

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W ∘ (r sᵀ), [S, outputs, inputs of a group, ...]."""
        weight, r, s = (tensors[name] for name in ("weight", "r", "s"))
        outputs, inputs = weight.shape[1:3]
        s = s.unflatten(1, (-1, inputs))  # [S, groups, inputs]
        factor = r.unsqueeze(2) * s.repeat_interleave(outputs // s.shape[1], 1)
        return {"weight": weight * factor.reshape(*factor.shape, *(1,) * (weight.ndim - 3))}


class RankOneLinear(RankOne):
    """The same with a form for all members at once."""

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: object) -> Value:
        def wide(name: str) -> Tensor | None:
            value = slots.take(name)
            if value is None or not slots.has_axis(name):
                return value
            return value.reshape(len(value), *(1,) * middle, -1)

        middle = h.ndim - 1 - has_axis  # axes of rows
        s, r, bias, weight = wide("s"), wide("r"), wide("bias"), slots.take("weight")
        assert s is not None and r is not None and weight is not None
        h = h * s
        stacked = has_axis or slots.has_axis("s")
        if slots.has_axis("weight"):
            out, stacked = stacked_linear(h, stacked, weight, None), True
        else:
            out = F.linear(h, weight)
        out = out * r
        out = out if bias is None else out + bias
        any_stacked = stacked or slots.has_axis("r") or slots.has_axis("bias")
        return out, any_stacked


def with_rank_one(name: str, layer: Any, spread: float) -> nn.Module:
    """A layer with the same weights under the same names, and factors r and s."""
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        raise ModelError(f"layer {name!r}: padding_mode={layer.padding_mode!r} is not supported")
    if isinstance(layer, nn.Linear):
        kind: type[RankOne] = RankOneLinear
        inputs, outputs = layer.in_features, layer.out_features
    else:
        kind, inputs, outputs = RankOne, layer.in_channels, layer.out_channels
    new = extended(layer, kind)
    new.spread = spread
    new.r = nn.Parameter(layer.weight.detach().new_ones(outputs))
    new.s = nn.Parameter(layer.weight.detach().new_ones(inputs))
    return new
