"""Linear, convolutional and embedding layers with Gaussian weights and noise on their outputs.

Each row has its own draw of the noise, at the cost of one draw for all rows.

    local    y = W̄x + b̄ + √(σ² x² + τ²) ∘ ε,                  ε: one number per output and row
    flipout  y = W̄x + b̄ + r ∘ ((σ ∘ ε)(s ∘ x) + τ ∘ ε′),      r, s: signs per row; ε, ε′ shared

Kingma, Salimans & Welling (2015); Wen et al. (2018). The weights are the means W̄ and b̄; the
deviations σ and τ, or σ ∘ ε and τ ∘ ε′, are inputs of the layer. Without them, it is the plain
layer. With flipout, each row has exactly the distribution of a separate draw of the weights. The
same holds for local noise if the layer has one output vector per row. If a weight is used at
several positions of a row (an image, a sequence, a layer that is called twice), local noise differs
between positions: each position has the right distribution, but positions are independent, which
they are not under one draw of the weight. Signs are the same at all positions. `exact_noise`
returns the kind of noise that is exact in a layer.

`NestedLinear` layers return several draws of the output per row, nested in draws of the input:

    y_s = W̄ h_p + b̄ ± √(σ² h_p² + τ²) ∘ ε_s,      p = ⌈s m / n⌉,      s = 1 … n,   p = 1 … m

This is local reparametrisation, but the two products are computed once for each of the m draws of
the input, and n/m draws of the noise are added to each. The input of the first layer is the same in
all draws, m = 1: its products, in many networks the largest, are computed once for all draws. Each
y_s has the distribution that a draw of the weights would give it.

Draws are rows, and those of one row of x are adjacent: [B·m, in] to [B·n, out]. If n is even, the
second half of a row's draws has the negated noise of the first half, in all layers, so that odd
functions of the noise cancel. A layer without noise is the plain layer.
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
    """The output of a layer with another weight and bias."""
    if isinstance(layer, nn.Embedding):
        return F.embedding(x, weight, layer.padding_idx)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return layer._conv_forward(x, weight, bias)


def exact_noise(net: Model, name: str) -> str | None:
    """The kind of noise that is a draw of a layer's weights for each row. "local" if the layer has
    one output vector per row, in one call; "flipout" if it has several positions or calls, with
    rows as the first axis in all of them; None if only noise on weights is exact, one draw for all
    rows. `Model.build` must have been called."""
    calls = net.calls.get(name, ())
    if not calls or None in calls or len({len(shape or ()) for shape in calls}) > 1:
        return None  # also if signs would have several shapes
    layer: Any = net.net.get_submodule(name)
    outputs = layer.weight.shape[1 if isinstance(layer, nn.Embedding) else 0]
    given = [numbers for layer, numbers in net.widths if layer == name]
    return "local" if given == [outputs] else "flipout"


def sign_shape(layer: Any, x: Tensor, inputs: int) -> Shape:
    """The shape of the signs per row, for `inputs` channels of x and then for the outputs; the same
    at all positions."""
    if isinstance(layer, nn.Embedding):
        return (len(x), *(1,) * (x.ndim - 1), layer.weight.shape[1])
    middle, axes = (1,) * (x.ndim - layer.weight.ndim), (1,) * (layer.weight.ndim - 2)
    return (len(x), *middle, inputs + len(layer.weight), *axes)


def signs(layer: Any, uniform: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """s and r from uniforms, in the shapes of their factors."""
    axis = 1 - layer.weight.ndim
    sign = torch.where(uniform > 0.5, 1.0, -1.0).to(uniform.dtype)
    return sign.narrow(axis, 0, inputs), sign.narrow(axis, inputs, sign.shape[axis] - inputs)


def root(variance: Tensor) -> Tensor:
    """The square root; at a variance of zero (an input of zeros) the gradient is 0, not
    infinite."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny ** 0.5).sqrt()


def local_deviation(layer: Any, x: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
    """The standard deviation of a layer's output, from the variances of its weight and bias."""
    x = x if isinstance(layer, nn.Embedding) else x.square()
    return root(applied(layer, x, variance, bias))


class Spread(MethodLayer):
    """Mixin of layers with Gaussian weights. `weight_away` and `bias_away` are set if they are
    uncertain: variances of a `Local` layer, differences of a `Flipout` layer."""

    given: ClassVar[tuple[str, ...]] = ("weight_away", "bias_away")
    row_noise: ClassVar[str]  # the buffer of the noise of rows
    weight: Tensor
    weight_away: Tensor | None
    bias_away: Tensor | None

    def use(self, buffer: str) -> str:
        return "training"


class Local(Spread):
    """Noise on the output, with the standard deviation that follows from the weights."""

    row_noise = "eps"
    eps: Tensor | None

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        bias = getattr(self, "bias", None)
        return {"eps": ("normal", tuple(applied(self, x, self.weight, bias).shape))}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        if self.eps is None or self.weight_away is None:
            return out
        std = local_deviation(self, x, self.weight_away, self.bias_away)
        return self.drawn(out, std, self.eps)

    def drawn(self, mean: Tensor, std: Tensor, eps: Tensor) -> Tensor:
        """A draw of the output."""
        return mean + eps * std


class LocalLinear(Local):
    """A linear layer with noise on the output, with a form for all members at once."""

    inner = nn.Linear

    def batched(self, h: Tensor, has_axis: bool, slots: Slots, inner: Any) -> Value:
        out, out_axis = inner(h, has_axis)
        eps, away, bias = (slots.take(name) for name in ("eps", *self.given))
        if eps is None or away is None:
            return out, out_axis
        variance = stacked_linear(h.square(), has_axis, away, bias)
        return self.drawn(out, root(variance), eps), True


class Flipout(Spread):
    """One difference of the weights for all rows, multiplied by signs per row."""

    row_noise = "uniform"
    uniform: Tensor | None
    inputs: int  # number of signs of the inputs (0 for an embedding), before those of the outputs

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
    """A linear layer with flipout, with a form for all members at once."""

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
    """A linear layer with `draws` draws of the output per row of x."""

    draws: int  # n; m of the layer before, or 1, divides it

    @property
    def fresh(self) -> int:
        """The number of draws whose noise is not the negated noise of others."""
        return self.draws // 2 if self.draws % 2 == 0 else self.draws

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        """The noise for rows of x that are not yet multiplied by draws."""
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
