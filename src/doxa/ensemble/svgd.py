"""Stein variational gradient descent: particles that ascend the posterior and repel each other.

    θ_i ← θ_i + ε φ(θ_i),    φ(θ) = 1/K Σ_j [ k(θ_j, θ) ∇ log p(θ_j, D) + T ∇_{θ_j} k(θ_j, θ) ]
    k(θ, θ') = exp(−‖θ − θ'‖² / h),    h = med² / log K

Liu & Wang (2016). φ is the direction that lowers KL(q ‖ p) fastest among functions in the unit ball
of the kernel's Hilbert space; med is the median distance between particles. One particle is MAP.
Gradients are those of mini-batches. Use it for a few networks that repel each other, at the cost of
an ensemble. In many dimensions all distances between particles are similar, and the spread is too
small (Ba et al., 2022): treat it as an ensemble, not as a sample. Weights outside the model's
subset are shared by all particles and follow their mean gradient; dropout is off, and each particle
has its own BatchNorm statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.method import (
    Clock,
    Info,
    Method,
    Run,
    Stage,
    State,
    flatten_particles,
    network_part,
    potential,
    unflatten_particles,
)
from doxa.method.method import Alternatives, positive, whole
from doxa.method.trace import Forces
from doxa.posterior import Posterior, SamplePosterior


@store.register("svgd")
@dataclass(frozen=True)
class SVGD(Method):
    """Stein variational gradient descent.

    Parameters
    ----------
    particles : int
        K, in each member; members are independent sets of them.
    bandwidth : float
        h as a multiple of med²/log K.
    temperature : float
        T, which multiplies the repulsion.
    """

    controls: ClassVar[tuple[str, ...]] = ("bandwidth", "temperature")
    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    name: ClassVar[str] = "svgd"
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()
    smaller: ClassVar[str] = "use fewer particles or members, or a smaller network"

    particles: int = whole(20, least=2)
    bandwidth: float = positive(1.0, per_run=True)
    temperature: float = positive(1.0, per_run=True)

    @property
    def width(self) -> int:
        return self.particles

    def init(self, run: Run) -> State:
        state = unflatten_particles(
            run.expand_particles(self.particles).init_network(), self.particles
        )
        theta = state["theta"]  # [M, K, P]
        theta = self._apart(run, theta)
        if run.free is not None:
            theta = torch.where(run.free > 0, theta, theta[:, :1])
        return {**state, "theta": theta}

    def _apart(self, run: Run, theta: Tensor) -> Tensor:
        """Particles that do not start from weights of their own: with equal ones they would stay
        equal."""
        if run.settings.fresh:
            return theta
        noise, shape = run.noise("particles"), tuple(theta.shape[1:])
        if run.settings.spread is not None:
            return theta + run.settings.spread * (2.0 * noise.uniform(shape) - 1.0)
        return theta + 0.01 * theta.square().mean(2, keepdim=True).sqrt() * noise.normal(shape)

    def restart(self, run: Run, state: State, theta: Tensor) -> State:
        """The particles of a member start around one point, [M, P]."""
        own = theta.unsqueeze(1).expand_as(state["theta"]) if theta.ndim == 2 else theta
        return {**state, "theta": self._apart(run, own), **run.settings.optimizer.init(
            {"theta": state["theta"]}
        )}  # fmt: skip

    def stages(self, run: Run) -> Iterable[Stage]:
        yield Stage("transport", self._step, run.steps, enter=_enter, validates=True)

    def _step(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        k, theta = self.particles, state["theta"]
        inner = flatten_particles({"theta": theta, **network_part(state)}, k)
        value, grads, changed = run.expand_particles(k).value_and_grad(
            potential, inner, batch.expand_particles(k), clock.expand_particles(k)
        )
        grad = grads["theta"].unflatten(0, (-1, k))  # [M, K, P]
        phi = self._stein(run, theta, grad, clock)
        descent = {"theta": run.descent(phi)}
        optimizer = run.settings.optimizer
        new = optimizer.update({"theta": theta}, descent, state, clock.rate, clock.t, clock.owned)
        loss = value.unflatten(0, (-1, k)).mean(1) * run.per_example
        return {**state, **unflatten_particles(changed, k), **new}, {"loss": loss}

    def _stein(self, run: Run, theta: Tensor, grad: Tensor, clock: Clock) -> Tensor:
        """φ at every particle, [M, K, P]."""
        free = theta if run.free is None else theta * run.free
        square = torch.cdist(free, free).square()  # [M, K, K]
        median = _off_diagonal(square).median(1).values  # [M]
        h = run.field(self, "bandwidth") * median / math.log(self.particles)
        h = h.clamp_min(torch.finfo(theta.dtype).tiny)[:, None, None]
        kernel = (-square / h).exp()
        pull = kernel @ grad
        push = (2.0 / h) * (kernel.sum(2, keepdim=True) * free - kernel @ free)
        heat = run.field(self, "temperature")[:, None, None]
        phi = (pull + heat * push) / self.particles
        if clock.trace is not None:
            drift, repulsion = pull / self.particles, heat * push / self.particles
            clock.trace.append(Forces(theta, drift, repulsion, kernel, h[:, 0, 0]))
        if run.free is None:
            return phi
        return torch.where(run.free > 0, phi, grad.mean(1, keepdim=True))

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return SamplePosterior(
            samples=state["theta"], chain=False, per_draw=True,
            **run.common(self), **run.shared(state),
        )  # fmt: skip


def _off_diagonal(square: Tensor) -> Tensor:
    """[M, K, K] to [M, K(K − 1)], without the diagonal, by reshaping only."""
    k = square.shape[1]
    return square.flatten(1)[:, 1:].unflatten(1, (k - 1, k + 1))[:, :, :-1].flatten(1)


def _enter(run: Run, state: State) -> State:
    return {**state, **run.settings.optimizer.init({"theta": state["theta"]})}
