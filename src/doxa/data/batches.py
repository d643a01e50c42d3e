"""Rows of R runs on a device, and what a step sees of them.

Small data lies on the device and is indexed there; what is larger stays where it is and is read by
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data.rows import Inputs, Rows, cast
from doxa.data.scaling import Standardisation, scaled


@dataclass
class Batch:
    """Rows for one step. `shared` rows have no member axis: x [B, ...]; otherwise x [M, B, ...]."""

    x: Inputs
    y: Any
    scale: Tensor  # [M], rows in the data set / rows in the batch
    weight: Tensor | None = None  # [B] or [M, B]
    shared: bool = True
    points: Tensor | None = None  # of tasks: which points are to be predicted, [B, N] or [M, B, N]

    def members(self, s: slice) -> Batch:
        """The rows of some members."""
        if self.shared:
            weight = self.weight
            if weight is not None and weight.ndim == 2:
                weight = weight[s]
            return replace(self, scale=self.scale[s], weight=weight)
        pick: Callable[[Any], Any] = lambda tree: tree_map(lambda t: t[s], tree)  # noqa: E731
        weight = None if self.weight is None else self.weight[s]
        points = None if self.points is None else self.points[s]
        return Batch(pick(self.x), pick(self.y), self.scale[s], weight, False, points)

    def times(self, k: int) -> Batch:
        """The same rows for each of k particles of every member: M·k in place of M."""
        again: Callable[[Tensor], Tensor] = lambda t: t.repeat_interleave(k, 0)  # noqa: E731
        weight = self.weight
        if weight is not None and weight.ndim > 1:
            weight = again(weight)
        if self.shared:
            return replace(self, scale=again(self.scale), weight=weight)
        x, y = tree_map(again, self.x), tree_map(again, self.y)
        points = None if self.points is None else again(self.points)
        return Batch(x, y, again(self.scale), weight, False, points)

    def drawn(self, k: int) -> Batch:
        """For a network that gives k outputs for each row of x, side by side: each stands for a
        k-th of the row."""
        if self.points is not None:
            raise ValueError("rows that are tasks have no several outputs")
        lead = 0 if self.shared else 1
        y = tree_map(lambda t: t.repeat_interleave(k, lead), self.y)
        weight = None if self.weight is None else self.weight.repeat_interleave(k, -1)
        return replace(self, y=y, weight=weight, scale=self.scale / k)

    def padded(self, k: int) -> Batch:
        """With as many rows more, of weight 0, as make their number a multiple of k."""
        lead, rows = 0 if self.shared else 1, batch_rows(self)
        over = -rows % k  # rows to add
        if not over:
            return self
        again = torch.arange(rows + over, device=self.scale.device) % rows
        more = lambda t: t.index_select(lead, again)  # noqa: E731
        weight = self.weight
        if weight is None:
            weight = torch.ones(rows, device=self.scale.device, dtype=self.scale.dtype)
        weight = torch.nn.functional.pad(weight, (0, over))
        points = None if self.points is None else more(self.points)
        x, y = tree_map(more, self.x), tree_map(more, self.y)
        return Batch(x, y, self.scale, weight, self.shared, points)

    def split(self, k: int) -> Batch:
        """Every member's rows dealt out to its k particles in turns, so that it does not matter
        which rows only pad the batch; where they do not come out even, more of those are added."""
        even = self.padded(k)
        lead = 0 if even.shared else 1

        def deal(t: Tensor) -> Tensor:  # [(M,) B, ...] to [M·k, B/k, ...]
            t = t.unflatten(lead, (-1, k)).transpose(lead, lead + 1)
            return t.flatten(0, 1) if lead else t.repeat(len(self.scale), *(1,) * (t.ndim - 1))

        weight = even.weight
        if weight is not None:
            weight = weight.expand(len(self.scale), -1)
            weight = weight.unflatten(1, (-1, k)).transpose(1, 2).flatten(0, 1)
        scale = (self.scale * k).repeat_interleave(k, 0)
        points = None if even.points is None else deal(even.points)
        x, y = tree_map(deal, even.x), tree_map(deal, even.y)
        return Batch(x, y, scale, weight, False, points)


def batch_rows(batch: Batch) -> int:
    """How many rows each member sees."""
    leaf = tree_flatten(batch.x)[0][0]
    return int(leaf.shape[0 if batch.shared else 1])


@dataclass
class Data:
    """Rows of R runs, on a device.

    x, y: tensors [N, ...], or [R·N, ...] when every run has its own scales (`banked`); on the
        device and in the type of the fit, unless `lazy`.
    rows: the row numbers of each split; validation: those held out of it. A run is one split, or
        several whose members each hold out another part; `owners` then says whose a split is.
    """

    x: Inputs
    y: Any
    rows: list[Tensor]
    scales: list[Standardisation]
    device: torch.device
    dtype: torch.dtype
    total: int
    validation: list[Tensor] | None = None
    weight: Tensor | None = None  # [N], or [M, N] where the method has some of its own
    banked: bool = False
    lazy: bool = False  # x and y lie as they were given: cast and standardised by the batch
    source: Rows | None = None
    prepare_y: Callable[[Any], Any] = field(default=lambda y: y)
    tasks: Any = False  # a row is a set of points: the tasks
    owners: Sequence[int] = ()  # the run of each split
    given_weight: Tensor | None = None  # the user's, [N], by which held-out rows count

    has_rows = True

    def __post_init__(self) -> None:
        if self.given_weight is None and self.weight is not None and self.weight.ndim == 1:
            self.given_weight = self.weight

    def run_of(self, split: int) -> int:
        """Whose scales a split has."""
        return self.owners[split] if self.owners else split

    def members(self, part: Any) -> Data:
        """For some of the members, where each has weights of its own."""
        if self.weight is None or self.weight.ndim == 1:
            return self
        return replace(self, weight=self.weight[part])

    @property
    def place(self) -> torch.device:
        """Where the rows lie, which is where they are picked."""
        leaves = tree_flatten(self.x)[0]
        return torch.device("cpu") if self.source is not None else leaves[0].device

    def take(self, index: Tensor, run: Tensor | None = None) -> tuple[Inputs, Any]:
        """Rows by number, in fitted units; `run` (broadcastable to index) says whose scales."""
        if self.source is not None:
            x, y = self.source.take(index)
            shape = tuple(index.shape)
            x = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(x))
            y = self.prepare_y(y)
            y = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(y))
            return self.scales[0].x(x), self.scales[0].y(y)
        if self.banked and run is not None:
            index = index + run * self.total
        index = index.to(self.place)
        x, y = (tree_map(lambda t: t[index], tree) for tree in (self.x, self.y))
        if not self.lazy:
            return x, y
        x, y = self._standardised(x, y, index.ndim, torch.tensor(0) if run is None else run)
        return self._place(x), self._place(y)

    def _standardised(self, x: Inputs, y: Any, axes: int, run: Tensor) -> tuple[Inputs, Any]:
        """Rows by the scales of their runs; `axes` of the rows come from the index."""
        count = len(self.scales)

        def scale(t: Tensor, *pairs: Tensor) -> Tensor:
            own = pairs[0].ndim
            shape = (*run.shape, *pairs[0].shape, *(1,) * (t.ndim - axes - own))
            locs, widths = pairs[:count], pairs[count:]
            loc, width = (torch.stack(p)[run].reshape(shape) for p in (locs, widths))
            return scaled(t, loc, width, self.dtype) if t.is_floating_point() else t

        if self.scales[0].x_loc is not None:
            each = [s.x_loc for s in self.scales] + [s.x_scale for s in self.scales]
            x = tree_map(scale, x, *each)
        if self.scales[0].y_loc is not None:
            each = [s.y_loc for s in self.scales] + [s.y_scale for s in self.scales]
            y = tree_map(scale, y, *each)
        return x, y

    def _place(self, tree: Any) -> Any:
        return tree_map(lambda t: cast(t, self.device, self.dtype), tree)

    def of_split(self, s: int) -> tuple[Inputs, Any]:
        """All training rows of one split, in fitted units."""
        return self.take(self.rows[s], torch.tensor(self.run_of(s)))

    def held_out(self, s: int) -> tuple[Inputs, Any]:
        assert self.validation is not None
        return self.take(self.validation[s], torch.tensor(self.run_of(s)))

    def held_out_rows(self) -> Data:
        """What is held out in place of what is fitted, with the user's weights."""
        assert self.validation is not None
        return replace(self, rows=self.validation, weight=self.given_weight)

    def weight_of(self, rows: Tensor) -> Tensor | None:
        """The user's weights of some rows; None where there are none."""
        if self.given_weight is None:
            return None
        return self.given_weight[rows.to(self.given_weight.device)]

    def total_weight(self, split_of: Sequence[int]) -> Tensor:
        """n for each member: the sum of its rows' weights, [M]."""
        totals = []
        for m, s in enumerate(split_of):
            if self.weight is None:
                totals.append(float(len(self.rows[s])))
            else:
                w = self.weight if self.weight.ndim == 1 else self.weight[m]
                totals.append(float(w[self.rows[s].to(w.device)].sum()))
        return torch.tensor(totals, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class NoData:
    """What a bare log density is sampled with: there are no rows."""

    device: torch.device
    dtype: torch.dtype
    has_rows = False
    validation = None
    weight = None

    def members(self, part: Any) -> NoData:
        return self
