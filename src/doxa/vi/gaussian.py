"""The ELBO of variational methods with a Gaussian over the weights.

    ELBO = E_q[Σ_i log p(y_i | θ)] + E_q log p(θ) + T·H[q],   θ = μ + R ε,   ε ~ N(0, I)

summed over the data set and over all weights, and estimated with `samples` draws per member and
step (pathwise gradients). With a Gaussian or a Laplace prior E_q log p(θ) is exact; with another
prior, log p is averaged over the same draws. It is a bound for T = 1. Parameters outside the
subset, and those of the likelihood, are point estimates: they maximise the ELBO plus their log
prior. The reported bound is conditional on them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from doxa import linalg
from doxa.data import Batch
from doxa.method import (
    Clock,
    Method,
    Objective,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    network_part,
    noise_on_held_out,
    optimise,
    unflatten_particles,
)
from doxa.method.method import Alternatives, Workload, between, drawn_bytes, positive, whole
from doxa.posterior import GaussianPosterior, Posterior
from doxa.priors import FanInNormal

LOG_2PI_E = math.log(2 * math.pi * math.e)
# Copies of all weights during a prediction, as measured (`python -m benchmarks.memory_plan`), of a
# large and of a small network. Rows of fewer bytes that were freed stay in the process (malloc).
_LARGE_STATE, _STATE, _RETURNED = 5.0, 22.0, 32 << 20


@dataclass(frozen=True)
class DrawnWeights(Method):
    """Weights drawn from q in every step: what a Gaussian and a flow have in common.

    Parameters
    ----------
    temperature : float
        T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    samples : int
        Draws of the weights per member and step.
    average : float
        The share of the last steps over which q is averaged (Polyak); 0: the last iterate.
    """

    default_steps: ClassVar[int] = 4000
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    overfits: ClassVar[bool] = True
    shrinks: ClassVar[bool] = True

    temperature: float = positive(1.0, per_run=True)
    samples: int = whole(1, least=1)
    average: float = between(0.25, 0, 1, "[)")

    @property
    def width(self) -> int:
        return self.samples

    def log_likelihood_at(
        self, run: Run, params: State, batch: Batch, theta: Tensor, **buffers: Tensor
    ) -> tuple[Tensor, State]:
        """The mean over draws θ [M, S, P] of Σ log p(y | θ), [M], and what the pass changed;
        `buffers` [M·S, ...] are given to layers."""
        s = theta.shape[1]
        if s == 1:
            fit = run.train(theta.squeeze(1), params, batch, None, **buffers)
            return fit.value, fit.changed
        inner = {k: v.repeat_interleave(s, 0) for k, v in network_part(params).items()}
        fit = run.expand_particles(s).train(
            theta.flatten(0, 1), inner, batch.expand_particles(s), None, **buffers
        )
        changed = {
            k: v[:, 0] for k, v in unflatten_particles(fit.changed, s).items()
        }  # the first draw's
        return fit.value.unflatten(0, (-1, s)).mean(1), changed

    def normals(self, clock: Clock, numbers: int) -> Tensor:
        """ε, [M, S, numbers]. An even number of draws consists of pairs ±ε, in which odd functions
        of ε cancel."""
        if self.samples == 1:
            return clock.noise(numbers).unsqueeze(1)
        paired = self.samples % 2 == 0
        count = self.samples // 2 if paired else self.samples
        eps = clock.expand_particles(count).noise(numbers).unflatten(0, (-1, count))
        return torch.cat([eps, -eps], 1) if paired else eps

    def log_prior_at(self, run: Run, theta: Tensor) -> Tensor:
        """The mean over draws θ [M, S, P] of log p(θ), [M], of all weights, including point
        estimates."""
        many = run.expand_particles(theta.shape[1])
        return many.prior.log_prob(theta.flatten(0, 1)).unflatten(0, theta.shape[:2]).mean(1)


@dataclass(frozen=True)
class VariationalGaussian(DrawnWeights):
    """A Gaussian q over the subset's weights, and its bound at the end; subclasses say how its
    covariance is held, and how it is found.

    Parameters
    ----------
    elbo_samples : int
        Draws with which the final ELBO is estimated.
    temperature, samples, average
        As in `DrawnWeights`.
    """

    shape: ClassVar[tuple[str, ...]]  # the names of q's trained tensors besides "mean"
    predicted_draws: ClassVar[int] = 100
    copies: ClassVar[float] = 45.0
    half_precision: ClassVar[bool] = True

    # Rows of weights of a large network: those of the state that the posterior is made of, and the
    # others that a step needs for each member (moments, θ and ε). None: steps copy rows.
    large_rows: ClassVar[tuple[int, int] | None] = None

    elbo_samples: int = whole(8, least=1)

    @property
    def best_copies(self) -> float:  # type: ignore[override]
        """The rows that the posterior is made of, and their averages."""
        own = 0 if self.large_rows is None else self.large_rows[0]
        return float(2 * own if self.average else own)

    @property
    def large_copies(self) -> tuple[float, float] | None:  # type: ignore[override]
        """The state and what a step needs besides, the last good state, and one gradient."""
        if self.large_rows is None:
            return None
        return 2 * self.best_copies + self.large_rows[1], 1.0

    def planned_bytes(self, work: Workload) -> int:
        """The peak of training, or of the prediction of rows after it."""
        drawn = drawn_bytes(self.predicted_draws, work)
        training = self.training_bytes(work) // self.width
        if not work.by_tensor:
            after = _STATE * work.copy + min(48 << 20, 24 * work.copy) + drawn
            return int(max(training, after))
        small = work.copy < work.members * _RETURNED
        return int(max(training, (training if small else _LARGE_STATE * work.copy) + drawn))

    @abstractmethod
    def init_shape(self, run: Run) -> State:
        """The initial covariance, as tensors with the names in `shape`."""

    @abstractmethod
    def covariance(self, params: State) -> linalg.Structure:
        """The covariance of the subset's weights, at the end."""

    @abstractmethod
    def numbers(self, params: State) -> int:
        """The number of standard normal numbers per draw."""

    @abstractmethod
    def away(self, params: State, eps: Tensor) -> Tensor:
        """R ε: a draw's distance from the mean, [M, S, subset], of ε [M, S, numbers]."""

    @abstractmethod
    def variances(self, params: State) -> Tensor:
        """The variance of each weight, [M, subset]."""

    @abstractmethod
    def logdet(self, params: State) -> Tensor:
        """log |Σ|, [M]."""

    def init(self, run: Run) -> State:
        state = run.init_network()
        return {"mean": state.pop("theta"), **state, **self.init_shape(run)}

    def entropy(self, run: Run, params: State) -> Tensor:
        """H[q], [M]."""
        return 0.5 * (self.logdet(params) + run.subset_size * LOG_2PI_E)

    def drawn(self, run: Run, params: State, eps: Tensor) -> Tensor:
        """Weights [M, S, P] from standard normals [M, S, numbers]."""
        return moved(run, params["mean"].unsqueeze(1), self.away(params, eps))

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "mean")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        q = {name: averaged(state, name) for name in ("mean", *self.shape)}
        posterior = GaussianPosterior(
            mean=q["mean"], covariance=self.covariance(q), priors=self.learned_priors(run, q),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, q, state)
        return posterior

    def learned_priors(self, run: Run, q: State) -> list[Any] | None:
        """The prior of each member, if it is learned."""
        return None

    def subset_log_prior(self, run: Run, q: State) -> Tensor | None:
        """E_q log p(θ) of the subset's weights, [M]; None if there is no closed form."""
        own = q["mean"][:, run.subset_where]
        if not run.subset_prior.widens:
            return None
        wider = run.subset_prior.widening(own, self.variances(q).sqrt())
        return run.subset_prior.log_prob(own) + wider

    def exact_log_likelihood(self, run: Run, q: State, state: State) -> Tensor | None:
        """E_q Σ log p(y | θ) over all rows, [M]; None if there is no closed form."""
        return None

    def _final_elbo(self, run: Run, q: State, state: State) -> float:
        """The bound for the final q, over all rows; the mean over members. Terms without a closed
        form are averaged over new draws. It is conditional on point estimates, which have neither
        prior nor entropy in it, as in an evidence."""
        rows, noise, inside = run.passes(), run.noise("elbo"), self.subset_log_prior(run, q)
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        with torch.no_grad():
            exact = self.exact_log_likelihood(run, q, state)
            known = inside is not None and exact is not None
            for s in range(0 if known else self.elbo_samples):
                eps = noise.normal((self.numbers(q),), s).unsqueeze(1)
                theta = self.drawn(run, q, eps)[:, 0]
                for t in range(rows.count if exact is None else 0):
                    total += run.log_likelihood(theta, rows.batch(t), state).double()
                if inside is None:
                    total += run.subset_prior.log_prob(theta[:, run.subset_where]).double()
            elbo = total / self.elbo_samples + self.entropy(run, q).double()
            elbo = elbo if exact is None else elbo + exact.double()
            elbo = elbo if inside is None else elbo + inside.double()
        return float((elbo + run.units_log_jacobian()).mean())


