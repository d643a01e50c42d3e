"""How a stage gets its rows: a source says which, and opens a feed of batches.

    mini          random rows, every row once an epoch
    independent   random rows with replacement: batches that know nothing of each other
    all           every row, every step
    pass          every row once, in order; the feed says how many steps that takes
    held-out      the rows that are not trained on, in order, again and again
    tasks         random tasks, each cut into a context and targets (`doxa.data.tasks`)

The batch at step t is a pure function of (seed, stage, member, t): data order needs no checkpoint.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data.batches import Batch, Data
from doxa.data.rows import BLOCK_BYTES
from doxa.errors import MethodError
from doxa.noise import generator


class Feed(Protocol):
    """Batches by the step. `steps`: how many there are, None where the stage decides."""

    steps: int | None

    def batch(self, t: int) -> Batch: ...


@dataclass(frozen=True)
class Ask:
    """Who asks for rows: the members' splits and keys, how many rows at a time, for which stage,
    and for how many steps at most, where that is known."""

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
    def open(self, ask: Ask) -> Feed: ...


@dataclass(frozen=True)
class Mini(Source):
    """Random rows. independent: with replacement, else every row once an epoch. shuffled: in
    another order at every step also where a batch holds all rows."""

    independent: bool = False
    shuffled: bool = False

    def open(self, ask: Ask) -> Feed:
        return Batches(
            ask.data, ask.split_of, ask.keys, ask.size, ask.stage, self.independent, self.shuffled,
            ask.steps,
        )  # fmt: skip


@dataclass(frozen=True)
class All(Source):
    """Every row, every step."""

    def open(self, ask: Ask) -> Feed:
        return Pass(ask.data, ask.split_of, repeats=True)


@dataclass(frozen=True)
class OnePass(Source):
    """Every row once, in order."""

    def open(self, ask: Ask) -> Feed:
        return Pass(ask.data, ask.split_of, ask.size)


@dataclass(frozen=True)
class HeldOut(Source):
    """The rows that were held out, in order, again and again."""

    def open(self, ask: Ask) -> Feed:
        return Pass(ask.data.held_out_rows(), ask.split_of, 1024, repeats=True)


SOURCES: dict[str, Source] = {
    "mini": Mini(), "dealt": Mini(shuffled=True), "independent": Mini(independent=True),
    "all": All(), "pass": OnePass(), "held-out": HeldOut(),
}  # fmt: skip


def source(spec: str | Source) -> Source:
    """A source from its name, or itself."""
    if isinstance(spec, Source):
        return spec
    if spec not in SOURCES:
        raise MethodError(f"a stage asks for unknown rows {spec!r}; known: {sorted(SOURCES)}")
    return SOURCES[spec]


class NoRows:
    """Batches that hold nothing: there is no data set."""

    steps: int | None = None

    def __init__(self, members: int, device: torch.device, dtype: torch.dtype) -> None:
        self._batch = Batch((), (), torch.ones(members, device=device, dtype=dtype))

    def batch(self, t: int) -> Batch:
        return self._batch


class Batches:
    """Minibatches for stacked members: `batch(t)`, gathered a block of steps at a time, and no
    more of them than there are `most` steps."""

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
        self.independent = independent  # rows with replacement, else every row once an epoch
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
        self._orders: dict[int, tuple[int, Tensor]] = {}  # the epoch that each member is in
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
            return rows  # a batch holds all rows, in whatever order
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
    """Every row exactly once, in order, in `count` batches, or again and again; short runs are
    padded with weight 0."""

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
