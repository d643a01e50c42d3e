"""Linear and convolutional layers whose weights are Gaussian around means that noise multiplies.

    q(W | z) = Π N(w_ij; z_i μ_ij, σ_ij²),   z = flow(z₀),   z₀ ~ N(m, s²)
    r(z | W) = N(flow'(z); μ̃ + b₁ a, σ̃ e^{b₂ a}) |∂flow'/∂z|,   a = mean_j tanh(Σ_i c_i w_ij)

z has an entry for each input of a linear layer and for each output channel of a convolution, as in
Louizos & Welling (2017). Biases are Gaussian without z. In training there is one z for the batch,
and each row has a draw of W given z, by the noise that is exact in a layer
(`doxa.model.spread.exact_noise`):

    local    on what the layer gives, where it gives one output vector for each row (local
             reparametrisation: Kingma, Salimans & Welling, 2015)
    flipout  one draw of W for the batch, with signs for each row, where several places of a row
             share W (a convolution, a linear layer on tokens)
    weights  one draw of W for the batch, elsewhere

In prediction a function is one z and one W. Without noise z₀ is m, and W its mean.

Two things are not the paper's, so that a layer starts as a mean-field one: the constants μ̃ and σ̃
of r, which begin at m and s; and flows that begin as the identity, whose masks alternate instead of
being drawn.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from doxa.model.layers import MethodLayer, Shape, deviation, extended
from doxa.model.spread import applied, local_deviation, root, sign_shape, signs


class Flow(MethodLayer, nn.Module):
    """A chain of masked couplings (RealNVP: Dinh et al., 2017), z [D] to z [D] and log |∂z_T/∂z_0|:

    h = tanh(A (m ∘ z) + a),   s = (1 − m) ∘ tanh(S h),   z ← z ∘ eˢ + (1 − m) ∘ (T h)

    with m every second entry, in turn. S and T begin at zero, where it is the identity.
    """

    own = ("inner_weight", "inner_bias", "outer_weight", "outer_bias")

    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__()
        self.size, self.length = size, length
        if length:
            self.inner_weight = nn.Parameter(torch.zeros(length, width, size))
            self.inner_bias = nn.Parameter(torch.zeros(length, width))
            self.outer_weight = nn.Parameter(torch.zeros(length, 2 * size, width))
            self.outer_bias = nn.Parameter(torch.zeros(length, 2 * size))

    def reset_parameters(self) -> None:
        if self.length:
            nn.init.normal_(self.inner_weight, std=1 / math.sqrt(self.size))
            for start in (self.inner_bias, self.outer_weight, self.outer_bias):
                nn.init.zeros_(start)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros_like(z[0])
        place = torch.arange(self.size, device=z.device)
        for t in range(self.length):
            kept = ((place + t) % 2).to(z.dtype)
            h = torch.tanh(F.linear(kept * z, self.inner_weight[t], self.inner_bias[t]))
            scale, shift = F.linear(h, self.outer_weight[t], self.outer_bias[t]).chunk(2)
            scale = (1 - kept) * torch.tanh(scale)
            z = z * scale.exp() + (1 - kept) * shift
            log_det = log_det + scale.sum()
        return z, log_det


class Multiplicative(MethodLayer):
    """Mixin of layers with Gaussian weights whose means are multiplied by z.

    The weights are μ. `rho` and `rho_bias` give the deviations, by softplus. The layer gives `z`,
    and `log_ratio`, a draw of log q(z) − log r(z | W), where it is in training.
    """

    own = (
        "rho", "rho_bias", "z_mean", "z_log_std", "r_summary", "r_mean", "r_mean_slope",
        "r_log_std", "r_log_std_slope",
    )  # fmt: skip
    gives = ("z", "log_ratio")
    in_training = ("row_noise", "uniform", "summary_noise")
    in_prediction = ("weight_noise", "bias_noise")  # in training too, where noise is not local

    weight: Tensor
    bias: Tensor | None
    rho: Tensor
    rho_bias: Tensor | None
    z_mean: Tensor
    z_log_std: Tensor
    r_summary: Tensor  # c
    r_mean: Tensor
    r_mean_slope: Tensor  # b₁
    r_log_std: Tensor
    r_log_std_slope: Tensor  # b₂
    flow: Flow
    inverse: Flow  # flow' of r
    initial: tuple[float, float]  # the deviations of a weight and of z at the start
    rows: str  # the noise of rows in training: "local", "flipout" or "weights" (none)
    inputs: int  # input channels, which have signs
    z_noise: Tensor | None
    row_noise: Tensor | None
    uniform: Tensor | None
    summary_noise: Tensor | None
    weight_noise: Tensor | None
    bias_noise: Tensor | None

    def noise(self, x: Tensor) -> dict[str, tuple[str, Shape]]:
        shapes = {"z_noise": tuple(self.z_mean.shape)}
        if self.rows == "local":
            shapes["row_noise"] = tuple(applied(self, x, self.weight, None).shape)
        shapes["summary_noise"] = (self.weight.numel() // self.z_mean.numel(),)
        shapes["weight_noise"] = tuple(self.weight.shape)
        if self.rho_bias is not None:
            shapes["bias_noise"] = tuple(self.rho_bias.shape)
        asked = {name: ("normal", shape) for name, shape in shapes.items()}
        if self.rows == "flipout":
            asked["uniform"] = ("uniform", sign_shape(self, x, self.inputs))
        return asked

    def use(self, buffer: str) -> str:
        if self.rows != "local" and buffer in self.in_prediction:
            return "both"
        return super().use(buffer)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        self.start()
        nn.init.normal_(self.r_summary, std=1 / math.sqrt(self.z_mean.numel()))

    def start(self) -> None:
        """Mean-field weights: z at 1, and r equal to q."""
        std, z_std = self.initial
        starts = {
            "rho": math.log(math.expm1(std)), "rho_bias": math.log(math.expm1(std)), "z_mean": 1.0,
            "z_log_std": math.log(z_std), "r_mean": 1.0, "r_log_std": math.log(z_std),
            "r_mean_slope": 0.0, "r_log_std_slope": 0.0,
        }  # fmt: skip
        for name, value in starts.items():
            if getattr(self, name) is not None:
                nn.init.constant_(getattr(self, name), value)

    def forward(self, x: Tensor) -> Tensor:
        z0 = self.z_mean
        if self.z_noise is not None:
            z0 = z0 + self.z_log_std.exp() * self.z_noise
        z, log_det = self.flow(z0)
        mean = self.weight * along(z, self.weight)  # of W
        if self.weight_noise is None:
            out = applied(self, x, mean, self.bias)
        else:
            out = self._drawn(x, mean, self.weight_noise)
        if self.summary_noise is None:  # not in training
            return out
        variance = deviation(self.rho).square()
        self.z, self.log_ratio = z, self._log_ratio(z, log_det, mean, variance)
        if self.row_noise is None:
            return out
        bias = None if self.rho_bias is None else deviation(self.rho_bias).square()
        return out + self.row_noise * local_deviation(self, x, variance, bias)

    def _drawn(self, x: Tensor, mean: Tensor, noise: Tensor) -> Tensor:
        """With a draw of W around its mean given z, for all rows; one for each, by signs."""
        away, bias_away = deviation(self.rho) * noise, None
        if self.rho_bias is not None:
            bias_away = deviation(self.rho_bias) * self.bias_noise  # type: ignore[operator]
        if self.uniform is not None:
            s, r = signs(self, self.uniform, self.inputs)
            return applied(self, x, mean, self.bias) + r * applied(self, x * s, away, bias_away)
        bias = self.bias if bias_away is None else self.bias + bias_away  # type: ignore[operator]
        return applied(self, x, mean + away, bias)

    def _log_ratio(self, z: Tensor, log_det: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """log q(z) − log r(z | W), with W drawn through Σ_i c_i w_ij alone."""
        assert self.z_noise is not None and self.summary_noise is not None
        c = self.r_summary
        centre = (mean * along(c, mean)).sum(_axes(mean)).flatten()
        spread = (variance * along(c.square(), mean)).sum(_axes(mean)).flatten()
        a = torch.tanh(centre + root(spread) * self.summary_noise).mean()
        moved, more = self.inverse(z)
        log_std = self.r_log_std + self.r_log_std_slope * a
        away = (moved - self.r_mean - self.r_mean_slope * a) * (-log_std).exp()
        log_q = -(0.5 * self.z_noise.square() + self.z_log_std).sum() - log_det
        log_r = -(0.5 * away.square() + log_std).sum() + more
        return log_q - log_r


def along(z: Tensor, weight: Tensor) -> Tensor:
    """z as a factor of a layer's weight: by input where it is linear, else by output channel."""
    return z if weight.ndim == 2 else z.reshape(-1, *(1,) * (weight.ndim - 1))


