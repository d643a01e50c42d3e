"""Mean-field variational inference (Bayes by Backprop).

    q(θ) = Π_j N(θ_j; μ_j, σ_j²),   σ = softplus(ρ)
    ELBO = E_q[Σ_i log p(y_i | θ)] − KL(q ‖ p),   summed over the data set and over all weights

Blundell et al. (2015). The expected log-likelihood is estimated with one draw θ = μ + σε a member
and step. With a Gaussian prior the KL is exact; with another, log p is averaged over the same draw.
Parameters outside the model's subset, and the likelihood's own, are point estimates on the ELBO,
with their prior; the reported bound is that of the others given them, without it.
The family cannot hold correlations, so it is too narrow where the posterior has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from doxa import linalg, store
from doxa.data import Batch
from doxa.method import (
    Clock,
    Known,
    Method,
    Run,
    Stage,
    State,
    averaged,
    noise_on_held_out,
    optimise,
)
from doxa.method.fields import between, positive, whole
from doxa.posterior import GaussianPosterior, Posterior
from doxa.priors import BoundPrior


@store.register("mean-field")
@dataclass(frozen=True)
class MeanField(Method):
    """A factorised Gaussian over the weights.

    Parameters
    ----------
    initial_std: the standard deviation each weight starts with.
    temperature: T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    average: the share of the last steps over which (μ, ρ) is averaged (Polyak), to take the
        gradient noise out of the answer; 0 for the last iterate.
    elbo_samples: draws with which the final ELBO is estimated.
    """

    name: ClassVar[str] = "mean-field"
    default_steps: ClassVar[int] = 4000
    overfits: ClassVar[bool] = True

    initial_std: float = positive(0.05, per_run=True)
    temperature: float = positive(1.0, per_run=True)
    average: float = between(0.25, 0, 1, "[)")
    elbo_samples: int = whole(8, least=1)

    def init(self, run: Run) -> State:
        state = run.init_network()
        mean = state.pop("theta")
        std = run.field(self, "initial_std").unsqueeze(1)
        rho = std.expm1().log().expand(run.size, len(run.subset_index)).clone()
        return {**state, "mean": mean, "rho": rho}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._elbo, run.steps, over=("mean", "rho"), average=self.average)
        yield from noise_on_held_out(self.score, run, "average.mean" if self.average else "mean")

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        mean, rho = params["mean"], params["rho"]
        eps = clock.noise(rho.shape[1])
        theta = add_at(mean, run.subset_where, softplus(rho) * eps)
        fit = run.train(theta, params, batch, None)
        value = fit.value
        if run.prior.precision is None:
            value = value + run.prior.log_prob(theta)
        return value, fit.changed, self._known(run, mean.detach(), rho.detach())

    def _known(self, run: Run, mean: Tensor, rho: Tensor) -> Known:
        """T·H[q], and E_q log p(θ) under a Gaussian prior, with their gradients."""
        std, slope = softplus(rho), torch.sigmoid(rho)
        temperature = run.field(self, "temperature").unsqueeze(1)
        value = temperature.squeeze(1) * entropy(std)
        pull = temperature / std
        add: dict[str, Callable[[Tensor], Tensor]] = {}
        precision = run.prior.precision
        if precision is not None:
            pull = pull - std * precision[..., run.subset_where]
            value = value + expected_log_prior(run.prior, mean, std, run.subset_where)
            add["mean"] = lambda grad: run.prior.add_score(grad, mean)
        add["rho"] = lambda grad: torch.addcmul(grad, pull, slope)
        return Known(value, add)

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "mean")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        mean, std = averaged(state, "mean"), softplus(averaged(state, "rho"))
        posterior = GaussianPosterior(
            mean=mean, covariance=linalg.Diagonal(std.square()),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, mean, std, state)
        return posterior

    def _final_elbo(self, run: Run, mean: Tensor, std: Tensor, state: State) -> float:
        """The bound at the answer, over all rows, with fresh draws; the mean over members. Points,
        given which it holds, have neither prior nor entropy, as in an evidence."""
        rows, noise, prior = run.passes(), run.noise("elbo"), run.subset_prior
        own = mean[:, run.subset_where]
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        with torch.no_grad():
            for s in range(self.elbo_samples):
                eps = noise.normal((std.shape[1],), s)
                theta = add_at(mean, run.subset_where, std * eps)
                for t in range(rows.count):
                    total += run.log_likelihood(theta, rows.batch(t), state).double()
                if prior.precision is None:
                    total += prior.log_prob(theta[:, run.subset_where]).double()
                else:
                    total += expected_log_prior(prior, own, std).double()
        elbo = total / self.elbo_samples + entropy(std).double() + run.units_log_jacobian()
        return float(elbo.mean())


def entropy(std: Tensor) -> Tensor:
    """H[q] of a factorised Gaussian, [M]."""
    return (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(1)


def expected_log_prior(
    prior: BoundPrior, mean: Tensor, std: Tensor, where: slice | Tensor = slice(None)
) -> Tensor:
    """E_q log p(θ) under a Gaussian prior, [M], of weights that are uncertain in some columns."""
    assert prior.precision is not None
    return prior.log_prob(mean) - 0.5 * (std.square() * prior.precision[..., where]).sum(1)


def add_at(base: Tensor, where: slice | Tensor, value: Tensor) -> Tensor:
    """base with `value` added in some columns."""
    if isinstance(where, Tensor):
        return base.index_add(1, where, value)
    if base.shape[1] == value.shape[1]:
        return base + value
    parts = [base[:, : where.start], base[:, where] + value, base[:, where.stop :]]
    return torch.cat(parts, 1)
