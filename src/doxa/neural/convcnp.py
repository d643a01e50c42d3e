"""The convolutional conditional neural process.

    h(t) = Σ_{i in C} [1, y_i] k(t − x_i) on a lattice t; the signal is divided by the density
    μ_j, s_j = Σ_t CNN(h)(t) k'(x_j − t),    k, k' Gaussians whose lengthscales are learned

Gordon, Bruinsma, Foong, Requeima, Dubois & Turner (2020), "Convolutional conditional neural
processes". If a context is shifted by lattice steps, its predictions are shifted as well, so the
network generalises to inputs outside the range of the training tasks. x has one column (functions)
or two (images, as pixels with coordinates). The lattice has `density` points per unit of x, in
fitted units: for pixels with integer coordinates use density=1 and no standardisation of x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from doxa import store
from doxa.errors import DataError, MethodError
from doxa.method.method import positive, whole
from doxa.neural.base import Amortised
from doxa.neural.blocks import Task, spanned

_MARGIN = 4  # lattice steps beyond the points, on either side


class Smoothing(nn.Module):
    """k(x − t) = exp(−(x − t)²/2ℓ²), with a learned ℓ that starts at one lattice step."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step
        self.log_length = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_length, math.log(self.step))

    def forward(self, x: Tensor, lattice: Tensor) -> Tensor:
        """[..., N, G] of x [..., N] and a lattice [..., G]."""
        away = (x.unsqueeze(-1) - lattice.unsqueeze(-2)) * (-self.log_length).exp()
        return (-0.5 * away.square()).exp()


class Block(nn.Module):
    """A residual convolution: h + conv(relu(conv(relu(h))))."""

    def __init__(self, axes: int, width: int, kernel: int) -> None:
        super().__init__()
        conv = nn.Conv1d if axes == 1 else nn.Conv2d
        self.first = conv(width, width, kernel, padding=kernel // 2)
        self.second = conv(width, width, 1)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.second(relu(self.first(relu(h))))


class ConvNet(nn.Module):
    """From points to a lattice, a CNN on the lattice, and back to points."""

    def __init__(
        self, inputs: int, outputs: int, width: int, layers: int, kernel: int, density: float
    ) -> None:
        super().__init__()
        self.density = density
        conv = nn.Conv1d if inputs == 1 else nn.Conv2d
        self.onto, self.back = Smoothing(1.0 / density), Smoothing(1.0 / density)
        self.lift = conv(1 + outputs, width, 1)
        self.blocks = nn.Sequential(*(Block(inputs, width, kernel) for _ in range(layers)))
        self.head = conv(width, 2 * outputs, 1)

    def forward(self, task: Task, *cells: int) -> Tensor:
        """The outputs for a task; cells: the number of lattice points along each column of x."""
        x, mask, target_x = task["context_x"], task["context"], task["target_x"]
        low = torch.minimum(spanned(x, mask)[0], spanned(target_x, task["targets"])[0])  # [B, D]
        start = (low * self.density).floor() - _MARGIN
        lattices = [
            (start[..., d : d + 1] + torch.arange(n, device=x.device, dtype=x.dtype)) / self.density
            for d, n in enumerate(cells)
        ]  # [B, G] each
        ones = mask.unsqueeze(-1)
        values = torch.cat([ones, task["context_y"] * ones], -1)  # [B, N, C]
        onto = [self.onto(x[..., d], lattice) for d, lattice in enumerate(lattices)]
        h = torch.einsum(_ONTO[len(cells)], values, *onto)  # [B, C, G...]
        seen = h.narrow(-len(cells) - 1, 0, 1)
        signal = h.narrow(-len(cells) - 1, 1, values.shape[-1] - 1) / (seen + 1e-6)
        h = self.lift(torch.cat([seen, signal], -len(cells) - 1))
        h = self.head(self.blocks(h))
        back = [self.back(target_x[..., d], lattice) for d, lattice in enumerate(lattices)]
        back = [k / k.sum(-1, keepdim=True).clamp_min(1e-6) for k in back]
        return torch.einsum(_BACK[len(cells)], h, *back)  # [B, T, 2·O]


_ONTO = {1: "bnc,bng->bcg", 2: "bnc,bng,bnh->bcgh"}
_BACK = {1: "bcg,bng->bnc", 2: "bcgh,bng,bnh->bnc"}


@store.register("convcnp")
@dataclass(frozen=True)
class ConvCNP(Amortised):
    """A CNN on a lattice from a context to predictions.

    Parameters
    ----------
    width : int
        Channels.
    layers : int
        Residual convolutions.
    kernel_size : int
        Width of each convolution in lattice points, odd.
    density : float
        Lattice points per unit of x, in fitted units.
    min_std : float
        The least standard deviation of the noise, in fitted units.
    """

    name: ClassVar[str] = "convcnp"
    renamed: ClassVar[Mapping[str, str]] = {"floor": "min_std", "kernel": "kernel_size"}

    width: int = whole(64, least=1)
    layers: int = whole(6, least=1)
    kernel_size: int = whole(9, least=1)
    density: float = positive(16.0)
    min_std: float = positive(1e-2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise MethodError(f"kernel_size must be odd, not {self.kernel_size}")

    def network(self, inputs: int, outputs: int) -> nn.Module:
        if inputs > 2:
            raise DataError(f"convcnp takes x of one or two columns, not {inputs}: tnp takes any")
        return ConvNet(inputs, outputs, self.width, self.layers, self.kernel_size, self.density)

    def fixed(self, low: Tensor, high: Tensor) -> tuple[Any, ...]:
        extent = (high - low).flatten(0, -2).amax(0).tolist()
        return tuple(math.ceil(1.1 * e * self.density) + 2 * _MARGIN + 2 for e in extent)
