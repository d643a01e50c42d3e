"""Inspection of a network: the order of layers, their sizes, noise, buffers and initialisation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from doxa.errors import ModelError
from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.layers import MaskedDropout, MethodLayer, Shape, Site
from doxa.nets import FilterResponseNorm
from doxa.noise import drawing

log = logging.getLogger("doxa")

Start = tuple[int, object]  # a seed and a member's id

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d, FilterResponseNorm)
_DRAWING = (nn.RNNBase, nn.MultiheadAttention, nn.RReLU, nn.AlphaDropout, nn.FeatureAlphaDropout)


def duplicate(
    net: nn.Module, frozen: bool = True, same: Mapping[int, Tensor] | None = None
) -> nn.Module:
    """A copy of a network, also after a forward pass. The older weight_norm and spectral_norm keep
    the weight of the last pass as an attribute; it has an autograd history and cannot be copied.
    Without `frozen`, parameters that are not trained are shared with the original. `same` has
    parameters to use in place of copies, by the id of the original."""
    history = {
        id(value): value.detach().clone()
        for module in net.modules() for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }  # fmt: skip
    shared = {} if frozen else {id(p): p for p in net.parameters() if not p.requires_grad}
    return copy.deepcopy(net, history | shared | dict(same or {}))


def masked_layers(order: Sequence[str], dropouts: Collection[str]) -> dict[str, str]:
    """For each dropout layer, the parametrised layer after it: its owner, or the next to run."""
    masked = {}
    for i, name in enumerate(order):
        if name not in dropouts:
            continue
        owner = name.removesuffix(".dropout")
        later = [layer for layer in order[i + 1 :] if layer not in dropouts]
        if owner in order and owner != name:
            masked[name] = owner
        elif later:
            masked[name] = later[0]
    return masked


def reset(
    net: nn.Module, given: Mapping[str, Tensor], kept: Collection[str] = ()
) -> tuple[set[str], set[str]]:
    """Re-initialise all layers, except those of which all parameters are in `kept`. Returns the
    names of two kinds of parameters that no `reset_parameters` sets: those that are drawn by the
    rule below, and those that have their `given` values, although these are not the same number
    everywhere.

    A tensor of two or more axes (the weight of a GPT-2 `Conv1D`, a position embedding) is drawn
    from N(0, s²), with s the root mean square of its given values: in a new network, that is the
    scale of its initialiser. A constant tensor (the scale or shift of a normalisation, a bias of
    zeros) starts with the same values in every new network, and stays. A vector that is not
    constant stays, too: whether it is a scale, a shift or a bias is not known."""
    with torch.no_grad():
        layers = [module for _, module in layers_to_reset(net, kept)]
        for name, p in net.named_parameters():
            if name not in kept:
                p.fill_(torch.nan)  # a value that is still NaN afterwards was not set
        for module in layers:
            reset = getattr(module, "reset_parameters", None)
            reset = reset or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        for module in layers:
            if hasattr(module, "reset_lora_parameters"):
                _reset_adapters(module)
        drawn: set[str] = set()
        stayed: set[str] = set()
        for name, p in net.named_parameters():
            if name in kept or not p.isnan().any():
                continue
            value = given[name]
            p.copy_(value)
            if not value.is_floating_point() or value.numel() == 0:
                continue
            if p.requires_grad and p.ndim > 1 and not bool((value == value.flatten()[0]).all()):
                p.normal_().mul_(value.double().square().mean().sqrt().to(p))
                drawn.add(name)
            elif not bool((value == value.flatten()[0]).all()) or value.numel() == 1:
                stayed.add(name)
    return drawn, stayed


def layers_to_reset(net: nn.Module, kept: Collection[str]) -> Iterator[tuple[set[str], nn.Module]]:
    """The layers that have parameters not in `kept`, or none at all, each with the names of its
    parameters; a parameter of several layers has one name."""
    names = {id(p): name for name, p in net.named_parameters()}
    for module in net.modules():
        own = {names[id(p)] for p in module.parameters()}
        if not own or own - {*kept}:
            yield own, module


def _reset_adapters(module: Any) -> None:
    """Initialise low-rank adapters as PEFT does: A random, B zero, so that they add nothing at the
    start. Their parts are linear layers, whose own initialisation would make B random."""
    kinds = (getattr(module, name, None) or {} for name in ("lora_A", "lora_embedding_A"))
    for adapter in [name for kind in kinds for name in kind]:
        module.reset_lora_parameters(adapter, True)


def fresh_rows(
    net: nn.Module,
    layout: Layout,
    starts: Sequence[Start],
    others: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Newly initialised values of the layout for each (seed, member id), [M, P]; no global
    generator is used. `others` are entries of the layout that are not in the network. Frozen
    parts are neither copied nor initialised, except the frozen parameters of a layer that
    initialises them together with others."""
    given = {name: p.detach() for name, p in net.named_parameters()}
    kept = untouched(net, layout)
    others = dict(others or {})
    kinds = [(given | others)[name].dtype for name in layout.names]
    rows = torch.empty(len(starts), layout.size, dtype=reduce(torch.promote_types, kinds))
    drawn: set[str] = set()
    stayed: set[str] = set()
    own = copied_into(net, layout, rows[0], kept)
    for row, (seed, member) in zip(rows, starts, strict=True):
        named = dict(own.named_parameters())
        for name, where in layout.slices.items():
            if name in named and named[name].dtype == rows.dtype:
                named[name].data = row[where].view(named[name].shape)  # is initialised in place
        with drawing("init", seed, member):
            drawn, stayed = reset(own, given, kept)
        for name, p in (dict(own.named_parameters()) | others).items():
            if name in layout.slices:
                value = p.detach().flatten()
                if value.data_ptr() != row[layout.slices[name]].data_ptr():
                    row[layout.slices[name]].copy_(value)
    if drawn := drawn & set(layout.names):
        log.info(
            "init='fresh': no reset_parameters sets %s: they are drawn from normals of the scale "
            "of their given values", ", ".join(sorted(drawn))
        )  # fmt: skip
    if stayed := stayed & set(layout.names):
        log.warning(
            "init='fresh' cannot re-initialise %s: no reset_parameters sets them, so all members "
            "start from the given values", ", ".join(sorted(stayed))
        )  # fmt: skip
    return rows


