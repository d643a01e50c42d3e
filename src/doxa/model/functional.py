"""A module as a pure function of its parameters, and parts of a network that are computed again.

**Modules of a method** besides the network (a flow, an encoder, a kernel, an auxiliary network) are
wrapped in a `Functional`. It has a layout, is initialised for each member, and is called on stacked
rows [M, P].

**Gradient checkpointing** (Chen et al., 2016). The activations inside some parts of a network are
not kept for the backward pass, which computes them again from the inputs of the part:

    memory   Σ_parts |inputs|  +  max_part |activations|     in place of   Σ_parts |activations|
    time     at most one more forward pass

A backward pass runs after `functional_call` has given the network its own weights back. So a part
remembers the tensors of its pass (weights, the noise of layers, buffers as they were when it was
called), and has them again when it is computed again. What it writes to buffers then is dropped:
BatchNorm counts a batch once. Random numbers that the network draws itself are drawn again from the
same state of their generator. The gradient is the same, bit for bit where the operations are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from doxa.errors import ModelError, StoreError
from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.inspection import Start, fresh_rows, lies_in, look, with_tensors
from doxa.model.layers import MethodLayer
from doxa.noise import drawing

if TYPE_CHECKING:
    from doxa.model.model import Model


def made_small(make: Callable[[], Functional], most: int) -> Functional:
    """The module that `make` builds, on the meta device, where tensors have shapes but no memory.
    An error if it has more than `most` numbers: stored settings could describe a module that is too
    large to build."""
    try:
        with torch.device("meta"):
            made = make()
    except NotImplementedError:  # an operation that the meta device does not support
        made = make()
    size = sum(t.numel() for t in made.net.parameters())
    if size > most:
        raise StoreError(f"a module of {size:,} numbers, of which the artefact holds {most:,}")
    return made


class Functional:
    """A copy of a module, called with its parameters as an argument."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)

    @cached_property
    def layout(self) -> Layout:
        named = self.net.named_parameters()
        return Layout(tuple(Entry(n, tuple(p.shape)) for n, p in named if p.requires_grad))

    @cached_property
    def fixed(self) -> Params:
        """Frozen parameters and buffers, the same for all members."""
        return look(self.net).fixed

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Functional:
        moved = Functional(self.net)
        moved.net = moved.net.to(device=device, dtype=dtype)
        return moved

    def forward(self, params: Mapping[str, Tensor], *args: Any) -> Any:
        """The output for one member's tensors."""
        return functional_call(self.net, {**self.fixed, **params}, args)

    def given(self) -> Tensor:
        """The module's current values, flat [P]."""
        return self.layout.flatten({n: p.detach() for n, p in self.net.named_parameters()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised values for each (seed, member id), [M, P]."""
        like = next(iter(self.net.parameters()))
        return fresh_rows(self.net, self.layout, starts).to(like)


@dataclass(frozen=True)
class Part:
    """A layer of a network whose activations are computed again in the backward pass: as a whole,
    or, if `sizes` are given, the layers of an `nn.Sequential` in segments of these sizes."""

    name: str
    sizes: tuple[int, ...] = ()


def find_parts(net: nn.Module, given: str | Sequence[str], rest: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a network that are computed again.

    Parameters
    ----------
    net : nn.Module
        The network.
    given : str or sequence of str
        "blocks", or names or patterns of layers. The blocks are the layers of the outermost
        `nn.Sequential` and `nn.ModuleList` modules that consist of layers themselves. Plain layers
        that follow each other in an `nn.Sequential` are divided into segments of √k layers.
    rest : sequence of str
        Layers that have no gradient: the frozen trunk.

    Returns
    -------
    tuple of Part
        The parts, none inside another.
    """
    if given == "blocks":
        return tuple(_blocks(net, "", rest))
    patterns = (given,) if isinstance(given, str) else tuple(given)
    found: list[str] = []
    for name, _ in net.named_modules():
        chosen = any(name == p or fnmatchcase(name, p) for p in patterns)
        if name and chosen and not lies_in(name, (*found, *rest)):
            found.append(name)
    return tuple(Part(name) for name in found)


def check_parts(model: Model, given: Any) -> None:
    """Raise an error if `given` names no parts of a network."""
    several = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
    if not (isinstance(given, str) or several):
        raise ModelError(
            f'recompute must be None, "blocks", or names or patterns of layers, not {given!r}'
        )
    if find_parts(model.net, given, model.at_rest):
        return
    names = [name for name, module in model.net.named_modules() if name and not _plain(module)]
    there = ", ".join(map(repr, names[:8])) or "no layers that consist of layers"
    if given == "blocks":
        raise ModelError(
            'recompute="blocks": the network has no nn.Sequential or nn.ModuleList of several '
            f"layers; name the layers to compute again, such as recompute=('block*',); there are "
            f"{there}"
        )
    raise ModelError(f"recompute={given!r} is the name of no layer; there are {there}")


_SHORT, _LONG = 4, 9  # single layers in a sequence that is divided: the network, or a part of it


def _plain(module: nn.Module) -> bool:
    """Whether a module is one layer, and not several."""
    return isinstance(module, MethodLayer) or next(module.children(), None) is None


def _blocks(module: nn.Module, path: str, rest: Sequence[str]) -> Iterator[Part]:
    prefix = f"{path}." if path else ""
    plain = [_plain(child) for child in module.children()]
    chain = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
    if chain and all(plain) and len(plain) >= (_LONG if path else _SHORT):
        yield Part(path, _segments(len(plain)))
        return
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    for (name, child), single in zip(module.named_children(), plain, strict=True):
        if single or lies_in(f"{prefix}{name}", rest):
            continue
        inner = list(child.children())
        lists = isinstance(child, nn.Sequential | nn.ModuleList)
        short = len(inner) < _LONG and all(map(_plain, inner))
        if listed and sum(1 for _ in child.modules()) > 2 and (short or not lists):
            yield Part(f"{prefix}{name}")
        else:
            yield from _blocks(child, f"{prefix}{name}", rest)


def _segments(layers: int) -> tuple[int, ...]:
    """About √k segments of k layers."""
    size = math.ceil(math.sqrt(layers))
    return tuple(min(size, layers - start) for start in range(0, layers, size))


Call = Callable[..., Any]
Around = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]

_recomputing: ContextVar[bool] = ContextVar("doxa_recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """A context for an objective whose gradient is taken: the parts of networks that have some are
    computed again in the backward pass."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def parts_of_pass(
    model: Model, tensors: Params, training: bool, draws: object
) -> AbstractContextManager[None] | None:
    """The context of one pass of a network whose parts are computed again; None outside
    `recomputing`. `tensors` are those of the pass, and `draws` is the generator of the numbers that
    the network draws itself."""
    if not _recomputing.get():
        return None
    again = partial(_again, model, tensors, training, draws)
    return _called_by(model.net, model.recomputed, again)


@contextmanager
def _called_by(net: nn.Module, parts: Sequence[Part], around: Around) -> Iterator[None]:
    """A context in which the parts of a network are called by a function."""
    before = []
    try:
        for part in parts:
            module = net.get_submodule(part.name)
            before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _form(module, part, around)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward


def _form(module: nn.Module, part: Part, around: Around) -> Call:
    """The forward pass of a part: all of it, or its segments."""
    if not part.sizes:
        call = module.forward
        return lambda *args, **options: around(call, args, options)
    layers, segments, start = list(module.children()), [], 0
    for size in part.sizes:
        segments.append(partial(_chain, layers[start : start + size]))
        start += size

    def forward(h: Any) -> Any:
        for segment in segments:
            h = around(segment, (h,), {})
        return h

    return forward


def _chain(layers: Sequence[nn.Module], h: Any) -> Any:
    for layer in layers:
        h = layer(h)
    return h


def _again(
    model: Model, tensors: Params, training: bool, draws: object, call: Call,
    args: tuple[Any, ...], options: dict[str, Any],
) -> Any:  # fmt: skip
    """A part of a pass, of which only the inputs are kept."""
    from torch.utils.checkpoint import checkpoint

    written = {*model.tracked, *model.written}
    now = dict(model.net.named_buffers()) if written else {}
    held = tensors | {name: now[name].clone() for name in written if name in now}
    start = draws.from_here() if isinstance(draws, drawing) else None
    passed: list[bool] = []

    def run(*args: Any, **options: Any) -> Any:
        if not passed:
            passed.append(True)
            return call(*args, **options)
        with model.turn, start or nullcontext():
            model.set_mode(training)
            return with_tensors(model.net, held, partial(call, *args, **options))

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **options)


