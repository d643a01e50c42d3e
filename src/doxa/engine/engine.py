"""Execution of stacked forward passes: batched layers, vmap, or one member at a time.

**Engine.** `Engine.apply` returns the outputs of M members, [M, N, ...]. "stack" replays the
network on stacked parameters (`doxa.model.plan.Plan`) or uses vmap; "loop" calls the network once
per member. All other code is independent of this choice. Gradients are plain autograd on the sum
over members, so the backward pass never runs under vmap.

**Work** (`Count`). The amount of work of a call is counted by operations, and not timed: it is the
same on an idle machine and on a busy one.

**Settings of torch** (`threads_for`, `default_modes`). These are the number of threads and the
modes during a computation. Threads that share a small matrix product wait longer than they compute.
On a machine with other load, a thread also waits to be scheduled: about 45 ms per product of any
size. So only a large product uses the number of threads that torch is set to; everything else uses
one. The number of threads affects how sums are split, hence the bits of a result. It does not
depend on the load of the machine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from doxa.errors import DoxaError, MethodError
from doxa.model import Applied, Model
from doxa.model.functional import Functional
from doxa.model.inspection import draws_itself

_aten = torch.ops.aten
# The operand of a matrix product whose last axis is summed over.
_SUMMED = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


class Count(TorchDispatchMode):
    """A context that counts operations, the numbers they write, and the multiplications of the
    largest matrix product, convolution or factorisation."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.operations, self.numbers, self.largest = 0, 0, 0.0
        self._formulas = flop_registry

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.operations += 1
        for leaf in out if isinstance(out, list | tuple) else (out,):
            self.numbers += leaf.numel() if isinstance(leaf, Tensor) else 0
        packet = func.overloadpacket
        if packet in _SUMMED:
            self.largest = max(self.largest, float(out.numel() * args[_SUMMED[packet]].shape[-1]))
        elif packet in self._formulas:
            formula = self._formulas[packet]
            self.largest = max(self.largest, formula(*args, **(kwargs or {}), out_val=out) / 2)
        elif "linalg" in func._name or "cholesky" in func._name:
            matrices = (t for t in args if isinstance(t, Tensor) and t.ndim > 1)
            square = (t for t in matrices if t.shape[-1] == t.shape[-2])
            self.largest = max(self.largest, *(float(t.numel() * t.shape[-1]) for t in square), 0.0)
        return out


P = ParamSpec("P")
R = TypeVar("R")

_LARGE = 1e8  # multiplications: about 3 ms of one core in single precision
_CAST = ("cpu", "cuda", "mps", "xpu")  # where autocast may be on

_most: ContextVar[int | None] = ContextVar("doxa_threads", default=None)


class _Outside:
    """The number of threads that torch is set to outside blocks of `threads_for`.

    `torch.set_num_threads` sets the number for the calling thread, and also the initial number of
    new threads of the program. A thread that starts while a block runs elsewhere would start with
    the 1 of that block. It uses the number from before the first of these blocks instead. (A thread
    that was itself set to 1 cannot be distinguished from this case while others compute.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._number = 0, 1

    def enter(self) -> int:
        """The number of this thread, before its outermost block."""
        found = torch.get_num_threads()
        with self._lock:
            if self._inside == 0:
                self._number = found
            self._inside += 1
            return self._number if found == 1 else found

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1


_outside = _Outside()


def may_use_threads() -> bool:
    """Whether there is a choice of threads; otherwise the work need not be counted."""
    return (_most.get() or torch.get_num_threads()) > 1


def threads() -> int:
    """The number of threads that large products have in this process: torch's, as it is outside
    `threads_for`."""
    return _most.get() or torch.get_num_threads()


@contextmanager
def threads_for(product: float) -> Iterator[None]:
    """A context and decorator that sets the number of threads for work whose largest matrix product
    has `product` multiplications: the number outside the outermost block, or one. The setting from
    before is restored, also after an error."""
    outermost = _most.get() is None
    before = _outside.enter() if outermost else torch.get_num_threads()
    most = _most.get() or before
    token = _most.set(most)
    torch.set_num_threads(most if product >= _LARGE else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _most.reset(token)
        if outermost:
            _outside.leave()


@contextmanager
def threads_outside() -> Iterator[None]:
    """A context in which the number of threads is that outside the blocks of `threads_for`: for a
    generator, while its caller works."""
    inside = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        yield
    finally:
        torch.set_num_threads(inside)


class _Convolutions:
    """Makes cuDNN convolutions deterministic in training. By default, some gradients are sums in no
    fixed order, and the same seed would give other bits on a GPU. The switch belongs to the
    process, so it is restored when the last of several threads leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, False

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cudnn.deterministic
                torch.backends.cudnn.deterministic = True
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cudnn.deterministic = self._before


