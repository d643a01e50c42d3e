"""Building blocks of the networks of neural processes.

A set of points is (x [..., N, D], y [..., N, O], mask [..., N]): the mask is 1 where a point
counts. The output of a block does not depend on the order of the points, nor on values where the
mask is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

# Inputs of a network: context_x, context_y, context (its mask), target_x, targets (its mask).
Task = Mapping[str, Tensor]


def mlp(inputs: int, width: int, outputs: int, depth: int) -> nn.Sequential:
    """`depth` linear layers with ReLU between them."""
    sizes = [inputs, *[width] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def pairs(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], -1)


class Attention(nn.Module):
    """Multi-head attention and a layer after it, each with a residual and a norm (Vaswani et al.,
    2017):  h = norm(q + Σ_j softmax_j(q·k_j / √d) v_j),   norm(h + feed(h)).

    forward: queries [..., Q, W], keys and values [..., K, W], allowed [..., Q or 1, K]: 1 where a
    query may attend to a key. Every query needs at least one key.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.feed = mlp(width, hidden, width, 2)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
        q = self._heads(self.query(queries))  # [..., H, Q, W/H]
        k, v = self._heads(self.key(keys)), self._heads(self.value(values))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        hidden = (1.0 - allowed.unsqueeze(-3)) * torch.finfo(logits.dtype).min
        seen = torch.softmax(logits + hidden, -1) @ v
        together = seen.transpose(-3, -2).flatten(-2)  # [..., Q, W]
        h = self.first(queries + self.out(together))
        return self.second(h + self.feed(h))

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class Pooled(nn.Module):
    """A set as one vector:  r = ρ(mean_i φ(x_i, y_i)), [..., outputs] (Zaheer et al., 2017).

    heads: if above 0, the points attend to each other before the mean.
    """

    def __init__(self, inputs: int, width: int, outputs: int, depth: int, heads: int = 0) -> None:
        super().__init__()
        self.each = mlp(inputs, width, width, depth)
        self.between = Attention(width, heads, width) if heads else None
        self.after = mlp(width, width, outputs, 2)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = self.each(pairs(x, y))
        if self.between is not None:
            each = self.between(each, each, each, mask.unsqueeze(-2))
        total = (each * mask.unsqueeze(-1)).sum(-2)
        return self.after(total / mask.sum(-1, keepdim=True))


class Attended(nn.Module):
    """A set as one vector for each target: targets attend to the points by their x (Kim et al.,
    2019), [..., targets, width]."""

    def __init__(self, inputs: int, outputs: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.place = mlp(inputs, width, width, 2)
        self.each = mlp(inputs + outputs, width, width, depth)
        self.between = Attention(width, heads, width)
        self.across = Attention(width, heads, width)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, target_x: Tensor) -> Tensor:
        each, seen = self.each(pairs(x, y)), mask.unsqueeze(-2)
        each = self.between(each, each, each, seen)
        return self.across(self.place(target_x), self.place(x), each, seen)


def at_targets(code: Tensor, target_x: Tensor) -> Tensor:
    """One vector per set, [..., C], repeated for every target, [..., N, C]."""
    return code.unsqueeze(-2).expand(*code.shape[:-1], target_x.shape[-2], -1)


def spanned(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest x of each set, [..., D]."""
    real = mask.unsqueeze(-1) > 0
    low = x.masked_fill(~real, float("inf")).amin(-2)
    return low, x.masked_fill(~real, float("-inf")).amax(-2)
