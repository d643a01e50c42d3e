"""One pass of a network that remembers what its layers were given, and what is asked back of them.

A zero is added to the output z of every layer; the gradient of vᵀf in it is the layer's g. Members
and rows are vectorised, so that a row is all that a layer sees, whichever way it lays out its axes;
gradients of several v are taken together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from doxa.errors import MethodError
from doxa.laplace.curvature import flatten_outputs
from doxa.laplace.layers import Layer
from doxa.linalg.layout import Params
from doxa.model import Model

log = logging.getLogger("doxa")


class Pass:
    """Some rows of all members.

    f: [M, B, O]. inputs: each layer's a_t, {key: [M, B, T, inputs]}; tokens [M, B, T] for an
    embedding.
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
    """A network at given weights whose layers are watched.

    Parameters
    ----------
    model: the network. params: its weights, each [M, ...]. buffers: each member's own.
    layers: those that are watched.
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
        """Some rows; x has a member axis unless it is shared."""
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
        """One member at one row: f [O], and what each call of a layer was given."""
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
        """Which layers are called at a row of this shape, in order, and the shapes they give."""
        key = tuple(t.shape for t in tree_flatten(row)[0])
        if key not in self._shapes:
            params, buffers = ({k: v[0] for k, v in t.items()} for t in (self.params, self.buffers))
            self._seen, self._zeros = [], None
            with torch.no_grad():
                self.model.forward(params, tree_map(lambda t: t[None], row), buffers=buffers)
            missed = {layer.key for layer in self.layers} - {s.key for s, _ in self._seen}
            if missed:
                raise MethodError(
                    f"structure='kronecker': the weights {sorted(missed)} are used without their "
                    "layers being called (as attention does with its own), or not at all; use "
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
    """Calls of one layer are further positions of it."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)