_convolutions = _Convolutions()


class _Rounded:
    """Lets a CUDA device round the operands of float32 products to TF32, inside a context. The
    switches belong to the process, so they are restored when the last of several threads leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, (False, False)

    def __enter__(self) -> None:
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        with self._lock:
            if self._inside == 0:
                self._before = products.allow_tf32, convolutions.allow_tf32
                products.allow_tf32 = convolutions.allow_tf32 = True
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
                products.allow_tf32, convolutions.allow_tf32 = self._before


_rounded = _Rounded()


class default_modes:  # noqa: N801  (a context, like torch.no_grad)
    """A context and decorator in which torch has its default modes: no autocast, and the CPU as the
    default device; in training also with gradients, outside inference mode, and with deterministic
    convolutions. The half precision of a fit is set inside.

    Modes belong to a thread, so other threads are not affected. The default type
    (`torch.set_default_dtype`) belongs to the process, so it is not changed.

    Parameters
    ----------
    train : bool
        Whether parameters are trained inside.
    """

    def __init__(self, train: bool = False) -> None:
        self._train = train
        self._stack: ExitStack | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function with each call inside such a context."""

        @wraps(function)
        def within(*args: P.args, **options: P.kwargs) -> R:
            with default_modes(self._train):
                return function(*args, **options)

        return within

    def __enter__(self) -> None:
        found: list[Any] = [
            torch.autocast(kind, enabled=False) for kind in _CAST if torch.is_autocast_enabled(kind)
        ]
        if torch.get_default_device().type != "cpu":
            found.append(torch.device("cpu"))
        if self._train and torch.is_inference_mode_enabled():
            found.append(torch.inference_mode(False))
        if self._train and not torch.is_grad_enabled():
            found.append(torch.enable_grad())
        if found:
            self._stack = ExitStack()
            for context in found:
                self._stack.enter_context(context)
        if self._train:
            _convolutions.enter()

    def __exit__(self, *error: Any) -> None:
        if self._train:
            _convolutions.leave()
        if self._stack is not None:
            self._stack.__exit__(*error)


log = logging.getLogger("doxa")

