"""Linear layers that give several draws of what they give for each row, nested in draws of what
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

import torch
from torch import Tensor, nn

from doxa.model.layers import Shape, extended
from doxa.model.spread import LocalLinear, Spread


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
