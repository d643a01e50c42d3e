"""Small networks, one for each design, trained side by side; and mixtures of Gaussians.

Weights are [D, in, out]: one batched product serves all designs, which share nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 32


class Net(NamedTuple):
    """x [D, B, in] to [D, B, out], through one hidden layer and a way past it."""

    into: Tensor
    into_bias: Tensor
    out: Tensor
    past: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.into_bias, x, self.into).tanh()
        return torch.baddbmm(torch.baddbmm(self.bias, x, self.past), hidden, self.out)


def fresh(designs: int, inputs: int, outputs: int, generator: torch.Generator, like: Tensor) -> Net:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

    return Net(
        normal(designs, inputs, WIDTH) / inputs**0.5, normal(designs, 1, WIDTH) * 0.3,
        normal(designs, WIDTH, outputs) * 0.1 / WIDTH**0.5,
        like.new_zeros(designs, inputs, outputs), normal(designs, 1, outputs) * 0.3,
    )  # fmt: skip


def trained(
    weights: list[Tensor], loss: Callable[[int], Tensor], steps: int, rate: float = 0.02
) -> None:
    """Adam on the sum over designs of `loss(t)` [D], with a rate that falls to zero."""
    with torch.enable_grad():
        for weight in weights:
            weight.requires_grad_()
        optimiser = torch.optim.Adam(weights, lr=rate)
        for t in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * t / steps))
            optimiser.zero_grad()
            loss(t).sum().backward()
            optimiser.step()
    for weight in weights:
        weight.requires_grad_(False)


class Mixture(NamedTuple):
    """Σ_k π_k N(μ_k, (WᵀW)⁻¹) over vectors of size P, for any axes in front: W whitens, so that a
    density is a product and no solve."""

    log_share: Tensor  # [..., K]
    mean: Tensor  # [..., K, P]
    whiten: Tensor  # W [..., K, P, P], lower triangular

    def log_prob(self, x: Tensor) -> Tensor:
        """[...] of [..., P]"""
        away = x.unsqueeze(-2) - self.mean
        z = (self.whiten * away.unsqueeze(-2)).sum(-1)
        log_det = self.whiten.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * x.shape[-1] * math.log(2 * math.pi)
        return (self.log_share - 0.5 * z.square().sum(-1) + log_det - constant).logsumexp(-1)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """[n, ..., P]"""
        shares = self.log_share.exp()
        front, size = shares.shape[:-1], self.mean.shape[-1]
        pick = torch.multinomial(shares.reshape(-1, shares.shape[-1]), n, True, generator=generator)
        pick = pick.T.reshape(n, *front, 1, 1)  # [n, ..., 1, 1]
        mean = self.mean.expand(n, *self.mean.shape).gather(-2, pick.expand(*pick.shape[:-1], size))
        whiten = self.whiten.expand(n, *self.whiten.shape).gather(
            -3, pick.unsqueeze(-1).expand(*pick.shape[:-2], 1, size, size)
        )
        z = torch.randn(
            (n, *front, size, 1), generator=generator, dtype=mean.dtype, device=mean.device
        )
        away = torch.linalg.solve_triangular(whiten.squeeze(-3), z, upper=False)
        return mean.squeeze(-2) + away.squeeze(-1)


def mixture_size(parts: int, size: int) -> int:
    return parts * (1 + size + size * (size + 1) // 2)


def mixture_of(raw: Tensor, parts: int, size: int) -> Mixture:
    """From unconstrained numbers [..., mixture_size]."""
    share, mean, rest = raw.split([parts, parts * size, parts * size * (size + 1) // 2], -1)
    rest = rest.unflatten(-1, (parts, -1))
    row, column = torch.tril_indices(size, size, device=raw.device)
    whiten = raw.new_zeros(*rest.shape[:-1], size * size)
    diagonal = row == column
    values = torch.where(diagonal, torch.nn.functional.softplus(rest + 0.5) + 1e-3, rest)
    index = (row * size + column).expand_as(values)
    whiten = whiten.scatter(-1, index, values).unflatten(-1, (size, size))
    return Mixture(share.log_softmax(-1), mean.unflatten(-1, (parts, size)), whiten)
