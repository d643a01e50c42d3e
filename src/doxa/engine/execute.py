"""Execution of a step: eager, traced, compiled, or as a CUDA graph.

**Executor.** The step of a stage is a function of (state, batch, t, rate). `Executor` flattens
these into a list of tensors, with the random numbers that are drawn ahead. The step can then be
recorded once with `make_fx` (forward, backward and update become one list of operations without the
overhead of autograd), compiled, or captured.

**Choice of the mode** (`choose_executor`). The mode affects the last bits of a result. So it
depends only on the work, the device and the version of torch, and not on the load of the machine.
(If recording or compiling fails, a step runs eagerly.) On the CPU, the operations of a step are
counted, not timed. Recording costs about as much as 500 recorded steps save, for any number of
operations. Compared with a recorded step, a compiled one saves about

    4 µs × operations + 0.3 ns × numbers written

(`benchmarks/modes.py` measures both, on one thread), and compiling takes about 8 s. On a GPU,
making a graph costs almost nothing; a compiled step in a graph saves 1.2 µs × operations + 2 ps ×
numbers written, and takes about 25 s to compile.

**Parts of a transition** (`Recorded`). A transition of NUTS is not a fixed sequence of operations.
A transition of HMC repeats the same leapfrog step many times, and takes minutes to compile as a
whole. The single step with its gradient is fixed and small, so it is recorded or compiled alone.
Its mode follows from the work at the start of a run; if the number of calls is not known in
advance, it is compiled after a number of calls (`compile_after`). Both are in the checkpoint
(`memory`), so that a resumed run continues bit for bit. Other repeated parts are executed in the
same mode: next to a compiled gradient, a dozen small operations would dominate the time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from doxa.data import Batch, batch_rows
from doxa.engine.engine import Count
from doxa.engine.simplify import expand_products, overwritten, reuse_memory, simplify
from doxa.model.inspection import draws_itself
from doxa.model.model import LogDensity, Network
from doxa.noise import PrefetchedNoise, Request
from doxa.optim import unfused

if TYPE_CHECKING:
    from doxa.method import Clock, Run


log = logging.getLogger("doxa")

State = dict[str, Tensor]
Step = Callable[..., tuple[State, dict[str, Tensor]]]  # (state, batch, t, rate, owned=False)

# Only one step at a time is recorded, compiled or captured in a process. `make_fx` replaces
# `nn.Module.__call__` during recording, and restores it afterwards: two at a time would restore
# each other's replacement. Networks of other threads still run, through the replacement, which
# calls them unchanged. This protects fits of this library only: other code that records with
# torch.fx in another thread does not take this lock.
_recording = threading.RLock()


class Executor:
    """Runs the step of a stage in a given mode; falls back to eager if the mode fails. `ahead` is
    the source of the step's random numbers, if they are drawn ahead."""

    def __init__(
        self, step: Step, mode: str = "eager", ahead: PrefetchedNoise | None = None,
        asked: bool = False,
    ) -> None:  # fmt: skip
        self.step = step
        self.mode = mode
        self.ahead = ahead
        self.asked = asked  # by the user: a mode that cannot run is then worth a warning
        self.ours: State | None = None  # a state that nothing else refers to: steps overwrite it
        self._ready: Any = None
        self._shapes: list[torch.Size] = []

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if self.mode == "eager":
            new, info = self.step(state, batch, t, rate, owned=state is self.ours)
            self.ours = new
            return new, info
        shapes = [leaf.shape for leaf in _tensors(batch)]
        if self._ready is None:
            try:
                with _recording:
                    self._ready = self._prepare(state, batch, t, rate)
                self._shapes = shapes
            except Exception as error:  # whatever a tracer or compiler raises: eager always works
                cause = _first(error)
                log.log(
                    logging.WARNING if self.asked else logging.INFO,
                    "engine: %s failed (%s: %s); running eagerly, with the same results",
                    self.mode, type(cause).__name__, (str(cause).splitlines() or [""])[0][:120],
                )  # fmt: skip
                self.mode = "eager"
                return self.step(state, batch, t, rate)
        if shapes != self._shapes:  # the last, shorter batch of a pass
            return self.step(state, batch, t, rate)
        try:
            return self._ready(state, batch, t, rate)
        except torch.linalg.LinAlgError:  # an eager run can identify the member that failed
            return self.step(state, batch, t, rate)

    def _prepare(self, state: State, batch: Batch, t: Tensor, rate: Tensor) -> Step:
        if self.mode in ("graph", "compiled-graph"):
            inner = self.step
            if self.mode == "compiled-graph":
                inner = _traced(
                    self.step, state, batch, t, rate, self.ahead, compiled=True, in_place=True
                )
            return _Captured(inner, state, batch, t, rate, self.mode == "graph")
        return _traced(self.step, state, batch, t, rate, self.ahead, self.mode == "compiled")


