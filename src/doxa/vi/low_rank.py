"""Low-rank variational inference: a Gaussian with a few directions of correlation.

    q(θ) = N(μ, D + F Fᵀ),   D = softplus(ρ)²,   F [P, R];   θ = μ + D^½ ε₁ + F ε₂

Ong, Nott & Smith (2018); Tomczak, Swaroop & Turner (2020). R = 0 is mean-field; with R as large as
the number of weights it holds any Gaussian. The directions that matter are those in which weights
make up for each other, where mean-field is too narrow. A step costs what mean-field's does plus R
numbers a weight; log|Σ| needs an R × R determinant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.method import Run, State
from doxa.method.fields import whole
from doxa.vi.gaussian import GaussianVI, positive_std


@store.register("low-rank-vi")
@dataclass(frozen=True)
class LowRankVI(GaussianVI):
    """A Gaussian of low rank plus a diagonal over the weights.

    Parameters
    ----------
    rank: R, the directions. The others are those of every Gaussian here: initial_std (σ at the
        start), temperature, samples (draws a step), average (Polyak), elbo_samples.
    """

    name: ClassVar[str] = "low-rank-vi"
    shape: ClassVar[tuple[str, ...]] = ("rho", "factor")

    rank: int = whole(10, least=1)

    def init_shape(self, run: Run) -> State:
        """σ in D alone; F small and random, since at zero its gradient is zero."""
        size = len(run.subset_index)
        std = run.field(self, "initial_std").unsqueeze(1)
        small = 0.1 * std.unsqueeze(2) / self.rank**0.5
        factor = small * run.noise("factor").normal((size, self.rank))
        return {"rho": std.expm1().log().expand(run.size, size).clone(), "factor": factor}

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1] + self.rank

    def away(self, params: State, eps: Tensor) -> Tensor:
        own, common = eps.split([eps.shape[2] - self.rank, self.rank], 2)
        return positive_std(params["rho"]).unsqueeze(1) * own + common @ params["factor"].mT

    def variances(self, params: State) -> Tensor:
        return positive_std(params["rho"]).square() + params["factor"].square().sum(2)

    def logdet(self, params: State) -> Tensor:
        """log|D| + log|I + Fᵀ D⁻¹ F|."""
        std = positive_std(params["rho"])
        white = params["factor"] / std.unsqueeze(2)
        inner = white.mT @ white + torch.eye(self.rank, dtype=std.dtype, device=std.device)
        root = torch.linalg.cholesky_ex(inner).L.diagonal(dim1=1, dim2=2)
        return 2 * (std.log().sum(1) + root.log().sum(1))

    def covariance(self, params: State) -> linalg.Structure:
        variance = positive_std(params["rho"]).square()
        return linalg.LowRankPlusDiagonal(variance, params["factor"])
