"""Objectives and their gradients.

An objective is differentiable code from (run, params, batch, clock) to (value [M], changed state[,
known]). `params` is the state of the run's members; the run may hold some of the members of the fit
only, so that an objective reads per-member tensors from its arguments alone. What is `Known` in
closed form is added to the gradient that autograd finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method.clock import Clock, State

if TYPE_CHECKING:
    from doxa.method.run import Run

Objective = Callable[[Any, State, Batch, Clock], Any]


@dataclass(frozen=True)
class Known:
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
        known = rest[0] if rest else Known(torch.zeros_like(value.detach()), {})
        add = known.add.get(name, lambda grad: grad)
        own = {name: lambda grad: add(grad) * run.free}
        return value, changed, Known(known.value, {**known.add, **own})

    return restricted


def differentiated(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, over: Sequence[str]
) -> tuple[Tensor, State, State]:
    with torch.enable_grad():
        leaves = {name: params[name].detach().requires_grad_() for name in over}
        value, changed, *rest = objective(run, {**params, **leaves}, batch, clock)
        known: Known | None = rest[0] if rest else None
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
