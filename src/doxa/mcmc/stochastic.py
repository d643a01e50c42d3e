"""Shared by samplers on mini-batches: the stochastic gradient, the step size and the posterior.

    Û(θ) = −(n/B) Σ_batch log p(y_i | θ) − log p(θ)

is the full-data potential, estimated on a batch of B of the n rows. A step size η multiplies its
gradient. With `step_size=None`, η is the learning rate of `fit` divided by n. The weights then move
as in stochastic gradient descent on the mean loss with that learning rate, so the same learning
rate suits small and large data sets.

A method of this family implements how θ moves (`move`), and may override the step sizes. Its file
also contains its settings. Dropout is off. BatchNorm is in training mode. Each chain has its own
running statistics, which all its draws share.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.mcmc.convergence import chain_status
from doxa.method import (
    Clock,
    ColumnClock,
    Info,
    Method,
    Number,
    Run,
    Stage,
    State,
    Step,
    TensorGradient,
    gradients_by_tensor,
    log_joint,
    optimise,
    potential,
)
from doxa.method.trace import Gradient, full_gradient
from doxa.posterior import Posterior, SamplePosterior, Status
from doxa.posterior.chains import finite

log = logging.getLogger("doxa")

Move = Callable[[Run, State, Tensor, Clock], State]


class StochasticGradient(Method):
    """Base of the samplers that move with mini-batch gradients of the log joint. Subclasses have
    the fields `draws`, `burn_in` and `thin`, or define their own stages."""

    draws: int
    burn_in: int
    thin: int
    controls: ClassVar[tuple[str, ...]] = ("step_size", "temperature")
    columnwise: ClassVar[bool] = False  # `move` is a function of each weight alone, with `noise`
    default_members: ClassVar[int] = 4
    default_rate: ClassVar[float] = 1e-3
    batch_norm: ClassVar[str] = (
        "all draws of a chain share its running BatchNorm statistics, which follow the last of them"
    )

    @property
    def rows(self) -> str:
        """The source of a step's rows. Here: shuffled epochs, in which noise cancels within an
        epoch."""
        return "mini"

    @property
    def kept_draws(self) -> int:
        return self.draws

    def init(self, run: Run) -> State:
        if run.problem.batch_norm:
            log.warning("%s: %s", self.name, self.batch_norm)
        state = run.init_network()
        return {**state, **self.memory(run, state["theta"])}

    def restart(self, run: Run, state: State, theta: Tensor) -> State:
        rest = {"velocity": torch.zeros_like(theta)} if "velocity" in state else {}
        return {**super().restart(run, state, theta), **rest}

    def memory(self, run: Run, theta: Tensor) -> State:
        """The entries of the state that the method needs besides θ."""
        return {}

    @abstractmethod
    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        """The new values of the entries of the state that change. `grad` is −∇Û, [M, P]."""

    def stages(self, run: Run) -> Iterable[Stage]:
        """Burn-in, then draws. If some weights are point estimates, their maximum is found
        first."""
        yield from self.maximum(run)
        sampled = self.draws * self.thin
        sizes = self.sizes(run, self.burn_in + sampled)
        cut = (lambda part: None) if sizes is None else (lambda part: sizes[part])
        if self.burn_in:
            step = self.step_of(run, burning=True)
            before = slice(0, self.burn_in)
            yield Stage("burn-in", step, self.burn_in, self.rows, rates=cut(before))
        step, after = self.step_of(run), slice(self.burn_in, None)
        yield Stage("sample", step, sampled, self.rows, keep=self.thin, rates=cut(after))

    def maximum(self, run: Run) -> Iterable[Stage]:
        """The stages that find the point estimate of the weights outside the subset."""
        if run.free is not None:
            yield optimise(log_joint, run.steps, name="maximum")

    def sizes(self, run: Run, steps: int) -> Tensor | None:
        """The step sizes η_t of a stage, or None if they are constant. They become `clock.rate`."""
        return None

    def step_of(self, run: Run, move: Move | None = None, burning: bool = False) -> Step:
        """The step function of a stage that moves θ by `move`, in burn-in or after it."""
        advance = move or self.move

        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            found = None
            if self.columnwise and run.by_tensor and run.free is None:
                found = self._in_blocks(run, state, batch, clock, advance)
            if found is not None:
                return found
            value, grad, changed = stochastic_gradient(run, state, batch, clock)
            new = advance(run, {**state, **changed}, grad, clock)
            new["theta"] = held(run, new["theta"], state["theta"])
            trace_gradient(run, state, new, grad, batch, clock)
            return {**state, **changed, **new}, report(run, value)

        return step

    def _in_blocks(
        self, run: Run, state: State, batch: Batch, clock: Clock, advance: Move
    ) -> tuple[State, Info] | None:
        """A step for a large network, in place and in blocks of its columns. None if the objective
        needs whole rows of weights."""
        shape = state["theta"].shape
        rows = {k: v for k, v in state.items() if v.shape == shape}
        if not clock.owned:
            rows = {k: v.clone() for k, v in rows.items()}

        def use(gradients: list[TensorGradient]) -> None:
            m = gradients[0].member
            own, at = run.select_members(slice(m, m + 1)), ColumnClock(clock, m, shape[1])
            for tensor in gradients:
                for block in tensor.blocks():
                    block.add_prior(block.of(rows["theta"]), 1.0)
                    at.begin_block()
                    part = {k: block.of(v).unsqueeze(0) for k, v in rows.items()}
                    new = advance(own, part, block.grad.unsqueeze(0), at)
                    for name, value in new.items():
                        part[name].copy_(value)

        found = gradients_by_tensor(run, potential, {**state, **rows}, batch, clock, use)
        if found is None:
            return None
        value, changed = found
        return {**state, **changed, **rows}, report(run, value) if clock.reported else {}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        last = state["theta"].unsqueeze(1)  # [K, 1, P]
        samples = last if kept is None else kept.transpose(0, 1).contiguous()
        for k, t in (~finite(samples)).nonzero().tolist():  # the driver reports the failed chains
            samples[k, t] = last[k, 0]
        posterior = SamplePosterior(samples=samples, **run.common(self), **run.shared(state))
        if kept is None:
            reason = "the run stopped before any draw was kept: this is the chain's last state"
            posterior.record.status = Status("not-converged", reason)
        else:
            chain_status(posterior, run, self.acceptance(state))
        return posterior

    def acceptance(self, state: State) -> float:
        """The smallest acceptance rate of the chains."""
        return 1.0


def stochastic_gradient(
    run: Run, state: State, batch: Batch, clock: Clock
) -> tuple[Tensor, Tensor, State]:
    """−Û [M], −∇Û [M, P] for the sampled weights, and the changed statistics of BatchNorm."""
    value, grads, changed = run.value_and_grad(potential, state, batch, clock)
    grad = grads["theta"]
    return value, grad if run.free is None else grad * run.free, changed


def trace_gradient(
    run: Run, state: State, new: State, grad: Tensor, batch: Batch, clock: Clock
) -> None:
    """The record of a step along the gradient −∇Û, where the step leaves any."""
    if clock.trace is not None:
        full = full_gradient(run, state, batch, clock)
        moved = new["theta"] - state["theta"]
        velocity = new.get("velocity")
        clock.trace.append(Gradient(state["theta"], grad, full, moved, velocity))


def held(run: Run, moved: Tensor, before: Tensor) -> Tensor:
    """The moved weights, in which those that are not sampled keep their values `before`."""
    return moved if run.free is None else torch.where(run.free > 0, moved, before)


def report(run: Run, value: Tensor) -> Info:
    """The statistic for progress and history: the mean loss, or the log density of a problem
    without data."""
    bare = not run.data.has_rows
    return {"log_density": value} if bare else {"loss": value * run.per_example}


def step_size(run: Run, method: Method) -> Number:
    """η, which multiplies ∇Û: the method's `step_size`, or the learning rate of `fit` over n."""
    if "step_size" in run.hyper or method.settings().get("step_size") is not None:
        return run.setting(method, "step_size")
    return run.over_n(run.settings.rate)


def rates(run: Run, method: Method, shape: Tensor) -> Tensor:
    """The step sizes of a stage: `shape` [steps] times the η of the method. They are [steps], or
    [steps, M, 1] if members differ."""
    size = step_size(run, method)
    shape = shape.to(run.device)
    if isinstance(size, Tensor):
        return (shape[:, None, None] * size.double()).to(run.dtype)
    return (shape * size).to(run.dtype)
