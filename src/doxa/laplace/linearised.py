"""Products with the Jacobian J of all rows, for directions of the weights, without J.

Forward derivatives give Jv at about the price of two passes of the network, and backward ones Jᵀv.
Memory bounds how many rows, or directions, go together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, batch_rows
from doxa.errors import MethodError
from doxa.laplace.curvature import Jacobians, chunk_bytes, flatten_outputs
from doxa.laplace.statistics import some_rows
from doxa.linalg.layout import Params
from doxa.model import Model


@dataclass(frozen=True)
class Linearised:
    """Products with J at all rows, some at a time, without J."""

    jacobians: Jacobians
    batch: Batch

    def along(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [M, B, O] and Jδ [M, S, B, O] for draws [M, S, p], as many together as memory allows:
        they share f, and a layer's products with all of them are one."""
        most = max(1, chunk_bytes(delta.device) // self._row_bytes)
        pushed = [self._together(some) for some in delta.split(most, 1)]
        return pushed[0][0], torch.cat([away for _, away in pushed], 1)

    def push(self, direction: Tensor) -> Tensor:
        """J v for v [M, p]: [M, B, O]."""
        return self._pushed(direction, _pushed)[1]

    def _together(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        if delta.shape[1] > 1:
            with contextlib.suppress(RuntimeError, ValueError):  # an operation without a rule
                f, away = self._pushed(delta, _pushed_together, delta.shape[1])
                return f, away.transpose(1, 2)
        pushed = [self._pushed(delta[:, s], _pushed) for s in range(delta.shape[1])]
        return pushed[0][0], torch.stack([away for _, away in pushed], 1)

    def _pushed(self, direction: Tensor, product: Any, draws: int = 1) -> tuple[Tensor, Tensor]:
        own = self.jacobians.layout.unflatten(direction.to(self._like.dtype))
        try:
            parts = [self._members(product, rows, own) for rows in self._parts(draws)]
        except NotImplementedError as error:
            raise MethodError(
                "centre='mean' needs forward derivatives, which an operation of the network has "
                f"none of ({str(error).splitlines()[0][:120]}): use centre='mode'"
            ) from error
        f, away = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return f, away

    def back(self, pulls: Tensor) -> Tensor:
        """Σ_i J_iᵀ v_i for v [M, B, O]: [M, p]."""
        slopes = [
            self.jacobians.layout.flatten(self._members(_pulled, rows, pulls[:, rows]))
            for rows in self._parts()
        ]
        return torch.stack(slopes).sum(0)

    @property
    def _like(self) -> Tensor:
        return next(iter(self.jacobians.own.values()))

    @property
    def _row_bytes(self) -> int:
        """What layers give for one row of all members, its tangent, and a copy."""
        numbers = max(1, sum(width for _, width in self.jacobians.model.widths))
        return 3 * self.jacobians.members * numbers * self._like.dtype.itemsize

    def _parts(self, draws: int = 1) -> list[slice]:
        """Pieces of the rows: no J is held, only what layers give."""
        count = batch_rows(self.batch)
        step = max(1, chunk_bytes(self._like.device) // (draws * self._row_bytes))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _members(self, product: Any, rows: slice, other: Any) -> Any:
        """A product of each member with what it is given, at some rows."""
        j, part = self.jacobians, some_rows(self.batch, rows)
        one = lambda tree: tree_map(lambda t: t[0], tree)  # noqa: E731
        own = (j.own, j.rest, j.buffers)
        if j.members == 1:  # convolutions of several members at once are grouped, and slower
            x = part.x if part.shared else one(part.x)
            found = product(j.model, *map(one, own), x, one(other))
            return tree_map(lambda t: t.detach().unsqueeze(0), found)
        places = (None, 0, 0, 0, None if part.shared else 0, 0)
        return tree_map(Tensor.detach, vmap(product, places)(j.model, *own, part.x, other))


def _outputs(model: Model, rest: Params, buffers: Params, x: Any) -> Callable[[Params], Tensor]:
    """One member's f [B, O] as a function of its uncertain weights."""
    return lambda own: flatten_outputs(model.forward({**rest, **own}, x, buffers=buffers), 0)


def _pushed(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv."""
    found = jvp(_outputs(model, rest, buffers, x), (own,), (v,))
    return found[0], found[1]


def _pushed_together(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv [B, S, O] for several v, each [S, ...]."""
    outputs = _outputs(model, rest, buffers, x)
    found = vmap(lambda one: jvp(outputs, (own,), (one,)), out_dims=(0, 1))(v)
    return found[0][0], found[1]


def _pulled(model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Tensor) -> Params:
    """Jᵀv, by name."""
    pull = vjp(_outputs(model, rest, buffers, x), own)[1]
    slopes: Params = pull(v)[0]
    return slopes
