"""Time, rate and noise of a stage, and the state it advances.

Objectives and their gradients.

An objective is differentiable code from (run, params, batch, clock) to (value [M], changed state[,
known]). `params` is the state of the run's members; the run may hold some of the members of the fit
only, so that an objective reads per-member tensors from its arguments alone. A gradient
that is known in closed form (`AnalyticGradient`) is added to the one that autograd finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.noise import Noise, PrefetchedNoise

if TYPE_CHECKING:
    from doxa.method.run import Run


State = dict[str, Tensor]  # named tensors with leading axis M
Info = dict[str, Tensor]  # what a step says of itself, for people: [M] each


class Clock:
    """Where a stage stands. Everything that changes from step to step is a tensor, so that a step
    can be recorded, compiled or captured.

    Attributes
    ----------
    t: [], the step within the stage; steps: how many there are. rate: [] or [M, 1], the learning
        rate now. owned: the state's tensors may be overwritten: nobody else holds them.
    """

    def __init__(
        self,
        t: Tensor,
        rate: Tensor,
        steps: int,
        source: Noise | PrefetchedNoise,
        owned: bool = False,
        calls: list[int] | None = None,
    ) -> None:
        self.t, self.rate, self.steps, self.source, self.owned = t, rate, steps, source, owned
        self._calls = [0] if calls is None else calls  # within this step

    def noise(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape]; each call within a step gets its own."""
        self._calls[0] += 1
        return self.source.normal(shape, self.t, self._calls[0])

    def alternating(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape], at every second step minus those of the step before: half
        the drawing, and what is odd in them cancels over two steps."""
        self._calls[0] += 1
        return self.source.alternating(shape, self.t, self._calls[0])

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in (0, 1], [M, *shape]."""
        self._calls[0] += 1
        return self.source.uniform(shape, self.t, self._calls[0])

    def rows(self, kind: str, *shape: int) -> Tensor:
        """Noise a row, "normal" or "uniform", [M, rows, ...]: rows that only pad change nothing."""
        self._calls[0] += 1
        return self.source.rowwise(kind, shape, self.t, self._calls[0])

    def select_members(self, members: slice) -> Clock:
        """Of some members, whose numbers do not depend on how members are cut."""
        rate = self.rate[members] if self.rate.ndim else self.rate
        calls = list(self._calls)
        return Clock(
            self.t, rate, self.steps, self.source.select_members(members), self.owned, calls
        )

    def expand_particles(self, k: int) -> Clock:
        """Of k particles a member, each with numbers of its own."""
        rate = self.rate.repeat_interleave(k, 0) if self.rate.ndim else self.rate
        return Clock(
            self.t, rate, self.steps, self.source.expand_particles(k), self.owned, self._calls
        )


class NoClock(Clock):
    """For objectives that ask for no noise."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(0), torch.tensor(0.0), 1, Noise(0, "none", []))

    def select_members(self, members: slice) -> Clock:
        return self


def slice_state(state: State, part: slice) -> State:
    return {k: v[part] for k, v in state.items()}


def flatten_particles(state: State, k: int) -> State:
    """[M, k, ...] to [M·k, ...]: particles as the rows of `run.expand_particles(k)`."""
    return {name: v.flatten(0, 1) for name, v in state.items()}


def unflatten_particles(state: State, k: int) -> State:
    """[M·k, ...] back to [M, k, ...]."""
    return {name: v.unflatten(0, (-1, k)) for name, v in state.items()}


def network_part(state: State) -> State:
    """What a network needs of a state besides its weights."""
    return {k: v for k, v in state.items() if k == "layers" or k.startswith("buffer.")}


Objective = Callable[[Any, State, Batch, Clock], Any]


@dataclass(frozen=True)
class AnalyticGradient:
    """A part of an objective whose gradient is known in closed form: its value [M], and what it
    does to the gradient of each name."""

    value: Tensor
    add: Mapping[str, Callable[[Tensor], Tensor]]


def log_joint(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """log p(θ) + (n/B) Σ log p(y|θ), with the network in training: MAP's objective."""
    return run.density(params["theta"], params, batch, clock, training=True)


def potential(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """−Û: the same with dropout off, which samplers on mini-batches climb."""
    return run.density(params["theta"], params, batch, None, training=True)


def target(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """The same with BatchNorm frozen, too: what samplers with an acceptance test target."""
    return run.density(params["theta"], params, batch, None, training=False)


def of_subset(objective: Objective, name: str = "theta") -> Objective:
    """An objective of weights under a name that leaves those outside the model's subset where they
    are."""

    def restricted(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed, *rest = objective(run, params, batch, clock)
        known = rest[0] if rest else AnalyticGradient(torch.zeros_like(value.detach()), {})
        add = known.add.get(name, lambda grad: grad)
        own = {name: lambda grad: add(grad) * run.free}
        return value, changed, AnalyticGradient(known.value, {**known.add, **own})

    return restricted


def differentiated(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, over: Sequence[str]
) -> tuple[Tensor, State, State]:
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in over}
        value, changed, *rest = objective(run, {**params, **leaves}, batch, clock)
        known: AnalyticGradient | None = rest[0] if rest else None
        if value.shape != (run.size,):
            raise MethodError(
                f"an objective gives one value a member, [{run.size}], not {list(value.shape)}"
            )
        grads = torch.autograd.grad(
            value, list(leaves.values()), torch.ones_like(value), allow_unused=True
        )
    found = dict(zip(over, grads, strict=True))
    add = {} if known is None else known.add
    for name, grad in found.items():
        if grad is None and name not in add:
            raise MethodError(f"the objective does not depend on {name!r}, which it is to train")
        grad = torch.zeros_like(params[name]) if grad is None else grad
        found[name] = add[name](grad) if name in add else grad
    value = value.detach()
    return value if known is None else value + known.value, found, changed


def joined(parts: Sequence[State]) -> State:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
