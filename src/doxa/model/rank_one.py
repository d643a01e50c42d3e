"""Linear and convolutional layers whose weights are scaled by a rank-one factor: W ∘ (r sᵀ).

    y = ((x ∘ s) Wᵀ) ∘ r + b

r has one entry per output (channel), s one per input (channel). Both are parameters of the layer;
in batch ensembles, many such layers share one W. With K components, r and s are [K, channels], and
row i uses component i mod K: one product with W computes all components. In rank-1 Bayesian
networks, r and s are Gaussian, with means and standard deviations as parameters of the layer: a
draw per row costs no more than one draw for all rows. All positions of a row share the draw. If
rows are not the first axis of a layer's input (because positions are rows of it), there is one draw
for all rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.errors import ModelError
from doxa.model.layers import MethodLayer, Shape, Slots, Value, deviation, extended
from doxa.model.plan import stacked_linear

SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEW = 4  # input channels up to which a convolution computes components as groups
_CONVOLUTIONS: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


class RankOne(MethodLayer):
    """Mixin of layers with the factors r and s. They start as random signs, or around one."""

    own: ClassVar[tuple[str, ...]] = ("r", "s")
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

    def wide(self, value: Tensor, middle: int = 0) -> Tensor:
        """One number per channel, for all positions: [..., channels, 1, ...], with `middle` axes
        between those of components and channels."""
        lead, places = value.shape[:-1], (1,) * (self.weight.ndim - 2)
        return value.reshape(*lead, *(1,) * middle, -1, *places)

    def factor(self, name: str, middle: int = 0) -> Tensor:
        """r or s, in the shape for multiplication."""
        return self.wide(getattr(self, name), middle)

    def times(self, x: Tensor, name: str, plus: Tensor | None = None) -> Tensor:
        """x ∘ r or x ∘ s, plus an optional term; with K components, each on its rows."""
        value = getattr(self, name)
        if value.ndim == 1:
            return _multiplied(x, self.factor(name), plus)
        middle = x.ndim - self.weight.ndim  # axes between rows and channels
        rows = dealt(x, 0, len(value))
        return _multiplied(rows, self.factor(name, middle), plus).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_groups():
            return self._grouped(x)
        x = self.times(x, "s")
        if isinstance(self, nn.Linear):
            out = F.linear(x, self.weight)
        else:
            out = self._conv_forward(x, self.weight, None)  # type: ignore[attr-defined]
        return self.times(out, "r", None if self.bias is None else self.wide(self.bias))

    def in_groups(self) -> bool:
        """Whether factors multiply the weights: with K components, if a convolution has few input
        channels. This is the first layer of a network. Its images need no gradient; factors s on
        them would need it, at the cost of another convolution."""
        return self.r.ndim == 2 and self.weight.ndim > 2 and self.weight.shape[1] <= FEW

    def _grouped(self, x: Tensor) -> Tensor:
        """A convolution with K groups, [rows/K, K · channels, ...], one per component."""
        layer: Any = self
        k, groups = len(self.r), layer.groups
        tensors = {"weight": self.weight.unsqueeze(0), "r": self.r, "s": self.s}
        weight = RankOne.plain(self, tensors)["weight"].flatten(0, 1)  # [K · outputs, ...]
        bias = None if self.bias is None else self.bias.repeat(k)
        convolve = _CONVOLUTIONS[self.weight.ndim]
        out = convolve(
            dealt(x, 0, k).flatten(1, 2), weight, bias, layer.stride, layer.padding,
            layer.dilation, k * groups,
        )  # fmt: skip
        return out.unflatten(1, (k, -1)).flatten(0, 1)

    def plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """W ∘ (r sᵀ), [S, outputs, inputs of a group, ...]."""
        weight, r, s = (tensors[name] for name in ("weight", "r", "s"))
        outputs, inputs = weight.shape[1:3]
        s = s.unflatten(1, (-1, inputs))  # [S, groups, inputs]
        factor = r.unsqueeze(2) * s.repeat_interleave(outputs // s.shape[1], 1)
        return {"weight": weight * factor.reshape(*factor.shape, *(1,) * (weight.ndim - 3))}


class RankOneLinear(RankOne):
    """A linear layer with the factors r and s, with a form for all members at once."""

    def stacked_factor(self, name: str, slots: Slots, middle: int) -> Value:
        """r or s of all members, and whether it has the member axis; `middle` is the number of row
        axes of the other factor."""
        return stacked(name, slots, middle)

    def stacked_times(
        self, h: Tensor, has_axis: bool, slots: Slots, name: str, plus: bool = False
    ) -> Value:
        """h ∘ r or h ∘ s, [M, rows, ..., channels], plus the bias; with K components, each on its
        rows."""
        middle = h.ndim - 1 - has_axis  # axes of rows
        value = slots.take(name)
        assert value is not None
        factor, factor_axis = self.stacked_factor(name, slots, middle)
        parts = value.ndim - slots.has_axis(name) == 2
        rows = dealt(h, int(has_axis), value.shape[-2]) if parts else h
        bias, bias_axis = stacked("bias", slots, middle + parts) if plus else (None, False)
        out, axis = _multiplied(rows, factor, bias), has_axis or factor_axis or bias_axis
        return out.flatten(int(axis), int(axis) + 1) if parts else out, axis

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: object) -> Value:
        weight = slots.take("weight")
        assert weight is not None
        h, has_axis = self.stacked_times(h, has_axis, slots, "s")
        if slots.has_axis("weight"):
            out, has_axis = stacked_linear(h, has_axis, weight, None), True
        else:
            out = F.linear(h, weight)
        return self.stacked_times(out, has_axis, slots, "r", plus=True)


def _multiplied(x: Tensor, factor: Tensor, plus: Tensor | None) -> Tensor:
    return x * factor if plus is None else torch.addcmul(plus, x, factor)


def dealt(x: Tensor, rows: int, k: int) -> Tensor:
    """Rows, at that axis, as [..., rows/k, k, ...]: row i is at component i mod k."""
    return x.unflatten(rows, (-1, k))


def stacked(name: str, slots: Slots, middle: int) -> Value:
    """One number per channel and member, [M, 1, ..., channels], and whether there is a member axis;
    with K components, [M, 1, K, ..., channels], for rows that are split by component."""
    value = slots.take(name)
    if value is None or not slots.has_axis(name):
        return value, False
    if value.ndim == 3:
        members, k, channels = value.shape
        return value.reshape(members, 1, k, *(1,) * (middle - 1), channels), True
    return value.reshape(len(value), *(1,) * middle, -1), True


class NormalRankOne(RankOne):
    """Mixin of layers with Gaussian factors: r = r̄ + softplus(ρ) ε, and the same for s. The
    parameters r̄ and s̄ are named r and s. Without noise, the factors are their means."""

    own = ("r", "s", "r_rho", "s_rho")
    r_rho: nn.Parameter
    s_rho: nn.Parameter
    eps: Tensor | None
    initial_std: float
    by_row: bool  # a draw for each row; else one for all

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for rho in (self.r_rho, self.s_rho):
            nn.init.constant_(rho, math.log(math.expm1(self.initial_std)))

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        """Noise per row, for r and then for s, the same at all positions of an image or a sequence.
        Both are drawn together, which is faster."""
        if not self.by_row:
            return {"eps": ("normal", (len(self.r) + len(self.s), *(1,) * (self.weight.ndim - 2)))}
        middle, axes = (1,) * (x.ndim - self.weight.ndim), (1,) * (self.weight.ndim - 2)
        return {"eps": ("normal", (len(x), *middle, len(self.r) + len(self.s), *axes))}

    def part(self, name: str, eps: Tensor) -> Tensor:
        """The noise of r or of s."""
        start = 0 if name == "r" else self.r.shape[-1]
        return eps.narrow(1 - self.weight.ndim, start, getattr(self, name).shape[-1])

    def in_groups(self) -> bool:
        return self.eps is None and super().in_groups()

    def factor(self, name: str, middle: int = 0) -> Tensor:
        mean = super().factor(name, middle)
        if self.eps is None:
            return mean
        value, eps = getattr(self, name), self.part(name, self.eps)
        has_rows = eps.ndim >= self.weight.ndim
        eps = dealt(eps, 0, len(value)) if value.ndim == 2 and has_rows else eps
        return mean + deviation(super().factor(f"{name}_rho", middle)) * eps


class NormalRankOneLinear(NormalRankOne, RankOneLinear):
    """A linear layer with Gaussian factors, with a form for all members at once."""

    def stacked_factor(self, name: str, slots: Slots, middle: int) -> Value:
        mean, eps = super().stacked_factor(name, slots, middle), slots.take("eps")
        if eps is None:
            return mean
        rho, _ = stacked(f"{name}_rho", slots, middle)
        value, own = slots.take(name), self.part(name, eps)
        assert value is not None
        parts = value.ndim - slots.has_axis(name) == 2
        if own.ndim == 2:  # one for all rows, [M, channels]
            own = own.reshape(len(own), *(1,) * (middle + parts), -1)
        elif parts:
            own = dealt(own, 1, value.shape[-2])
        away = deviation(rho) * own  # noise always has the member axis
        return mean[0] + away, True


def with_rank_one(
    name: str, layer: Any, spread: float, initial_std: float | None = None, by_row: bool = True
) -> nn.Module:
    """A layer with the same weights under the same names, and with factors r and s. The factors are
    Gaussian if `initial_std` is given, with one draw per row (`by_row`) or one for all rows."""
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        raise ModelError(f"layer {name!r}: padding_mode={layer.padding_mode!r} is not supported")
    linear = isinstance(layer, nn.Linear)
    if linear:
        inputs, outputs = layer.in_features, layer.out_features
    else:
        inputs, outputs = layer.in_channels, layer.out_channels
    ones = layer.weight.detach().new_ones
    if initial_std is None:
        new = extended(layer, RankOneLinear if linear else RankOne)
    else:
        new = extended(layer, NormalRankOneLinear if linear else NormalRankOne)
        new.initial_std, new.by_row = initial_std, by_row
        new.r_rho, new.s_rho = nn.Parameter(ones(outputs)), nn.Parameter(ones(inputs))
        new.register_buffer("eps", None)
    new.spread = spread
    new.r, new.s = nn.Parameter(ones(outputs)), nn.Parameter(ones(inputs))
    return new
