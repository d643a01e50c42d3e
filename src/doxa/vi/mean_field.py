"""Mean-field variational inference (Bayes by Backprop).

    q(θ) = Π_j N(θ_j; μ_j, σ_j²),   σ = softplus(ρ)
    ELBO = E_q[Σ_i log p(y_i | θ)] − KL(q ‖ p),   summed over the data set and over all weights

Blundell et al. (2015). The expected log-likelihood is estimated with `samples` draws θ = μ + σε a
member and step; the entropy's gradient, and under a Gaussian prior the KL's, is in closed form.
What is a point, and what the bound counts, is as for every Gaussian (`doxa.vi.gaussian`).
The family cannot hold correlations, so it is too narrow where the posterior has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.data import Batch
from doxa.method import Clock, Known, Run, State
from doxa.model.layers import deviation
from doxa.vi.gaussian import GaussianVI


@store.register("mean-field")
@dataclass(frozen=True)
class MeanField(GaussianVI):
    """A factorised Gaussian over the weights.

    Parameters
    ----------
    temperature: T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    samples: draws of the weights a member and step.
    average: the share of the last steps over which (μ, ρ) is averaged (Polyak), to take the
        gradient noise out of the answer; 0 for the last iterate.
    elbo_samples: draws with which the final ELBO is estimated.
    initial_std: the standard deviation each weight starts with.
    """

    name: ClassVar[str] = "mean-field"
    shape: ClassVar[tuple[str, ...]] = ("rho",)

    def init_shape(self, run: Run) -> State:
        std = run.field(self, "initial_std").unsqueeze(1)
        return {"rho": std.expm1().log().expand(run.size, len(run.subset_index)).clone()}

    def numbers(self, params: State) -> int:
        return params["rho"].shape[1]

    def away(self, params: State, eps: Tensor) -> Tensor:
        return deviation(params["rho"]).unsqueeze(1) * eps

    def variances(self, params: State) -> Tensor:
        return deviation(params["rho"]).square()

    def logdet(self, params: State) -> Tensor:
        return 2 * deviation(params["rho"]).log().sum(1)

    def covariance(self, params: State) -> linalg.Structure:
        return linalg.Diagonal(self.variances(params))

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed, theta = self.expected_log_likelihood(run, params, batch, clock)
        if run.prior.precision is None:
            value = value + self.expected_log_prior(run, params, theta)
        return value, changed, self._known(run, {k: v.detach() for k, v in params.items()})

    def _known(self, run: Run, params: State) -> Known:
        """T·H[q], and E_q log p(θ) under a Gaussian prior, with their gradients."""
        mean, rho = params["mean"], params["rho"]
        std, slope = deviation(rho), torch.sigmoid(rho)
        temperature = run.field(self, "temperature")
        value = temperature * self.entropy(run, params)
        pull = temperature.unsqueeze(1) / std
        add: dict[str, Callable[[Tensor], Tensor]] = {}
        precision = run.prior.precision
        if precision is not None:
            pull = pull - std * precision[..., run.subset_where]
            value = value + self.expected_log_prior(run, params, mean)
            add["mean"] = lambda grad: run.prior.add_score(grad, mean)
        add["rho"] = lambda grad: torch.addcmul(grad, pull, slope)
        return Known(value, add)
