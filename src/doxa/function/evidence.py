"""The evidence of a Gaussian process and its gradient, for all members at once.

    B = I + W^½ K W^½ / σ²,    α = B⁻¹u,  u = W^½y/σ
    log p(y) = −½ uᵀα − ½ log |B| − n log σ − (n/2) log 2π
    ∂/∂K = ½ W^½(ααᵀ − B⁻¹)W^½/σ²,    ∂/∂log σ = αᵀα + N − tr B⁻¹ − n

with W the rows' weights: B has no eigenvalue below 1, so that its Cholesky factor needs no jitter,
and a row of weight 0, which only pads a short run, changes nothing. Rasmussen & Williams (2006),
eq. 5.9. An evaluation is one Cholesky decomposition, its gradient one inverse from the factor; the
kernel is passed over in blocks of rows, so that two matrices [N, N] are all that is held.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from doxa.function.kernels import KernelFunction

BLOCK_BYTES = 2 << 20  # of covariances at a time, where they are passed over


def evenly(rows: int, count: int) -> Tensor:
    """At most `count` of so many rows, evenly spaced."""
    return torch.linspace(0, rows - 1, min(count, rows), dtype=torch.float64).long()


class Solved(NamedTuple):
    """Targets and the factor of B for every level of noise, L = 1 where all outputs share it."""

    y: Tensor  # [..., L, N, O/L]
    root: Tensor  # W^½/σ [..., L, N]
    factor: Tensor  # the Cholesky factor of B, [..., L, N, N]; not a number where that failed
    solution: Tensor  # α [..., L, N, O/L]


def by_level(y: Tensor, levels: int) -> Tensor:
    """Targets [..., N, O] of each noise level: [..., L, N, O/L]."""
    return y.unsqueeze(-3) if levels == 1 else y.mT.unsqueeze(-1)


def root_weights(log_noise: Tensor, weight: Tensor | None, rows: int) -> Tensor:
    """W^½/σ of each row, [..., L, N], for log σ [..., L] and weights [..., N]."""
    inverse = (-log_noise).exp().unsqueeze(-1)
    if weight is None:
        return inverse.expand(*log_noise.shape, rows)
    return inverse * weight.sqrt().unsqueeze(-2)


def solve(covariance: Tensor, y: Tensor, log_noise: Tensor, weight: Tensor | None) -> Solved:
    """For log σ [..., L], L = 1 or O, of targets y [..., N, O] under K [..., N, N]."""
    root = root_weights(log_noise, weight, y.shape[-2])
    own = by_level(y, log_noise.shape[-1]).expand(*root.shape, -1)
    scaled = root.unsqueeze(-1) * covariance.unsqueeze(-3) * root.unsqueeze(-2)
    return factored(scaled, own, root)


def factored(scaled: Tensor, y: Tensor, root: Tensor) -> Solved:
    """From W^½KW^½/σ² [..., L, N, N], which becomes B in its place."""
    scaled.diagonal(0, -2, -1).add_(1.0)
    factor, info = torch.linalg.cholesky_ex(scaled)
    del scaled
    factor.diagonal(0, -2, -1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
    return Solved(y, root, factor, torch.cholesky_solve(root.unsqueeze(-1) * y, factor))


def log_evidence(solved: Solved, log_noise: Tensor, n: Tensor | float) -> Tensor:
    """log p(y) [...] in fitted units, for log σ [..., L], with n [...] the sum of weights."""
    y, root, factor, solution = solved
    misfit = (root.unsqueeze(-1) * y * solution).sum((-3, -2, -1))
    logdet = 2 * factor.diagonal(0, -2, -1).log().sum((-2, -1))
    levels = math.log(2 * math.pi) * log_noise.shape[-1] + 2 * log_noise.sum(-1)
    return -0.5 * (misfit + y.shape[-1] * (logdet + n * levels))


def extended(solved: Solved, blocks: tuple[Tensor, Tensor], y: Tensor, log_noise: Tensor) -> Solved:
    """With further rows of weight 1: their y [B, O], and K [M, N, B], [M, B, B] with those before.

    [L 0; C D],   C = (L⁻¹B₁₂)ᵀ,   DDᵀ = B₂₂ − CCᵀ:   n²B in place of (n + B)³
    """
    root = root_weights(log_noise, None, len(y))
    right = root.unsqueeze(-2)
    cross = solved.root.unsqueeze(-1) * blocks[0].unsqueeze(1) * right
    below = torch.linalg.solve_triangular(solved.factor, cross, upper=False).mT
    left = root.unsqueeze(-1) * blocks[1].unsqueeze(1) * right - below @ below.mT
    own = by_level(y, log_noise.shape[-1]).expand(*root.shape, -1)
    corner = factored(left, own, root).factor
    zero = corner.new_zeros(()).expand(below.mT.shape)
    factor = torch.cat([torch.cat([solved.factor, zero], -1), torch.cat([below, corner], -1)], -2)
    whole_y, whole_root = torch.cat([solved.y, own], -2), torch.cat([solved.root, root], -1)
    solution = torch.cholesky_solve(whole_root.unsqueeze(-1) * whole_y, factor)
    return Solved(whole_y, whole_root, factor, solution)


class Problem(NamedTuple):
    """What the evidence is of: rows [..., N, D], targets [..., N, O], weights, and their sum n.

    log_noise: log σ [..., L] where it is given; None: the last L entries of θ.
    """

    kernel: KernelFunction
    x: Tensor
    y: Tensor
    weight: Tensor | None
    n: Tensor
    log_noise: Tensor | None

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """θ as the kernel's part and log σ."""
        size = self.kernel.layout.size
        if self.log_noise is None:
            return theta[..., :size], theta[..., size:]
        return theta[..., :size], self.log_noise.expand(*theta.shape[:-1], -1)

    def blocks(self, members: int) -> list[slice]:
        rows = self.x.shape[-2]
        step = max(1, BLOCK_BYTES // (8 * rows * members))
        return [slice(a, a + step) for a in range(0, rows, step)]

    def members(self, part: Tensor | slice) -> Problem:
        """Of some members; what they share has no axis for them."""
        own: dict[str, Any] = {
            name: value[part]
            for name, value, alone in (
                ("x", self.x, 2), ("y", self.y, 2), ("weight", self.weight, 1),
                ("n", self.n, 0), ("log_noise", self.log_noise, 1),
            )
            if value is not None and value.ndim > alone
        }  # fmt: skip
        return self._replace(**own)

    def thinned(self, count: int) -> Problem:
        """Of `count` rows, evenly spaced."""
        index = evenly(self.x.shape[-2], count).to(self.x.device)
        weight = None if self.weight is None else self.weight[..., index]
        n = torch.full_like(self.n, len(index)) if weight is None else weight.sum(-1)
        x, y = self.x[..., index, :], self.y[..., index, :]
        return self._replace(x=x, y=y, weight=weight, n=n)

    @torch.no_grad()
    def solve(self, theta: Tensor) -> Solved:
        """At θ [M, H]."""
        flat, log_noise = self.split(theta)
        rows, (members, levels) = self.x.shape[-2], log_noise.shape
        root = root_weights(log_noise, self.weight, rows)
        scaled = root.new_empty(members, levels, rows, rows)
        for block in self.blocks(members):
            part = self.kernel(flat, self.x[..., block, :], self.x).unsqueeze(-3)
            torch.mul(part, root[..., block].unsqueeze(-1), out=scaled[..., block, :])
        scaled.mul_(root.unsqueeze(-2))
        y = by_level(self.y, levels).expand(*root.shape, -1)
        return factored(scaled, y, root)

    def value(self, theta: Tensor, solved: Solved) -> Tensor:
        """log p(y) at θ [M, H], from what `solve` gave there: [M]."""
        return log_evidence(solved, self.split(theta)[1], self.n)

    def gradient(self, theta: Tensor, solved: Solved) -> Tensor:
        """Of the evidence at θ [M, H], from what `solve` gave there: [M, H]."""
        flat, _ = self.split(theta)
        y, root, factor, alpha = solved
        outputs, rows = y.shape[-1], y.shape[-2]
        inverse = torch.cholesky_inverse(factor)
        trace = inverse.diagonal(0, -2, -1).sum(-1)  # [M, L]
        fold = inverse.flatten(0, 1)
        fold.baddbmm_(alpha.flatten(0, 1), alpha.flatten(0, 1).mT, beta=-outputs, alpha=1.0)
        weights = inverse.mul_(0.5 * root.unsqueeze(-1)).mul_(root.unsqueeze(-2))
        weights = weights.squeeze(1) if len(trace[0]) == 1 else weights.sum(1)
        grad = torch.zeros_like(flat)
        for block in self.blocks(len(flat)) if flat.shape[1] else ():
            with torch.enable_grad():
                leaf = flat.detach().requires_grad_()
                part = self.kernel(leaf, self.x[..., block, :], self.x)
            grad += torch.autograd.grad(part, leaf, weights[:, block])[0]
        if self.log_noise is not None:
            return grad
        noise = alpha.square().sum((-2, -1)) + outputs * (rows - trace - self.n.unsqueeze(-1))
        return torch.cat([grad, noise], -1)


class Evidence(torch.autograd.Function):
    """log p(y) of each member as a function of θ [M, H], with the gradient above."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, problem: Problem) -> Tensor:
        solved = problem.solve(theta)
        ctx.save_for_backward(problem.gradient(theta, solved))
        return problem.value(theta, solved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1) * gradient, None