def _axes(weight: Tensor) -> int:
    """The axis of z."""
    return 1 if weight.ndim == 2 else 0


def with_multiplicative(
    layer: Any,
    bias: bool,
    length: int,
    width: int,
    initial: tuple[float, float],
    rows: str = "local",
) -> nn.Module:
    """A layer with the same weights under the same names as means, and what a `Multiplicative` has
    besides. bias: whether the bias is uncertain too. length, width: of the flows. rows: the noise
    of rows in training."""
    new = extended(layer, Multiplicative)
    weight = layer.weight.detach()
    size = weight.shape[1] if weight.ndim == 2 else weight.shape[0]
    for name in Multiplicative.own[2:]:
        setattr(new, name, nn.Parameter(weight.new_ones(size)))
    new.rho = nn.Parameter(torch.ones_like(weight))
    own = bias and layer.bias is not None
    new.register_parameter("rho_bias", nn.Parameter(weight.new_ones(len(weight))) if own else None)
    new.flow, new.inverse = (Flow(size, length, width).to(weight) for _ in range(2))
    new.initial, new.rows = initial, rows
    new.inputs = layer.in_features if weight.ndim == 2 else layer.in_channels
    new.start()
    for buffer in (
        *Multiplicative.gives,
        *Multiplicative.in_training,
        *Multiplicative.in_prediction,
    ):
        new.register_buffer(buffer, None)
    new.register_buffer("z_noise", None)
    return new