def untouched(net: nn.Module, layout: Layout) -> frozenset[str]:
    """Frozen parameters that no initialisation of the weights in the layout can write to."""
    frozen = {name for name, _ in net.named_parameters()} - set(layout.names)
    written: set[str] = set()
    for own, module in layers_to_reset(net, frozen):
        if any(hasattr(module, n) for n in ("reset_parameters", "_reset_parameters")):
            written |= own
    return frozenset(frozen - written)


def copied_into(
    net: nn.Module, layout: Layout, row: Tensor, kept: Collection[str] = ()
) -> nn.Module:
    """A copy of a network on the CPU whose weights have no memory but that of a row [P]. Their
    values are not copied. Parameters that are `kept` have their shape, and no values."""
    same = {
        id(p): nn.Parameter(row[layout.slices[name]].view(p.shape))
        for name, p in net.named_parameters()
        if name in layout.slices and type(p) is nn.Parameter and p.dtype == row.dtype
    }
    same |= {
        id(p): nn.Parameter(p.new_zeros((), device="cpu").expand(p.shape), requires_grad=False)
        for name, p in net.named_parameters()
        if name in kept
    }
    return duplicate(net, same=same).cpu()


@dataclass
class Trace:
    """The record of one forward pass."""

    order: list[str] = field(default_factory=list)  # parametrised and dropout layers, as they ran
    dropouts: set[str] = field(default_factory=set)
    head: str | None = None  # the trainable layer that ran last
    last: str | None = None  # the layer with weights that ran last, trainable or frozen
    noise: dict[str, tuple[str, Shape, str]] = field(default_factory=dict)  # the noise of layers
    leads: list[int] = field(default_factory=list)  # first axis of the input of each noisy layer
    widths: list[tuple[str, int]] = field(default_factory=list)  # output size of layers, in order
    calls: list[tuple[str, Shape]] = field(default_factory=list)  # the input shape of each call


