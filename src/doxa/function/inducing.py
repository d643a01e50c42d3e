"""A sparse Gaussian-process layer: values at inducing points stand for the whole function.

    u = f(Z) = L v,   LLᵀ = K_ZZ,   a(x) = L⁻¹ k_Z(x),   q(v_o) = N(m_o, S_o)
    q(f_o(x)) = N(a(x)ᵀ m_o,  k(x, x) − |a(x)|² + a(x)ᵀ S_o a(x))
    KL[q(u) ‖ p(u)] = ½ Σ_o (tr S_o + |m_o|² − Z − log |S_o|)

Titsias (2009), Hensman et al. (2013); whitened, so that the prior of v is N(0, I) whatever the
kernel. All members at once, outputs share the kernel and the points; in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from doxa.function.composed import Composed

JITTER = 1e-8  # of the mean variance at the inducing points


class Layer(NamedTuple):
    """What a layer believes: its kernel's logarithms [M, H], points [M, Z, D], and q(v): means
    [M, O, Z] and square roots R of the covariances, S = RRᵀ, [M, O, Z, Z]."""

    kernel: Composed
    hyper: Tensor
    points: Tensor
    mean: Tensor
    root: Tensor

    def marginals(self, x: Tensor, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at each row of x [M, N, D]: [M, N, O] each."""
        a = whitened(self.kernel, self.hyper, self.points, x) if basis is None else basis
        spread = (self.root.mT @ a.unsqueeze(1)).square().sum(2)  # [M, O, N]
        left = self.kernel(self.hyper, x, x, True) - a.square().sum(1)  # [M, N]
        return (self.mean @ a).mT, (left.unsqueeze(1) + spread).mT.clamp_min(1e-12)

    def joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [M, N, O], and covariance over the rows for each output, [M, O, N, N]."""
        a = whitened(self.kernel, self.hyper, self.points, x)
        spread = self.root.mT @ a.unsqueeze(1)  # [M, O, Z, N]
        left = self.kernel(self.hyper, x, x) - a.mT @ a
        return (self.mean @ a).mT, left.unsqueeze(1) + spread.mT @ spread


def kl(mean: Tensor, root: Tensor, half_logdet: Tensor) -> Tensor:
    """KL[q ‖ p], [M], given Σ_o ½ log |S_o|, which a parametrisation knows."""
    trace = root.square().sum((1, 2, 3)) + mean.square().sum((1, 2))
    return 0.5 * (trace - mean[0].numel()) - half_logdet


def whitened(kernel: Composed, hyper: Tensor, points: Tensor, x: Tensor) -> Tensor:
    """a(x) of every row: [M, Z, N]."""
    root = factor(kernel, hyper, points)
    return torch.linalg.solve_triangular(root, kernel(hyper, points, x), upper=False)


def factor(kernel: Composed, hyper: Tensor, points: Tensor) -> Tensor:
    """L, [M, Z, Z]."""
    return cholesky(jittered(kernel(hyper, points, points)))


def jittered(covariance: Tensor) -> Tensor:
    """With a little more on the diagonal, for points that are close."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    more = JITTER * diagonal.mean(-1, keepdim=True).expand_as(diagonal)
    return covariance + torch.diag_embed(more)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower factor; not a number for a member whose matrix has none, which the driver sees."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    return torch.where((info == 0)[..., None, None], lower, torch.nan)


def from_precision(precision: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q(v) in natural parameters, Λ [M, O, Z, Z] and Λm [M, O, Z]: the mean, a square root of
    Λ⁻¹, and Σ_o ½ log |Λ_o⁻¹|, [M]."""
    lower = cholesky(precision)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    mean = (root @ (root.mT @ shift.unsqueeze(-1))).squeeze(-1)
    return mean, root, -lower.diagonal(dim1=-2, dim2=-1).log().sum((1, 2))


def spread_out(x: Tensor, count: int, way: Tensor, weight: Tensor, rounds: int = 10) -> Tensor:
    """`count` points [M, Z, D] among each member's rows [M, N, D], of which those of weight 0 are
    none: from the one farthest along `way` [M, D], each the row farthest from those before it
    (Gonzalez, 1985), then the centres of their neighbourhoods (Lloyd, 1982), rows counted by their
    weights [M, N]. As many points as rows are the rows."""
    there = weight > 0
    who = torch.arange(len(x), device=x.device)
    first = (x @ way.unsqueeze(-1)).squeeze(-1).masked_fill(~there, -torch.inf)
    chosen = [x[who, first.argmax(1)]]
    nearest = torch.where(there, torch.inf, -1.0).to(x)
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, (x - chosen[-1].unsqueeze(1)).square().sum(2))
        chosen.append(x[who, nearest.argmax(1)])
    rows = points = torch.stack(chosen, 1)
    for _ in range(rounds):
        owner = torch.cdist(x, points).argmin(2)  # [M, N]
        number = x.new_zeros(len(x), count).scatter_add(1, owner, weight).unsqueeze(2)
        owners = owner.unsqueeze(2).expand_as(x)
        total = torch.zeros_like(points).scatter_add(1, owners, x * weight.unsqueeze(2))
        points = torch.where(number > 0, total / number, points)
    return torch.where((there.sum(1) == count)[:, None, None], rows, points)
