"""The transformer neural process: context and targets are tokens.

    tokens (x_i, y_i) of the context, (x_j, 0) of the targets; every token attends to the context
    autoregressive: also tokens (x_j, y_j) of the targets; target j attends to those before it:
    log p(y_T | x_T, C) = Σ_j log N(y_j; μ(x_j, C, y_<j), σ²)

Nguyen & Grover (2022), "Transformer neural processes": TNP-D and TNP-A. The order of the targets is
drawn again at every step. In both modes, `predict` treats each point as the only target. In the
autoregressive mode, `functions` draws jointly, one point after the other, so that its cost grows
with the cube of the number of points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.method import Clock, Run, State
from doxa.method.method import one_of, positive, whole
from doxa.neural.anp import divides
from doxa.neural.base import Amortised, members_axis
from doxa.neural.blocks import Attention, Task, mlp, pairs


class TokenNet(nn.Module):
    """A transformer over points."""

    def __init__(
        self, inputs: int, outputs: int, width: int, depth: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.embed = mlp(inputs + outputs, width, width, depth)
        self.layers = nn.ModuleList(Attention(width, heads, 2 * width) for _ in range(layers))
        self.head = mlp(width, 2 * width, 2 * outputs, 2)

    def forward(
        self, task: Task, target_y: Tensor | None = None, rank: Tensor | None = None
    ) -> Tensor:
        """rank [B, T]: the position of each target in the order. With target_y, target j attends to
        the context and to the targets of lower rank."""
        x, context = task["target_x"], task["context"].unsqueeze(-2)  # [B, 1, N]
        given = pairs(task["context_x"], task["context_y"])
        blank = x.new_zeros(*x.shape[:-1], given.shape[-1] - x.shape[-1])
        queries = pairs(x, blank)
        keys = given.shape[-2]
        if target_y is None or rank is None:
            tokens, allowed = torch.cat([given, queries], -2), context
        else:
            observed = pairs(x, target_y)
            tokens = torch.cat([given, observed, queries], -2)
            later, earlier = rank.unsqueeze(-1), rank.unsqueeze(-2)
            real = task["targets"].unsqueeze(-2)
            before = (earlier < later).to(x.dtype) * real  # [B, T, T]
            itself = (earlier <= later).to(x.dtype) * real
            seen = context.expand(*x.shape[:-1], -1)
            none = real.new_zeros(*given.shape[:-1], x.shape[-2])
            allowed = torch.cat([
                torch.cat([context.expand(*given.shape[:-1], -1), none], -1),
                torch.cat([seen, itself], -1), torch.cat([seen, before], -1),
            ], -2)  # fmt: skip
            keys = keys + x.shape[-2]
        h = self.embed(tokens)
        for layer in self.layers:
            of = h[..., :keys, :]
            h = layer(h, of, of, allowed)
        return self.head(h[..., -x.shape[-2] :, :])


@store.register("tnp")
@dataclass(frozen=True)
class TNP(Amortised):
    """A transformer from a context to predictions.

    Parameters
    ----------
    width : int
        Numbers of a token; a layer's hidden units are twice as many.
    depth : int
        Layers of the embedding of a point.
    layers : int
        Layers of the transformer.
    heads : int
        Number of attention heads; it divides the width.
    min_std : float
        The least standard deviation of the noise, in fitted units.
    mode : str
        "diagonal" (TNP-D: points one by one) or "autoregressive" (TNP-A: jointly, by the chain
        rule).
    """

    name: ClassVar[str] = "tnp"

    width: int = whole(64, least=1)
    depth: int = whole(4, least=1)
    layers: int = whole(6, least=1)
    heads: int = whole(4, least=1)
    min_std: float = positive(1e-3)
    mode: str = one_of("diagonal", "autoregressive")

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.width, self.heads)

    @property
    def autoregressive(self) -> bool:
        return self.mode == "autoregressive"

    def network(self, inputs: int, outputs: int) -> nn.Module:
        return TokenNet(inputs, outputs, self.width, self.depth, self.layers, self.heads)

    def bound_of(
        self, run: Run, params: State, batch: Batch, clock: Clock | None, fixed: tuple[Any, ...]
    ) -> Tensor:
        if self.mode == "diagonal" or clock is None:
            return super().bound_of(run, params, batch, clock, fixed)
        rank = clock.rows("uniform", *batch.x["context"].shape[-2:])  # a random order
        f = self.called(run, params, batch, members_axis(batch.y, batch), rank)
        return self.at_points(f, batch)
