"""What variational methods with a Gaussian over the weights share: one ELBO.

    ELBO = E_q[Σ_i log p(y_i | θ)] + E_q log p(θ) + T·H[q],   θ = μ + R ε,   ε ~ N(0, I)

summed over the data set and over all weights, and estimated with `samples` draws a member and step
(pathwise gradients). With a Gaussian prior E_q log p(θ) is exact; with another, log p is averaged
over the same draws. T = 1 is the bound. Parameters outside the model's subset, and the likelihood's
own, are points on the ELBO with their prior; the reported bound is that of the others given them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import linalg
from doxa.data import Batch
from doxa.method import (
    Clock,
    Method,
    Run,
    Stage,
    State,
    averaged,
    network_part,
    noise_on_held_out,
    optimise,
    unfolded,
)
from doxa.method.fields import between, positive, whole
from doxa.posterior import GaussianPosterior, Posterior

LOG_2PI_E = math.log(2 * math.pi * math.e)


@dataclass(frozen=True)
class GaussianVI(Method):
    """A Gaussian q over the subset's weights; subclasses say how its covariance is held.

    Parameters
    ----------
    initial_std: the standard deviation each weight starts with.
    temperature: T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    samples: draws of the weights a member and step.
    average: the share of the last steps over which q is averaged (Polyak); 0: the last iterate.
    elbo_samples: draws with which the final ELBO is estimated.
    """

    default_steps: ClassVar[int] = 4000
    overfits: ClassVar[bool] = True
    shape: ClassVar[tuple[str, ...]]  # the names, besides "mean", that q is trained by

    initial_std: float = positive(0.05, per_run=True)
    temperature: float = positive(1.0, per_run=True)
    samples: int = whole(1, least=1)
    average: float = between(0.25, 0, 1, "[)")
    elbo_samples: int = whole(8, least=1)

    @property
    def width(self) -> int:
        return self.samples

    @abstractmethod
    def init_shape(self, run: Run) -> State:
        """What the covariance starts as, under the names of `shape`."""

    @abstractmethod
    def covariance(self, params: State) -> linalg.Structure:
        """Of the subset's weights."""

    def init(self, run: Run) -> State:
        state = run.init_network()
        return {**state, "mean": state.pop("theta"), **self.init_shape(run)}

    def stages(self, run: Run) -> Iterable[Stage]:
        over = ("mean", *self.shape)
        yield optimise(self._elbo, run.steps, over=over, average=self.average)
        yield from noise_on_held_out(self.score, run, "average.mean" if self.average else "mean")

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        q = self.covariance(params)
        value, changed, theta = self.expected_log_likelihood(run, params, q, batch, clock)
        value = value + self.log_prior(run, params["mean"], q, theta)
        return value + run.field(self, "temperature") * _entropy(q), changed

    def expected_log_likelihood(
        self, run: Run, params: State, q: linalg.Structure, batch: Batch, clock: Clock
    ) -> tuple[Tensor, State, Tensor]:
        """E_q Σ log p(y | θ), [M], what the pass changed, and the draws [M, S, P]."""
        s = self.samples
        eps = clock.times(s).noise(q.numbers).unflatten(0, (-1, s))
        theta = drawn(run, params["mean"], q, eps)
        inner = {k: v.repeat_interleave(s, 0) for k, v in network_part(params).items()}
        fit = run.times(s).train(theta.flatten(0, 1), inner, batch.times(s), None)
        changed = {k: v[:, 0] for k, v in unfolded(fit.changed, s).items()}  # the first draw's
        return fit.value.unflatten(0, (-1, s)).mean(1), changed, theta

    def log_prior(self, run: Run, mean: Tensor, q: linalg.Structure, theta: Tensor) -> Tensor:
        """E_q log p(θ), [M], of all weights, also of those that are points."""
        precision = run.prior.precision
        if precision is None:
            many = run.times(theta.shape[1])
            return many.prior.log_prob(theta.flatten(0, 1)).unflatten(0, theta.shape[:2]).mean(1)
        spread = (q.diagonal() * precision[..., run.subset_where]).sum(1)
        return run.prior.log_prob(mean) - 0.5 * spread

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "mean")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        mean = averaged(state, "mean")
        q = self.covariance({name: averaged(state, name) for name in self.shape})
        posterior = GaussianPosterior(
            mean=mean, covariance=q, **run.common(self), **run.shared(state)
        )
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, mean, q, state)
        return posterior

    def _final_elbo(self, run: Run, mean: Tensor, q: linalg.Structure, state: State) -> float:
        """The bound at the answer, over all rows, with fresh draws; the mean over members. Points,
        given which it holds, have neither prior nor entropy, as in an evidence."""
        rows, noise, prior = run.passes(), run.noise("elbo"), run.subset_prior
        own = mean[:, run.subset_where]
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        with torch.no_grad():
            for s in range(self.elbo_samples):
                eps = noise.normal((q.numbers,), s).unsqueeze(1)
                theta = drawn(run, mean, q, eps)[:, 0]
                for t in range(rows.count):
                    total += run.log_likelihood(theta, rows.batch(t), state).double()
                if prior.precision is None:
                    total += prior.log_prob(theta[:, run.subset_where]).double()
            if prior.precision is not None:
                spread = 0.5 * (q.diagonal() * prior.precision).sum(1)
                total += self.elbo_samples * (prior.log_prob(own) - spread).double()
        elbo = total / self.elbo_samples + _entropy(q).double() + run.units_log_jacobian()
        return float(elbo.mean())


def drawn(run: Run, mean: Tensor, q: linalg.Structure, eps: Tensor) -> Tensor:
    """Weights [M, S, P] from standard normals [M, S, numbers]."""
    away = q.sample(eps.transpose(0, 1)).transpose(0, 1)  # [M, S, subset]
    theta = mean.unsqueeze(1).expand(-1, eps.shape[1], -1)
    if away.shape[2] == mean.shape[1]:
        return theta + away
    return theta.index_add(2, run.subset_index, away)


def _entropy(q: linalg.Structure) -> Tensor:
    """H[q], [M]."""
    return 0.5 * (q.logdet() + q.size * LOG_2PI_E)
