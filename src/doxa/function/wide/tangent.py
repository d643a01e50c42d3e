"""The tangent kernel of a network of finite width at each member's weights, scaled.

    k(x, x') = s² Θ̂(x, x'),    Θ̂ = (1/O) Σ_o J_o(x) J_o(x')ᵀ,    J_o = ∂f_o/∂θ

the mean over its outputs, which is what Θ is the limit of (Jacot et al. 2018; Novak et al. 2022).
It is made of Jacobians of some rows at a time: J of all of them is never held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.errors import ShapeError
from doxa.laplace.curvature import Jacobians
from doxa.linalg.layout import Entry, Layout
from doxa.model import Model

_HELD = 256 << 20  # bytes of Jacobians that are multiplied with all others


@store.register("packed-rows")
@dataclass(frozen=True)
class Packed:
    """How inputs of any kind lie in one matrix.

    names: of a dict's tensors, numbers of a tuple's, None of one tensor. shapes: of a row of each.
    kinds: types of those that are no floats, else "".
    """

    names: tuple[str, ...] | tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, x: Any) -> Packed:
        names: Any = None
        if not isinstance(x, Tensor):
            names = tuple(sorted(x)) if isinstance(x, dict) else tuple(range(len(x)))
        parts = [x] if names is None else [x[name] for name in names]
        kinds = ["" if p.is_floating_point() else str(p.dtype).split(".")[1] for p in parts]
        return cls(names, tuple(tuple(p.shape[1:]) for p in parts), tuple(kinds))

    def pack(self, x: Any, lead: int = 1) -> Tensor:
        """Rows as vectors [..., N, D], in float64, with `lead` axes up to the rows."""
        parts = [x] if self.names is None else [x[name] for name in self.names]
        for part, shape in zip(parts, self.shapes, strict=True):
            if tuple(part.shape[lead:]) != shape:
                raise ShapeError(
                    f"a tangent kernel is of rows of one shape, {list(shape)}, and x has "
                    f"{list(part.shape[lead:])}"
                )
        return torch.cat([part.reshape(*part.shape[:lead], -1).double() for part in parts], -1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Any:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        found = [
            part.reshape(*part.shape[:-1], *shape).to(getattr(torch, kind) if kind else dtype)
            for part, shape, kind in zip(
                rows.split(sizes, -1), self.shapes, self.kinds, strict=True
            )
        ]
        if self.names is None:
            return found[0]
        if self.names and isinstance(self.names[0], str):
            return dict(zip(self.names, found, strict=True))
        return tuple(found)


class TangentFunction:
    """k(hyper, a, b) of rows that are packed, for hyper [K, 1 + P]: log s and the weights."""

    def __init__(self, model: Model, packed: Packed) -> None:
        self.model, self.packed = model, packed
        self.layout = Layout((Entry("scale", (1,)), Entry("start", (model.layout.size,))))
        self._rowwise = False

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """[K, N, N'], or k(a_i, a_i) [K, N]; rows [N, D], or [K, N, D] of each member."""
        jacobians = Jacobians(self.model, self._weights(flat), self.model.subset_names)
        jacobians.rowwise = self._rowwise  # a network that does not run under vmap says so once
        size = (2 * flat[:, 0]).exp() / jacobians.outputs
        if diag:
            each = [own.square().sum(-1) for _, own in self._pieces(jacobians, a)]
            found = torch.cat(each, 1) * size[:, None]
        else:
            found = self._products(jacobians, a, b) * size[:, None, None]
        self._rowwise = jacobians.rowwise
        return found

    def _weights(self, flat: Tensor) -> Tensor:
        return flat[:, 1:].to(self.model.dtype)

    def _products(self, jacobians: Jacobians, a: Tensor, b: Tensor) -> Tensor:
        """Σ_o J_o(a) J_o(b)ᵀ, [K, N, N']: one side is held in panels, the other passes by."""
        found = a.new_empty(jacobians.members, a.shape[-2], b.shape[-2])
        for left, own in self._panels(jacobians, a):
            if a is b:
                found[:, left, left] = own @ own.mT
            for right, other in self._pieces(jacobians, b, left.stop if a is b else 0):
                block = own @ other.mT
                found[:, left, right] = block
                if a is b:
                    found[:, right, left] = block.mT
        return found

    def _pieces(
        self, jacobians: Jacobians, x: Tensor, first: int = 0
    ) -> Iterator[tuple[slice, Tensor]]:
        """(which rows, their J [K, n, O·P]), in float64: rounded, it still has a true kernel."""
        for part in jacobians.chunks(x.shape[-2] - first):
            own = slice(first + part.start, first + part.stop)
            rows = self.packed.unpack(x[..., own, :], self.model.dtype)
            yield own, jacobians(rows, x.ndim == 2)[1].double().flatten(2)

    def _panels(self, jacobians: Jacobians, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        parts: list[Tensor] = []
        start = stop = held = 0
        for own, part in self._pieces(jacobians, x):
            if parts and held + 8 * part.numel() > _HELD:
                yield slice(start, stop), torch.cat(parts, 1)
                parts, start, held = [], stop, 0
            parts.append(part)
            stop, held = own.stop, held + 8 * part.numel()
        yield slice(start, stop), torch.cat(parts, 1)

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name: flat [K, 1 + P]."""
        return {"scale": flat[:, 0].exp().tolist()}
