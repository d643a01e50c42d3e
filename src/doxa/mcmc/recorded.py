"""The parts of a kernel's transition, each recorded or compiled by itself.

A transition of NUTS is no fixed sequence of operations, and one of HMC repeats the same leapfrog
step many times, which takes minutes to compile as a whole. The step with the gradient in it is
fixed and small. How it is executed is chosen by measurement when a run begins; where only time can
tell how often it will be called, it is compiled after so many calls. Both are kept in the state: a
run that is resumed goes on as it began, bit for bit. What else is repeated follows it: beside a
compiled gradient a dozen small operations are what takes time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from doxa.data import Batch
from doxa.engine import MODES
from doxa.execute import Executor, choose_executor, compile_after
from doxa.method import Clock, Run, State

Inner = Callable[[State, Batch, State], State]  # the state, rows, and the values it advances
Part = Callable[[State], State]

_NEVER = 1e30  # calls; a state must be finite
_FOLLOWED = ("traced", "compiled")  # a graph's tensors would be overwritten by its next call


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
        self._done, self._after = 0.0, math.inf

    def resume(self, state: State) -> None:
        """Before a transition: go on as the run that left this state did."""
        before = int(state["inner.mode"][0]) if self._executor is None else -1
        if before >= 0:
            rest = float(state["inner.rest"][0])
            self._after = rest if rest < _NEVER / 2 else math.inf
            self._executor = Executor(self._step, MODES[before])

    def __call__(self, state: State, batch: Batch, clock: Clock, values: State) -> State:
        self._state = state  # for buffers, which stay as they are
        if self._executor is None:
            self._executor = self._chosen(batch, clock, values)
        self._done += 1
        new, _ = self._executor(values, batch, clock.t, clock.rate)
        if "graph" in self._executor.mode:  # its tensors are overwritten by the next call
            return {name: value.clone() for name, value in new.items()}
        return new

    def after(self, state: State) -> State:
        """The state at the end of a transition, with what a resumed run must know."""
        if self._executor is None:
            return state
        if self._done >= self._after:
            self._executor, self._after = Executor(self._step, "compiled"), math.inf
        like = state["inner.mode"]
        mode = torch.full_like(like, MODES.index(self._executor.mode))
        rest = torch.full_like(like, min(self._after - self._done, _NEVER))
        return {**state, "inner.mode": mode, "inner.rest": rest}

    def part(self, inner: Part) -> Part:
        """Another fixed sequence of operations, without a gradient, executed as `inner` is; eagerly
        until that has been chosen, in the first transition of a run."""
        nothing = torch.zeros((), device=self.run.device)
        batch = Batch((), (), nothing)
        step = lambda values, *_: (values, inner(values))  # noqa: E731
        ready: dict[str, Executor] = {}

        def call(values: State) -> State:
            mode = "eager" if self._executor is None else self._executor.mode
            if mode not in _FOLLOWED:
                return inner(values)
            if mode not in ready:
                ready[mode] = Executor(step, mode)
            return ready[mode](values, batch, nothing, nothing)[1]

        return call

    def _step(self, values: State, batch: Batch, t: Any, rate: Any, owned: bool = False) -> Any:
        return self.inner(self._state, batch, values), {}

    def _chosen(self, batch: Batch, clock: Clock, values: State) -> Executor:
        if self.run.engine.mode != "eager" or self.run.engine.reason == "asked for":
            return Executor(self._step, self.run.engine.mode)
        trial = lambda: (dict(values), batch, clock.t, clock.rate)  # noqa: E731
        found = choose_executor(self._step, trial, self.run, self.calls, False, worth=1.0)
        if found.mode in ("eager", "traced"):
            self._after = compile_after(found, trial, self.run)
        return found


def start_recorded(like: torch.Tensor) -> State:
    """How the inner step is executed: the number of the mode, −1 before it is chosen, and the calls
    after which it is compiled; [M]."""
    return {"inner.mode": torch.full_like(like, -1.0), "inner.rest": torch.zeros_like(like)}


def mode_name(state: State) -> str | None:
    number = int(state["inner.mode"][0])
    return MODES[number] if number >= 0 else None