@dataclass(frozen=True)
class GaussianVI(VariationalGaussian):
    """A Gaussian whose mean and covariance ascend the ELBO together, by the optimiser of `fit`.

    Parameters
    ----------
    initial_std : float
        The standard deviation each weight starts with.
    temperature, samples, average, elbo_samples
        As in `VariationalGaussian`.
    """

    rate_by_network: ClassVar[bool] = True
    state_copies: ClassVar[float | None] = 5.0  # ρ, and the moments of mean and ρ
    alternatives: ClassVar[Alternatives] = Alternatives(
        FanInNormal(30.0),
        1.0,
        ({"initial_std": 0.005, "lr": 0.01}, {"initial_std": 0.002, "lr": 0.02}),
    )

    initial_std: float = positive(0.05, per_run=True)

    def stages(self, run: Run) -> Iterable[Stage]:
        over = ("mean", *self.shape)
        yield optimise(self.objective(run), run.steps, over=over, average=self.average)
        yield from noise_on_held_out(self.score, run, average_name("mean", self.average))

    def objective(self, run: Run) -> Objective:
        """The objective that is maximised."""
        return self._elbo

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed, theta = self.expected_log_likelihood(run, params, batch, clock)
        value = value + self.expected_log_prior(run, params, theta)
        return value + run.field(self, "temperature") * self.entropy(run, params), changed

    def expected_log_likelihood(
        self, run: Run, params: State, batch: Batch, clock: Clock
    ) -> tuple[Tensor, State, Tensor]:
        """E_q Σ log p(y | θ), [M], the state entries that the pass changed, and the draws [M, S,
        P]."""
        theta = self.drawn(run, params, self.normals(clock, self.numbers(params)))
        return *self.log_likelihood_at(run, params, batch, theta), theta

    def expected_log_prior(self, run: Run, params: State, theta: Tensor) -> Tensor:
        """E_q log p(θ), [M], of all weights, including point estimates."""
        if run.subset_prior.widens:
            own, std = params["mean"][:, run.subset_where], self.variances(params).sqrt()
            return run.prior.log_prob(params["mean"]) + run.subset_prior.widening(own, std)
        return self.log_prior_at(run, theta)


def moved(run: Run, mean: Tensor, away: Tensor) -> Tensor:
    """The mean [..., P] plus a difference of the subset's weights [..., subset]."""
    where = run.subset_where
    if isinstance(where, Tensor):
        return mean.expand(*away.shape[:-1], -1).index_add(-1, where, away)
    if away.shape[-1] == mean.shape[-1]:
        return mean + away
    return mean + pad(away, (where.start, mean.shape[-1] - where.stop))


BLOCK = 1 << 16  # numbers of a row that stay in the cache


def columns(size: int) -> list[slice]:
    """The columns of a row in blocks that stay in the cache."""
    return [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def fit_one(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """The log-likelihood at one draw θ of each member."""
    fit = run.train(params["theta"], params, batch, None)
    return fit.value, fit.changed


def entropy(std: Tensor) -> Tensor:
    """H of independent normals, summed over the last axis."""
    return (std.log() + 0.5 * LOG_2PI_E).sum(-1)
