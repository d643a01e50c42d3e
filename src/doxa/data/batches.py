"""Rows of R runs on a device, and the batches each step sees.

Small data lies on the device and is indexed there; what is larger stays where it is and is read by
the batch. The batch at step t is a pure function of (seed, stage, member, t).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data.rows import BLOCK_BYTES, Inputs, Rows, cast
from doxa.data.scaling import Standardisation, scaled
from doxa.noise import generator


@dataclass
class Batch:
    """Rows for one step. `shared` rows have no member axis: x [B, ...]; otherwise x [M, B, ...]."""

    x: Inputs
    y: Any
    scale: Tensor  # [M], rows in the data set / rows in the batch
    weight: Tensor | None = None  # [B] or [M, B]
    shared: bool = True

    def members(self, s: slice) -> Batch:
        """The rows of some members."""
        if self.shared:
            weight = self.weight
            if weight is not None and weight.ndim == 2:
                weight = weight[s]
            return replace(self, scale=self.scale[s], weight=weight)
        pick: Callable[[Any], Any] = lambda tree: tree_map(lambda t: t[s], tree)  # noqa: E731
        weight = None if self.weight is None else self.weight[s]
        return Batch(pick(self.x), pick(self.y), self.scale[s], weight, shared=False)


@dataclass
class Data:
    """Rows of R runs, on a device.

    x, y: tensors [N, ...], or [R·N, ...] when every run has its own scales (`banked`).
    rows: the row numbers of each run; validation: those held out of each run.
    """

    x: Inputs
    y: Any
    rows: list[Tensor]
    scales: list[Standardisation]
    device: torch.device
    dtype: torch.dtype
    total: int
    validation: list[Tensor] | None = None
    weight: Tensor | None = None  # [N] or [M, N]
    banked: bool = False
    lazy: bool = False  # x and y lie as they were given: cast and standardised by the batch
    source: Rows | None = None
    prepare_y: Callable[[Any], Any] = field(default=lambda y: y)

    @property
    def runs(self) -> int:
        return len(self.rows)

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
        if self.lazy:
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

    def of_run(self, r: int) -> tuple[Inputs, Any]:
        """All training rows of one run, in fitted units."""
        return self.take(self.rows[r], torch.tensor(r))

    def held_out(self, r: int) -> tuple[Inputs, Any]:
        assert self.validation is not None
        return self.take(self.validation[r], torch.tensor(r))

    def total_weight(self, run_of: Sequence[int]) -> Tensor:
        """n for each member: the sum of its rows' weights, [M]."""
        totals = []
        for m, r in enumerate(run_of):
            if self.weight is None:
                totals.append(float(len(self.rows[r])))
            else:
                w = self.weight if self.weight.ndim == 1 else self.weight[m]
                totals.append(float(w[self.rows[r].to(w.device)].sum()))
        return torch.tensor(totals, device=self.device, dtype=self.dtype)


class NoRows:
    """What a bare log density is sampled with: there is no data set, a batch holds nothing."""

    steps = 1

    def __init__(self, members: int, device: torch.device, dtype: torch.dtype) -> None:
        self._batch = Batch((), (), torch.ones(members, device=device, dtype=dtype))

    def batch(self, t: int) -> Batch:
        return self._batch


