"""Preparation of a fit to a stream: the first pass, held-out rows, and a sample in memory.

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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks
from doxa.data import Data, Standardisation, cast, rows_of, warn_unscaled
from doxa.data.streams import SAMPLE, HeldPart, Stream, StreamedRows, Survey, row_hash
from doxa.driver.runs import RunSpec
from doxa.driver.setup import FEWEST_ROWS, Given, Splits, check_classes, appended, parts
from doxa.errors import DataError, MethodError
from doxa.likelihoods import Likelihood
from doxa.method import Method
from doxa.method.run import FEWEST_HELD_OUT
from doxa.model import Model

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

