"""A kernel's inner step, recorded or compiled by itself.

A transition of NUTS is no fixed sequence of operations, and one of HMC repeats the same leapfrog
step many times, which takes minutes to compile as a whole. The inner step is fixed and small. How
it is executed is chosen once in a run, by measurement, and kept in the state: a run that is
resumed goes on as it began, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from doxa.data import Batch
from doxa.engine import MODES
from doxa.execute import Executor, choose_executor
from doxa.method import Clock, Run, State

Inner = Callable[[State, Batch, State], State]  # the state, rows, and the values it advances


class Recorded:
    """Calls `inner`, in the mode the engine was asked for or in the fastest.

    Parameters
    ----------
    calls: about how many there will be, for what it is worth to prepare them.
    """

    def __init__(self, run: Run, inner: Inner, calls: int) -> None:
        self.run, self.inner, self.calls = run, inner, calls
        self._executor: Executor | None = None
        self._state: State = {}

    def __call__(self, state: State, batch: Batch, clock: Clock, values: State) -> State:
        self._state = state  # for buffers, which stay as they are
        if self._executor is None:
            self._executor = self._chosen(batch, clock, values, int(state["inner.mode"][0]))
        new, _ = self._executor(values, batch, clock.t, clock.rate)
        if "graph" in self._executor.mode:  # its tensors are overwritten by the next call
            return {name: value.clone() for name, value in new.items()}
        return new

    @property
    def mode(self) -> int:
        return -1 if self._executor is None else MODES.index(self._executor.mode)

    def _chosen(self, batch: Batch, clock: Clock, values: State, before: int) -> Executor:
        def step(values: State, batch: Batch, t: Any, rate: Any, owned: bool = False) -> Any:
            return self.inner(self._state, batch, values), {}

        if before >= 0:
            return Executor(step, MODES[before])
        if self.run.engine.mode != "eager" or self.run.engine.reason == "asked for":
            return Executor(step, self.run.engine.mode)
        trial = lambda: (dict(values), batch, clock.t, clock.rate)  # noqa: E731
        return choose_executor(step, trial, self.run, self.calls)


def start_recorded(like: torch.Tensor) -> State:
    """How the inner step is executed: the number of the mode, −1 before it is chosen; [M]."""
    return {"inner.mode": torch.full_like(like, -1.0)}


def mode_name(state: State) -> str | None:
    number = int(state["inner.mode"][0])
    return MODES[number] if number >= 0 else None
