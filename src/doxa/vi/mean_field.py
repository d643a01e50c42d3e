"""Mean-field variational inference (Bayes by Backprop).

    q(θ) = Π_j N(θ_j; μ_j, σ_j²),   σ = softplus(ρ)
    ELBO = E_q[Σ_i log p(y_i | θ)] − KL(q ‖ p),   summed over the data set and over all weights

Blundell et al. (2015). The expected log-likelihood is estimated with one draw θ = μ + σε a member
and step; its gradient flows to μ as ∇θ and to ρ as ∇θ · ε · sigmoid(ρ). With a Gaussian prior the
KL is exact; with another, log p is averaged over the same draw. Parameters outside the model's
subset, and the likelihood's own, are point estimates on the ELBO.
The family cannot hold correlations, so it is too narrow where the posterior has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from doxa import linalg, store
from doxa.data import Batch, Pass
from doxa.fields import between, positive, whole
from doxa.method import Clock, Method, Run, Stage, State, optimise
from doxa.posterior import GaussianPosterior, Posterior


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

    initial_std: float = positive(0.05, per_run=True)
    temperature: float = positive(1.0, per_run=True)
    average: float = between(0.25, 0, 1, "[)")
    elbo_samples: int = whole(8, least=1)

    def init(self, run: Run) -> State:
        index = run.subset_index()
        std = run.field(self, "initial_std").unsqueeze(1)
        rho = (std.expm1()).log().expand(run.size, len(index))
        theta = torch.cat([run.start(), rho], 1)
        return {"theta": theta, "mean": theta.clone(), **run.init_buffers()}

    def stages(self, run: Run, steps: int) -> Iterable[Stage]:
        stage = optimise(self._elbo, steps)
        first = steps - max(1, math.ceil(self.average * steps))
        update = stage.step

        def averaged(run: Run, state: State, batch: Batch, clock: Clock):  # type: ignore[no-untyped-def]
            new, info = update(run, state, batch, clock)
            weight = 1.0 / (clock.t - first + 1).clamp(min=1).to(run.dtype)
            new["mean"] = torch.lerp(state["mean"], new["theta"], weight)
            return new, info

        stage.step = averaged
        yield stage

    def _elbo(
        self, run: Run, state: State, batch: Batch, clock: Clock
    ) -> tuple[Tensor, Tensor, State]:
        size, index = run.layout.size, run.subset_index()
        mu, rho = state["theta"].split([size, len(index)], 1)
        eps = clock.noise(len(index))
        std, slope = softplus(rho), torch.sigmoid(rho)
        theta = _add_at(mu, run.subset_where(), std * eps)
        changed = {k: v.clone() for k, v in state.items() if k.startswith("buffer.")}
        fit, grad = run.grad(
            theta, batch, buffers=run.buffers(changed) or None, training=bool(changed)
        )
        value, prior_mu, prior_std = self._prior(run, mu, std, eps, theta)
        temperature = run.field(self, "temperature").unsqueeze(1)
        entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(1)
        grad_std = grad[:, run.subset_where()] * eps + prior_std + temperature / std
        value = fit + value + temperature.squeeze(1) * entropy
        return value, torch.cat([grad + prior_mu, grad_std * slope], 1), changed

    def _prior(
        self, run: Run, mu: Tensor, std: Tensor, eps: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """E_q log p(θ) and its gradients in μ and σ: exact for a Gaussian prior."""
        precision, where = run.prior.precision, run.subset_where()
        if precision is None:
            score = run.prior.score(theta)
            return run.prior.log_prob(theta), score, score[:, where] * eps
        own = precision[..., where]
        value = run.prior.log_prob(mu) - 0.5 * (std.square() * own).sum(1)
        return value, run.prior.score(mu), -std * own

    def parameters(self, run: Run, state: State) -> Tensor:
        return state["theta"][:, : run.layout.size]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        size, index = run.layout.size, run.subset_index()
        final = state["mean"] if self.average > 0 else state["theta"]
        mu, rho = final.split([size, len(index)], 1)
        posterior = GaussianPosterior(
            mean=mu, covariance=linalg.Diagonal(softplus(rho).square()),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        if self.temperature == 1.0 and "temperature" not in run.hyper:
            posterior.elbo = self._final_elbo(run, mu, softplus(rho), state)
        return posterior

    def _final_elbo(self, run: Run, mu: Tensor, std: Tensor, state: State) -> float:
        """The bound at the answer, over all rows, with fresh draws; the mean over members."""
        index = run.subset_index()
        rows = Pass(run.data, run.run_of, 4096)
        noise = run.noise("elbo")
        buffers = run.buffers(state) or None
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        for s in range(self.elbo_samples):
            eps = noise.normal((len(index),), s)
            theta = _add_at(mu, run.subset_where(), std * eps)
            for t in range(rows.steps):
                with torch.no_grad():
                    fit = run.log_likelihood(theta, rows.batch(t), buffers=buffers)
                total += fit.double()
            total += self._prior(run, mu, std, eps, theta)[0].double()
        entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(1).double()
        elbo = total / self.elbo_samples + entropy + run.units_log_jacobian()
        return float(elbo.mean())


def _add_at(base: Tensor, where: slice | Tensor, value: Tensor) -> Tensor:
    """base with `value` added in some columns."""
    if isinstance(where, Tensor):
        return base.index_add(1, where, value)
    parts = [base[:, : where.start], base[:, where] + value, base[:, where.stop :]]
    return torch.cat(parts, 1)
