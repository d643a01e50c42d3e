"""Layers whose curvature has Kronecker factors, and how a weight's gradient is made in them.

At each position t of a row (a pixel of a convolution, a token of a sequence, each call of a layer
that is called again) a layer maps an input a_t to z_t = W a_t + b, so that

    ∂f/∂W = Σ_t g_t a_tᵀ,    ∂f/∂b = Σ_t g_t,    g_t = ∂f/∂z_t

A convolution's a_t is the patch under its window, unfolded (Grosse & Martens 2016); an embedding's
weight is transposed, and its a_t the unit vector of a token, kept as a number.

`Passes` runs the network and records the inputs of its layers. A zero is added to the output z of
every layer; the gradient of vᵀf with respect to this zero is g. Members and rows are vectorised, so
that each layer receives a single row, in any layout of axes. Gradients of several v are computed
together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from doxa.errors import MethodError
from doxa.laplace.curvature import flatten_outputs
from doxa.linalg.layout import Params
from doxa.model import Model

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FACTORED: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS, nn.Embedding)
_LEFT = 0.1  # largest share of weights without factors, such as scales and shifts


@dataclass(frozen=True)
class Layer:
    """One weight and bias; it has several paths where modules share them.

    weight, bias: their names; None where they are not uncertain, or where there is no bias.
    inputs, outputs: the sizes of a_t and z_t; for an embedding, of the dictionary and of a vector.
    """

    module: Any
    weight: str | None
    bias: str | None
    inputs: int
    outputs: int
    paths: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def key(self) -> str:
        return self.names[0]

    @property
    def embeds(self) -> bool:
        return isinstance(self.module, nn.Embedding)

    def positions(self, a: Tensor) -> Tensor:
        """The layer's input for one row as a_t, [T, inputs]; tokens [T] for an embedding."""
        if self.embeds:
            return a.reshape(-1)
        if isinstance(self.module, _CONVOLUTIONS):
            return unfold(self.module, a)
        return a.reshape(-1, self.inputs)

    def gradients(self, g: Tensor, lead: int) -> Tensor:
        """Gradients with respect to the layer's output, [*lead, *z], as g_t: [*lead, T,
        outputs]."""
        if isinstance(self.module, _CONVOLUTIONS):  # a view, without a copy
            return g.reshape(*g.shape[:lead], self.outputs, -1).mT
        return g.reshape(*g.shape[:lead], -1, self.outputs)


def unfold(module: Any, a: Tensor) -> Tensor:
    """Patches of a convolution's input [..., C, *pixels] as [T, C · window], in any dimension."""
    sizes, strides, gaps = module.kernel_size, module.stride, module.dilation
    count = len(sizes)
    a = a.reshape(-1, *a.shape[-count - 1 :])
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = F.pad(a, padding, mode=mode)
    for axis, (size, stride, gap) in enumerate(zip(sizes, strides, gaps, strict=True)):
        a = a.unfold(axis + 2, gap * (size - 1) + 1, stride)[..., ::gap]
    a = a.movedim(1, count + 1)  # [1, *pixels, C, *window]
    return a.reshape(-1, math.prod(a.shape[count + 1 :]))


def of(model: Model, names: Sequence[str]) -> tuple[list[Layer], tuple[str, ...]]:
    """The layers of the named weights, and the names of the weights without Kronecker factors.

    Weights without factors are scales and shifts of norm layers, parameters of user-defined
    modules, grouped convolutions, and weights that layers of different kinds share. Any other layer
    of torch with weight matrices is an error.
    """
    called = {id(p): name for name, p in model.net.named_parameters()}
    wanted = set(names)
    found: dict[str, Layer] = {}
    refused: set[str] = set()
    for path, module in model.net.named_modules():
        layer = _layer(module, called, wanted)
        if layer is None:
            continue
        known = found.setdefault(layer.key, layer)
        same = type(known.module) is type(module) and known.names == layer.names
        if not same or (isinstance(module, _CONVOLUTIONS) and known.paths):
            refused |= {*known.names, *layer.names}
        known.paths.append(path)
    layers = [layer for layer in found.values() if not refused & set(layer.names)]
    factored = {name for layer in layers for name in layer.names}
    rest = tuple(name for name in names if name not in factored)
    _check(model, rest, refused)
    return layers, rest


def factored(model: Model, names: Sequence[str]) -> bool:
    """Whether at least 90 % of the named weights have factors, all in layers that are called."""
    try:
        found, rest = of(model, names)
    except MethodError:
        return False
    called = {path for path, _ in model.widths}
    left = model.layout.select(rest).size / model.layout.select(names).size
    return left <= _LEFT and all(called.intersection(layer.paths) for layer in found)


