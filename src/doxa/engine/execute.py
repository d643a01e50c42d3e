"""One step as a function of tensors: eager, traced, compiled, or a CUDA graph.

A stage's step is a function of (state, batch, t, rate). `Executor` flattens these into a list of
tensors, with the random numbers that are drawn ahead, so that the step can be recorded once with
`make_fx` (forward, backward and update become one list of operations without autograd's
bookkeeping), compiled, or captured.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from doxa.data import Batch
from doxa.engine.ahead import Ahead, Request
from doxa.engine.simplify import overwritten, simplified, spelled_out, thrifty
from doxa.optim import unfused

log = logging.getLogger("doxa")

State = dict[str, Tensor]
Step = Callable[[State, Batch, Tensor, Tensor], tuple[State, dict[str, Tensor]]]

# One step at a time is recorded, compiled or captured in a process. `make_fx` replaces
# `nn.Module.__call__` meanwhile and then puts back what it found: two at a time would put back each
# other's. Networks of other threads still run, through that replacement, which calls them as they
# are. Promised for fits of this library: a program that records with torch.fx in another thread of
# its own does not take this lock.
_recording = threading.RLock()


class Executor:
    """Runs one stage's step in a given mode; falls back to eager if a mode fails. `ahead` is where
    the step's random numbers come from, if it does not compute them."""

    def __init__(self, step: Step, mode: str = "eager", ahead: Ahead | None = None) -> None:
        self.step = step
        self.mode = mode
        self.ahead = ahead
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
                with _recording:
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
                inner = _traced(self.step, state, batch, t, rate, self.ahead, compiled=True)
            return _Captured(inner, state, batch, t, rate, self.mode == "graph")
        return _traced(self.step, state, batch, t, rate, self.ahead, self.mode == "compiled")


def _leaves(batch: Batch) -> tuple[list[Tensor], Any]:
    given = [() if part is None else (part,) for part in (batch.weight, batch.points)]
    return tree_flatten((batch.x, batch.y, *given))


def _batch(leaves: list[Tensor], spec: Any, like: Batch) -> Batch:
    """From the leaves back to a batch."""
    x, y, weight, points = tree_unflatten(leaves, spec)
    own, aims = weight[0] if weight else None, points[0] if points else None
    return Batch(x, y, like.scale, own, like.shared, aims)


def _tensors(batch: Batch) -> list[Tensor]:
    """The leaves alone: asked for at every step."""
    x, y, weight = batch.x, batch.y, batch.weight
    if weight is None and batch.points is None:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return [x, y]
        if isinstance(x, tuple) and not x:
            return []
    return leaves_of(batch)


def leaves_of(batch: Batch) -> list[Any]:
    """What a batch is made of; not only tensors, where rows are of a kind of their own."""
    return _leaves(batch)[0]


def _traced(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, ahead: Ahead | None,
    compiled: bool,
) -> Step:  # fmt: skip
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(state)
    leaves, spec = _leaves(batch)
    requests = _rehearsed(step, state, batch, t, rate, ahead)
    changed: list[str] = []
    keys: list[str] = []
    owned = {} if compiled else {"owned": True}  # an optimiser overwrites what is `ours` below
    ends = len(names), len(names) + len(leaves)

    def flat(*tensors: Tensor) -> list[Tensor]:
        values, rows, rest = tensors[: ends[0]], tensors[slice(*ends)], tensors[ends[1] :]
        given_rows = _batch(list(rows), spec, batch)
        given = dict(zip(names, values, strict=True))
        numbers = dict(zip(requests, rest[2:], strict=True))
        with ahead.giving(numbers) if ahead is not None else nullcontext():
            new, info = step(dict(given), given_rows, rest[0], rest[1], **owned)
        changed[:] = [name for name in new if new[name] is not given.get(name)]
        keys[:] = list(info)
        out = [new[name] for name in changed]
        return [v.contiguous() for v in out] + list(info.values()) if compiled else [
            *out, *info.values()
        ]  # fmt: skip

    readers = [] if ahead is None else [ahead.reader(request) for request in requests]

    def numbers(step: int) -> list[Tensor]:
        return [read(step) for read in readers]

    example = [*(_fresh(state[name]) for name in names), *map(_solid, leaves), t, rate]
    example += map(_solid, numbers(int(t)))
    with unfused() if compiled else nullcontext():
        module = make_fx(flat)(*example)
    module = simplified(module, example)
    written = _written(module, names)
    ours: State = {}  # the state as it was handed out last
    call: Callable[..., Any] = _compiled(module, example) if compiled else thrifty(module).forward

    def run(state: State, batch: Batch, t: Tensor, rate: Tensor) -> Any:
        nonlocal ours
        if state is not ours:  # somebody else may hold these
            state = state | {name: state[name].clone() for name in written}
        given = [*(state[name] for name in names), *_tensors(batch), t, rate]
        if requests:
            given += numbers(int(t))
        with torch.no_grad():
            out = call(*map(_solid, given) if compiled else given)
        new = ours = state | dict(zip(changed, out, strict=False))
        return new, dict(zip(keys, out[len(changed) :], strict=True))

    run(
        {k: v.clone() for k, v in state.items()}, batch, t, rate
    )  # compile now, on a copy, so that a failure falls back before anything has changed
    return run


def _written(module: torch.fx.GraphModule, names: list[str]) -> list[str]:
    """The entries of the state that a recorded step overwrites."""
    held = {value for node in module.graph.nodes for value in overwritten(node)}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [name for name, node in zip(names, inputs, strict=False) if node in held]


def _rehearsed(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, ahead: Ahead | None
) -> list[Request]:
    """The random numbers that a step asks for. The step is run once on a copy, so that whatever is
    computed once and kept is not computed while the step is recorded."""
    copy = {k: v.clone() for k, v in state.items()}
    if ahead is None:
        step(copy, batch, t, rate)
        return []
    with ahead.listening() as asked:
        step(copy, batch, t, rate)
    return list(asked)


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
        self.batch = _batch(self.inputs, spec, batch)
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
            torch._foreach_copy_(self.inputs, leaves_of(batch))
        self.t.copy_(t)
        self.rate.copy_(rate)
        self.graph.replay()
        return self._given, self.info