class Batches:
    """Minibatches for stacked members: `batch(t)`, gathered a block of steps at a time."""

    def __init__(
        self, data: Data, run_of: Sequence[int], keys: Sequence[object], size: int,
        seed: int, stage: str, independent: bool = False,
    ) -> None:  # fmt: skip
        self.data = data
        self.run_of = list(run_of)
        self.keys = list(keys)
        self.counts = [len(data.rows[r]) for r in self.run_of]
        self.sizes = [max(1, min(size, count)) for count in self.counts]  # of each member's own
        self.size = max(self.sizes)
        self.per_epoch = [c // own for c, own in zip(self.counts, self.sizes, strict=True)]
        self.seed = seed
        self.stage = stage
        self.independent = independent  # rows with replacement, else every row once an epoch
        self.scale = torch.tensor(
            [c / own for c, own in zip(self.counts, self.sizes, strict=True)],
            device=data.device, dtype=data.dtype,
        )  # fmt: skip
        self._real: Tensor | None = None  # [M, B], 0 where a short run is padded
        if min(self.sizes) < self.size:
            real = torch.arange(self.size) < torch.tensor(self.sizes)[:, None]
            self._real = real.to(data.device, data.dtype)
        self._place = data.place
        self._runs = torch.tensor(self.run_of, device=self._place)
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._ahead: tuple[int, Tensor] | None = None  # row numbers of the next steps
        self._block: tuple[int, Any, Any, Tensor | None] | None = None
        x, y = data.take(data.rows[0][:1], torch.tensor(0))
        row = sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
        budget = BLOCK_BYTES if data.device.type == "cpu" else 8 * BLOCK_BYTES
        self.block = max(1, min(64, budget // max(1, row * self.size * len(self.keys))))
        self.span = self.block * (64 // self.block)

    def _order(self, m: int, epoch: int) -> Tensor:
        """The rows of member m in the order of an epoch."""
        if self.sizes[m] == self.counts[m]:  # a batch holds all rows, in whatever order
            return self.data.rows[self.run_of[m]]
        key = (m, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[1] >= epoch - 1}
            g = generator("batches", self.seed, self.stage, self.keys[m], epoch)
            rows = self.data.rows[self.run_of[m]]
            if self.independent:
                drawn = torch.randint(self.counts[m], (self.counts[m],), generator=g)
            else:
                drawn = torch.randperm(self.counts[m], generator=g)
            self._orders[key] = rows[drawn]
        return self._orders[key]

    def index(self, t: int, steps: int) -> Tensor:
        """Row numbers of steps t … t + steps − 1: [steps, M, B]."""
        columns = []
        for m, (per_epoch, size) in enumerate(zip(self.per_epoch, self.sizes, strict=True)):
            parts, at, left = [], t, steps
            while left > 0:
                epoch, step = divmod(at, per_epoch)
                count = min(left, per_epoch - step)
                order = self._order(m, epoch)
                parts.append(order[step * size : (step + count) * size])
                at, left = at + count, left - count
            own = torch.cat(parts).reshape(steps, size)
            columns.append(torch.cat([own, own[:, :1].expand(-1, self.size - size)], 1))
        return torch.stack(columns, dim=1)

    def _numbers(self, t: int) -> Tensor:
        """Row numbers of the block that starts at t, where the rows lie: many blocks are sent
        there at once, because each sending waits for a GPU to finish."""
        if self._ahead is None or not self._ahead[0] <= t < self._ahead[0] + self.span:
            start = t - t % self.span
            self._ahead = (start, self.index(start, self.span).to(self._place))
        start, numbers = self._ahead
        return numbers[t - start : t - start + self.block]

    def batch(self, t: int) -> Batch:
        if self._block is None or not self._block[0] <= t < self._block[0] + self.block:
            start = t - t % self.block
            index = self._numbers(start)
            x, y = self.data.take(index, self._runs[None, :, None])
            weight = _gather_weight(self.data, index)
            if self._real is not None:
                weight = self._real.expand(index.shape) if weight is None else weight * self._real
            self._block = (start, x, y, weight)
        start, x, y, weight = self._block
        j = t - start
        shared = len(self.keys) == 1
        pick = (lambda v: v[j, 0]) if shared else (lambda v: v[j])
        return Batch(
            tree_map(pick, x), tree_map(pick, y), self.scale,
            None if weight is None else weight[j], shared,
        )  # fmt: skip


class Pass:
    """Every row exactly once, in order: `steps` batches; short runs are padded with weight 0."""

    def __init__(self, data: Data, run_of: Sequence[int], size: int | None = None) -> None:
        self.data = data
        self.run_of = list(run_of)
        counts = [len(data.rows[r]) for r in self.run_of]
        self.longest = max(counts)
        self.size = self.longest if size is None else max(1, min(size, self.longest))
        self.steps = math.ceil(self.longest / self.size)
        self.single = len(set(self.run_of)) == 1
        self.scale = torch.ones(len(self.run_of), device=data.device, dtype=data.dtype)
        self._cache: Batch | None = None

    def batch(self, t: int) -> Batch:
        if self._cache is not None:
            return self._cache
        start = t % self.steps * self.size  # "all" repeats the one batch at every step
        stop = min(start + self.size, self.longest)
        if self.single:
            run = self.run_of[0]
            index = self.data.rows[run][start:stop]
            x, y = self.data.take(index, torch.tensor(run))
            members = index.expand(len(self.run_of), -1)
            batch = Batch(x, y, self.scale, _gather_weight(self.data, members))
        else:
            index, real = self._padded(start, stop)
            x, y = self.data.take(index, torch.tensor(self.run_of)[:, None])
            weight = _gather_weight(self.data, index)
            real = real.to(self.data.device, self.data.dtype)
            if weight is not None:
                real = real * weight
            padded = weight is not None or not bool(real.all())
            batch = Batch(x, y, self.scale, real if padded else None, shared=False)
        if self.steps == 1:
            self._cache = batch
        return batch

    def _padded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        index = torch.zeros(len(self.run_of), stop - start, dtype=torch.long)
        real = torch.zeros(index.shape, dtype=torch.bool)
        for m, r in enumerate(self.run_of):
            rows = self.data.rows[r][start:stop]
            index[m, : len(rows)] = rows
            index[m, len(rows) :] = self.data.rows[r][0]
            real[m, : len(rows)] = True
        return index, real


def _gather_weight(data: Data, index: Tensor) -> Tensor | None:
    """Weights of rows [..., M, B]."""
    if data.weight is None:
        return None
    index = index.to(data.weight.device)
    if data.weight.ndim == 1:
        return data.weight[index]
    members = torch.arange(data.weight.shape[0], device=index.device)[:, None]
    return data.weight[members, index]
