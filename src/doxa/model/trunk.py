"""The frozen trunk of a network: layers without trained weights that run before all trained ones.

    f(x; θ) = head(trunk(x); θ)

The outputs of the trunk do not depend on the trained weights. They are therefore the same for all
members, steps and draws. This requires that the trunk is deterministic, so it stays in evaluation
mode during training: its dropout is off, and BatchNorm uses its running statistics.

**The trace** (`find`). One forward pass records every operation and every call of a layer, with the
memory that each reads and writes. Memory is called dependent if its values depend on a trained
weight or on the noise of a layer. A frozen layer belongs to the trunk if its input is not
dependent; the operations inside it are not recorded. Only the outputs that the rest of the network
reads are kept. A liveness analysis, backwards from the network's output, finds them.

**The head** (`Split`). It has the trained weights under their original names, and one of three
forms, which are tried in this order:

    tail        if the rest of the network is one layer that takes one tensor: this layer alone
    chain       if the network is an `nn.Sequential`: the same, with identities in place of the
                layers of the trunk
    stand-ins   for any other network: the layers of the trunk return given values, and the rest
                of the user's code runs unchanged; it is given x if it reads x

Each form is compared with the whole network on rows of the data. The first form that gives the same
outputs is used. If none does, the trunk is computed in every pass. Examples are a layer that
overwrites its input, and outputs without an axis of rows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from doxa.linalg.layout import Params
from doxa.model.inspection import lies_in
from doxa.model.layers import MaskedDropout, MethodLayer

if TYPE_CHECKING:
    from doxa.model.model import Model

_MOST_KEPT = 256 << 20  # bytes that `remembered` keeps at most
LEAST = 0.2  # smallest share of a pass's multiplications for which a trunk is separated


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class Call(NamedTuple):
    """One call of a layer of the trunk: the name of the layer, and the number of the call."""

    layer: str
    number: int


@dataclass(frozen=True)
class Trunk:
    """What the trace of a network found.

    Parameters
    ----------
    layers : tuple of str
        The names of the outermost layers of the trunk.
    needed : tuple of Call
        The calls whose outputs the rest of the network reads, in the order of the pass.
    reads_x : bool
        Whether the rest of the network also reads x.
    tail : str or None
        The name of the layer that is the whole rest of the network. None if there is no such layer.
    share : float
        The multiplications of the trunk, as a share of all multiplications in a pass.
    """

    layers: tuple[str, ...]
    needed: tuple[Call, ...]
    reads_x: bool
    tail: str | None
    share: float


class _Event(NamedTuple):
    """An operation, or a call of a layer of the trunk, with the memory it reads and writes."""

    call: Call | None
    read: set[int]
    written: set[int]


class _Trace(TorchDispatchMode):
    """Records the operations of a pass outside the trunk, and which memory is dependent.

    References to all tensors are kept until the end. Otherwise freed memory could be used again for
    another tensor, and the two would be confused."""

    def __init__(self, trained: Iterable[Tensor]) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.events: list[_Event] = []
        self.inside: str | None = None  # the layer of the trunk that is running
        self.work = {True: 0.0, False: 0.0}  # multiplications inside and outside the trunk
        self.lengths: dict[Call, set[int]] = {}  # lengths of the first axis, per call
        self._held: list[Any] = []
        self._formulas = flop_registry
        self.dependent = self.memory(list(trained))

    def memory(self, tree: Any) -> set[int]:
        leaves = tensors_of(tree)
        self._held.append(leaves)
        return {leaf.untyped_storage().data_ptr() for leaf in leaves}

    def depends(self, tree: Any) -> bool:
        return bool(self.memory(tree) & self.dependent)

    def add(self, call: Call | None, read: set[int], written: set[int]) -> None:
        self.events.append(_Event(call, read, written))
        if call is None and read & self.dependent:
            self.dependent |= written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket in self._formulas:
            formula = self._formulas[func.overloadpacket]
            self.work[self.inside is not None] += formula(*args, **kwargs, out_val=out) / 2
        if self.inside is None:
            read, written = self.memory((args, kwargs)), self.memory(out)
            if func._schema.is_mutable:  # in place: it writes its inputs, and may return nothing
                written = written | read
            self.add(None, read, written)
        return out


def find(model: Model, x: Any, given: Sequence[str] = ()) -> Trunk | None:
    """The frozen trunk of a network, found by tracing a pass on two rows of its inputs x.

    None if there is no trunk, or if its share of the multiplications is below `LEAST`. If the user
    has named layers (`given`), the trunk is returned whatever its share."""
    outside: set[str] = set()
    while True:
        found = _trace(model, x, given, outside)
        if isinstance(found, str):  # this layer cannot be part of the trunk: repeat without it
            outside.add(found)
            continue
        if found is None or (found.share < LEAST and not given):
            return None
        return found


def _trace(model: Model, x: Any, given: Sequence[str], outside: set[str]) -> Trunk | str | None:
    net = model.net
    may = _candidates(model, given) - outside
    if not may:
        return None
    trained = [p for p in net.parameters() if p.requires_grad]
    trace, calls, tails = _Trace(trained), dict.fromkeys(may, 0), _Tails(net, trained)
    late: list[str] = []  # layers of the trunk that were called after a trained layer
    opened: list[str] = []

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if trace.inside is not None:
            return
        if name in may and not trace.depends((args, kwargs)):
            trace.inside = name
            return
        if name in may:
            late.append(name)
        opened.append(name)
        tails.before(name, module, args, kwargs, trace)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if trace.inside not in (None, name):
            return
        read, written = trace.memory((args, kwargs)), trace.memory(output)
        if trace.inside == name:
            trace.inside = None
            call = Call(name, calls[name])
            trace.add(call, read, written)
            trace.lengths[call] = {len(t) if t.ndim else 0 for t in tensors_of(output)}
            calls[name] += 1
            return
        tails.after(name, output)
        if isinstance(module, MethodLayer):  # noisy in training, although the noise is off here
            trace.add(None, read, written)
            trace.dependent |= written

    hooks = []
    for name, module in net.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(after, name), with_kwargs=True))
    start = trace.memory(x)
    try:
        with torch.no_grad(), model.turn, trace:
            output = model.forward({}, x, buffers=model.scratch())
    finally:
        for hook in hooks:
            hook.remove()
    twice = [name for name in late if calls[name]]
    if twice:
        return twice[0]
    used = [name for name in may if calls[name]]
    if not any(_has_weights(net.get_submodule(name)) for name in used):
        return None
    needed, live = _needed(trace, output)
    if not needed:
        return None
    rows = len(tensors_of(x)[0])
    for call in needed:
        if trace.lengths[call] != {rows}:  # not one output per row, such as embedded positions
            return call.layer
    total = trace.work[True] + trace.work[False]
    share = trace.work[True] / total if total else 0.0
    layers = tuple(name for name, _ in net.named_modules() if name in used)
    return Trunk(layers, tuple(needed), bool(live & start), tails.of(output), share)


def _needed(trace: _Trace, output: Any) -> tuple[list[Call], set[int]]:
    """The calls of the trunk that the output depends on, and the memory that it depends on and that
    existed before the pass."""
    live, needed = trace.memory(output), []
    for call, read, written in reversed(trace.events):
        if written and not written & live:
            continue  # kept if it writes nothing: Python code may use the result (`item`)
        if call is None:
            live |= read
        else:
            needed.append(call)
            live -= written
    return needed[::-1], live


class _Tails:
    """Finds the tail: the outermost layer that contains all trained weights, is called once with
    one tensor that is not dependent, and returns the network's output."""

    def __init__(self, net: nn.Module, trained: Sequence[Tensor]) -> None:
        ids = {id(p) for p in trained}
        self._whole = {
            name for name, m in net.named_modules()
            if name and ids <= {id(p) for p in m.parameters()}
        }  # fmt: skip
        self._outputs: dict[str, Any] = {}
        self._calls: dict[str, int] = {}

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any, trace: _Trace) -> None:
        if name not in self._whole:
            return
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        fits = alone and not trace.depends(args)
        self._calls[name] = self._calls.get(name, 0) + (1 if fits else 2)

    def after(self, name: str, output: Any) -> None:
        if name in self._whole:
            self._outputs[name] = output

    def of(self, output: Any) -> str | None:
        found = (n for n, own in self._outputs.items() if own is output and self._calls[n] == 1)
        return min(found, key=len, default=None)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _candidates(model: Model, given: Sequence[str]) -> set[str]:
    """The layers that may be part of a trunk.

    None of their weights is trained, and none of their noise belongs to a trained layer. Dropout
    inside a frozen layer with weights belongs to this frozen layer. Other dropout belongs to the
    next layer with weights."""
    net = model.net
    trained = {n.rpartition(".")[0] for n, p in net.named_parameters() if p.requires_grad}

    def rests(layer: str) -> bool:
        return model.masked.get(layer, layer) not in {layer, *trained}

    may = set()
    for name, module in net.named_modules():
        if not name or any(p.requires_grad for p in module.parameters()):
            continue
        noisy = {
            f"{name}.{path}" if path else name: type(m)
            for path, m in module.named_modules() if isinstance(m, MethodLayer)
        }  # fmt: skip
        if any(kind is not MaskedDropout for kind in noisy.values()):
            continue
        if not (_has_weights(module) or lies_in(name, given)):
            if not all(map(rests, noisy)):
                continue
            if next(_learned(module), None) is not None:
                continue  # training changes its buffers: a BatchNorm without weights, an average
        may.add(name)
    return may


