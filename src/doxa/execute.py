"""One step as a function of tensors: eager, traced, compiled, or a CUDA graph.

A stage's step is a function of (state, batch, t, rate). `Executor` flattens these into a list of
tensors, so that the step can be recorded once with `make_fx` (forward, backward and update become
one list of operations without autograd's bookkeeping), compiled, or captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from doxa.data import Batch

log = logging.getLogger("doxa")

State = dict[str, Tensor]
Step = Callable[[State, Batch, Tensor, Tensor], tuple[State, dict[str, Tensor]]]


class Executor:
    """Runs one stage's step in a given mode; falls back to eager if a mode fails."""

    def __init__(self, step: Step, mode: str = "eager") -> None:
        self.step = step
        self.mode = mode
        self._ready: Any = None

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if self.mode == "eager":
            return self.step(state, batch, t, rate)
        if self._ready is None:
            try:
                self._ready = self._prepare(state, batch, t, rate)
            except Exception as error:  # whatever a tracer or compiler raises: eager always works
                log.warning(
                    "engine: %s failed (%s: %s); running eagerly",
                    self.mode, type(error).__name__, (str(error).splitlines() or [""])[0][:120],
                )  # fmt: skip
                self.mode = "eager"
                return self.step(state, batch, t, rate)
        return self._ready(state, batch, t, rate)

    def _prepare(self, state: State, batch: Batch, t: Tensor, rate: Tensor) -> Step:
        if self.mode in ("graph", "compiled-graph"):
            inner = self.step
            if self.mode == "compiled-graph":
                inner = _traced(self.step, state, batch, t, rate, compiled=True)
            return _Captured(inner, state, batch, t, rate)
        return _traced(self.step, state, batch, t, rate, self.mode == "compiled")


def _leaves(batch: Batch) -> tuple[list[Tensor], Any]:
    weight = () if batch.weight is None else (batch.weight,)
    return tree_flatten((batch.x, batch.y, *weight))


def _traced(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, compiled: bool
) -> Step:
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(state)
    leaves, spec = _leaves(batch)
    scale, shared = batch.scale, batch.shared
    keys: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        values, rest = tensors[: len(names)], tensors[len(names) :]
        x, y, *weight = tree_unflatten(list(rest[:-2]), spec)
        rows = Batch(x, y, scale, weight[0] if weight else None, shared)
        new, info = step(dict(zip(names, values, strict=True)), rows, rest[-2], rest[-1])
        keys[:] = list(info)
        return [new[name] for name in names] + list(info.values())

    example = [*(state[name].clone() for name in names), *leaves, t, rate]
    module = make_fx(flat)(*example)
    module.graph.eliminate_dead_code()
    module.recompile()
    call: Callable[..., Any] = module.forward
    if compiled:
        call = torch.compile(module, dynamic=False)

    def run(state: State, batch: Batch, t: Tensor, rate: Tensor) -> Any:
        with torch.no_grad():
            out = call(*(state[name] for name in names), *_leaves(batch)[0], t, rate)
        new = dict(zip(names, out, strict=False))
        return new, dict(zip(keys, out[len(names) :], strict=True))

    run(
        {k: v.clone() for k, v in state.items()}, batch, t, rate
    )  # compile now, on a copy, so that a failure falls back before anything has changed
    return run


class _Captured:
    """A CUDA graph of the step, with its own copies of everything it reads and writes."""

    def __init__(self, step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor) -> None:
        leaves, spec = _leaves(batch)
        self.state = {k: v.clone() for k, v in state.items()}
        self.inputs = [leaf.clone() for leaf in leaves]
        self.t, self.rate = t.clone(), rate.clone()
        x, y, *weight = tree_unflatten(self.inputs, spec)
        self.batch = Batch(x, y, batch.scale, weight[0] if weight else None, batch.shared)
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(3):
                step(dict(self.state), self.batch, self.t, self.rate)
        torch.cuda.current_stream().wait_stream(self.side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            new, self.info = step(dict(self.state), self.batch, self.t, self.rate)
            for name, value in self.state.items():
                value.copy_(new[name])
        self._given: State | None = None

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if state is not self._given:  # the driver hands our own tensors back, except at the start
            for name, value in self.state.items():
                value.copy_(state[name])
            self._given = dict(self.state)
        torch._foreach_copy_(self.inputs, _leaves(batch)[0])
        self.t.copy_(t)
        self.rate.copy_(rate)
        self.graph.replay()
        return self._given, self.info


_COMPILE_SECONDS = 8.0
_TRACE_STEPS = 150  # below this, recording the step does not pay


def choose_mode(step: Step, trial: Callable[[], tuple[State, Batch, Tensor, Tensor]], run: Any,
                steps: int) -> str:  # fmt: skip
    """How to execute a stage: by a rule on the CPU, by a short measurement on a GPU."""
    if steps < _TRACE_STEPS or run.model is None or run.model.tracked or run.model.draws_itself:
        return "eager"
    if run.device.type == "cuda":
        return _fastest(step, trial, ("eager", "graph"))
    if run.model.plan is None or not isinstance(trial()[1].x, Tensor):
        return "eager"
    seconds = _time(step, trial(), 3)
    if 0.6 * seconds * steps > 3 * _COMPILE_SECONDS and run.size * run.layout.size < 1e6:
        return "compiled"
    return "traced"


def _fastest(
    step: Step, trial: Callable[[], tuple[State, Batch, Tensor, Tensor]], modes: tuple[str, ...]
) -> str:
    timed = {}
    for mode in modes:
        state, batch, t, rate = trial()
        executor = Executor(step, mode)
        executor({k: v.clone() for k, v in state.items()}, batch, t, rate)
        timed[executor.mode] = _time(executor, (state, batch, t, rate), 10)
    return min(timed, key=lambda mode: timed[mode])


def _time(step: Step, arguments: tuple[State, Batch, Tensor, Tensor], repeats: int) -> float:
    """Seconds a call, on copies: the state is not advanced."""
    state, batch, t, rate = arguments
    state = {k: v.clone() for k, v in state.items()}
    step(state, batch, t, rate)
    if t.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        state, _ = step(state, batch, t, rate)
    if t.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