def recomputed_bytes(
    model: Model, parts: Sequence[Part], buffers: Callable[[], Params], one: Any, two: Any
) -> int:
    """The bytes that a pass keeps for its backward pass, per row, if these parts are computed
    again: what is kept between the parts, and the activations of the largest one. 0 if the pass
    fails."""
    found: list[tuple[int, list[int]]] = []
    for x in (one, two):
        between: dict[int, Tensor] = {}  # by their memory, of which several may be views
        inside: list[dict[int, Tensor]] = []

        def measured(
            call: Call, args: tuple[Any, ...], options: dict[str, Any],
            between: dict[int, Tensor] = between, inside: list[dict[int, Tensor]] = inside,
        ) -> Any:  # fmt: skip
            for leaf in tree_flatten((args, options))[0]:
                if isinstance(leaf, Tensor):
                    _keep(between, leaf)
            inside.append({})
            with torch.autograd.graph.saved_tensors_hooks(partial(_keep, inside[-1]), _same):
                return call(*args, **options)

        try:
            with (
                torch.enable_grad(), drawing("probe"),
                torch.autograd.graph.saved_tensors_hooks(partial(_keep, between), _same),
                _called_by(model.net, parts, measured),
            ):  # fmt: skip
                model.forward({}, x, buffers=buffers())
        except Exception:  # whatever the user's forward raises
            return 0
        each = [sum(t.nbytes for key, t in own.items() if key not in between) for own in inside]
        found.append((sum(t.nbytes for t in between.values()), each))
    (rest, each), (twice, pair) = found
    largest = max((b - a for a, b in zip(each, pair, strict=True)), default=0)
    return max(0, twice - rest) + max(0, largest)


def _keep(kept: dict[int, Tensor], value: Tensor) -> Tensor:
    place = value.untyped_storage().data_ptr()
    if place not in kept or value.numel() > kept[place].numel():
        kept[place] = value
    return value


def _same(value: Any) -> Any:
    return value
