"""Linear, convolutional and embedding layers with normal weights, whose noise is put on what the
layer gives: a draw of its own for each row, at the price of one for all.

    local    y = W̄x + b̄ + √(σ² x² + τ²) ∘ ε,                  ε: a number an output and row
    flipout  y = W̄x + b̄ + r ∘ ((σ ∘ ε)(s ∘ x) + τ ∘ ε′),      r, s: signs of a row; ε, ε′ of all

Kingma, Salimans & Welling (2015); Wen et al. (2018). The weights are the means W̄ and b̄; the
deviations σ and τ, or σ ∘ ε and τ ∘ ε′, are given from outside. Without them a layer is the plain
one. Flipout's rows have exactly the noise that weights of their own would give, and so have locally
reparametrised ones where a layer gives one output vector for each row. Where a weight is used at
several places of a row (an image, a sequence, a layer that is called twice) local noise differs
from place to place: each place has the right distribution, but places are independent of each
other, and under one weight they are not. Signs are the same at all places. `exact_noise` says which
of the two is exact in a layer.

Linear layers that give several draws of what they give for each row, nested in draws of what
they are given.

    y_s = W̄ h_p + b̄ ± √(σ² h_p² + τ²) ∘ ε_s,      p = ⌈s m / n⌉,      s = 1 … n,   p = 1 … m

As in `doxa.model.spread` (local reparametrisation: Kingma, Salimans & Welling, 2015), but the two
products are taken once for each of the m draws of the input, and n/m draws of the noise are added
to each. The first layer's input is the same in all draws, m = 1: its products, the largest of many
networks, serve them all. Every y_s has the distribution that a draw of the weights would give it.

Draws are rows, and those of one row of x lie together: [B·m, in] to [B·n, out]. Where n is even,
the second half of a row's draws has minus the noise of the first, in all layers, so that what is
odd in the noise cancels. A layer without noise is the plain one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.model import Model
from doxa.model.layers import MethodLayer, Shape, Slots, Value, extended
from doxa.model.plan import stacked_linear

SPREAD = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def applied(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a layer gives with another weight and bias."""
    if isinstance(layer, nn.Embedding):
        return F.embedding(x, weight, layer.padding_idx)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return layer._conv_forward(x, weight, bias)


def exact_noise(net: Model, name: str) -> str | None:
    """Which noise on rows is a draw of a layer's weights for each row: "local" where the layer
    gives one output vector for each row, in one call; "flipout" where it has several places or
    calls, with the rows first in all of them; None: noise on weights alone, one draw for all rows.
    The network must have seen a row."""
    calls = net.calls.get(name, ())
    if not calls or None in calls or len({len(shape or ()) for shape in calls}) > 1:
        return None  # also where signs would be of several shapes
    layer: Any = net.net.get_submodule(name)
    outputs = layer.weight.shape[1 if isinstance(layer, nn.Embedding) else 0]
    given = [numbers for layer, numbers in net.widths if layer == name]
    return "local" if given == [outputs] else "flipout"


def sign_shape(layer: Any, x: Tensor, inputs: int) -> Shape:
    """The shape of the signs of each row, for `inputs` channels of x and then for the outputs, the
    same at all places."""
    if isinstance(layer, nn.Embedding):
        return (len(x), *(1,) * (x.ndim - 1), layer.weight.shape[1])
    middle, axes = (1,) * (x.ndim - layer.weight.ndim), (1,) * (layer.weight.ndim - 2)
    return (len(x), *middle, inputs + len(layer.weight), *axes)