def _layer(module: Any, called: dict[int, str], wanted: set[str]) -> Layer | None:
    kind = next((kind for kind in _FACTORED if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward or getattr(module, "groups", 1) > 1:
        return None
    own = {leaf: called.get(id(p)) for leaf, p in module.named_parameters(recurse=False)}
    weight, bias = (own[n] if own.get(n) in wanted else None for n in ("weight", "bias"))
    if weight is None and bias is None:
        return None
    if isinstance(module, nn.Embedding):
        return Layer(module, weight, None, module.num_embeddings, module.embedding_dim)
    outputs = module.weight.shape[0]
    return Layer(module, weight, bias, module.weight[0].numel(), outputs)


def _check(model: Model, rest: Sequence[str], shared: set[str]) -> None:
    owners = {
        name: (path, module)
        for path, module in model.net.named_modules()
        for name in _names_of(path, module)
    }
    for name in rest:
        path, module = owners[name]
        grouped = getattr(module, "groups", 1) > 1 and isinstance(module, _CONVOLUTIONS)
        vector = len(model.layout.select([name]).entries[0].shape) < 2
        if vector or grouped or name in shared or not type(module).__module__.startswith("torch."):
            continue
        raise MethodError(
            f"structure='kronecker': layer {path or 'the network'!r} ({type(module).__name__}) has "
            f"no Kronecker factors for {name!r}; use structure='diagonal' or 'low-rank', a subset "
            "without it (subset='last_layer'), or write it with Linear layers"
        )


def _names_of(path: str, module: nn.Module) -> list[str]:
    prefix = f"{path}." if path else ""
    return [prefix + leaf for leaf, _ in module.named_parameters(recurse=False)]


log = logging.getLogger("doxa")


class Pass:
    """The result of one forward pass: some rows of all members.

    f: the outputs, [M, B, O].
    inputs: a_t of each layer, {key: [M, B, T, inputs]}; tokens [M, B, T] for an embedding.
    """

    def __init__(
        self, f: Tensor, inputs: dict[str, Tensor], calls: list[Layer], zeros: list[Tensor]
    ) -> None:
        self.f, self.inputs = f.detach(), inputs
        self._graph, self._calls, self._zeros = f, calls, zeros

    def gradients(self, columns: Tensor) -> dict[str, Tensor]:
        """g_t of every layer for each column v of [M, B, O, R]: {key: [M, R, B, T, out]}."""
        each = columns.detach().to(self._graph.dtype).movedim(-1, 0)  # [R, M, B, O]
        try:
            if len(each) == 1:
                found = [g[None] for g in self._pull(each[0], batched=False)]
            else:
                found = self._pull(each, batched=True)
        except (RuntimeError, NotImplementedError):  # an operation without a batching rule
            single = [self._pull(column, batched=False) for column in each]
            found = [torch.stack(parts) for parts in zip(*single, strict=True)]
        grouped: dict[str, list[Tensor]] = {}
        for layer, g in zip(self._calls, found, strict=True):
            grouped.setdefault(layer.key, []).append(layer.gradients(g.transpose(0, 1), 3))
        whole = {key: _joined(parts, 3) for key, parts in grouped.items()}
        for layer in self._calls:
            if layer.embeds and (unused := layer.module.padding_idx) is not None:
                kept = self.inputs[layer.key].ne(unused)[:, None, ..., None]
                whole[layer.key] = whole[layer.key] * kept
        return whole

    def _pull(self, columns: Tensor, batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(
            self._graph, self._zeros, columns, retain_graph=True, is_grads_batched=batched,
            allow_unused=True,
        )  # fmt: skip
        lead = columns.shape[:1] if batched else ()
        pairs = zip(found, self._zeros, strict=True)
        return [z.new_zeros((*lead, *z.shape)) if g is None else g for g, z in pairs]


class Passes:
    """A network at given weights, with hooks on its layers.

    Parameters
    ----------
    model : Model
        The network.
    params : dict of Tensor
        Its weights, each [M, ...].
    buffers : dict of Tensor
        The buffers of each member.
    layers : list of Layer
        The layers whose inputs and gradients are recorded.
    """

    def __init__(
        self, model: Model, params: Params, buffers: Mapping[str, Tensor], layers: list[Layer]
    ) -> None:
        self.model, self.params, self.buffers = model, params, dict(buffers)
        self.layers = layers
        self.members = len(next(iter(params.values())))
        self._seen: list[tuple[Layer, Tensor]] = []
        self._zeros: Iterator[Tensor] | None = None
        self._shapes: dict[Any, tuple[list[Layer], list[tuple[int, ...]]]] = {}
        self._rowwise = False

    def __call__(self, x: Any, shared: bool = True) -> Pass:
        """Run some rows; x has a member axis unless it is shared."""
        first = tree_map(lambda t: t[0] if shared else t[0, 0], x)
        lead = (self.members, tree_flatten(x)[0][0].shape[0 if shared else 1])
        with self._watched(), torch.enable_grad():
            calls, shapes = self._traced(first)
            like = next(iter(self.params.values()))
            zeros = [like.new_zeros((*lead, *shape)).requires_grad_() for shape in shapes]
            f, seen = self._run(x, shared, zeros)
        grouped: dict[str, list[Tensor]] = {}
        for layer, a in zip(calls, seen, strict=True):
            grouped.setdefault(layer.key, []).append(a.detach())
        return Pass(f, {key: _joined(parts, 2) for key, parts in grouped.items()}, calls, zeros)

    def _run(self, x: Any, shared: bool, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if not self._rowwise:
            try:
                return self._vectorised(x, shared, zeros)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                log.warning(
                    "curvature: the network does not run under vmap (%s); one row at a time",
                    (str(error).splitlines() or [""])[0][:120],
                )
                self._rowwise = True
        return self._one_by_one(x, shared, zeros)

    def _row(
        self, params: Params, buffers: Params, x: Any, zeros: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """One member at one row: f [O], and the input of each call of a layer."""
        self._seen, self._zeros = [], iter(zeros)
        row = tree_map(lambda t: t.unsqueeze(0), x)
        f = flatten_outputs(self.model.forward(params, row, buffers=buffers), 0)[0]
        return f, [a for _, a in self._seen]

    def _vectorised(self, x: Any, shared: bool, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        rows = vmap(self._row, in_dims=(None, None, 0, 0), randomness="error")
        if self.members == 1:  # convolutions of several members at once are grouped, and slower
            one = lambda tree: tree_map(lambda t: t[0], tree)  # noqa: E731
            own = x if shared else one(x)
            f, seen = rows(one(self.params), one(self.buffers), own, one(zeros))
            return f.unsqueeze(0), [a.unsqueeze(0) for a in seen]
        members = vmap(rows, in_dims=(0, 0, None if shared else 0, 0), randomness="error")
        f, seen = members(self.params, self.buffers, x, zeros)
        return f, list(seen)

    def _one_by_one(self, x: Any, shared: bool, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values, given = [], []
        lead = (self.members, len(zeros[0][0]))
        for m in range(lead[0]):
            params, buffers = ({k: v[m] for k, v in t.items()} for t in (self.params, self.buffers))
            for b in range(lead[1]):
                row = tree_map(lambda t, m=m, b=b: t[b] if shared else t[m, b], x)
                f, seen = self._row(params, buffers, row, [z[m, b] for z in zeros])
                values.append(f)
                given.append(seen)
        stacked = [torch.stack(list(parts)) for parts in zip(*given, strict=True)]
        f = torch.stack(values)
        return f.reshape(*lead, -1), [a.reshape(*lead, *a.shape[1:]) for a in stacked]

    def _traced(self, row: Any) -> tuple[list[Layer], list[tuple[int, ...]]]:
        """The layers that are called for a row of this shape, in order, and their output shapes."""
        key = tuple(t.shape for t in tree_flatten(row)[0])
        if key not in self._shapes:
            params, buffers = ({k: v[0] for k, v in t.items()} for t in (self.params, self.buffers))
            self._seen, self._zeros = [], None
            with torch.no_grad():
                self.model.forward(params, tree_map(lambda t: t[None], row), buffers=buffers)
            missed = {layer.key for layer in self.layers} - {s.key for s, _ in self._seen}
            if missed:
                raise MethodError(
                    f"structure='kronecker': the weights {sorted(missed)} are used without a "
                    "call of their layer (as in attention), or not used at all; use "
                    "structure='diagonal', or a subset without them"
                )
            calls = [layer for layer, _ in self._seen]
            self._shapes[key] = calls, [tuple(z.shape) for _, z in self._seen]
        return self._shapes[key]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        modules = dict(self.model.net.named_modules())
        handles = [
            modules[path].register_forward_hook(self._hook(layer), with_kwargs=True)
            for layer in self.layers
            for path in layer.paths
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: Layer) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
            if self._zeros is None:  # being traced
                self._seen.append((layer, output))
                return None
            given = args[0] if args else kwargs["input"]
            self._seen.append((layer, layer.positions(given)))
            return output + next(self._zeros)

        return hook


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate the calls of one layer: each call adds positions t."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
