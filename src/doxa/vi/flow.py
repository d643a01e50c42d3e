"""Variational inference with a normalising flow over some of the weights.

    θ = μ + σ ∘ f(z),   z ~ N(0, I),   log q(θ) = log N(z; 0, I) − log |det ∂f/∂z| − Σ log σ
    ELBO = E_q[Σ_i log p(y_i | θ) + log p(θ) − log q(θ)]

Rezende & Mohamed (2015). f is the flow of `doxa.vi.couplings`, which starts at the identity, so
that q starts as mean-field does. The family contains every Gaussian, and q may be curved or have
several modes; from a narrow start, q ends in one of them. All three terms are averaged over the
same draws (pathwise gradients), with the entropy of z itself in closed form. The final bound
averages log p(y, θ) − log q(θ), which is the evidence at every draw if q is the posterior.

The flow is over the weights of the model's `subset`. With the default "all" it is over the last
layer, because a flow suits a few hundred dimensions (a tuple of names selects any weights, also all
of them). The other weights, and the parameters of the likelihood, are point estimates with their
prior, as for every Gaussian (`doxa.vi.gaussian`); the reported bound is conditional on them. Early
stopping evaluates θ = μ + σ f(0).

`FlowPosterior` is the posterior of such a fit: any number of draws, each with its log q.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.engine import Engine
from doxa.errors import MemoryBudgetError, StoreError
from doxa.method import (
    Clock,
    Problem,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import one_of, positive, whole
from doxa.model.functional import Functional, made_small
from doxa.model.layers import deviation
from doxa.model.model import Network, chosen
from doxa.noise import drawing, repeated
from doxa.posterior import CentredPosterior, Posterior, register_posterior
from doxa.vi.couplings import Couplings, identity
from doxa.vi.gaussian import LOG_2PI_E, DrawnWeights, moved


@register_posterior
class FlowPosterior(CentredPosterior):
    """θ = μ + σ ∘ f(z) over the subset's parameters, one q per member; the rest are points.

    mean: μ, [K, P], whose entries outside the subset are those points. rho: σ = softplus(ρ),
    [K, subset]. flow: the flow's own numbers, [K, Q].
    """

    kind = "flow"
    flat = "mean"

    def __init__(self, *args: Any, mean: Tensor, rho: Tensor, flow: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean, self.rho, self.flow = mean, rho, flow

    def check_restored(self) -> None:
        if self.mean.ndim != 2 or self.rho.ndim != 2:
            raise StoreError(f"the mean has the shape {list(self.mean.shape)}")
        super().check_restored()
        size = len(self.layout.index(self.network.subset_names))
        self._check_tensor("rho", self.rho, (self.members, size))
        most = self.flow.numel()
        made = made_small(lambda: Functional(self.method.module(size)), most)
        self._check_tensor("flow", self.flow, (self.members, made.layout.size))

    def centre(self) -> Tensor:
        return self.mean

    def point(self) -> Tensor:
        """Each member at z = 0: not the mean of its draws."""
        index = self.layout.index(self.network.subset_names).to(self.device)
        away = self.push(torch.zeros_like(self.rho).unsqueeze(1))[0][:, 0]
        return self.mean.index_add(1, index, away)

    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        return self.push(self.normals(keys, seed, k), k)[0]

    def log_q(self, n: int | None = None, seed: int | None = None) -> Tensor:
        """log q of the subset's weights at each of `draw(n, seed)`, [n], where q is that of the
        draw's member."""
        seed = self.sampling(n, seed, "samples")
        counts = self._split(n)
        z = self.normals([f"{k}/{j}" for k in self.ids for j in range(max(counts))], seed, None)
        each = log_normal(z) - self.push(z)[1]  # [K, S]
        return torch.cat([own[:count] for own, count in zip(each, counts, strict=True)])

    def normals(self, keys: list[str], seed: int, k: int | None) -> Tensor:
        """z, [K, S, subset]."""
        size = (self.rho.shape[1],)
        z = repeated("normal", seed, "draws", keys, size, self.device, self.dtype)
        return z.unflatten(0, (self.members if k is None else 1, -1))

    def push(self, z: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """σ ∘ f(z), [K, S, subset], and log |det ∂θ/∂z|, [K, S]; of all members, or of one."""
        own = slice(None) if k is None else slice(k, k + 1)
        std = deviation(self.rho[own])
        y, change = Engine("stack").call(self._module, self.flow[own], z)
        return std.unsqueeze(1) * y, change + std.log().sum(1, keepdim=True)

    @cached_property
    def _module(self) -> Functional:
        return Functional(self.method.module(self.rho.shape[1])).to(self.device, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"mean": self.mean, "rho": self.rho, "flow": self.flow}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> FlowPosterior:
        q = {name: tensors[name] for name in ("mean", "rho", "flow")}
        new = cls(**common, **cls._shared(tensors, extra), **q)
        new.elbo = extra.get("elbo")
        return new


def log_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I), over the last axis."""
    return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)


_MOST = 2000  # weights that a flow takes


@store.register("flow-vi")
@dataclass(frozen=True)
class FlowVI(DrawnWeights):
    """A normalising flow over the last layer, or over a subset of the weights.

    Parameters
    ----------
    flow : str
        What moves a weight: a "spline", or an "affine" map.
    flow_length : int
        Couplings; 0: q is a Gaussian with a full covariance.
    flow_width : int
        Hidden units of a coupling.
    initial_std : float
        The standard deviation each weight starts with.
    temperature : float
        T in E_q[−log joint] − T·H[q]; below 1 the posterior is colder (and narrower).
    samples : int
        Draws of the weights per member and step.
    average : float
        The share of the last steps over which q is averaged (Polyak); 0: the last iterate.
    elbo_samples : int
        Draws with which the final ELBO is estimated.
    """

    name: ClassVar[str] = "flow-vi"
    half_precision: ClassVar[bool] = True
    rate_by_network: ClassVar[bool] = True

    samples: int = whole(4, least=1)
    elbo_samples: int = whole(32, least=1)
    flow: str = one_of("spline", "affine")
    flow_length: int = whole(2, least=0, most=64)
    flow_width: int = whole(32, least=1, most=1024)
    initial_std: float = positive(0.05, per_run=True)

    def prepare(self, problem: Problem) -> Problem:
        assert isinstance(problem, Network)
        net = problem.net
        subset = "last_layer" if net.subset == "all" else net.subset
        names = [name for name in net.layout.names if not name.startswith("likelihood.")]
        layout = net.layout.select(chosen(subset, names, net.head))
        if layout.size > _MOST:
            raise MemoryBudgetError(
                f"a flow over {layout.size} weights ({', '.join(layout.names)}) has "
                f"{layout.size**2:,} numbers in its shear alone: at most {_MOST} are allowed; "
                "name fewer with subset=(...), or take low-rank-vi, which takes any number"
            )
        narrow = problem.rewrite(lambda name, layer: None, subset)
        return narrow.add_modules(flow=self.module(layout.size))

    def module(self, features: int) -> Couplings:
        """The flow; the global random state does not change."""
        with drawing("flow"):
            return Couplings(features, self.flow, self.flow_length, self.flow_width)

    def init(self, run: Run) -> State:
        state = run.init_network()
        std = run.field(self, "initial_std").unsqueeze(1)
        rho = std.expm1().log().expand(run.size, run.subset_size).clone()
        flow = identity(run.problem.modules["flow"], run.init_modules()["flow"])
        return {"mean": state.pop("theta"), **state, "rho": rho, "flow": flow}

    def stages(self, run: Run) -> Iterable[Stage]:
        over = ("mean", "rho", "flow")
        yield optimise(self._elbo, run.steps, over=over, average=self.average)
        yield from noise_on_held_out(self.score, run, average_name("mean", self.average))

    def _elbo(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        eps = self.normals(clock, params["rho"].shape[1])
        theta, change = self._pushed(run, params, eps)
        value, changed = self.log_likelihood_at(run, params, batch, theta)
        entropy = change.mean(1) + 0.5 * LOG_2PI_E * eps.shape[2]
        temperature = run.field(self, "temperature")
        return value + self.log_prior_at(run, theta) + temperature * entropy, changed

    def _pushed(self, run: Run, q: State, z: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [M, S, P] of z [M, S, subset], and log |det ∂θ/∂z| [M, S]."""
        y, change = run.call("flow", q, z)
        std = deviation(q["rho"])
        theta = moved(run, q["mean"].unsqueeze(1), std.unsqueeze(1) * y)
        return theta, change + std.log().sum(1, keepdim=True)

    def parameters(self, run: Run, state: State) -> Tensor:
        """μ + σ f(0), [M, P]."""
        q = _answer(state)
        return self._pushed(run, q, torch.zeros_like(q["rho"]).unsqueeze(1))[0][:, 0]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        q = _answer(state)
        posterior = FlowPosterior(**q, **run.common(self), **run.shared(state))
        heated = bool((run.field(self, "temperature") != 1.0).any())
        if not heated and not run.tempered:
            posterior.elbo = self._final_elbo(run, q, state)
        return posterior

    def _final_elbo(self, run: Run, q: State, state: State) -> float:
        """The bound for the final q, over all rows, with new draws; the mean over members. It is
        conditional on point estimates, which have neither prior nor entropy in it, as in an
        evidence."""
        rows, noise = run.passes(), run.noise("elbo")
        total = torch.zeros(run.size, device=run.device, dtype=torch.float64)
        with torch.no_grad():
            for s in range(self.elbo_samples):
                z = noise.normal((q["rho"].shape[1],), s)
                each, change = self._pushed(run, q, z.unsqueeze(1))
                theta = each[:, 0]
                for t in range(rows.count):
                    total += run.log_likelihood(theta, rows.batch(t), state).double()
                prior = run.subset_prior.log_prob(theta[:, run.subset_where])
                total += (prior - log_normal(z) + change[:, 0]).double()
        return float((total / self.elbo_samples + run.units_log_jacobian()).mean())


def _answer(state: State) -> State:
    """The final q: the averages, or else the last iterate."""
    return {name: averaged(state, name) for name in ("mean", "rho", "flow")}
