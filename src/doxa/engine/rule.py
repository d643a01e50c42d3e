"""How the steps of a stage are executed: a rule about the work.

A mode decides the last bits of a result, so it is a function of the work, the device and torch's
version alone (where recording or compiling fails, a step runs eagerly): the same on an idle machine
and on a busy one. On the CPU a step is counted, not timed. Recording costs about as much as 500
steps save, however many operations they have. Beside a recorded step, a compiled one saves about

    4 µs × operations + 0.3 ns × numbers written

(`benchmarks/modes.py` measures both, on one thread), and compiling takes some 8 s. On a GPU a graph
costs next to nothing to make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from doxa.data import Batch
from doxa.engine.ahead import Ahead
from doxa.engine.execute import Executor, State, Step, leaves_of
from doxa.engine.work import Count
from doxa.model.inspection import draws_itself
from doxa.model.problem import LogDensity, Network

_COMPILE_SECONDS = 8.0
_OPERATION_SECONDS = 4e-6
_NUMBER_SECONDS = 3e-10
_TRACE_STEPS = 500
_GRAPH_STEPS = 100
_SMALL = 1e6  # weights of all members, below which compiling a step pays

Trial = Callable[[], tuple[State, Batch, Tensor, Tensor]]


def choose_executor(
    step: Step, trial: Trial, run: Any, steps: int, ahead: Ahead | None = None, worth: float = 3.0
) -> Executor:
    """How to execute a stage of so many steps: compiled, where that saves more than `worth` times
    what compiling costs."""
    graphs = run.device.type == "cuda"
    if steps < (_GRAPH_STEPS if graphs else _TRACE_STEPS):
        return Executor(step)
    if not _repeats(run) or not all(isinstance(leaf, Tensor) for leaf in leaves_of(trial()[1])):
        return Executor(step)
    if graphs:
        return Executor(step, "graph")
    if _compilable(run, trial) and saved(step, trial) * steps > worth * _COMPILE_SECONDS:
        return Executor(step, "compiled", ahead)
    return Executor(step, "traced", ahead)


def compile_after(step: Step, trial: Trial, run: Any) -> float:
    """After how many calls a step whose number is not known beforehand is compiled: when that would
    have saved what compiling costs. Infinite where it cannot be, or not with gain."""
    if run.device.type != "cpu" or not (_repeats(run) and _compilable(run, trial)):
        return math.inf
    return math.ceil(_COMPILE_SECONDS / saved(step, trial))


def saved(step: Step, trial: Trial) -> float:
    """Seconds that a compiled step saves beside a recorded one. The step runs on a copy, and once
    before it is counted: what is computed once and kept is no part of a step."""
    state, batch, t, rate = trial()
    copy = {k: v.clone() for k, v in state.items()}
    step(dict(copy), batch, t, rate)
    with Count() as count:
        step(dict(copy), batch, t, rate)
    return _OPERATION_SECONDS * count.operations + _NUMBER_SECONDS * count.numbers


def _compilable(run: Any, trial: Trial) -> bool:
    """Whether the compiler is known to gain: on few weights, in batched layers and in what a person
    wrote."""
    state = trial()[0]
    moved = [state["theta"]] if "theta" in state else state.values()
    small = max(value.numel() for value in moved) < _SMALL
    if isinstance(run.problem, Network):
        return small and run.net.plan is not None
    return small and isinstance(run.problem, LogDensity)


def _repeats(run: Any) -> bool:
    """Whether a step is a fixed sequence of tensor operations that can be recorded: not where a
    network draws for itself or changes its buffers, nor where a density refused to be stacked."""
    if isinstance(run.problem, Network):
        return not (run.net.tracked or run.net.draws)
    if run.problem.modules:
        return not any(draws_itself(module.net) for module in run.problem.modules.values())
    return isinstance(run.problem, LogDensity) and run.engine.kind == "stack"
