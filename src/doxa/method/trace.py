"""What a step did, for people who watch a method: typed records, and changes between steps.

A step that somebody watches has a list at `clock.trace`; otherwise it is None, and nothing is
computed for it. The step itself appends its records, so that they are the numbers with which it
moved:

    if clock.trace is not None:
        clock.trace.append(Proposal(theta, there, change, rate, accept))

    Proposal     a point that is proposed, and whether it was accepted
    Trajectory   the points of a trajectory of HMC, with momenta and energies
    Tree         the points of a tree of NUTS, and the one that was taken
    Gradient     the gradient of a stochastic step, that of all rows, and the move
    Forces       the drift and the repulsion of every particle of SVGD

All tensors are copies. M is the number of chains (members), P the number of weights. Positions are
in the free (unconstrained) space in which samplers move.

A setting may be changed between two steps (`changed`): the run then has the new value among those
that a grid of runs may vary, and the stages are made anew from it. So a step reads such a setting
by `run.field` or `run.setting`, as for a grid. `Method.controls` names the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method.state import Clock, State, potential

if TYPE_CHECKING:
    from doxa.method.method import Method
    from doxa.method.run import Run


@dataclass(frozen=True, eq=False)
class Record:
    """Base of the records. Tensors are copied: later steps may overwrite those of the step."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                object.__setattr__(self, each.name, value.detach().clone())


@dataclass(frozen=True, eq=False)
class Proposal(Record):
    """A proposed point, and whether the chain moved to it.

    Attributes
    ----------
    start, end : Tensor of shape [M, P]
        The point before the step, and the proposed one.
    log_ratio : Tensor of shape [M]
        The logarithm of the acceptance ratio, which includes the densities of the proposals. On a
        mini-batch it is an estimate.
    accept : Tensor of shape [M]
        The acceptance probability, min(1, exp(log_ratio)).
    accepted : Tensor of shape [M]
        Whether it was accepted.
    mean : Tensor of shape [M, P], optional
        The mean of the proposal: the start, moved along the gradient (Langevin proposals).
    """

    start: Tensor
    end: Tensor
    log_ratio: Tensor
    accept: Tensor
    accepted: Tensor
    mean: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Trajectory(Record):
    """A trajectory of L leapfrog steps, with its start.

    Attributes
    ----------
    positions : Tensor of shape [L + 1, M, P]
    momenta : Tensor of shape [L + 1, M, P]
        In the coordinates of the leapfrog, in which they are standard normal at rest.
    energies : Tensor of shape [L + 1, M]
        The Hamiltonian H at every point.
    step_size : Tensor of shape [M]
        The step size of this trajectory.
    """

    positions: Tensor
    momenta: Tensor
    energies: Tensor
    step_size: Tensor


@dataclass(frozen=True, eq=False)
class Tree(Record):
    """The points of a tree of NUTS, in the order in which they were made. Node 0 is the start.

    Attributes
    ----------
    positions, momenta : Tensor of shape [N, M, P]
    energies : Tensor of shape [N, M]
    doubling : Tensor of shape [N]
        The doubling that made the node: 0 for the start, then 1, 2, …
    forward : Tensor of shape [D, M]
        Whether each of the D doublings was forwards in time.
    reached : Tensor of shape [N, M]
        Whether the chain made this node: chains whose tree is complete wait for the others, and the
        last step of a divergent trajectory is no node.
    chosen : Tensor of shape [M]
        The node to which each chain moved.
    """

    positions: Tensor
    momenta: Tensor
    energies: Tensor
    doubling: Tensor
    forward: Tensor
    reached: Tensor
    chosen: Tensor


