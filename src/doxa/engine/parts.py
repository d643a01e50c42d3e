"""The parts of a kernel's transition, each recorded or compiled by itself.

A transition of NUTS is no fixed sequence of operations, and one of HMC repeats the same leapfrog
step many times, which takes minutes to compile as a whole. The step with the gradient in it is
fixed and small. How it is executed follows from the work when a run begins (`rule`); where only
time can tell how often it will be called, it is compiled after so many calls. A checkpoint has both
(`memory`): a run that is resumed goes on as it began, bit for bit. What else is repeated follows
it: beside a compiled gradient a dozen small operations are what takes time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from doxa.data import Batch
from doxa.engine.execute import Executor, State
from doxa.engine.rule import choose_executor, compile_after

if TYPE_CHECKING:
    from doxa.method import Clock, Run

Inner = Callable[[State, Batch, State], State]  # the state, rows, and the values it advances
Part = Callable[[State], State]

_FOLLOWED = ("traced", "compiled")  # a graph's tensors would be overwritten by its next call


class Recorded:
    """Calls `inner`, in the mode the engine was asked for or by the rule.

    Parameters
    ----------
    calls: about how many there will be, for what it is worth to prepare them.
    """

    def __init__(self, run: Run, inner: Inner, calls: int) -> None:
        self.run, self.inner, self.calls = run, inner, calls
        self._executor: Executor | None = None
        self._state: State = {}
        self._done, self._after = 0, math.inf

    @property
    def mode(self) -> str | None:
        """How the step is executed; None before that is chosen."""
        return None if self._executor is None else self._executor.mode

    def memory(self) -> dict[str, Any]:
        """What a resumed run must know: the mode, and the calls after which it is compiled."""
        rest = self._after - self._done
        return {"mode": self.mode, "rest": rest if math.isfinite(rest) else None}

    def resume(self, memory: dict[str, Any]) -> None:
        """Go on as the run did that left this memory."""
        if memory["mode"] is not None:
            self._done, self._after = 0, math.inf if memory["rest"] is None else memory["rest"]
            self._executor = Executor(self._step, memory["mode"])

    def __call__(self, state: State, batch: Batch, clock: Clock, values: State) -> State:
        self._state = state  # for buffers, which stay as they are
        if self._executor is None:
            self._executor = self._chosen(batch, clock, values)
        self._done += 1
        new, _ = self._executor(values, batch, clock.t, clock.rate)
        if "graph" in self._executor.mode:  # its tensors are overwritten by the next call
            return {name: value.clone() for name, value in new.items()}
        return new

    def end_transition(self) -> None:
        """Compile from the next transition on, where there have been enough calls."""
        if self._done >= self._after:
            self._executor, self._after = Executor(self._step, "compiled"), math.inf

    def part(self, inner: Part) -> Part:
        """Another fixed sequence of operations, without a gradient, executed as `inner` is; eagerly
        until that has been chosen, in the first transition of a run."""
        nothing = torch.zeros((), device=self.run.device)
        batch = Batch((), (), nothing)
        step = lambda values, *_, owned=False: (values, inner(values))  # noqa: E731
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
        if self.run.engine.mode is not None:
            return Executor(self._step, self.run.engine.mode)
        trial = lambda: (dict(values), batch, clock.t, clock.rate)  # noqa: E731
        found = choose_executor(self._step, trial, self.run, self.calls, worth=1.0)
        if found.mode in ("eager", "traced"):
            self._after = compile_after(self._step, trial, self.run)
        return found
