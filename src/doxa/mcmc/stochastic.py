"""What samplers on mini-batches share: the noisy gradient, the step size, the posterior.

    Û(θ) = −(n/B) Σ_batch log p(y_i | θ) − log p(θ)

is the full-data potential, estimated on a batch, and a step size η multiplies its gradient. With
`step=None` it is the rate of `fit` over n, which moves the weights exactly as stochastic gradient
descent on the mean loss does at that rate: one number serves small and large data sets alike.

A method of this family says how θ moves (`move`); its file is otherwise its settings and stages.
Dropout is off. BatchNorm is in training mode with running statistics of each chain's own, which
all draws of that chain share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from doxa.chains import finite
from doxa.data import Batch
from doxa.mcmc.convergence import chain_status
from doxa.method import Clock, Info, Method, Run, State
from doxa.posterior import Posterior, SamplePosterior, Status

log = logging.getLogger("doxa")

Step = Callable[[Run, State, Batch, Clock], tuple[State, Info]]
Move = Callable[[Run, State, Tensor, Clock], State]
Number = float | Tensor  # a float where all members share it, else [M, 1]


class StochasticGradient(Method):
    """A chain driven by mini-batch gradients of the log joint. Subclasses are the methods."""

    default_members: ClassVar[int] = 4
    default_rate: ClassVar[float] = 1e-3
    batch_norm: ClassVar[str] = (
        "all draws of a chain share its running BatchNorm statistics, which follow the last of them"
    )

    def init(self, run: Run) -> State:
        theta = run.start()
        if run.model is None:
            return {"theta": theta, **self.memory(theta)}
        if run.net.batch_norm:
            log.warning("%s: %s", self.name, self.batch_norm)
        return {"theta": theta, **run.init_buffers(), **self.memory(theta)}

    def memory(self, theta: Tensor) -> State:
        """What the method carries besides θ."""
        return {}

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        """The entries of the state that change; `grad` is −∇Û, [M, P]."""
        raise NotImplementedError

    def step_of(self, free: Tensor | None, move: Move | None = None) -> Step:
        """The step of a stage that moves by `move`; `free` as `uncertain` gives it."""
        advance = move or self.move

        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            value, grad, changed = joint(run, state, batch)
            if free is not None:
                grad = grad * free
            new = advance(run, state, grad, clock)
            if free is not None:
                new["theta"] = torch.where(free > 0, new["theta"], state["theta"])
            return {**state, **changed, **new}, report(run, value)

        return step

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        last = state["theta"].unsqueeze(1)  # [K, 1, P]
        samples = last if kept is None else kept.transpose(0, 1).contiguous()
        for k, t in (~finite(samples)).nonzero().tolist():  # the driver says who broke down
            samples[k, t] = last[k, 0]
        posterior = SamplePosterior(samples=samples, **run.common(self), **run.shared(state))
        if kept is None:
            reason = "the run stopped before any draw was kept: this is the chain's last state"
            posterior.record.status = Status("not-converged", reason)
        else:
            chain_status(posterior, run, self.acceptance(state))
        return posterior

    def acceptance(self, state: State) -> float:
        """The smallest of the chains' rates of acceptance."""
        return 1.0


def joint(run: Run, state: State, batch: Batch) -> tuple[Tensor, Tensor, State]:
    """−Û [M], −∇Û [M, P], and the BatchNorm statistics that changed."""
    theta = state["theta"]
    if run.density is not None:
        return *run.joint(theta, batch, state), {}
    changed = {k: v.clone() for k, v in state.items() if k.startswith("buffer.")}
    fit, grad = run.grad(theta, batch, buffers=run.buffers(changed) or None, training=bool(changed))
    return fit + run.prior.log_prob(theta), run.prior.add_score(grad, theta), changed


def report(run: Run, value: Tensor) -> Info:
    """For people: the loss as optimisers count it, or the log density where there is no data."""
    return {"log_density": value} if run.density is not None else {"loss": value * run.per_example}


def setting(run: Run, method: Method, name: str) -> Number:
    """A hyper-parameter: a number, or [M, 1] where a grid varies it."""
    if name in run.hyper:
        return run.hyper[name].unsqueeze(1)
    return float(getattr(method, name))


def step_size(run: Run, method: Method) -> Number:
    """η, which multiplies ∇Û: the method's `step`, or the rate of `fit` over n."""
    if "step" in run.hyper or getattr(method, "step", None) is not None:
        return setting(run, method, "step")
    if "lr" in run.hyper:
        return (run.hyper["lr"] / run.n).unsqueeze(1)
    if run._same_n is not None:
        return run.rate / run._same_n
    return (run.rate / run.n).unsqueeze(1)


def rates(run: Run, method: Method, shape: Tensor) -> Tensor:
    """η of each step of a stage, `shape` [steps] times the method's: [steps] or [steps, M, 1]."""
    size = step_size(run, method)
    shape = shape.to(run.device)
    if isinstance(size, Tensor):
        return (shape[:, None, None] * size.double()).to(run.dtype)
    return (shape * size).to(run.dtype)


def root(value: Number) -> Number:
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def plus(base: Tensor, factor: Number, value: Tensor) -> Tensor:
    """base + factor · value in one pass over memory."""
    if isinstance(factor, Tensor):
        return torch.addcmul(base, value, factor)
    return torch.add(base, value, alpha=factor)
