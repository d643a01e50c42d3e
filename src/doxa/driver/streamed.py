"""A fit to a stream: the first pass, held-out rows, a sample in memory, and the batches.

    prepare_stream    the data of the fit, as `prepare_data` makes them of rows in memory
    StreamBatches     mini-batches by seeking: batch t is a function of (seed, stage, t)
    StreamPass        each row once, in order

A stream (`doxa.data.streams`) is trained on by windows. Everything else of a fit needs only some
rows, which are in memory:

    held-out rows    stop the training, set the noise, and evaluate the fit: at most 4,096 of each
                     split, and 64 MiB of all of them
    sample           4,096 training rows, for comparison with simple models, and to choose the
                     engine

Both are chosen by a hash of the seed and the number of the row. By default each member holds out
its own part of the rows, as in memory (`driver/setup.py`). A part has a twentieth of the rows
(fewer than 10,000 rows: as in memory), but no more rows than are used. A fraction that the user
gives is held out from all members; of its rows, as many as above are in memory. A pair (x, y) is in
memory already.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks
from doxa.data import (
    Batch,
    BatchRequest,
    Data,
    Standardisation,
    cast,
    rows_of,
    warn_unscaled,
)
from doxa.data.streams import Stream, Survey, join, row_hash
from doxa.driver.runs import RunSpec
from doxa.driver.setup import FEWEST_ROWS, Given, Splits, appended, check_classes, parts
from doxa.errors import DataError, MethodError
from doxa.likelihoods import Likelihood
from doxa.method import Method
from doxa.method.run import FEWEST_HELD_OUT
from doxa.model import Model
from doxa.noise import generator

SAMPLE = 4096  # training rows in memory, for comparison with simple models
HELD_OUT = 4096  # rows in memory of each split, at most
HELD_OUT_BYTES = 64 << 20  # of all splits


def check_streamed(method: Method, given: Given, specs: Sequence[RunSpec]) -> None:
    """An error if a method, or a run, needs all rows of a stream in memory."""
    if method.streams is None:
        raise MethodError(
            f"{method.name} needs all rows in memory, and {given.source!r} is read by windows: fit "
            "a sample, doxa.fit(..., stream.sample(10_000), ...), or use a method that reads "
            "batches, such as map, deep-ensemble, mc-dropout or sgld (see doxa.methods())"
        )
    if any(spec.rows is not None for spec in specs):
        raise MethodError(
            "runs of a stream have all its rows: Runs(grid=..., seeds=...) without rows"
        )


def prepare_stream(
    given: Given, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, device: torch.device, dtype: torch.dtype | None,
    members: Sequence[int],
) -> tuple[Data, Splits, Any, Any]:  # fmt: skip
    """As `driver.setup.prepare_data`, for a stream."""
    stream, x = given.source, given.x
    assert isinstance(stream, Stream)
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    inputs = tree_map(lambda t: list(t.shape[1:]), x)
    if model is None:
        if likelihood.class_axis:
            raise DataError("a stream of classes needs a network: its outputs are the classes")
        output = likelihood.outputs(given.y) if isinstance(given.y, Tensor) else (1,)
    else:
        if model.output is None:
            model.build(tree_map(lambda t: cast(t[:1], device, dtype), x))
        output = model.output
    prepare = lambda y: likelihood.prepare_targets(y, output)  # noqa: E731
    splits, parts_of = _parts(stream, specs, validation, members)
    rate = min(1.0, SAMPLE / len(stream))

    def collect(numbers: Tensor) -> tuple[Tensor, Tensor]:
        kept = row_hash(specs[0].seed, "sample of rows", numbers) <= rate
        held = torch.zeros(len(parts_of), dtype=torch.long)
        for s, part in enumerate(parts_of):
            if part is not None:
                kept = kept | part.in_memory(numbers)
                held[s] = part.of(numbers).sum()
        return kept, held

    key = (repr(parts_of), specs[0].seed, repr(likelihood), repr(output), dtype)
    found = stream.survey(key, collect, prepare, dtype)
    if likelihood.classifies and found.classes is not None and isinstance(found.y, Tensor):
        check_classes(torch.tensor(list(found.classes)), likelihood)
    y = prepare(found.y)
    sampled = row_hash(specs[0].seed, "sample of rows", found.numbers) <= rate
    rows = [_where(sampled, part, found, True) for part in parts_of]
    held_out = [_where(sampled, part, found, False) for part in parts_of]
    x, splits = found.x, Splits(rows, held_out, splits.owners, splits.of)
    if parts_of[0] is None:
        splits = Splits(rows, None, (), splits.of)
    if isinstance(validation, tuple | list):
        x, y, splits = appended(x, y, rows, validation, prepare)
    if any(len(own) == 0 for own in splits.held_out or ()):
        raise DataError(
            f"validation={validation!r} of {len(stream)} rows leaves none to validate on; it must "
            "be a larger fraction, or a pair (x, y)"
        )
    if any(len(own) == 0 for own in rows):
        raise DataError(f"validation={validation!r} of {len(stream)} rows leaves none to train on")
    scale_y = likelihood.scales_targets
    scales = found.scales(scale_y) if standardize else Standardisation()
    if not standardize:
        warn_unscaled(x, y, rows[0], scale_y)
    put = lambda tree: tree_map(lambda t: cast(t, device, dtype), tree)  # noqa: E731
    counts = [len(stream) - int(held) for held in found.held]
    streamed = StreamedRows(
        stream, scales, device, dtype, prepare, specs[0].seed, parts_of, counts
    )  # fmt: skip
    data = Data(
        put(scales.x(x, dtype)), put(scales.y(y, dtype)), splits.rows, [scales] * len(specs),
        device, dtype, rows_of(x, "x"), splits.held_out, prepare_y=prepare, owners=splits.owners,
        stream=streamed,
    )  # fmt: skip
    return data, splits, output, inputs


def _where(sampled: Tensor, part: HeldPart | None, found: Survey, training: bool) -> Tensor:
    """The places in memory of the training rows of a split, or of its held-out rows."""
    if part is None:
        return sampled.nonzero()[:, 0] if training else torch.zeros(0, dtype=torch.long)
    out = part.of(found.numbers) if training else part.in_memory(found.numbers)
    return ((sampled & ~out) if training else out).nonzero()[:, 0]


def _parts(
    stream: Stream, specs: Sequence[RunSpec], validation: Any, members: Sequence[int]
) -> tuple[Splits, list[HeldPart | None]]:
    """What each split holds out. The rows of `Splits` are not known yet."""
    total, row = len(stream), max(1, stream.reader.row_bytes)
    none: list[HeldPart | None] = [None] * len(specs)
    if isinstance(validation, tuple | list) or validation is None:
        return Splits([]), none
    if not isinstance(validation, str):
        share = float(checks.positive("validation", validation))
        if not share < 1.0:
            raise DataError(f"validation={share} must be a fraction below 1, or a pair (x, y)")
        most = min(4 * HELD_OUT, HELD_OUT_BYTES // row // len(specs))
        kept = min(share, most / total)
        return Splits([]), [HeldPart(spec.seed, 0.0, share, kept) for spec in specs]
    count = parts(total)
    numbers = sorted({member % count for member in members})
    most = max(1, min(HELD_OUT, HELD_OUT_BYTES // row // (len(specs) * len(numbers))))
    share = min(1.0 / count, most / total)
    alone = len(numbers) < 2 and total // count < FEWEST_HELD_OUT
    if total < FEWEST_ROWS or alone:
        return Splits([]), none
    found: list[HeldPart | None] = []
    owners, of = [], []
    for r, spec in enumerate(specs):
        first = len(found)
        for number in numbers:
            low = number * share
            found.append(HeldPart(spec.seed, low, low + share, low + share))
            owners.append(r)
        of += [first + numbers.index(member % count) for member in members]
    return Splits([], None, owners, of), found


@dataclass(frozen=True)
class HeldPart:
    """The rows that a split holds out: those with low < hash ≤ high. Of these, the rows up to
    `kept` are in memory, and evaluate."""

    seed: int
    low: float
    high: float
    kept: float

    def of(self, numbers: Tensor) -> Tensor:
        mark = row_hash(self.seed, "held out", numbers)
        return (mark > self.low) & (mark <= self.high)

    def in_memory(self, numbers: Tensor) -> Tensor:
        mark = row_hash(self.seed, "held out", numbers)
        return (mark > self.low) & (mark <= self.kept)


RowWeights = Callable[[Sequence[str], Tensor], Tensor | None]


@dataclass(frozen=True)
class StreamedRows:
    """The training rows of a fit that are read from a stream.

    Parameters
    ----------
    stream : Stream
    scales : Standardisation
    device, dtype : of the fit.
    prepare_y : callable
        Gives targets the form that the likelihood takes.
    seed : int
        The seed of the order of the rows.
    parts : sequence of HeldPart or None
        What each split holds out.
    counts : sequence of int
        The number of training rows of each split.
    weights : callable, optional
        Weights of rows for each member, from the keys of the members and the numbers of the rows.
    """

    stream: Stream
    scales: Standardisation
    device: torch.device
    dtype: torch.dtype
    prepare_y: Callable[[Any], Any]
    seed: int
    parts: Sequence[HeldPart | None]
    counts: Sequence[int]
    weights: RowWeights | None = None

    def weighted(self, weights: RowWeights) -> StreamedRows:
        return replace(self, weights=weights)

    def batches(self, request: BatchRequest, independent: bool) -> StreamBatches:
        if independent:
            raise MethodError(
                "this method draws rows with replacement at every step, which a stream cannot: "
                "use another method, or a sample in memory, stream.sample(10_000)"
            )
        return StreamBatches(self, request)

    def one_pass(
        self, split_of: Sequence[int], keys: Sequence[str], size: int, repeats: bool = False
    ) -> StreamPass:
        return StreamPass(self, split_of, keys, size, repeats)

    def fitted(self, window: int) -> tuple[Any, Any]:
        """The rows of a window in fitted units, on the device."""
        x, y = self.stream.window(window)
        x, y = self.scales.x(x, self.dtype), self.scales.y(self.prepare_y(y), self.dtype)
        put: Callable[[Tensor], Tensor] = lambda t: cast(t, self.device, self.dtype)  # noqa: E731
        return tree_map(put, x), tree_map(put, y)

    def member_weights(
        self, window: int, split_of: Sequence[int], keys: Sequence[str]
    ) -> Tensor | None:
        """The weights of the rows of a window for each member, [M, N]: 0 if they are held out."""
        if self.weights is None and all(self.parts[s] is None for s in split_of):
            return None
        numbers = torch.arange(self.stream.starts[window], self.stream.starts[window + 1])
        kept: dict[int, Tensor] = {}
        for s in dict.fromkeys(split_of):
            part = self.parts[s]
            out = torch.zeros(len(numbers), dtype=torch.bool) if part is None else part.of(numbers)
            kept[s] = (~out).to(self.device, self.dtype)
        found = torch.stack([kept[s] for s in split_of])
        weights = None if self.weights is None else self.weights(keys, numbers)
        return found if weights is None else found * weights.to(found)


class _Windows:
    """Windows of a stream in fitted units, of which at most two are in memory: (epoch, place)."""

    def __init__(
        self, rows: StreamedRows, split_of: Sequence[int], keys: Sequence[str], stage: str | None
    ) -> None:
        self.rows, self.split_of, self.keys = rows, list(split_of), list(keys)
        self.stage = stage  # None: in order
        self.starts = rows.stream.starts
        self._held: dict[tuple[int, int], tuple[Any, Any, Tensor | None]] = {}
        self._order: tuple[int, list[int], list[int]] | None = None

    def order(self, epoch: int) -> tuple[list[int], list[int]]:
        """The windows in the order of an epoch, and the place where each begins."""
        count = len(self.rows.stream.windows)
        if self.stage is None:
            return list(range(count)), self.starts
        if self._order is None or self._order[0] != epoch:
            g = generator("windows", self.rows.seed, self.stage, epoch)
            windows = torch.randperm(count, generator=g).tolist()
            starts = [0]
            for w in windows:
                starts.append(starts[-1] + self.starts[w + 1] - self.starts[w])
            self._order = (epoch, windows, starts)
        return self._order[1], self._order[2]

    def rows_at(self, epoch: int, start: int, stop: int) -> tuple[Any, Any, Tensor | None]:
        """The rows of an epoch from one place to another: x, y and weights [M, B]."""
        windows, starts = self.order(epoch)
        first, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1) - 1
        needed = [(epoch, place) for place in range(first, last + 1)]
        self._held = {key: value for key, value in self._held.items() if key in needed}
        parts = []
        for key in needed:
            if key not in self._held:
                self._held[key] = self._loaded(epoch, windows[key[1]])
            begin = starts[key[1]]
            own = slice(max(0, start - begin), min(stop, starts[key[1] + 1]) - begin)
            x, y, weight = self._held[key]
            cut: Callable[[Tensor], Tensor] = lambda t: t[own]  # noqa: B023, E731
            parts.append(
                (tree_map(cut, x), tree_map(cut, y), None if weight is None else weight[:, own])
            )
        if len(parts) == 1:
            return parts[0]
        weights = [w for _, _, w in parts if w is not None]
        return (
            join([x for x, _, _ in parts]), join([y for _, y, _ in parts]),
            torch.cat(weights, 1) if weights else None,
        )  # fmt: skip

    def _loaded(self, epoch: int, window: int) -> tuple[Any, Any, Tensor | None]:
        x, y = self.rows.fitted(window)
        weight = self.rows.member_weights(window, self.split_of, self.keys)
        if self.stage is not None:
            count = self.starts[window + 1] - self.starts[window]
            g = generator("window rows", self.rows.seed, self.stage, epoch, window)
            order = torch.randperm(count, generator=g).to(self.rows.device)
            x, y = (tree_map(lambda t: t[order], tree) for tree in (x, y))
            weight = None if weight is None else weight[:, order]
        return x, y, weight


class StreamBatches:
    """Mini-batches from a stream, the same rows for all members: `batch(t)`."""

    steps: int | None = None

    def __init__(self, rows: StreamedRows, request: BatchRequest) -> None:
        total, members = len(rows.stream), len(request.split_of)
        self.size = max(1, min(request.size, total))
        self.per_epoch = total // self.size
        self.scale = torch.full((members,), total / self.size, device=rows.device, dtype=rows.dtype)
        self._windows = _Windows(rows, request.split_of, request.keys, request.stage)

    def batch(self, t: int) -> Batch:
        epoch, step = divmod(t, self.per_epoch)
        start = step * self.size
        x, y, weight = self._windows.rows_at(epoch, start, start + self.size)
        return Batch(x, y, self.scale, weight)


class StreamPass:
    """Each row of a stream once, in order, in `count` batches."""

    def __init__(
        self, rows: StreamedRows, split_of: Sequence[int], keys: Sequence[str], size: int,
        repeats: bool = False,
    ) -> None:  # fmt: skip
        self.longest = len(rows.stream)
        self.size = max(1, min(size, self.longest))
        self.count = math.ceil(self.longest / self.size)
        self.steps: int | None = None if repeats else self.count
        self.scale = torch.ones(len(split_of), device=rows.device, dtype=rows.dtype)
        self._repeats = repeats
        self._windows = _Windows(rows, split_of, keys, None)

    def batch(self, t: int) -> Batch:
        if self._repeats:
            raise MethodError(
                "this method needs all rows in one batch, which a stream has not: use another "
                "method, or a sample in memory, stream.sample(10_000)"
            )
        start = t % self.count * self.size
        x, y, weight = self._windows.rows_at(0, start, min(start + self.size, self.longest))
        return Batch(x, y, self.scale, weight)
