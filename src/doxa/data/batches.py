"""The rows of R runs (`Data`), and the batches of a stage (`Batch`, `Source`, `Feed`).

Small data sets are moved to the device and indexed there. Larger ones stay where they are, and
batches are read from them.

A source opens a feed of batches for a stage:

    mini          random rows, each row once per epoch
    independent   random rows with replacement: batches are independent
    all           all rows in each step
    pass          each row once, in order; the feed has the number of steps
    held-out      the held-out rows in order, repeatedly
    tasks         random tasks, each split into a context and targets (`doxa.data.tasks`)

The batch at step t is a pure function of (seed, stage, member, t): data order needs no checkpoint.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data.rows import BLOCK_BYTES, Inputs, Rows, cast, number_of_rows
from doxa.data.scaling import Standardisation, scaled
from doxa.errors import MethodError
from doxa.noise import generator


@dataclass
class Batch:
    """Rows for one step. `shared` rows have no member axis: x [B, ...]; otherwise x [M, B, ...]."""

    x: Inputs
    y: Any
    scale: Tensor  # [M], rows in the data set / rows in the batch
    weight: Tensor | None = None  # [B] or [M, B]
    shared: bool = True
    points: Tensor | None = None  # for tasks: mask of the target points, [B, N] or [M, B, N]

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

    def pieces(self, size: int) -> list[tuple[slice, float, Batch]]:
        """The rows in pieces of at most `size`, each with its place and its share of the rows. The
        scale of a piece is that of a batch of its own, so that the mean of an objective over the
        pieces, weighted with these shares, is the objective of the batch."""
        rows, lead = batch_rows(self), 0 if self.shared else 1

        def cut(t: Tensor, where: slice) -> Tensor:
            return t.narrow(lead, where.start, where.stop - where.start)

        found = []
        for start in range(0, rows, size):
            where = slice(start, min(start + size, rows))
            share = (where.stop - where.start) / rows
            pick = lambda tree, where=where: tree_map(lambda t: cut(t, where), tree)  # noqa: E731
            weight = None if self.weight is None else self.weight[..., where]
            points = None if self.points is None else pick(self.points)
            piece = Batch(
                pick(self.x), pick(self.y), self.scale / share, weight, self.shared, points
            )
            found.append((where, share, piece))
        return found

    def expand_particles(self, k: int) -> Batch:
        """The same rows for each of k particles per member: M·k in place of M."""
        again: Callable[[Tensor], Tensor] = lambda t: t.repeat_interleave(k, 0)  # noqa: E731
        weight = self.weight
        if weight is not None and weight.ndim > 1:
            weight = again(weight)
        if self.shared:
            return replace(self, scale=again(self.scale), weight=weight)
        x, y = tree_map(again, self.x), tree_map(again, self.y)
        points = None if self.points is None else again(self.points)
        return Batch(x, y, again(self.scale), weight, False, points)

    def repeat_targets(self, k: int) -> Batch:
        """The batch for a network that returns k adjacent outputs per row of x: each has 1/k of the
        row's weight."""
        if self.points is not None:
            raise ValueError("tasks cannot have several outputs per row")
        lead = 0 if self.shared else 1
        y = tree_map(lambda t: t.repeat_interleave(k, lead), self.y)
        weight = None if self.weight is None else self.weight.repeat_interleave(k, -1)
        return replace(self, y=y, weight=weight, scale=self.scale / k)

    def padded(self, k: int) -> Batch:
        """The batch, padded with rows of weight 0 to a multiple of k rows."""
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
        """The rows of each member, distributed to its k particles in turn, so that padding rows are
        spread evenly. Padding rows are added if the number is not a multiple of k."""
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
    """The number of rows of each member."""
    leaf = tree_flatten(batch.x)[0][0]
    return int(leaf.shape[0 if batch.shared else 1])