def _learned(module: nn.Module) -> Iterator[Tensor]:
    """The buffers of a module, except those of dropout layers."""
    for m in module.modules():
        if not isinstance(m, MaskedDropout):
            yield from m.buffers(recurse=False)


class _Enough(Exception):
    """Raised by a hook to end a pass when all needed outputs are known."""


class _StandIn(nn.Module):
    """Replaces a layer of the trunk: it returns given values, and has the layer's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not registered as a submodule
        self.values: list[Any] = []  # one per call of the layer
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.values[self.calls - 1]


class _Result(NamedTuple):
    """The form of a call's output: the tree structure, and its leaves for one row. A leaf that is a
    tensor has the shape [1, ...]."""

    spec: TreeSpec
    leaves: list[Any]


class Split:
    """A network split into its frozen trunk and its trained head.

    Parameters
    ----------
    model : Model
        The network, after `build`.
    x : Tensor, tuple or dict
        Some rows of its inputs.

    Attributes
    ----------
    head : Model
        The trained part. Its inputs are what `features` returns.

    Raises
    ------
    ValueError
        If the network cannot be split, with the reason.
    """

    head: Model

    def __init__(self, model: Model, x: Any) -> None:
        if model.trunk is None:
            raise ValueError("the network has no frozen trunk")
        if any(
            hooks for hooks in (model.net._forward_hooks, model.net._forward_pre_hooks)
        ) or "forward" in vars(model.net):
            raise ValueError("the network has hooks, or its forward is replaced")
        self.model, self.trunk = model, model.trunk
        self.tail = self.trunk.tail
        self._spec: TreeSpec | None = None
        self._results: dict[Call, _Result] = {}
        reasons = []
        for form in (self._tail, self._chain, self._general):
            try:
                net = form(x)
                if net is None:
                    continue
                self.head = self._model_of(net, x)
                self._compare(x)
            except Exception as error:  # the user's code may raise anything if only a part runs
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            return
        raise ValueError(reasons[-1] if reasons else "its trunk cannot be separated")

    def features(self, x: Any) -> Any:
        """The outputs of the trunk at N rows of inputs x, in the form that the head takes: a tensor
        [N, ...], or a tuple of tensors. If the head reads x, the tensors of x come first."""
        kept = _kept.get()
        if kept is None:
            return self._features(x)
        leaves = tensors_of(x)
        key = _fingerprint(self, leaves)
        if key in kept and all(map(_same, kept[key][1], leaves)):
            return kept[key][2]
        found = self._features(x)
        held = sum(t.nbytes for own in kept.values() for t in tensors_of(own[1:]))
        if held + sum(t.nbytes for t in (*leaves, *tensors_of(found))) <= _MOST_KEPT:
            kept[key] = (self, leaves, found)
        return found

    def _features(self, x: Any) -> Any:
        if self.tail is not None:
            return self._captured(x, self.tail)
        values = self._outputs(x)
        leaves = [leaf for call in self.trunk.needed for leaf in tensors_of(values[call])]
        if self._spec is None:
            return leaves[0]
        return (*(tensors_of(x) if self.trunk.reads_x else ()), *leaves)

    def tensors(self) -> Params:
        """The tensors of the trunk, by name."""
        fixed = self.model.fixed.items()
        return {name: value for name, value in fixed if lies_in(name, self.trunk.layers)}

    def _captured(self, x: Any, layer: str) -> Tensor:
        """The input of a layer."""
        seen: list[Tensor] = []

        def before(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise _Enough

        self._pass(x, [self.model.net.get_submodule(layer).register_forward_pre_hook(before)])
        return seen[0]

    def _outputs(self, x: Any) -> dict[Call, Any]:
        """The outputs of the needed calls."""
        found: dict[Call, Any] = {}
        numbers: dict[str, int] = {}
        needed = set(self.trunk.needed)

        def after(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
            call = Call(name, numbers.get(name, 0))
            numbers[name] = call.number + 1
            if call in needed:
                found[call] = output
                if len(found) == len(needed):
                    raise _Enough

        layers = dict.fromkeys(call.layer for call in self.trunk.needed)
        self._pass(
            x,
            [
                self.model.net.get_submodule(name).register_forward_hook(partial(after, name))
                for name in layers
            ],
        )
        return found

    def _pass(self, x: Any, hooks: Sequence[Any]) -> None:
        model = self.model
        try:
            with torch.no_grad(), model.turn:
                model.forward({}, x)
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()

    def _tail(self, x: Any) -> nn.Module | None:
        """The head as one layer, under its name."""
        if self.tail is None:
            return None
        module: nn.Module = _kept_weights(self.model.net.get_submodule(self.tail), {})
        for name in reversed(self.tail.split(".")):
            module = nn.Sequential(OrderedDict([(name, module)]))
        return module

    def _chain(self, x: Any) -> nn.Module | None:
        """The head as the same sequence, with identities in place of the layers of the trunk."""
        self.tail = None
        one = len(self.trunk.needed) == 1 and not self.trunk.reads_x
        if type(self.model.net) is not nn.Sequential or not one:
            return None
        return _kept_weights(self.model.net, {n: nn.Identity() for n in self.trunk.layers})

    def _general(self, x: Any) -> nn.Module:
        """The head as the whole network, with stand-ins for the layers of the trunk."""
        self.tail = None
        given, spec = tree_flatten(x)
        self._spec = spec
        layers = self.trunk.layers
        every = _all_results(self.model, layers, x)
        self._results = {
            call: _Result(spec=tree_flatten(out)[1], leaves=[_template(v) for v in leaves])
            for call, out in every.items() for leaves in [tree_flatten(out)[0]]
        }  # fmt: skip
        net = _kept_weights(
            self.model.net, {name: _StandIn(self.model.net.get_submodule(name)) for name in layers}
        )
        forms = [_template(leaf) for leaf in given]
        net.__class__ = type(net.__class__.__name__, (net.__class__,), {
            "forward": _forward_of(net.__class__, self, forms, spec),
        })  # fmt: skip
        return net

    def stand_in_values(self, features: Sequence[Tensor], rows: int) -> dict[Call, Any]:
        """The outputs of all calls of the trunk: the given features where the head reads them, and
        NaN elsewhere. The NaN are one expanded number, which takes no memory."""
        left, device = list(features), features[0].device
        needed, values = set(self.trunk.needed), {}
        for call, result in self._results.items():
            leaves = []
            for leaf in result.leaves:
                if not isinstance(leaf, Tensor):
                    leaves.append(leaf)
                else:
                    leaves.append(left.pop(0) if call in needed else _unread(leaf, rows, device))
            values[call] = tree_unflatten(leaves, result.spec)
        return values

    def _model_of(self, net: nn.Module, x: Any) -> Model:
        """The head as a model with the same weights in the same order."""
        whole = self.model
        head = copy.copy(whole)
        head.net, head.trunk, head.at_rest, head.whole = net.eval(), None, (), whole
        head.shares, head.output = False, None
        head.named = whole.named if self.tail is None else None
        head.derive()
        head.build(self.features(x))
        pairs = ((head.layout, whole.layout), (head.layers, whole.layers))
        if any(one.entries != other.entries for one, other in pairs):
            raise ValueError("its trained weights are not those of the network")
        return head

    def _compare(self, x: Any) -> None:
        """Compare the head with the whole network at the given weights, on all rows of x and on the
        first one alone. Raises `ValueError` if they differ."""
        for some in (x, _first(x)):
            rows = len(tensors_of(some)[0])
            with torch.no_grad():
                features = self.features(some)
                before = [t.clone() for t in tensors_of(features)]
                if any(len(t) != rows for t in before):
                    raise ValueError("the first axis of a value of the trunk is not the rows")
                ours = tensors_of(self.head.forward({}, features))
                theirs = tensors_of(self.model.forward({}, some))
            same = len(ours) == len(theirs) and all(map(_close, ours, theirs))
            if not same:
                raise ValueError("its outputs are not a function of those of the trunk")
            if not all(map(torch.equal, before, tensors_of(features))):
                raise ValueError("a layer overwrites the outputs of the trunk")


def _close(one: Tensor, two: Tensor) -> bool:
    """Whether outputs are equal up to rounding."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    size = two.abs().max() if two.numel() and two.is_floating_point() else 0.0
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5 * float(size))


