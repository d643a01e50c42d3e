"""One step as a function of tensors: eager, traced, compiled, or a CUDA graph.

A stage's step is a function of (state, batch, t, rate). `Executor` flattens these into a list of
tensors, so that the step can be recorded once with `make_fx` (forward, backward and update become
one list of operations without autograd's bookkeeping), compiled, or captured.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from doxa.data import Batch
from doxa.optim import unfused
from doxa.replay import simplified, spelled_out

log = logging.getLogger("doxa")

State = dict[str, Tensor]
Step = Callable[[State, Batch, Tensor, Tensor], tuple[State, dict[str, Tensor]]]


class Executor:
    """Runs one stage's step in a given mode; falls back to eager if a mode fails."""

    def __init__(self, step: Step, mode: str = "eager") -> None:
        self.step = step
        self.mode = mode
        self._ready: Any = None
        self._shapes: list[torch.Size] = []

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if self.mode == "eager":
            return self.step(state, batch, t, rate)
        shapes = [leaf.shape for leaf in _tensors(batch)]
        if self._ready is None:
            try:
                self._ready = self._prepare(state, batch, t, rate)
                self._shapes = shapes
            except Exception as error:  # whatever a tracer or compiler raises: eager always works
                log.warning(
                    "engine: %s failed (%s: %s); running eagerly",
                    self.mode, type(error).__name__, (str(error).splitlines() or [""])[0][:120],
                )  # fmt: skip
                self.mode = "eager"
                return self.step(state, batch, t, rate)
        if shapes != self._shapes:  # the last, shorter batch of a pass
            return self.step(state, batch, t, rate)
        try:
            return self._ready(state, batch, t, rate)
        except torch.linalg.LinAlgError:  # of some member: run eagerly, it can be told apart
            return self.step(state, batch, t, rate)

    def _prepare(self, state: State, batch: Batch, t: Tensor, rate: Tensor) -> Step:
        if self.mode in ("graph", "compiled-graph"):
            inner = self.step
            if self.mode == "compiled-graph":
                inner = _traced(self.step, state, batch, t, rate, compiled=True)
            return _Captured(inner, state, batch, t, rate, self.mode == "graph")
        return _traced(self.step, state, batch, t, rate, self.mode == "compiled")


def _leaves(batch: Batch) -> tuple[list[Tensor], Any]:
    weight = () if batch.weight is None else (batch.weight,)
    return tree_flatten((batch.x, batch.y, *weight))


def _tensors(batch: Batch) -> list[Tensor]:
    """The leaves alone: asked for at every step."""
    x, y, weight = batch.x, batch.y, batch.weight
    if weight is None and isinstance(x, Tensor) and isinstance(y, Tensor):
        return [x, y]
    if isinstance(x, tuple) and not x and weight is None:
        return []
    return _leaves(batch)[0]


def _traced(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, compiled: bool
) -> Step:
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(state)
    leaves, spec = _leaves(batch)
    scale, shared = batch.scale, batch.shared
    changed: list[str] = []
    keys: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        values, rest = tensors[: len(names)], tensors[len(names) :]
        x, y, *weight = tree_unflatten(list(rest[:-2]), spec)
        rows = Batch(x, y, scale, weight[0] if weight else None, shared)
        given = dict(zip(names, values, strict=True))
        new, info = step(dict(given), rows, rest[-2], rest[-1])
        changed[:] = [name for name in names if new[name] is not given[name]]
        keys[:] = list(info)
        out = [new[name] for name in changed]
        return [v.contiguous() for v in out] + list(info.values()) if compiled else [
            *out, *info.values()
        ]  # fmt: skip

    example = [*(_fresh(state[name]) for name in names), *map(_solid, leaves), t, rate]
    with unfused() if compiled else nullcontext():
        module = make_fx(flat)(*example)
    module = simplified(module, example)
    call: Callable[..., Any] = _compiled(module, example) if compiled else module.forward

    def run(state: State, batch: Batch, t: Tensor, rate: Tensor) -> Any:
        given = [*(state[name] for name in names), *_tensors(batch), t, rate]
        with torch.no_grad():
            out = call(*map(_solid, given) if compiled else given)
        new = state | dict(zip(changed, out, strict=False))
        return new, dict(zip(keys, out[len(changed) :], strict=True))

    run(
        {k: v.clone() for k, v in state.items()}, batch, t, rate
    )  # compile now, on a copy, so that a failure falls back before anything has changed
    return run


def _solid(value: Tensor) -> Tensor:
    return value if value.is_contiguous() else value.contiguous()