MODES = ("eager", "traced", "compiled", "graph", "compiled-graph")
_TILE_BYTES = 4 << 20  # size of the largest activation of one tile on the CPU, to fit a cache
_UNSTACKABLE = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True)
class Engine:
    """How members and steps are executed.

    Parameters
    ----------
    kind : {"stack", "loop"}
        "stack" computes all members at once, "loop" one at a time.
    mode : str or None
        "eager", "traced" (recorded once, replayed without the overhead of autograd), "compiled",
        "graph" (a CUDA graph) or "compiled-graph". None means a choice for each stage.
    native : bool
        Whether to use batched layers instead of vmap if the network allows it.
    chunk : int or None
        The number of members in one gradient computation. None means all.
    reason : str
        Why this engine was chosen, for the log.
    product : float
        Multiplications per row in the largest matrix product of a gradient, as counted.
    half : bool
        Whether the network's products are in bfloat16, by autocast. Weights, sums over rows, and
        everything outside the network stay in full precision.
    tf32 : bool
        Whether a CUDA device rounds the operands of float32 products while a fit trains.
    channels_last : bool
        Whether "loop" gives images to the network in the memory format `torch.channels_last`.
    """

    kind: str = "stack"
    mode: str | None = "eager"
    native: bool = True
    chunk: int | None = None
    reason: str = ""
    product: float = 0.0
    half: bool = False
    tf32: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("stack", "loop"):
            raise MethodError(f"engine kind must be 'stack' or 'loop', not {self.kind!r}")
        if self.mode is not None and self.mode not in MODES:
            raise MethodError(f"engine mode must be one of {MODES}, not {self.mode!r}")

    @classmethod
    def parse(cls, spec: str | Engine) -> Engine:
        """ "stack", "loop", "stack:compiled", "loop:graph"…"""
        if isinstance(spec, Engine):
            return spec
        if not isinstance(spec, str):
            raise MethodError(f"engine must be a name or an Engine, not {spec!r}")
        kind, _, mode = spec.partition(":")
        return cls(kind, mode or "eager", reason="asked for")

    @property
    def precision(self) -> str:
        """As in `fit`: "full", "tf32" or "bfloat16"."""
        return "bfloat16" if self.half else "tf32" if self.tf32 else "full"

    def rounding(self) -> AbstractContextManager[None]:
        """The context of training in which products have this precision."""
        return _rounded if self.tf32 else nullcontext()

    def takes_tensors(self, device: torch.device) -> bool:
        """Whether steps of a large network may take gradients by its tensors: members run one at a
        time, and no step is recorded as operations on rows. A CUDA graph records kernels."""
        modes = (None, "eager", "graph") if device.type == "cuda" else (None, "eager")
        return self.kind == "loop" and self.mode in modes

    @property
    def label(self) -> str:
        return f"{self.kind}:{self.mode or 'auto'}"

    def chunks(self, members: int) -> Iterator[slice]:
        size = 1 if self.kind == "loop" else (self.chunk or members)
        for start in range(0, members, size):
            yield slice(start, min(start + size, members))

    def apply(
        self,
        model: Model,
        params: Mapping[str, Tensor],
        x: Any,
        *,
        shared: bool = True,
        constant: frozenset[str] = frozenset(),
        buffers: Mapping[str, Tensor] | None = None,
        training: bool = False,
        who: Sequence[str] | None = None,
    ) -> Applied:
        """The outputs of all members, [M, N, ...], the additional terms of layers, and the buffers
        that training changed, each with the member axis.

        `shared` inputs and `constant` parameters have no member axis (a trunk that is the same for
        all samples is computed once). Buffers (noise, BatchNorm statistics) always have it. `who`
        are keys of members and step, for a network that draws random numbers itself.
        """
        if self.half:
            full, given = replace(self, half=False), next(iter(params.values()))
            # without autocast's cache: a captured graph would keep old weights
            with torch.autocast(given.device.type, torch.bfloat16, cache_enabled=False):
                found = full.apply(
                    model, params, x, shared=shared, constant=constant, buffers=buffers,
                    training=training, who=who,
                )  # fmt: skip
            return tree_map(lambda t: t.to(given.dtype) if t.is_floating_point() else t, found)
        params = {k: v for k, v in params.items() if not k.startswith("likelihood.")}
        buffers = dict(buffers or {})
        if self.kind == "stack" and self.native and isinstance(x, Tensor) and model.plan:
            stacked = lambda name: name in buffers or (name in params and name not in constant)  # noqa: E731
            terms: dict[str, Tensor] = {}
            tensors = model.fixed | params | buffers
            out, has_axis = model.plan(tensors, stacked, x, not shared, terms)
            return Applied(out if has_axis else out.unsqueeze(0), terms, {})
        axes = {name: None if name in constant else 0 for name in params}
        if self.kind == "loop":
            form = _channels_last if self.channels_last else None
            return _loop(model, params, axes, x, shared, buffers, training, who, form)
        if not buffers and shared and all(a is None for a in axes.values()):
            return _add_axis(model.apply(params, x, training=training))

        def one(params: Any, x: Any, buffers: Any) -> Applied:
            return model.apply(params, x, buffers=buffers, training=training)

        return vmap(one, in_dims=(axes, None if shared else 0, 0), randomness="error")(
            params, x, buffers
        )

    def call(self, module: Functional, flat: Tensor, *args: Any, dims: Any = 0) -> Any:
        """Call a module of the method with each member's row of parameters [M, P]. `dims` is 0 for
        arguments with a member axis, and None for arguments that all members share."""
        dims = dims if isinstance(dims, tuple) else (dims,) * len(args)
        params = module.layout.unflatten(flat)
        members = len(flat)
        if members > 1 and self.kind == "stack":
            return vmap(module.forward, in_dims=(0, *dims), randomness="error")(params, *args)
        outputs = []
        for m in range(members):
            # squeeze, not select: its backward pass is a view
            pick = lambda t, m=m: t.squeeze(0) if members == 1 else t[m]  # noqa: E731
            own = [a if d is None else tree_map(pick, a) for a, d in zip(args, dims, strict=True)]
            outputs.append(module.forward({k: pick(v) for k, v in params.items()}, *own))
        return _stacked(outputs)


def _add_axis(out: Any) -> Any:
    return tree_map(lambda t: t.unsqueeze(0), out)


