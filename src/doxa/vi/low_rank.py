"""Low-rank variational inference: a Gaussian with a few directions of correlation.

    q(θ) = N(μ, D^½ (I + G Gᵀ/R) D^½),   D = softplus(ρ)²,   G [P, R]
    θ = μ + D^½ (ε₁ + G ε₂/√R)

Ong, Nott & Smith (2018); Tomczak, Swaroop & Turner (2020). R = 0 is mean-field; with R as large as
the number of weights, the family has all Gaussians. The important directions are those in which
weights compensate for each other; there, mean-field is too narrow. G is in units of each weight's
σ, so that a step of the optimiser cannot make a weight very noisy. A step costs as much as one of
mean-field, plus R numbers per weight; log|Σ| = log|D| + log|I + Gᵀ G/R| needs an R × R determinant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.method import Run, State
from doxa.method.method import Workload, whole
from doxa.model.layers import deviation
from doxa.vi.gaussian import GaussianVI

_FACTORS = 10.0  # copies of G at the peak of a step, as measured


@store.register("low-rank-vi")
@dataclass(frozen=True)
class LowRankVI(GaussianVI):
    """A Gaussian of low rank plus a diagonal over the weights.

    Parameters
    ----------
    rank : int
        R, the number of directions of the low-rank part.
    samples : int
        Draws of the weights per member and step.
    initial_std, temperature, average, elbo_samples
        As in `MeanField`. `initial_std` is σ at the start.
    """

    name: ClassVar[str] = "low-rank-vi"
    shape: ClassVar[tuple[str, ...]] = ("rho", "factor")

    smaller: ClassVar[str] = "use a lower rank, fewer members, or subset='last_layer'"

    rank: int = whole(10, least=1)
    samples: int = whole(4, least=1)  # with one, the directions are lost in the gradient's noise

    def planned_bytes(self, work: Workload) -> int:
        factors = work.members * work.uncertain * self.rank * work.itemsize
        return super().planned_bytes(work) + int(_FACTORS * factors)

    def init_shape(self, run: Run) -> State:
        """Initially σ is in D only. G is small and random, because its gradient at zero is zero."""
        size = run.subset_size
        std = run.field(self, "initial_std").unsqueeze(1)
        return {
            "rho": std.expm1().log().expand(run.size, size).clone(),
            "factor": 0.1 * run.noise("factor").normal((size, self.rank)),
        }

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1] + self.rank

    def away(self, params: State, eps: Tensor) -> Tensor:
        own, common = eps.split([eps.shape[2] - self.rank, self.rank], 2)
        std, directions = deviation(params["rho"]), params["factor"] / self.rank**0.5
        return std.unsqueeze(1) * (own + common @ directions.mT)

    def variances(self, params: State) -> Tensor:
        more = params["factor"].square().mean(2)
        return deviation(params["rho"]).square() * (1 + more)

    def logdet(self, params: State) -> Tensor:
        std, factor = deviation(params["rho"]), params["factor"]
        eye = torch.eye(self.rank, dtype=std.dtype, device=std.device)
        root = torch.linalg.cholesky_ex(eye + factor.mT @ factor / self.rank).L
        return 2 * (std.log().sum(1) + root.diagonal(dim1=1, dim2=2).log().sum(1))

    def covariance(self, params: State) -> linalg.Structure:
        std = deviation(params["rho"])
        factor = std.unsqueeze(2) * params["factor"] / self.rank**0.5
        return linalg.LowRankPlusDiagonal(std.square(), factor)
