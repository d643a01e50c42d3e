"""A stage: a step repeated, and what the driver must know to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from doxa.data import Batch, Source
from doxa.method.clock import Clock, Info, State
from doxa.method.run import Run

if TYPE_CHECKING:
    from doxa.engine.parts import Recorded

Mark = Callable[[Run, State], State]
Marks = Mapping[int, Mark]
Step = Callable[[Run, State, Batch, Clock], tuple[State, Info]]


@dataclass
class Stage:
    """A phase of a method: a step repeated.

    Parameters
    ----------
    source: which rows each step sees: "mini", "dealt", "independent", "all", "pass", "held-out",
        "tasks", or a `Source`.
    keep: store the current parameters every `keep` steps.
    over: the names that the step moves: what the non-finite guard watches.
    enter: what happens to the state when the stage begins.
    validates: the driver may stop the stage early, on held-out rows.
    capturable: the step is a fixed sequence of tensor operations, none of which waits for the host
        where the run is on a GPU.
    marks: {t: what happens to the state before step t}, outside what is recorded or compiled.
    rates: what `clock.rate` is at each step, [steps] or [steps, M, 1]; None: as `fit` was asked.
    recorded: how parts of the step are executed, where that is not the whole step.
    product: multiplications in the largest matrix product of the stage, for the number of threads;
        None: that of the network's gradient.
    """

    name: str
    step: Step
    steps: int
    source: str | Source = "mini"
    keep: int = 0
    over: tuple[str, ...] = ("theta",)
    enter: Callable[[Run, State], State] | None = None
    validates: bool = False
    capturable: bool = True
    marks: Marks = field(default_factory=dict)
    rates: Tensor | None = None
    recorded: Recorded | None = None
    product: float | None = None