def _stacked(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return _add_axis(outputs[0])
    return tree_map(lambda *parts: torch.stack(parts), *outputs)


def _channels_last(x: Tensor) -> Tensor:
    """Images [B, C, H, W] in the order [B, H, W, C] in memory; other inputs are unchanged. A
    convolution keeps the order of its input, and so do layers by element and by channel."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _loop(
    model: Model,
    params: Mapping[str, Tensor],
    axes: Mapping[str, int | None],
    x: Any,
    shared: bool,
    buffers: Mapping[str, Tensor],
    training: bool,
    who: Sequence[str] | None,
    form: Callable[[Tensor], Tensor] | None = None,
) -> Applied:
    stacks = [*(v for k, v in params.items() if axes[k] == 0), *buffers.values()]
    members = stacks[0].shape[0] if stacks else 1
    # not `select`: its backward pass fills a whole stack with zeros for each member
    apart = lambda v: (v.squeeze(0),) if members == 1 else v.unbind(0)  # noqa: E731
    weights = {k: apart(v) if axes[k] == 0 else (v,) * members for k, v in params.items()}
    given = {k: apart(v) for k, v in buffers.items()}
    outputs = []
    for m in range(members):
        rows = x if shared else tree_map(lambda t, m=m: t[m], x)
        rows = rows if form is None else tree_map(form, rows)
        own, swapped = ({k: v[m] for k, v in tree.items()} for tree in (weights, given))
        name = None if who is None else who[m]
        outputs.append(model.apply(own, rows, buffers=swapped, training=training, who=name))
    return _stacked(outputs)


def choose_engine(
    model: Model, members: int, device: torch.device, same_weights: bool = False
) -> Engine:
    """Choose an engine by rule, from the amount of work only. Members with the same weights, which
    differ in the noise of layers, share convolutions: these run once, or on all rows as one
    batch."""
    if model.recomputed:
        return Engine("loop", reason="parts of the network are computed again")
    kinds = [type(m) for m in model.net.modules()]
    if any(issubclass(k, _UNSTACKABLE) for k in kinds):
        return Engine("loop", None, reason="recurrent layers do not run under vmap")
    if draws_itself(model.net):
        return Engine("loop", None, reason="the net draws random numbers itself")
    if members == 1:
        return Engine("loop", None, reason="one member")
    convs = [m for m in model.net.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    widest = max((c.out_channels for c in convs), default=0)
    most = 12 if device.type == "cpu" else 48  # measured: each fills the processor
    if device.type == "cuda" and members >= 8:  # grouped convolutions, whose time hardly grows
        most = 128
    if widest > most and not same_weights:
        return Engine("loop", None, reason="wide convolutions are faster one member at a time")
    how = "batched layers" if model.plan else "vmap"
    return Engine("stack", None, reason=f"{members} members at once, {how}")


def fall_back_to_loop(engine: Engine, trial: Callable[[Engine], Any]) -> Engine:
    """The engine, or "loop" if a trial of "stack" fails, with a warning in the log."""
    try:
        trial(engine)
        return engine
    except DoxaError:
        raise
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        if engine.kind == "loop":
            raise
        reason = f"stacking failed ({str(error).splitlines()[0][:120]})"
        log.warning("engine: %s; members run one at a time", reason)
        return fall_back_to_loop(replace(engine, kind="loop", reason=reason), trial)


def tiles(
    samples: int,
    rows: int,
    width: int,
    itemsize: int,
    device: torch.device,
    trunk: bool = False,
    heavy: bool = False,
) -> Iterator[tuple[slice, slice]]:
    """Tiles of samples × rows whose largest activation is small; rows vary fastest.

    With a `trunk` that all samples share, a tile contains all samples, so that the trunk is
    computed once per row. If a tile would then have few rows, this is done only if the trunk is
    `heavy`.
    """
    budget = _TILE_BYTES if device.type == "cpu" else 256 << 20
    cells = max(1, budget // max(1, width * itemsize))
    row_step = max(1, min(rows, cells))
    if trunk:
        together = heavy or cells >= 16 * samples
        row_step = max(1, min(rows, cells // samples)) if together else row_step
    elif row_step < rows:  # several samples per tile amortise the calls
        row_step = max(1, min(rows, cells // min(samples, 4)))
    sample_step = max(1, min(samples, cells // row_step))
    for s in range(0, samples, sample_step):
        for r in range(0, rows, row_step):
            yield slice(s, min(s + sample_step, samples)), slice(r, min(r + row_step, rows))
