"""Rows that are held out of a fit, to stop in time and to judge it by.

By default every member holds out a part of its own: a run's rows are cut into K parts at random,
and member m does not see part m mod K. Together the members see every row, and every row is seen
by none of those that are judged by it. A share or a pair that the user gives is held out of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks
from doxa.data import check_finite, parse, rows_of
from doxa.data.weights import effective_rows
from doxa.errors import DataError, ShapeError
from doxa.noise import generator

FEWEST = 10  # held-out rows, by their effective number: fewer say nothing about when to stop


@dataclass(frozen=True)
class Splits:
    """What each split is fitted to and judged by: row numbers, and whose it is.

    A run is one split, or one for each part that a member holds out.
    """

    rows: list[Tensor]
    held_out: list[Tensor] | None = None
    owners: Sequence[int] = ()  # the run of each split; (): split r is run r
    of: Sequence[int] = ()  # the split of each run and member, runs × members; (): its run's


def parts(rows: int) -> int:
    """Into how many parts so many rows are cut: tenths, but of twenty rows or fifths where there
    are few, and twentieths where there are many."""
    return 20 if rows >= 10_000 else min(10, max(5, rows // 20))


def own_parts(
    rows: Sequence[Tensor], members: Sequence[int], seeds: Sequence[int],
    weight: Tensor | None = None,
) -> Splits | None:  # fmt: skip
    """A part for each member, or None where the rows of some run are too few to spare any; weight:
    of each row, [N]."""
    sizes = [len(own) if weight is None else int(effective_rows(weight[own])) for own in rows]
    if min(size // parts(size) for size in sizes) < FEWEST:
        return None
    kept: list[Tensor] = []
    held: list[Tensor] = []
    owners: list[int] = []
    of: list[int] = []
    for r, (own, seed) in enumerate(zip(rows, seeds, strict=True)):
        count = parts(sizes[r])
        order = torch.randperm(len(own), generator=generator("validation", seed))
        found: dict[int, int] = {}
        for member in members:
            part = member % count
            if part not in found:
                found[part] = len(kept)
                out = torch.zeros(len(own), dtype=torch.bool)
                out[order[part::count]] = True
                kept.append(own[~out])
                held.append(own[out])
                owners.append(r)
            of.append(found[part])
    return Splits(kept, held, owners, of)


def share(rows: Sequence[Tensor], size: float, seeds: Sequence[int]) -> Splits:
    """The same random share of each run's rows, held out of all its members."""
    kept, held = [], []
    for own, seed in zip(rows, seeds, strict=True):
        count = round(size * len(own))
        if not 0 < count < len(own):
            raise DataError(
                f"validation={size} of {len(own)} rows leaves {len(own) - count} to train on and "
                f"{count} to validate on; it is a share between 0 and 1, or a pair (x, y)"
            )
        order = torch.randperm(len(own), generator=generator("validation", seed))
        kept.append(own[order[count:].sort().values])
        held.append(own[order[:count].sort().values])
    return Splits(kept, held)


def appended(
    x: Any, y: Any, rows: list[Tensor], given: Any, prepare: Callable[[Any], Any]
) -> tuple[Any, Any, Splits]:
    """Rows of the user's own, appended to the data set's."""
    vx, vy, _ = parse(given)
    start, count = rows_of(x, "x"), rows_of(vx, "validation x")
    if count == 0 or rows_of(vy, "validation y") != count:
        raise ShapeError(f"validation x has {count} rows and y {rows_of(vy, 'validation y')}")
    shapes, fitted = ([tuple(t.shape[1:]) for t in tree_flatten(v)[0]] for v in (vx, x))
    if shapes != fitted:
        raise ShapeError(f"validation x has rows of shape {shapes}, but x has {fitted}")
    check_finite(vx, "validation x")
    check_finite(vy, "validation y")
    vy = prepare(vy)
    x = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), x, vx)
    y = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), y, vy)
    return x, y, Splits(rows, [torch.arange(start, start + count)] * len(rows))


def hold_out(
    x: Any, y: Any, rows: list[Tensor], validation: Any, members: Sequence[int], streamed: bool,
    prepare: Callable[[Any], Any], seeds: Sequence[int], weight: Tensor | None = None,
) -> tuple[Any, Any, Splits]:  # fmt: skip
    """The data with what is held out: "auto" (a part for each member), a share or a pair; weight:
    of each row, [N]."""
    if isinstance(validation, str) and validation == "auto":
        return x, y, own_parts(rows, members, seeds, weight) or Splits(rows)
    if isinstance(validation, int | float | str):
        return x, y, share(rows, float(checks.positive("validation", validation)), seeds)
    if streamed:
        raise DataError("validation as a pair needs data as a pair; pass a share instead")
    return appended(x, y, rows, validation, prepare)
