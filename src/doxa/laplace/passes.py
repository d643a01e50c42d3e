"""Per-row gradients from forward passes with hooks on the layers.

A zero is added to the output z of every layer. The gradient of vᵀf with respect to this zero is
g = ∂(vᵀf)/∂z. One backward pass gives g for all rows, because the output of a row depends on no
other row. The gradients of the weights per row follow from g and the recorded inputs a of the layer
(`layers.py`).

Rows are run in one of three ways, called modes. The first mode that works is used, and `Plan`
records it:

batch: all rows together, as in training. Each layer has an axis of rows in its input and output.
    This axis may also hold the positions of each row ([B·T, d]). To find it, two rows are run
    together, and the results are compared with those of the same rows alone. This also shows
    whether rows are independent. A tensor that is the same for all rows, such as an embedding of
    positions, is repeated for each row.
vmap: by `torch.func.vmap`. Each layer receives one row, so any layout of axes is possible.
rows: one row at a time. A message states the number of passes.

The gradients of the two rows are also compared with those of autograd. They differ if a weight is
used outside its layer: if it is tied to another weight, or read without a call of the layer.
`Jacobians` then computes the gradient of this weight through the whole network. Plans are cached
for each network, so that each mode is tried, and each message logged, only once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from doxa.laplace.curvature import flatten_outputs, known, refused
from doxa.laplace.layers import Layer, Leaf
from doxa.linalg.layout import Params
from doxa.model import Model

log = logging.getLogger("doxa")

_CLOSE = {torch.float64: 1e-7, torch.float32: 5e-3}  # relative to the largest entry
_PROBES = 3  # rows that are tried as the second row of the comparison

Hooked = Layer | Leaf


@dataclass(frozen=True)
class Place:
    """Where the rows are in a tensor of a batch.

    Parameters
    ----------
    axis : int or None
        The axis of the rows. None if the tensor is the same for all rows.
    each : int
        The number of entries on that axis per row.
    outer : bool
        Whether the entries of one row are adjacent.
    """

    axis: int | None
    each: int = 1
    outer: bool = True

    def rows(self, t: Tensor, count: int, lead: int) -> Tensor:
        """Give the rows an axis of their own: from [*lead, *batched] to [*lead, count, *one].
        `one` is the shape of the tensor in a batch of one row."""
        if self.axis is None:
            return t.unsqueeze(lead).expand(*t.shape[:lead], count, *t.shape[lead:])
        axis = lead + self.axis
        if self.outer:
            return t.unflatten(axis, (count, self.each)).movedim(axis, lead)
        return t.unflatten(axis, (self.each, count)).movedim(axis + 1, lead)

    def batched(self, one: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of the tensor in a batch of `count` rows, from that in a batch of one row."""
        if self.axis is None:
            return (count, *(one[1:] if one and one[0] == 1 else one))
        return (*one[: self.axis], count * self.each, *one[self.axis + 1 :])

    def gradient(self, g: Tensor, count: int, lead: int, one: Sequence[int]) -> Tensor:
        """As `rows`, for a gradient of the shape that `batched` returns."""
        if self.axis is None:
            return g.reshape(*g.shape[:lead], count, *one)
        return self.rows(g, count, lead)


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Parameters
    ----------
    layer : Layer or Leaf
        The layer.
    given, made : Place
        Where the rows are in its input and in its output.
    shape : tuple of int
        The shape of its output for a batch of one row.
    """

    layer: Hooked
    given: Place
    made: Place
    shape: tuple[int, ...]


@dataclass
class Plan:
    """How a network runs rows of one shape.

    Parameters
    ----------
    mode : str
        "batch", "vmap" or "rows".
    calls : list of Call
        The calls of layers, in the order of the pass.
    missed : frozenset of str
        The keys of layers whose gradients differ from those of autograd.
    members : bool
        Whether all members run together under vmap.
    columns : bool
        Whether all columns v run together under vmap.
    """

    mode: str
    calls: list[Call]
    missed: frozenset[str] = frozenset()
    members: bool = True
    columns: bool = True


class Pass:
    """The result of one forward pass at some rows, for all members.

    Attributes
    ----------
    f : Tensor of shape [M, B, O]
        The outputs.
    keys : list of str
        The keys of the layers with factors.
    """

    def __init__(
        self, plan: Plan, f: Tensor, given: list[Tensor], zeros: list[Tensor], source: Passes
    ) -> None:
        self.f = f.detach()
        self._plan, self._graph, self._zeros, self._source = plan, f, zeros, source
        self._given = [a.detach() for a in given]  # the input of each call, [M, B, *a]

    @property
    def keys(self) -> list[str]:
        """The keys of the layers with factors, in the order of their first calls."""
        own = (call.layer for call in self._plan.calls if isinstance(call.layer, Layer))
        return list(dict.fromkeys(layer.key for layer in own))

    def positions(self, key: str) -> Tensor:
        """The inputs a_t of a layer, [M, B, T, inputs]; for an embedding, its tokens [M, B, T]."""
        pairs = zip(self._plan.calls, self._given, strict=True)
        return _joined(
            [
                call.layer.positions(a, 2)
                for call, a in pairs
                if isinstance(call.layer, Layer) and call.layer.key == key
            ],
            2,
        )

    def gradients(self, columns: Tensor) -> dict[str, Tensor]:
        """The gradients g_t of every layer with factors, {key: [M, R, B, T, out]}, for the columns
        v of [M, B, O, R]."""
        return self._grouped(self._pulled(columns))

    def slopes(self, columns: Tensor, factored: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The name of each hooked parameter and its gradient per row, [M, R, B, size]. With
        `factored=False`, only parameters of modules without factors."""
        pulled = self._pulled(columns)
        for layer, g in self._layers(pulled) if factored else ():
            yield from layer.slopes(g, self.positions(layer.key))
        yield from self._of_leaves(pulled)

    def totals(
        self, columns: Tensor, layers: bool = True, leaves: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The name of each hooked parameter and its gradient summed over rows, [M, R, size], in
        float64."""
        pulled = self._pulled(columns)
        for layer, g in self._layers(pulled) if layers else ():
            yield from layer.total(g, self.positions(layer.key))
        for name, slope in self._of_leaves(pulled) if leaves else ():
            yield name, slope.sum(2).double()

    def squares(self, columns: Tensor, most: int) -> Iterator[tuple[str, Tensor]]:
        """The name of each hooked parameter and its squared gradients, summed over rows and
        columns: [M, size], in float64. At most `most` numbers are held at once."""
        pulled = self._pulled(columns)
        for layer, g in self._layers(pulled):
            yield from layer.squares(g, self.positions(layer.key), most)
        for name, slope in self._of_leaves(pulled):
            yield name, slope.square().sum((1, 2)).double()

    def _layers(self, pulled: list[Tensor]) -> Iterator[tuple[Layer, Tensor]]:
        for key, g in self._grouped(pulled).items():
            if key not in self._plan.missed:
                yield self._source.by_key[key], g

    def _of_leaves(self, pulled: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        total: Params = {}
        for call, a, g in zip(self._plan.calls, self._given, pulled, strict=True):
            if isinstance(call.layer, Leaf) and call.layer.key not in self._plan.missed:
                params, buffers = self._source.params, self._source.buffers
                for name, slope in call.layer.slopes(g, a, params, buffers):
                    total[name] = total[name] + slope if name in total else slope
        yield from total.items()

    def _grouped(self, pulled: list[Tensor]) -> dict[str, Tensor]:
        grouped: dict[str, list[Tensor]] = {}
        for call, g in zip(self._plan.calls, pulled, strict=True):
            if isinstance(call.layer, Layer):
                own = call.layer.gradients(g.transpose(0, 1), 3)
                grouped.setdefault(call.layer.key, []).append(own)
        whole = {key: _joined(parts, 3) for key, parts in grouped.items()}
        for key in whole:
            layer = self._source.by_key[key]
            if layer.embeds and (unused := layer.module.padding_idx) is not None:
                whole[key] = whole[key] * self.positions(key).ne(unused)[:, None, ..., None]
        return whole

    def _pulled(self, columns: Tensor) -> list[Tensor]:
        """The gradient at the output of each call, [R, M, B, *z]."""
        each = columns.detach().to(self._graph.dtype).movedim(-1, 0)  # [R, M, B, O]
        if len(each) == 1 or not self._plan.columns:
            found = self._one_by_one(each)
        else:
            try:
                found = self._pull(each, batched=True)
            except (RuntimeError, NotImplementedError):  # an operation without a batching rule
                self._plan.columns = False
                found = self._one_by_one(each)
        if self._plan.mode != "batch":
            return found
        count = self.f.shape[1]
        return [
            call.made.gradient(g, count, 2, call.shape)
            for call, g in zip(self._plan.calls, found, strict=True)
        ]

    def _one_by_one(self, each: Tensor) -> list[Tensor]:
        single = [self._pull(column, batched=False) for column in each]
        return [torch.stack(parts) for parts in zip(*single, strict=True)]

    def _pull(self, columns: Tensor, batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(
            self._graph, self._zeros, columns, retain_graph=True, is_grads_batched=batched,
            allow_unused=True,
        )  # fmt: skip
        lead = columns.shape[:1] if batched else ()
        pairs = zip(found, self._zeros, strict=True)
        return [z.new_zeros((*lead, *z.shape)) if g is None else g for g, z in pairs]


@dataclass
class _Record:
    """What the hooks record in one pass: layer, input and output of each call. `zeros` are added to
    the outputs. If they are None, copies of inputs and outputs are recorded."""

    seen: list[tuple[Hooked, Tensor, Tensor]] = field(default_factory=list)
    zeros: Iterator[Tensor] | None = None


class Passes:
    """A network at given weights, with hooks on its layers. A call runs some rows.

    Parameters
    ----------
    model : Model
        The network.
    params : dict of str to Tensor
        Its weights, each [M, ...].
    buffers : dict of str to Tensor
        The buffers of each member.
    layers : sequence of Layer
        Layers with Kronecker factors, whose inputs and gradients are recorded.
    leaves : sequence of Leaf
        Modules without factors, whose inputs and gradients are also recorded.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        buffers: Mapping[str, Tensor],
        layers: Sequence[Layer],
        leaves: Sequence[Leaf] = (),
    ) -> None:
        self.model, self.params, self.buffers = model, params, dict(buffers)
        self.by_key: dict[str, Layer] = {layer.key: layer for layer in layers}
        self.hooked: list[Hooked] = [*layers, *leaves]
        self.members = len(next(iter(params.values())))
        self._record = _Record()

    def plan(self, x: Any, shared: bool = True) -> Plan:
        """The cached plan for rows of this shape, made at the first call."""
        rows = x if shared else tree_map(lambda t: t[0], x)
        shapes = tuple((t.shape[1:], t.dtype) for t in tree_flatten(rows)[0])
        several = len(tree_flatten(rows)[0][0]) > 1
        key = (tuple(layer.key for layer in self.hooked), shapes, several)
        plans = known(self.model).plans
        if key not in plans:
            plans[key] = self._planned(rows)
        return plans[key]

    def keys(self, x: Any, shared: bool = True) -> set[str]:
        """The keys of the layers that are called and whose gradients agree with autograd."""
        plan = self.plan(x, shared)
        return {call.layer.key for call in plan.calls} - plan.missed

    def names(self, x: Any, shared: bool = True) -> set[str]:
        """The names of the weights whose gradients per row can be computed with hooks."""
        called = self.keys(x, shared)
        return {
            name
            for layer in self.hooked
            if layer.key in called
            for name in (layer.names.values() if isinstance(layer, Leaf) else layer.names)
        }

    def __call__(self, x: Any, shared: bool = True) -> Pass:
        """Run some rows of inputs x. With `shared=False`, x has a leading member axis."""
        plan = self.plan(x, shared)
        with torch.enable_grad():
            if plan.mode == "batch":
                return self._batch(plan, x, shared)
            if plan.mode == "vmap":
                try:
                    return self._each(plan, x, shared, self._vectorised)
                except (RuntimeError, NotImplementedError, ValueError) as error:
                    plan.mode = "rows"
                    count = len(tree_flatten(x)[0][0]) if shared else tree_flatten(x)[0][0].shape[1]
                    cost = "one row at a time: %d passes of the network a batch of as many rows"
                    refused(self.model, "passes", error, cost % (self.members * count))
            return self._one(plan, x, shared)

    def _planned(self, rows: Any) -> Plan:
        """Make a plan from the first row and another one that differs from it."""
        one = lambda b: tree_map(lambda t: t[b : b + 1], rows)  # noqa: E731
        count = len(tree_flatten(rows)[0][0])
        alone = self._probe(one(0))
        each = [Call(layer, Place(0), Place(0), tuple(z.shape)) for layer, _, z in alone.seen]
        plan = Plan("vmap" if count > 1 else "rows", each)
        for other in range(1, min(count, 1 + _PROBES)):
            found = self._compared(rows, one, alone, other)
            if found is not None:
                plan = found
                break
        own = one(0) if plan.mode != "batch" else tree_map(lambda t: t[:2], rows)
        plan.missed = self._missed(plan, own)
        return plan

    def _compared(self, rows: Any, one: Any, alone: _Probe, other: int) -> Plan | None:
        """A plan of mode "batch". None if two rows together differ from the same rows alone."""
        try:
            pair = tree_map(lambda t: t[[0, other]], rows)
            both, second = self._probe(pair), self._probe(one(other))
            if not _close(torch.cat([alone.f, second.f]), both.f):
                return None
            calls = []
            for first, last, two in zip(alone.seen, second.seen, both.seen, strict=True):
                given = _place([first[1], last[1]], two[1])
                made = _place([first[2], last[2]], two[2])
                if given is None or made is None or not (first[0] is last[0] is two[0]):
                    return None
                if isinstance(two[0], Layer) and two[0].convolves and (given.axis or 0) != 0:
                    return None
                calls.append(Call(two[0], given, made, tuple(first[2].shape)))
            plan = Plan("batch", calls)
            with torch.enable_grad():
                found = self._select(0)._batch(plan, pair, True).f[0]
            return plan if _close(found, both.f) else None
        except Exception as error:  # the user's network may raise anything for two rows
            log.debug("curvature: rows do not run together: %s", error)
            return None

    def _select(self, m: int) -> Passes:
        """The passes of member m alone."""
        own = copy.copy(self)
        own.members = 1
        own.params, own.buffers = (
            {k: v[m : m + 1] for k, v in tree.items()} for tree in (self.params, self.buffers)
        )
        return own

    def _probe(self, rows: Any) -> _Probe:
        """Run some rows of the first member: f, and layer, input and output of each call."""
        params, buffers = ({k: v[0] for k, v in t.items()} for t in (self.params, self.buffers))
        with torch.no_grad(), self._watched(None):
            f = flatten_outputs(self.model.forward(params, rows, buffers=buffers), 0)
        return _Probe(f, self._record.seen)

    def _missed(self, plan: Plan, rows: Any) -> frozenset[str]:
        """The keys of the layers whose gradients, summed over some rows, differ from autograd."""
        first = self._select(0)
        params = {k: v[0].detach().clone().requires_grad_() for k, v in first.params.items()}
        buffers = {k: v[0] for k, v in first.buffers.items()}
        with torch.enable_grad():
            f = flatten_outputs(self.model.forward(params, rows, buffers=buffers), 0)
            column = torch.cos(torch.arange(f.numel(), device=f.device)).reshape(f.shape).to(f)
            exact = torch.autograd.grad(f, list(params.values()), column, allow_unused=True)
            run = first._batch if plan.mode == "batch" else first._one
            made = run(plan, rows, True)
        expected = {k: g for k, g in zip(params, exact, strict=True) if g is not None}
        size = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0)
        floor = 0.02 * _CLOSE.get(f.dtype, 5e-2) * size  # absolute tolerance, for sums that cancel
        columns = column.reshape(1, *f.shape, 1)
        found = dict(made.totals(columns, leaves=False))
        try:
            found |= dict(made.totals(columns, layers=False))
        except Exception as error:  # the user's module may raise anything when it runs alone
            log.debug("curvature: a module does not run alone: %s", error)
        wrong = set()
        for layer in self.hooked:
            for name in layer.names.values() if isinstance(layer, Leaf) else layer.names:
                g, e = found.get(name), expected.get(name)
                if g is None or e is None or not _close(g.flatten().to(e), e.flatten(), floor):
                    wrong.add(layer.key)
        return frozenset(wrong)

    def _batch(self, plan: Plan, x: Any, shared: bool) -> Pass:
        like = next(iter(self.params.values()))
        count = tree_flatten(x)[0][0].shape[0 if shared else 1]
        shapes = [call.made.batched(call.shape, count) for call in plan.calls]
        zeros = [like.new_zeros((self.members, *shape)).requires_grad_() for shape in shapes]

        def run(params: Params, buffers: Params, x: Any, zeros: Any) -> tuple[Tensor, list[Tensor]]:
            with self._watched(zeros):
                f = flatten_outputs(self.model.forward(params, x, buffers=buffers), 0)
            return f, [a for _, a, _ in self._record.seen]

        if self.members > 1 and plan.members:
            try:
                places = (0, 0, None if shared else 0, 0)
                f, seen = vmap(run, places, randomness="error")(self.params, self.buffers, x, zeros)
            except (RuntimeError, NotImplementedError, ValueError):
                plan.members = False
        if self.members == 1 or not plan.members:
            each = []
            for m in range(self.members):
                pick = lambda tree, m=m: tree_map(lambda t: t[m], tree)  # noqa: E731
                own = x if shared else pick(x)
                each.append(run(pick(self.params), pick(self.buffers), own, pick(zeros)))
            f = torch.stack([f for f, _ in each])
            seen = [torch.stack(parts) for parts in zip(*(s for _, s in each), strict=True)]
        given = [c.given.rows(a, count, 1) for c, a in zip(plan.calls, seen, strict=True)]
        return Pass(plan, f, given, zeros, self)

    def _each(self, plan: Plan, x: Any, shared: bool, run: Any) -> Pass:
        """Run rows with `run`, which runs them one at a time or under vmap."""
        like = next(iter(self.params.values()))
        lead = (self.members, tree_flatten(x)[0][0].shape[0 if shared else 1])
        zeros = [like.new_zeros((*lead, *call.shape)).requires_grad_() for call in plan.calls]
        f, seen = run(x, shared, zeros)
        return Pass(plan, f, seen, zeros, self)

    def _one(self, plan: Plan, x: Any, shared: bool) -> Pass:
        return self._each(plan, x, shared, self._row_by_row)

    def _row(
        self, params: Params, buffers: Params, x: Any, zeros: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """One member at one row: f [O], and the input of each call of a layer."""
        row = tree_map(lambda t: t.unsqueeze(0), x)
        with self._watched(zeros):
            f = flatten_outputs(self.model.forward(params, row, buffers=buffers), 0)[0]
        return f, [a for _, a, _ in self._record.seen]

    def _vectorised(self, x: Any, shared: bool, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        rows = vmap(self._row, in_dims=(None, None, 0, 0), randomness="error")
        if self.members == 1:  # vmap over members would use grouped convolutions, which are slower
            one = lambda tree: tree_map(lambda t: t[0], tree)  # noqa: E731
            own = x if shared else one(x)
            f, seen = rows(one(self.params), one(self.buffers), own, one(zeros))
            return f.unsqueeze(0), [a.unsqueeze(0) for a in seen]
        members = vmap(rows, in_dims=(0, 0, None if shared else 0, 0), randomness="error")
        f, seen = members(self.params, self.buffers, x, zeros)
        return f, list(seen)

    def _row_by_row(self, x: Any, shared: bool, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        values, given = [], []
        lead = (self.members, tree_flatten(x)[0][0].shape[0 if shared else 1])
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

    @contextmanager
    def _watched(self, zeros: Any) -> Iterator[None]:
        """A context with hooks on the layers, in which `zeros` are added to their outputs."""
        self._record.seen = []
        self._record.zeros = None if zeros is None else iter(zeros)
        modules = dict(self.model.net.named_modules())
        handles = [
            modules[path].register_forward_hook(self._hook(layer), with_kwargs=True)
            for layer in self.hooked
            for path in layer.paths
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: Hooked) -> Any:
        record = self._record

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()))
            if not (isinstance(given, Tensor) and isinstance(output, Tensor)):
                return None
            if record.zeros is None:
                record.seen.append((layer, given.clone(), output.clone()))
                return None
            record.seen.append((layer, given, output))
            return output + next(record.zeros)

        return hook


class _Probe(NamedTuple):
    """The outputs f of some rows, and layer, input and output of each call."""

    f: Tensor
    seen: list[tuple[Hooked, Tensor, Tensor]]


def _place(alone: list[Tensor], both: Tensor) -> Place | None:
    """Where two rows are in the tensor `both`, from the tensors of the same rows `alone`. None if
    no place fits, or more than one."""
    one = alone[0].shape
    stacked = torch.stack(alone)
    if both.shape == one:
        place = Place(None)
        return place if _close(place.rows(both, 2, 0), stacked) else None
    if len(both.shape) != len(one):
        return None
    other = [d for d in range(len(one)) if both.shape[d] != one[d]]
    if len(other) != 1 or both.shape[other[0]] != 2 * one[other[0]]:
        return None
    axis = other[0]
    orders = (True,) if one[axis] == 1 else (True, False)
    found = [Place(axis, one[axis], outer) for outer in orders]
    found = [place for place in found if _close(place.rows(both, 2, 0), stacked)]
    return found[0] if len(found) == 1 else None  # both orders fit if the two rows are equal


def _close(a: Tensor, b: Tensor, floor: float = 0.0) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if not a.numel():
        return True
    size = float(torch.maximum(a.abs().amax(), b.abs().amax()))
    return not float((a - b).abs().amax()) > _CLOSE.get(a.dtype, 5e-2) * size + floor


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Concatenate the calls of one layer along the positions t."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