def _leaves(batch: Batch) -> tuple[list[Tensor], Any]:
    given = [() if part is None else (part,) for part in (batch.weight, batch.points)]
    return tree_flatten((batch.x, batch.y, *given))


def _batch(leaves: list[Tensor], spec: Any, like: Batch) -> Batch:
    """A batch from its leaves."""
    x, y, weight, points = tree_unflatten(leaves, spec)
    own, aims = weight[0] if weight else None, points[0] if points else None
    return Batch(x, y, like.scale, own, like.shared, aims)


def _tensors(batch: Batch) -> list[Tensor]:
    """The leaves only; this is called at each step."""
    x, y, weight = batch.x, batch.y, batch.weight
    if weight is None and batch.points is None:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return [x, y]
        if isinstance(x, tuple) and not x:
            return []
    return leaves_of(batch)


def leaves_of(batch: Batch) -> list[Any]:
    """The leaves of a batch; not all are tensors if rows have a type of their own."""
    return _leaves(batch)[0]


def _traced(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, ahead: PrefetchedNoise | None,
    compiled: bool, in_place: bool = False,
) -> Step:  # fmt: skip
    """The step as recorded operations. `in_place`: compiled, and each call overwrites the state it
    is given, which is contiguous; it returns the same tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names = list(state)
    leaves, spec = _leaves(batch)
    requests = _noise_requests(step, state, batch, t, rate, ahead)
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

    example = [
        *(_contiguous_copy(state[name]) for name in names),
        *map(_contiguous, leaves),
        t,
        rate,
    ]
    example += map(_contiguous, numbers(int(t)))
    with unfused() if compiled else nullcontext():
        module = make_fx(flat)(*example)
    module = simplify(module, example)
    if in_place:
        _store_outputs(module, [names.index(name) for name in changed])
    written = _written(module, names)
    ours: State = {}  # the state that was returned last
    call: Callable[..., Any] = (
        _compiled(module, example) if compiled else reuse_memory(module).forward
    )

    def run(state: State, batch: Batch, t: Tensor, rate: Tensor) -> Any:
        nonlocal ours
        if in_place:
            given = [*(state[name] for name in names), *map(_contiguous, _tensors(batch)), t, rate]
            with torch.no_grad():
                out = call(*given, *map(_contiguous, numbers(int(t)) if requests else ()))
            return state, dict(zip(keys, out, strict=True))
        if state is not ours:  # other code may refer to these tensors
            state = state | {name: state[name].clone() for name in written}
        given = [*(state[name] for name in names), *_tensors(batch), t, rate]
        if requests:
            given += numbers(int(t))
        with torch.no_grad():
            out = call(*map(_contiguous, given) if compiled else given)
        new = ours = state | dict(zip(changed, out, strict=False))
        return new, dict(zip(keys, out[len(changed) :], strict=True))

    run(
        {k: _contiguous_copy(v) for k, v in state.items()}, batch, t, rate
    )  # compile now, on a copy, so that a failure falls back before anything has changed
    return run


def _store_outputs(module: torch.fx.GraphModule, places: list[int]) -> None:
    """Make the first outputs of a module overwrite its inputs at these places, as the last of its
    operations. A compiler then writes them there, instead of to new memory."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    output = next(node for node in module.graph.nodes if node.op == "output")
    values = list(output.args[0])
    with module.graph.inserting_before(output):
        # an entry that is moved to another name is read before it is overwritten
        stored = [
            module.graph.call_function(torch.ops.aten.clone.default, (value,))
            if _is_an_input(value) else value
            for value in values[: len(places)]
        ]  # fmt: skip
        for place, value in zip(places, stored, strict=True):
            module.graph.call_function(torch.ops.aten.copy_.default, (inputs[place], value))
    output.args = (values[len(places) :],)
    module.recompile()