@dataclass
class Data:
    """The rows of R runs, on a device.

    x and y are tensors [N, ...], or [R·N, ...] if each run has its own scales (`scaled_per_run`).
    They are on the device and in the type of the fit, unless `lazy`. `rows` are the row numbers of
    each split, and `validation` its held-out rows. A run has one split, or several if its members
    hold out different parts; `owners` then has the run of each split.
    """

    x: Inputs
    y: Any
    rows: list[Tensor]
    scales: list[Standardisation]
    device: torch.device
    dtype: torch.dtype
    total: int
    validation: list[Tensor] | None = None
    weight: Tensor | None = None  # [N], or [M, N] if the method has its own weights
    scaled_per_run: bool = False
    lazy: bool = False  # x and y stay as given: each batch is cast and standardised
    source: Rows | None = None
    prepare_y: Callable[[Any], Any] = field(default=lambda y: y)
    tasks: Any = False  # the tasks, if a row is a set of points
    owners: Sequence[int] = ()  # the run of each split
    given_weight: Tensor | None = None  # the user's weights, [N], used for held-out rows
    group: Tensor | None = None  # the number of each row's group, [N], if rows belong together
    evaluation: list[Tensor] | None = None  # rows that evaluate, if other held-out rows do not
    stream: Any = None  # the training rows, if they are not in memory: `data.streams.StreamedRows`

    has_rows = True

    def __post_init__(self) -> None:
        if self.given_weight is None and self.weight is not None and self.weight.ndim == 1:
            self.given_weight = self.weight

    def run_of(self, split: int) -> int:
        """The run of a split."""
        return self.owners[split] if self.owners else split

    def members(self, part: Any) -> Data:
        """The data for some of the members, if members have different weights."""
        if self.weight is None or self.weight.ndim == 1:
            return self
        return replace(self, weight=self.weight[part])

    @property
    def place(self) -> torch.device:
        """The device of the rows, where they are indexed."""
        leaves = tree_flatten(self.x)[0]
        return torch.device("cpu") if self.source is not None else leaves[0].device

    def take(self, index: Tensor, run: Tensor | None = None) -> tuple[Inputs, Any]:
        """Rows by number, in fitted units; `run` (broadcastable to index) selects the scales."""
        if self.source is not None:
            x, y = self.source.take(index)
            shape = tuple(index.shape)
            x = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(x))
            y = self.prepare_y(y)
            y = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(y))
            return self.scales[0].x(x), self.scales[0].y(y)
        if self.scaled_per_run and run is not None:
            index = index + run * self.total
        index = index.to(self.place)
        x, y = (tree_map(lambda t: t[index], tree) for tree in (self.x, self.y))
        if not self.lazy:  # the outputs of a frozen trunk may be on disk
            return (self._place(x) if self.place.type != self.device.type else x), y
        x, y = self._standardised(x, y, index.ndim, torch.tensor(0) if run is None else run)
        return self._place(x), self._place(y)

    def _standardised(self, x: Inputs, y: Any, axes: int, run: Tensor) -> tuple[Inputs, Any]:
        """Rows standardised with the scales of their runs; `axes` is the number of index axes."""
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
        """The held-out rows in place of the training rows, with the user's weights."""
        assert self.validation is not None
        return replace(self, rows=self.validation, weight=self.given_weight, stream=None)

    @property
    def counts(self) -> Sequence[int]:
        """The number of training rows of each split."""
        return [len(rows) for rows in self.rows] if self.stream is None else self.stream.counts

    def weight_of(self, rows: Tensor) -> Tensor | None:
        """The user's weights of some rows; None if there are none."""
        if self.given_weight is None:
            return None
        return self.given_weight[rows.to(self.given_weight.device)]

    def groups_of(self, rows: Tensor) -> Tensor | None:
        """The groups of some rows; None if rows do not belong together."""
        return None if self.group is None else self.group[rows.cpu()]

    def effective_rows(self, rows: Tensor) -> float:
        """The effective number of some rows, in which a group counts as one row."""
        weight, group = self.weight_of(rows), self.groups_of(rows)
        return number_of_rows(rows, weight, group)

    def evaluated(self, split: int) -> Tensor:
        """The held-out rows of a split that evaluate the fit."""
        held_out = self.validation if self.evaluation is None else self.evaluation
        assert held_out is not None
        return held_out[split]

    def total_weight(self, split_of: Sequence[int]) -> Tensor:
        """n for each member: the sum of its rows' weights, [M]."""
        totals, counts = [], self.counts
        for m, s in enumerate(split_of):
            if self.weight is None:
                totals.append(float(counts[s]))
            else:
                w = self.weight if self.weight.ndim == 1 else self.weight[m]
                totals.append(float(w[self.rows[s].to(w.device)].sum()))
        return torch.tensor(totals, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class NoData:
    """The data of a bare log density: there are no rows."""

    device: torch.device
    dtype: torch.dtype
    has_rows = False
    validation = None
    weight = None

    def members(self, part: Any) -> NoData:
        return self

    def open(self, rows: Any, stage: str, keys: Sequence[str]) -> Feed:
        """The batches of a stage for members with these keys: empty ones."""
        return NoRows(len(keys), self.device, self.dtype)


class Feed(Protocol):
    """Batches by step. `steps` is their number, or None if the stage has the number of steps;
    `size` is the largest number of rows of a batch."""

    steps: int | None
    size: int

    def batch(self, t: int) -> Batch: ...


@dataclass(frozen=True)
class BatchRequest:
    """A request for batches: the splits and keys of the members, the batch size, the stage, and the
    largest number of steps, if there is one."""

    data: Data
    split_of: Sequence[int]
    keys: Sequence[str]
    size: int
    stage: str
    steps: int | None = None


@dataclass(frozen=True)
class Source:
    """Opens a feed of a data set's rows."""

    @abstractmethod
    def open(self, request: BatchRequest) -> Feed: ...


@dataclass(frozen=True)
class Mini(Source):
    """Random rows. independent: with replacement, else each row once per epoch. shuffled: a new
    order at each step, even if a batch contains all rows."""

    independent: bool = False
    shuffled: bool = False

    def open(self, request: BatchRequest) -> Feed:
        if request.data.stream is not None:
            feed: Feed = request.data.stream.batches(request, self.independent)
            return feed
        return Batches(
            request.data, request.split_of, request.keys, request.size, request.stage,
            self.independent, self.shuffled, request.steps,
        )  # fmt: skip


@dataclass(frozen=True)
class All(Source):
    """All rows in each step."""

    def open(self, request: BatchRequest) -> Feed:
        return _passed(request, None, repeats=True)


@dataclass(frozen=True)
class OnePass(Source):
    """Each row once, in order."""

    def open(self, request: BatchRequest) -> Feed:
        return _passed(request, request.size)


def _passed(request: BatchRequest, size: int | None, repeats: bool = False) -> Feed:
    """The rows in order, in memory or from a stream."""
    data, streamed = request.data, request.data.stream
    if streamed is None:
        return Pass(data, request.split_of, size, repeats)
    feed: Feed = streamed.one_pass(request.split_of, request.keys, size or 1, repeats)
    return feed


@dataclass(frozen=True)
class HeldOut(Source):
    """The held-out rows in order, repeatedly."""

    def open(self, request: BatchRequest) -> Feed:
        return Pass(request.data.held_out_rows(), request.split_of, 1024, repeats=True)


SOURCES: dict[str, Source] = {
    "mini": Mini(), "dealt": Mini(shuffled=True), "independent": Mini(independent=True),
    "all": All(), "pass": OnePass(), "held-out": HeldOut(),
}  # fmt: skip


def source(spec: str | Source) -> Source:
    """A source from its name, or the source itself."""
    if isinstance(spec, Source):
        return spec
    if spec not in SOURCES:
        raise MethodError(f"unknown source of rows {spec!r}; there are {sorted(SOURCES)}")
    return SOURCES[spec]


class NoRows:
    """Empty batches, for problems without a data set. A density is evaluated once per step, as for
    one row."""

    steps: int | None = None
    size = 1

    def __init__(self, members: int, device: torch.device, dtype: torch.dtype) -> None:
        self._batch = Batch((), (), torch.ones(members, device=device, dtype=dtype))

    def batch(self, t: int) -> Batch:
        return self._batch


class Batches:
    """Mini-batches for stacked members, `batch(t)`. Blocks of steps are gathered together, and no
    more than `most` steps."""

    steps: int | None = None

    def __init__(
        self, data: Data, split_of: Sequence[int], keys: Sequence[object], size: int, stage: str,
        independent: bool = False, shuffled: bool = False, most: int | None = None,
    ) -> None:  # fmt: skip
        self.data = data
        self.split_of = list(split_of)
        self.keys = list(keys)
        self.counts = [len(data.rows[s]) for s in self.split_of]
        self.sizes = [max(1, min(size, count)) for count in self.counts]  # of each member's own
        self.size = max(self.sizes)
        self.per_epoch = [c // own for c, own in zip(self.counts, self.sizes, strict=True)]
        self.stage = stage
        self.independent = independent  # rows with replacement, else each row once per epoch
        self.shuffled = shuffled
        self.scale = torch.tensor(
            [c / own for c, own in zip(self.counts, self.sizes, strict=True)],
            device=data.device, dtype=data.dtype,
        )  # fmt: skip
        self._real: Tensor | None = None  # [M, B], 0 where a short run is padded
        if min(self.sizes) < self.size:
            real = torch.arange(self.size) < torch.tensor(self.sizes)[:, None]
            self._real = real.to(data.device, data.dtype)
        self._place = data.place
        self._runs = torch.tensor([data.run_of(s) for s in self.split_of], device=self._place)
        self._orders: dict[int, tuple[int, Tensor]] = {}  # current epoch of each member, its order
        self._ahead: tuple[int, Tensor] | None = None  # row numbers of the next steps
        self._block: tuple[int, Any, Any, Tensor | None] | None = None
        x, y = data.take(data.rows[0][:1], torch.tensor(0))
        row = sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
        budget = BLOCK_BYTES if data.device.type == "cpu" else 8 * BLOCK_BYTES
        ahead = max(1, min(64, most or 64))  # steps
        self.block = max(1, min(ahead, budget // max(1, row * self.size * len(self.keys))))
        self.span = self.block * (ahead // self.block)

    def _order(self, m: int, epoch: int) -> Tensor:
        """The rows of member m in the order of an epoch."""
        rows = self.data.rows[self.split_of[m]]
        if self.sizes[m] == self.counts[m] and not self.shuffled:
            return rows  # a batch contains all rows: the order does not matter
        if m not in self._orders or self._orders[m][0] != epoch:
            g = generator("batches", 0, self.stage, self.keys[m], epoch)
            if self.independent:
                drawn = torch.randint(self.counts[m], (self.counts[m],), generator=g)
            else:
                drawn = torch.randperm(self.counts[m], generator=g)
            self._orders[m] = (epoch, rows[drawn])
        return self._orders[m][1]

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
        """Row numbers of the block that starts at t, on the device of the rows. Many blocks are
        sent at once, because each transfer waits for the GPU."""
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
            weight = None if self.data.weight is None else _gather_weight(self.data, index)
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
    """Each row exactly once, in order, in `count` batches, or repeatedly. Short runs are padded
    with rows of weight 0."""

    def __init__(
        self, data: Data, split_of: Sequence[int], size: int | None = None, repeats: bool = False
    ) -> None:
        self.data = data
        self.split_of = list(split_of)
        counts = [len(data.rows[s]) for s in self.split_of]
        self.longest = max(counts)
        self.size = self.longest if size is None else max(1, min(size, self.longest))
        self.count = math.ceil(self.longest / self.size)
        self.steps: int | None = None if repeats else self.count
        self.single = len(set(self.split_of)) == 1
        self.scale = torch.ones(len(self.split_of), device=data.device, dtype=data.dtype)
        self._cache: Batch | None = None

    def batch(self, t: int) -> Batch:
        if self._cache is not None:
            return self._cache
        batch = self._batch(t)
        if self.count == 1:
            self._cache = batch
        return batch

    def _batch(self, t: int) -> Batch:
        start = t % self.count * self.size  # "all" repeats the one batch at every step
        stop = min(start + self.size, self.longest)
        if self.single:
            split = self.split_of[0]
            index = self.data.rows[split][start:stop]
            x, y = self.data.take(index, torch.tensor(self.data.run_of(split)))
            members = index.expand(len(self.split_of), -1)
            return Batch(x, y, self.scale, _gather_weight(self.data, members))
        else:
            index, real = self._padded(start, stop)
            runs = torch.tensor([self.data.run_of(s) for s in self.split_of])
            x, y = self.data.take(index, runs[:, None])
            weight = _gather_weight(self.data, index)
            real = real.to(self.data.device, self.data.dtype)
            if weight is not None:
                real = real * weight
            padded = weight is not None or not bool(real.all())
            return Batch(x, y, self.scale, real if padded else None, shared=False)

    def _padded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        index = torch.zeros(len(self.split_of), stop - start, dtype=torch.long)
        real = torch.zeros(index.shape, dtype=torch.bool)
        for m, s in enumerate(self.split_of):
            rows = self.data.rows[s][start:stop]
            index[m, : len(rows)] = rows
            index[m, len(rows) :] = self.data.rows[s][0]
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