def signs(layer: Any, uniform: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """s and r of uniforms, as what is multiplied by them is shaped."""
    axis = 1 - layer.weight.ndim
    sign = torch.where(uniform > 0.5, 1.0, -1.0).to(uniform.dtype)
    return sign.narrow(axis, 0, inputs), sign.narrow(axis, inputs, sign.shape[axis] - inputs)


def root(variance: Tensor) -> Tensor:
    """Its root; where there is none (an input of zeros) the gradient is 0, not infinite."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.5).sqrt()


def local_deviation(layer: Any, x: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
    """The standard deviation of what a layer gives, from the variances of its weight and bias."""
    x = x if isinstance(layer, nn.Embedding) else x.square()
    return root(applied(layer, x, variance, bias))


class Spread(MethodLayer):
    """Mixin of layers with normal weights. `weight_away` and `bias_away` are given where they are
    uncertain: deviations of a `Local` layer, differences of a `Flipout` one."""

    given: ClassVar[tuple[str, ...]] = ("weight_away", "bias_away")
    row_noise: ClassVar[str]  # the buffer of the noise of rows
    weight: Tensor
    weight_away: Tensor | None
    bias_away: Tensor | None

    def use(self, buffer: str) -> str:
        return "training"


class Local(Spread):
    """Noise on what the layer gives, of the deviation that its weights' give it."""

    row_noise = "eps"
    eps: Tensor | None

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        bias = getattr(self, "bias", None)
        return {"eps": ("normal", tuple(applied(self, x, self.weight, bias).shape))}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        if self.eps is None or self.weight_away is None:
            return out
        bias = None if self.bias_away is None else self.bias_away.square()
        return self.drawn(out, local_deviation(self, x, self.weight_away.square(), bias), self.eps)

    def drawn(self, mean: Tensor, std: Tensor, eps: Tensor) -> Tensor:
        """A draw of what the layer gives."""
        return mean + eps * std


class LocalLinear(Local):
    """The same with a form for all members at once."""

    inner = nn.Linear

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        out, out_axis = inner(h, has_axis)
        eps, away, bias = (slots.take(name) for name in ("eps", *self.given))
        if eps is None or away is None:
            return out, out_axis
        bias = None if bias is None else bias.square()
        variance = stacked_linear(h.square(), has_axis, away.square(), bias)
        return self.drawn(out, root(variance), eps), True


class Flipout(Spread):
    """One difference of the weights for all rows, under each row's own signs."""

    row_noise = "uniform"
    uniform: Tensor | None
    inputs: int  # signs of the inputs (none of an embedding's), before those of the outputs

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        return {"uniform": ("uniform", sign_shape(self, x, self.inputs))}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        if self.uniform is None or self.weight_away is None:
            return out
        s, r = signs(self, self.uniform, self.inputs)
        x = x * s if self.inputs else x
        return out + r * applied(self, x, self.weight_away, self.bias_away)


class FlipoutLinear(Flipout):
    """The same with a form for all members at once."""

    inner = nn.Linear

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        out, out_axis = inner(h, has_axis)
        uniform, away, bias = (slots.take(name) for name in ("uniform", *self.given))
        if uniform is None or away is None:
            return out, out_axis
        s, r = signs(self, uniform, self.inputs)  # noise always has the member axis
        return out + r * stacked_linear(h * s, True, away, bias), True


def with_spread(layer: Any, kind: str) -> nn.Module:
    """A layer with the same weights under the same names as means; kind: "local" or "flipout"."""
    linear = isinstance(layer, nn.Linear)
    if kind == "local":
        new = extended(layer, LocalLinear if linear else Local)
    else:
        new = extended(layer, FlipoutLinear if linear else Flipout)
        channels = getattr(layer, "in_features" if linear else "in_channels", 0)
        new.inputs = channels
    for buffer in (*Spread.given, new.row_noise):
        new.register_buffer(buffer, None)
    return new


class NestedLinear(LocalLinear):
    """A linear layer whose outputs are drawn `draws` times for each row of x."""

    draws: int  # n; m of the layer before, or 1, divides it

    @property
    def fresh(self) -> int:
        """Draws whose noise is not minus that of others."""
        return self.draws // 2 if self.draws % 2 == 0 else self.draws

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        """For rows of x that are not yet several: without noise they never are."""
        return {"eps": ("normal", (len(x) * self.fresh, self.weight.shape[-2]))}

    def drawn(self, mean: Tensor, std: Tensor, eps: Tensor) -> Tensor:
        """[..., B·m, out] twice and [..., B·fresh, out] to [..., B·n, out]."""
        rows = eps.shape[-2] // self.fresh
        before = mean.shape[-2] // rows  # m
        halves = self.draws // self.fresh
        parents = max(1, before // halves)  # of the draws of a half
        eps = eps.unflatten(-2, (rows, 1, parents, -1))
        mean, std = (t.unflatten(-2, (rows, -1, parents, 1)) for t in (mean, std))
        if halves == 2:  # the sign is put on the deviations, which are fewer
            first, last = (std, std) if before == 1 else std.split(1, -4)
            std = torch.cat([first, -last], -4)
        return torch.addcmul(mean, std, eps).flatten(-5, -2)  # [..., B, half, parent, each, out]


def with_nested(layer: nn.Module, draws: int) -> nn.Module:
    """A layer with the same weights under the same names as means."""
    new = extended(layer, NestedLinear)
    new.draws = draws
    for buffer in (*Spread.given, new.row_noise):
        new.register_buffer(buffer, None)
    return new