def _fresh(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _compiled(module: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
    """On the CPU without dynamo, whose guards cost as much as a small step itself: shapes and
    types never change here, and `_solid` sees to the strides. tanh becomes 2σ(2x) − 1, three times
    as fast and as exact as single precision is near ±1. The processor's word for the instructions
    it has is taken: trying them out takes five seconds, and a failure falls back to eager."""
    if example[0].device.type != "cpu":
        return torch.compile(spelled_out(module), dynamic=False)
    wishes = {
        "size_asserts": False, "alignment_asserts": False, "cpp.use_decompose_tanh": True,
        "cpp.vec_isa_ok": True,
    }  # fmt: skip
    known = set(torch._inductor.list_options())  # of this version
    options = {name: wish for name, wish in wishes.items() if name in known}
    with torch.no_grad():
        return torch._inductor.compile(module, list(example), options=options)


class _Captured:
    """A CUDA graph of the step, with its own copies of everything it reads and writes."""

    def __init__(
        self, step: Any, state: State, batch: Batch, t: Tensor, rate: Tensor, in_place: bool
    ) -> None:
        leaves, spec = _leaves(batch)
        owned = {"owned": True} if in_place else {}  # the graph's tensors are its own
        self.state = {k: v.clone() for k, v in state.items()}
        self.inputs = [leaf.clone() for leaf in leaves]
        self.t, self.rate = t.clone(), rate.clone()
        x, y, *weight = tree_unflatten(self.inputs, spec)
        self.batch = Batch(x, y, batch.scale, weight[0] if weight else None, batch.shared)
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for _ in range(3):
                step(dict(self.state), self.batch, self.t, self.rate, **owned)
        torch.cuda.current_stream().wait_stream(self.side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            new, self.info = step(dict(self.state), self.batch, self.t, self.rate, **owned)
            for name, value in self.state.items():
                if new[name] is not value:
                    value.copy_(new[name])
        self._given: State | None = None

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if state is not self._given:  # the driver hands our own tensors back, except at the start
            for name, value in self.state.items():
                value.copy_(state[name])
            self._given = dict(self.state)
        if self.inputs:
            torch._foreach_copy_(self.inputs, _leaves(batch)[0])
        self.t.copy_(t)
        self.rate.copy_(rate)
        self.graph.replay()
        return self._given, self.info


_COMPILE_SECONDS = 8.0
_TRACE_STEPS = 500  # recording costs some 150 steps and may save a third of each
_GRAPH_STEPS = 100
_LOOP_MEMBERS = 16  # beyond this a captured loop over members is never the fastest

Trial = Callable[[], tuple[State, Batch, Tensor, Tensor]]


def choose_executor(
    step: Step, trial: Trial, run: Any, steps: int, other_engines: bool = True, worth: float = 3.0
) -> Executor:
    """How to execute a stage of so many steps.

    On the CPU: eagerly; recorded, if a measurement says that it is faster; compiled, if that saves
    more than `worth` times what compiling costs. On a GPU every candidate is measured, and the
    run's engine set to the fastest: one member after the other can win where each fills the chip.
    Without `other_engines` the engine stays as it is, and so does every bit of the result.
    """
    eager = Executor(step)
    if not _repeats(run) or not all(isinstance(leaf, Tensor) for leaf in _leaves(trial()[1])[0]):
        return eager
    if run.device.type == "cuda":
        if steps < _GRAPH_STEPS:
            return eager
        if other_engines:
            return _fastest_engine(step, trial, run)
        return _fastest([eager, Executor(step, "graph")], trial)[0]
    bare = run.model is None
    if steps < _TRACE_STEPS or (not bare and run.model.plan is None):
        return eager
    small = run.size * run.layout.size < 1e6
    if small and 0.6 * _time(step, trial(), 3) * steps > worth * _COMPILE_SECONDS:
        return Executor(step, "compiled")
    return _fastest([eager, Executor(step, "traced")], trial)[0]


def compile_after(step: Step, trial: Trial, run: Any) -> float:
    """After how many calls a step whose number is not known beforehand is compiled: when it has
    taken as long as compiling does. Infinite where it cannot be, or not with gain."""
    plain = run.model is None or run.model.plan is not None
    small = run.size * trial()[0]["theta"].shape[1] < 1e6
    if run.device.type != "cpu" or not (plain and small and _repeats(run)):
        return math.inf
    return math.ceil(_COMPILE_SECONDS / _time(step, trial(), 3))


def _repeats(run: Any) -> bool:
    """Whether a step is a fixed sequence of tensor operations that can be recorded: not where a
    network draws for itself or changes its buffers, nor where a density refused to be stacked."""
    if run.model is None:
        return run.density is not None and run.engine.kind == "stack"
    return not (run.model.tracked or run.model.draws_itself)


def _fastest_engine(step: Step, trial: Trial, run: Any) -> Executor:
    given = run.engine
    kinds = (
        ["stack", "loop"] if given.kind == "stack" and run.size <= _LOOP_MEMBERS else [given.kind]
    )
    found = []
    for kind in kinds:
        run.engine = replace(given, kind=kind)
        executor, seconds = _fastest([Executor(step), Executor(step, "graph")], trial)
        found.append((seconds, kind, executor))
    seconds, kind, executor = min(found, key=lambda each: each[0])
    run.engine = replace(given, kind=kind, reason=f"measured: {seconds * 1e3:.3g} ms a step")
    log.info("engine: %s:%s (%s)", kind, executor.mode, run.engine.reason)
    return executor


def _fastest(executors: list[Executor], trial: Trial) -> tuple[Executor, float]:
    timed = [(_time(executor, trial(), 8), executor) for executor in executors]
    seconds, executor = min(timed, key=lambda each: each[0])
    return executor, seconds


def _time(step: Step, arguments: tuple[State, Batch, Tensor, Tensor], repeats: int) -> float:
    """The median of seconds a call, on copies: the state is not advanced."""
    state, batch, t, rate = arguments
    state = {k: v.clone() for k, v in state.items()}
    step(state, batch, t, rate)
    times = []
    for _ in range(repeats):
        if t.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        state, _ = step(state, batch, t, rate)
        if t.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