def _first(x: Any) -> Any:
    leaves, spec = tree_flatten(x)
    return tree_unflatten([leaf[:1] for leaf in leaves], spec)


def _template(leaf: Any) -> Any:
    """A tensor of one row on the meta device, which takes no memory; other values are returned
    unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty((1, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")


def _unread(form: Tensor, rows: int, device: torch.device) -> Tensor:
    """Values that the head does not read: NaN, so that a result that reads them is NaN."""
    value = float("nan") if form.is_floating_point() else 0
    one = torch.full((), value, dtype=form.dtype, device=device)
    return one.expand(rows, *form.shape[1:])


def _all_results(model: Model, layers: Sequence[str], x: Any) -> dict[Call, Any]:
    """The outputs of all calls of the trunk."""
    found: dict[Call, Any] = {}
    numbers: dict[str, int] = {}

    def after(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        found[Call(name, numbers.get(name, 0))] = output
        numbers[name] = numbers.get(name, 0) + 1

    hooks = [
        model.net.get_submodule(name).register_forward_hook(partial(after, name)) for name in layers
    ]
    try:
        with torch.no_grad(), model.turn:
            model.forward({}, x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _forward_of(
    cls: type[nn.Module], split: Split, forms: Sequence[Tensor], spec: TreeSpec
) -> Callable[..., Any]:
    """The forward pass of a network with stand-ins. Its arguments are the tensors of x, if the head
    reads x, and then the features."""

    def forward(self: nn.Module, *given: Tensor) -> Any:
        rows, device = len(given[0]), given[0].device
        if split.trunk.reads_x:
            leaves, features = list(given[: len(forms)]), given[len(forms) :]
        else:
            leaves, features = [_unread(form, rows, device) for form in forms], given
        values = split.stand_in_values(features, rows)
        standing = {call.layer: self.get_submodule(call.layer) for call in values}
        for layer in standing.values():
            layer.values, layer.calls = [], 0  # type: ignore[assignment]
        for call, value in values.items():
            standing[call.layer].values.append(value)  # type: ignore[union-attr,operator]
        x = tree_unflatten(leaves, spec)
        try:
            if isinstance(x, dict):
                return cls.forward(self, **x)
            return cls.forward(self, *(x if isinstance(x, tuple | list) else (x,)))
        finally:
            for layer in standing.values():
                layer.values = []  # type: ignore[assignment]

    return forward


def _kept_weights(net: nn.Module, others: dict[str, nn.Module]) -> nn.Module:
    """A copy of a network with some layers replaced. The copy shares all tensors with the network,
    and the replaced layers are not copied."""
    replaced: dict[int, Any] = {id(net.get_submodule(n)): new for n, new in others.items()}
    for module in net.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                replaced[id(value)] = value
    made = copy.deepcopy(net, replaced)
    assert isinstance(made, nn.Module)
    return made


_Kept = dict[Any, tuple["Split", list[Tensor], Any]]
_kept: ContextVar[_Kept | None] = ContextVar("doxa_trunk_outputs", default=None)


@contextmanager
def remembered() -> Iterator[None]:
    """A context in which `Split.features` caches its results, up to a limit of memory. It is used
    where several posteriors, or several groups of draws, predict the same rows."""
    if _kept.get() is not None:
        yield
        return
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def _fingerprint(split: Split, leaves: Sequence[Tensor]) -> Any:
    """A key of the cache. Different inputs may have the same key, so their values are compared
    too."""
    some = [leaf.reshape(-1)[:: max(1, leaf.numel() // 64)].double().sum() for leaf in leaves]
    return id(split), *(tuple(leaf.shape) for leaf in leaves), *map(float, some)


def _same(one: Tensor, two: Tensor) -> bool:
    return one is two or (one.shape == two.shape and torch.equal(one, two))