@dataclass(frozen=True, eq=False)
class Gradient(Record):
    """A step along a stochastic gradient. Gradients are those of the log joint.

    Attributes
    ----------
    start : Tensor of shape [M, P]
        The point before the step.
    noisy : Tensor of shape [M, P]
        The gradient that the step used: of a mini-batch, or with stated noise.
    full : Tensor of shape [M, P] or None
        The gradient of all rows, without noise. None if it is the same.
    moved : Tensor of shape [M, P]
        The change of the weights.
    velocity : Tensor of shape [M, P] or None
        The velocity after the step, for methods with momentum.
    """

    start: Tensor
    noisy: Tensor
    full: Tensor | None
    moved: Tensor
    velocity: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Forces(Record):
    """The two forces between the K particles of Stein variational gradient descent: the direction
    of a particle is their sum.

    Attributes
    ----------
    positions : Tensor of shape [M, K, P]
        The particles before the step.
    drift : Tensor of shape [M, K, P]
        The mean of the particles' gradients, weighted by the kernel.
    repulsion : Tensor of shape [M, K, P]
        The force that keeps particles apart.
    kernel : Tensor of shape [M, K, K]
    bandwidth : Tensor of shape [M]
        h of the kernel exp(−‖θ − θ'‖²/h).
    """

    positions: Tensor
    drift: Tensor
    repulsion: Tensor
    kernel: Tensor
    bandwidth: Tensor


def full_gradient(
    run: Run, state: State, batch: Batch, clock: Clock, objective: Any = potential
) -> Tensor | None:
    """The gradient of an objective of all rows without noise, [M, P]; None if that of the batch is
    the same. The random numbers of the step are not used up."""
    if not noisy_batch(run, batch):
        return None
    at = Clock(clock.t, clock.rate, clock.steps, clock.source, calls=list(clock.calls))
    _, grads, _ = run.value_and_grad(objective, state, run.all_rows(), at)
    return grads["theta"]


def noisy_batch(run: Run, batch: Batch) -> bool:
    """Whether the gradient of a batch differs from that of all rows."""
    if isinstance(batch.x, tuple) and not batch.x:
        return False
    return not run.data.has_rows or bool((batch.scale != 1).any())


def changed(method: Method, run: Run, state: State, name: str, value: Any) -> tuple[Run, State]:
    """The run and the state in which a setting has a new value.

    Parameters
    ----------
    method : Method
    run : Run
    state : State
    name : str
        One of `controls_of`.
    value : float, int or sequence of float
        The value, or one for each member.
    """
    found = setting_value(method, run, name, value)
    if isinstance(found, int):
        return replace(run, settings=replace(run.settings, batch_size=found)), state
    return method.change(run, state, name, found)


def controls_of(method: Method, run: Run) -> tuple[str, ...]:
    """The settings that may change between two steps: those of the method, and those of `fit` that
    it uses."""
    rate = ("lr",) if method.uses_rate and "step_size" not in method.controls else ()
    return (*method.controls, *rate, *(("batch_size",) if run.data.has_rows else ()))


def setting_value(method: Method, run: Run, name: str, value: Any) -> Tensor | int:
    """The checked value of a setting: a batch size, or a positive number for each member, [M]."""
    known = controls_of(method, run)
    if name not in known:
        raise MethodError(
            f"{method.name} has no setting {name!r} that may change between two steps; there are "
            f"{list(known)}"
        )
    if name == "batch_size":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MethodError(f"batch_size must be a whole number, at least 1, not {value!r}")
        return value
    try:
        found = torch.as_tensor(value, dtype=run.dtype, device=run.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MethodError(f"{name} must be a number, or one per member, not {value!r}") from error
    if found.ndim > 1 or (found.ndim == 1 and len(found) != run.size):
        raise MethodError(
            f"{name} must be a number, or one for each of {run.size} members, not a tensor of "
            f"shape {list(found.shape)}"
        )
    if not bool((torch.isfinite(found) & (found > 0)).all()):
        raise MethodError(f"{name} must be positive and finite, not {value!r}")
    found = found.expand(run.size).clone()
    method.check_setting(name, found.tolist())
    return found