def _is_an_input(node: torch.fx.Node) -> bool:
    """Whether a value is an input of the module, or a view of one."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _written(module: torch.fx.GraphModule, names: list[str]) -> list[str]:
    """The entries of the state that a recorded step overwrites."""
    held = {value for node in module.graph.nodes for value in overwritten(node)}
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [name for name, node in zip(names, inputs, strict=False) if node in held]


def _noise_requests(
    step: Step, state: State, batch: Batch, t: Tensor, rate: Tensor, ahead: PrefetchedNoise | None
) -> list[Request]:
    """The random numbers that a step requests. The step is run once on a copy, so that values that
    are computed once and cached are not part of the recording."""
    copy = {k: v.clone() for k, v in state.items()}
    if ahead is None:
        step(copy, batch, t, rate)
        return []
    with ahead.listening() as asked:
        step(copy, batch, t, rate)
    return list(asked)


def _contiguous(value: Tensor) -> Tensor:
    return value if value.is_contiguous() else value.contiguous()


def _contiguous_copy(value: Tensor) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _compiled(module: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
    """The compiled module. On the CPU, dynamo is not used: its guards cost as much as a small step.
    Shapes and types never change here, and `_contiguous` makes the strides fixed. tanh becomes
    2σ(2x) − 1, which is three times as fast, and as exact as single precision is near ±1. The
    processor's list of instructions is used without a test, which would take five seconds; a
    failure falls back to eager."""
    if example[0].device.type != "cpu":
        return torch.compile(expand_products(module), dynamic=False)
    wanted = {
        "size_asserts": False, "alignment_asserts": False, "cpp.use_decompose_tanh": True,
        "cpp.vec_isa_ok": True,
    }  # fmt: skip
    known = set(torch._inductor.list_options())  # of this version
    options = {name: value for name, value in wanted.items() if name in known}
    with torch.no_grad():
        return torch._inductor.compile(module, list(example), options=options)


def _first(error: BaseException) -> BaseException:
    """The error that came before all others: a capture that is broken off raises one of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return error


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what runs inside. After an error, torch's random generator of the device would stay
    in the state of a capture, and any later draw of the user's would fail. An empty capture resets
    it."""
    try:
        with torch.cuda.graph(graph):
            yield
    except Exception:
        with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
        raise


class _Captured:
    """A CUDA graph of the step, with its own copies of all tensors that it reads and writes."""

    def __init__(
        self, step: Any, state: State, batch: Batch, t: Tensor, rate: Tensor, in_place: bool
    ) -> None:
        leaves, spec = _leaves(batch)
        owned = {"owned": True} if in_place else {}  # the graph's tensors are its own
        self.state = {k: _contiguous_copy(v) for k, v in state.items()}
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
        with _captured(self.graph):
            new, self.info = step(dict(self.state), self.batch, self.t, self.rate, **owned)
            own = {value.untyped_storage().data_ptr() for value in self.state.values()}
            moved = {
                name: new[name].clone() if new[name].untyped_storage().data_ptr() in own
                else new[name]
                for name, value in self.state.items() if new[name] is not value
            }  # fmt: skip
            for name, value in moved.items():
                self.state[name].copy_(value)
        self._given: State | None = None

    def __call__(
        self, state: State, batch: Batch, t: Tensor, rate: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        if state is not self._given:  # the driver passes our own tensors, except at the start
            for name, value in self.state.items():
                value.copy_(state[name])
            self._given = dict(self.state)
        if self.inputs:
            torch._foreach_copy_(self.inputs, leaves_of(batch))
        self.t.copy_(t)
        self.rate.copy_(rate)
        self.graph.replay()
        return self._given, self.info


_COMPILE_SECONDS = 8.0
_OPERATION_SECONDS = 4e-6
_NUMBER_SECONDS = 3e-10
_LAUNCH_SECONDS, _TRAFFIC_SECONDS = 1.2e-6, 2e-12  # the same beside a CUDA graph
_GPU_COMPILE_SECONDS, _MOST_COMPILED = 25.0, 500  # of a step with at most so many operations
_TRACE_STEPS = 500
_GRAPH_STEPS = 100
_SMALL = 1e6  # weights of all members, below which compiling a step pays

Trial = Callable[[], tuple[State, Batch, Tensor, Tensor]]


def choose_executor(
    step: Step,
    trial: Trial,
    run: Any,
    steps: int,
    ahead: PrefetchedNoise | None = None,
    worth: float = 3.0,
) -> Executor:
    """The executor of a stage with this number of steps: compiled, if that saves more than `worth`
    times the cost of compiling."""
    graphs = run.device.type == "cuda"
    if run.by_tensor and not graphs:
        return Executor(step)
    if steps < (_GRAPH_STEPS if graphs else _TRACE_STEPS):
        return Executor(step)
    batch = trial()[1]
    tensors = all(isinstance(leaf, Tensor) for leaf in leaves_of(batch))
    if not tensors or not _repeats(run, batch, graphs):
        return Executor(step)
    if graphs:
        planned = not isinstance(run.problem, Network) or run.net.plan is not None
        if planned and not run.by_tensor:
            operations, numbers = counted(step, trial)
            gain = _LAUNCH_SECONDS * operations + _TRAFFIC_SECONDS * numbers
            if operations < _MOST_COMPILED and gain * steps > worth * _GPU_COMPILE_SECONDS:
                return Executor(step, "compiled-graph", ahead)
        return Executor(step, "graph")
    if _compilable(run, trial) and saved(step, trial) * steps > worth * _COMPILE_SECONDS:
        return Executor(step, "compiled", ahead)
    return Executor(step, "traced", ahead)


def compile_after(step: Step, trial: Trial, run: Any) -> float:
    """The number of calls after which a step is compiled, if the total is not known in advance:
    when compiling would have paid off. Infinite if the step cannot be compiled, or without gain."""
    repeats = run.device.type == "cpu" and _repeats(run, trial()[1], False)
    if not (repeats and _compilable(run, trial)):
        return math.inf
    return math.ceil(_COMPILE_SECONDS / saved(step, trial))


def saved(step: Step, trial: Trial) -> float:
    """Seconds that a compiled step saves compared with a recorded one, on a CPU."""
    operations, numbers = counted(step, trial)
    return _OPERATION_SECONDS * operations + _NUMBER_SECONDS * numbers


def counted(step: Step, trial: Trial) -> tuple[int, int]:
    """The operations of a step, and the numbers that they write. The step runs on a copy, and once
    before it is counted, so that values that are cached do not count."""
    state, batch, t, rate = trial()
    copy = {k: v.clone() for k, v in state.items()}
    step(dict(copy), batch, t, rate)
    with Count() as count:
        step(dict(copy), batch, t, rate)
    return count.operations, count.numbers


def _compilable(run: Any, trial: Trial) -> bool:
    """Whether compiling is known to be faster: for few weights, in batched layers, and in log
    densities written by a user."""
    state = trial()[0]
    moved = [state["theta"]] if "theta" in state else state.values()
    small = max(value.numel() for value in moved) < _SMALL
    if isinstance(run.problem, Network):
        return small and run.net.plan is not None
    return small and isinstance(run.problem, LogDensity)


def _repeats(run: Any, batch: Batch, graph: bool) -> bool:
    """Whether a step is a fixed sequence of tensor operations that can be recorded. It is not if a
    network draws random numbers itself, if a density cannot be stacked, or if several processes may
    compute blocks of the rows (`method/row_sums.py`); nor if a network changes its buffers, except
    as a CUDA graph."""
    if run.data.has_rows and run.row_block(batch_rows(batch)) < batch_rows(batch):
        return False
    if isinstance(run.problem, Network):
        return not run.net.draws and (graph or not run.net.tracked)
    if run.problem.modules:
        return not any(draws_itself(module.net) for module in run.problem.modules.values())
    return isinstance(run.problem, LogDensity) and run.engine.kind == "stack"


Inner = Callable[[State, Batch, State], State]  # the state, rows, and the values it advances
Part = Callable[[State], State]

_RECORDED_MODES = ("traced", "compiled")  # a graph's tensors would be overwritten by its next call


class Recorded:
    """Calls `inner`, in the mode of the engine or in the mode chosen by rule.

    Parameters
    ----------
    calls : float
        The approximate number of calls, to decide whether preparation pays off.
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
        """The values that a resumed run needs: the mode, and the calls after which it is
        compiled."""
        rest = self._after - self._done
        return {"mode": self.mode, "rest": rest if math.isfinite(rest) else None}

    def resume(self, memory: dict[str, Any]) -> None:
        """Continue in the mode of the run that saved this memory."""
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
        """Compile from the next transition on, if there have been enough calls."""
        if self._done >= self._after:
            self._executor, self._after = Executor(self._step, "compiled"), math.inf

    def part(self, inner: Part) -> Part:
        """Another fixed sequence of operations, without a gradient, executed in the mode of
        `inner`; eagerly until the mode is chosen, in the first transition of a run."""
        nothing = torch.zeros((), device=self.run.device)
        batch = Batch((), (), nothing)
        step = lambda values, *_, owned=False: (values, inner(values))  # noqa: E731
        ready: dict[str, Executor] = {}

        def call(values: State) -> State:
            mode = "eager" if self._executor is None else self._executor.mode
            if mode not in _RECORDED_MODES:
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