@contextmanager
def watched(net: nn.Module) -> Iterator[Trace]:
    """Record the forward pass of one row."""
    trace = Trace()

    def before(
        name: str, weighted: bool | None, module: nn.Module, args: tuple[Tensor, ...]
    ) -> None:
        if isinstance(module, MethodLayer):
            prefix = f"{name}." if name else ""
            asked = module.noise(args[0])
            trace.leads.append(len(args[0]))
            trace.noise |= {
                f"{prefix}{k}": (kind, tuple(s), module.use(k)) for k, (kind, s) in asked.items()
            }
        if isinstance(module, MaskedDropout):
            trace.dropouts.add(name)
            trace.order.append(name)
        elif weighted is not None:
            trace.order.append(name)
            trace.head, trace.last = name if weighted else trace.head, name
            tensor = bool(args) and isinstance(args[0], Tensor)
            trace.calls.append((name, tuple(args[0].shape) if tensor else ()))

    def after(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        leaves = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        trace.widths.append((name, max((leaf.numel() for leaf in leaves), default=1)))

    hooks = []
    for name, module in net.named_modules():
        apart = module.own if isinstance(module, MethodLayer) else ()  # no weights
        own = [p for leaf, p in module.named_parameters(recurse=False) if leaf not in apart]
        weighted = any(p.requires_grad for p in own) if own else None  # False: frozen
        hooks.append(module.register_forward_hook(partial(after, name)))
        if own or isinstance(module, MethodLayer):
            hooks.append(module.register_forward_pre_hook(partial(before, name, weighted)))
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def inputs_of(net: nn.Module, layer: str) -> Iterator[list[Tensor]]:
    """The inputs of a layer in the forward passes inside the context."""
    try:
        module = net.get_submodule(layer)
    except AttributeError as error:
        known = [n for n, _ in net.named_modules() if n]
        raise ModelError(f"no layer named {layer!r}; there are {known}") from error
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        hook.remove()


def failure(x: Any, error: Exception) -> ModelError:
    """The error for a network that fails on x."""
    shapes = [(tuple(t.shape[1:]), t.dtype) for t in tree_flatten(x)[0]]
    advice = (
        "; integers are passed on as they are, for embeddings: convert x to floats where the "
        "network multiplies them"
    )
    if all(kind.is_floating_point for _, kind in shapes):
        advice = ""
        if any(shape == () for shape, _ in shapes):
            advice = "; x of one column needs an axis for it: x[:, None]"
    return ModelError(f"the network fails on one row of x (shape, type: {shapes}): {error}{advice}")


def noise_sites(one: Trace, two: Trace) -> dict[str, Site]:
    """The noise of the layers, from the noise they declare for one row of x and for two."""
    sites = {}
    for name, (kind, shape, use) in one.noise.items():
        more = two.noise[name][1]
        if more == shape:
            sites[name] = Site(kind, shape, 0, use)
        elif more == (2 * shape[0], *shape[1:]):
            sites[name] = Site(kind, shape[1:], shape[0], use)
        else:
            raise ModelError(
                f"the noise {name!r} has shape {list(shape)} for one row of x and {list(more)} for "
                "two: only its first axis may grow with the rows"
            )
    return sites


def inputs_of_rows(one: Trace, two: Trace) -> dict[str, tuple[Shape | None, ...]]:
    """{layer: the shape of its input for one row, in each call}, from passes of one row and of two;
    None if the first axis is not the rows."""
    found: dict[str, tuple[Shape | None, ...]] = {}
    for i, (name, shape) in enumerate(one.calls):
        more = two.calls[i] if i < len(two.calls) else ("", ())
        own = shape[:1] == (1,) and more == (name, (2, *shape[1:]))
        found[name] = (*found.get(name, ()), shape[1:] if own else None)
    return found


def probe(
    net: nn.Module, known: Collection[str], x: Any, at_rest: Collection[str] = ()
) -> tuple[tuple[str, ...], bool]:
    """The side effects of a training pass on x: the names of buffers that it writes (the vectors of
    spectral norm, moving averages, counters), except the `known` ones and those of method layers;
    and whether it draws random numbers. The layers `at_rest` are in evaluation mode. The pass runs
    on a copy and changes no random state. If it fails, all candidates are returned.

    An in-place write is detected by the version of the tensor, an assignment by its identity, and a
    write through `.data` by its values."""
    apart = {
        f"{path}." if path else "" for path, m in net.named_modules() if isinstance(m, MethodLayer)
    }

    def candidates(module: nn.Module) -> Params:
        return {
            name: value for name, value in module.named_buffers()
            if name not in known and name[: name.rfind(".") + 1] not in apart
        }  # fmt: skip

    net = duplicate(net, frozen=False).train()
    for layer in at_rest:
        net.get_submodule(layer).eval()
    before = candidates(net)
    seen = {name: (value._version, value.clone()) for name, value in before.items()}
    args = () if isinstance(x, dict) else tuple(x) if isinstance(x, list | tuple) else (x,)
    try:
        with torch.no_grad(), drawing("probe") as numbers:
            net(*args, **(x if isinstance(x, dict) else {}))
    except Exception:  # an exception of the user's forward is reported by the trial of the engine
        return tuple(before), numbers.drew
    after = candidates(net)
    for name, value in after.items():
        if name not in before or value.shape != before[name].shape:
            was = list(before[name].shape) if name in before else None
            raise ModelError(
                f"a training pass changes the shape of the buffer {name!r} from {was} to "
                f"{list(value.shape)}: every member has its own, of one shape. Register it with "
                "its final shape, for example register_buffer(name, torch.zeros(...))"
            )

    def changed(name: str, value: Tensor) -> bool:
        version, values = seen[name]
        new = after.get(name)
        return new is not value or new._version != version or not torch.equal(new, values)

    return tuple(name for name, value in before.items() if changed(name, value)), numbers.drew


class _Whole(nn.Module):
    """A network, around which a function is called."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


def with_tensors(net: nn.Module, tensors: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    """The result of a call during which a network has other tensors."""
    return functional_call(_Whole(net), {f"net.{k}": v for k, v in tensors.items()}, (call,))


def bytes_per_row(forward: Callable[..., Any], buffers: Params, one: Any, two: Any) -> int:
    """The bytes that a pass keeps for its backward pass, per row: those of two rows minus those of
    one, so that weights do not count. 0 if the pass fails; the trial of the engine reports why."""
    found: list[int] = []
    for x in (one, two):
        kept: dict[int, Tensor] = {}  # by their memory, of which several may be views

        def keep(value: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            place = value.untyped_storage().data_ptr()
            if place not in kept or value.numel() > kept[place].numel():
                kept[place] = value
            return value

        try:
            with (
                torch.enable_grad(), drawing("probe"),
                torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
            ):  # fmt: skip
                forward({}, x, buffers=buffers)
        except Exception:  # whatever the user's forward raises
            return 0
        found.append(sum(value.nbytes for value in kept.values()))
    return max(0, found[1] - found[0])


class Inside(NamedTuple):
    """The contents of a network besides weights."""

    fixed: Params  # frozen parameters and buffers, the same for all members
    terms: tuple[str, ...]  # additional outputs of layers
    momenta: dict[str, float]  # the weight of one batch in each buffer of BatchNorm
    batch_norm: bool


def look(net: nn.Module, at_rest: Collection[str] = ()) -> Inside:
    """Inspect a network that has not run. The weights of batches are those for new buffers. In the
    layers `at_rest` nothing changes."""
    fixed = {name: p.detach() for name, p in net.named_parameters() if not p.requires_grad}
    terms: list[str] = []
    momenta: dict[str, float] = {}
    batch_norm = False
    for path, module in net.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, MethodLayer):
            terms += [f"{prefix}{name}" for name in module.gives]
        if isinstance(module, _BatchNorm) and not lies_in(path, at_rest):
            batch_norm = True
            share = 1.0 if module.momentum is None else float(module.momentum)
            own = module.named_buffers(recurse=False) if module.track_running_stats else ()
            momenta |= {f"{prefix}{name}": share for name, _ in own}
    return Inside(fixed | dict(net.named_buffers()), tuple(terms), momenta, batch_norm)


def trainable(net: nn.Module) -> tuple[list[Entry], list[Entry]]:
    """The trainable parameters, with position, fan-in and the centre of the prior; and the
    parameters of method layers, which are not weights."""
    owners = {id(p): module for module in net.modules() for p in module.parameters(recurse=False)}
    weights: list[Entry] = []
    own: list[Entry] = []
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        owner, leaf = owners[id(p)], name.rpartition(".")[2]
        scale = isinstance(owner, _NORMS) and leaf == "weight"
        fan_in = int(p.numel() // p.shape[0]) if p.ndim > 1 else 1
        entry = Entry(name, tuple(p.shape), max(fan_in, 1), 1.0 if scale else 0.0)
        apart = isinstance(owner, MethodLayer) and leaf in owner.own
        (own if apart else weights).append(entry)
    return weights, own


def freeze_layers(net: nn.Module, trunk: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the layers of a trunk, whose parameters are frozen in place."""
    if trunk is None:
        return ()
    names = (trunk,) if isinstance(trunk, str) else tuple(trunk)
    known = [name for name, _ in net.named_modules() if name]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ModelError(
                f"trunk must name layers of the network, or is a tuple of names: there is no layer "
                f"{name!r}; there are {known}"
            )
        net.get_submodule(name).requires_grad_(False)
    return names


def lies_in(name: str, layers: Collection[str]) -> bool:
    """Whether a tensor or layer is one of the layers, or lies in one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def draws_itself(net: nn.Module, at_rest: Collection[str] = ()) -> bool:
    """Whether layers may draw random numbers themselves in training, besides those `at_rest`."""
    return any(
        isinstance(m, _DRAWING) and getattr(m, "dropout", getattr(m, "p", 1.0)) != 0.0
        for name, m in net.named_modules()
        if not lies_in(name, at_rest)
    )
