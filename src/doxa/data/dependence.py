"""Rows that belong together: rows of one group, and rows in order of time.

The rows of one group (a person, a device, a site) resemble each other, and so do rows of about the
same time. A fit that is evaluated on other rows of its training groups, or on rows between its
training rows, is evaluated on an easier problem than new groups, or the future. So

    groups   held-out rows are whole groups; each group counts as one row
    time     held-out rows are later than training rows; rows of the same time stay together
    both     held-out rows are later rows of other groups

Here are the functions that read groups and times, cut the rows, and compute statistics in which a
group counts as one row. The standard error of a mean over G groups is

    √( G/(G − 1) Σ_g (Σ_{i∈g} w_i (v_i − v̄))² ) / Σ_i w_i

(Liang and Zeger, 1986; the factor as in Cameron and Miller, 2015). The effective number of rows of
weights w_i is that of the sums of the weights of each group.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError

MOST_PARTS = 10  # of groups
SHARE_OF_GROUPS = 0.25  # with groups and times: groups that evaluate, and groups that stop


def read_groups(groups: Any, total: int, kept: Tensor | None = None) -> Tensor | None:
    """The number of each row's group, [N], counted by first appearance. None if each group has one
    row: there is nothing that belongs together. `kept`: the mask of the rows that are read."""
    values = _values(groups, "groups", total)
    rows = range(total) if kept is None else kept.nonzero()[:, 0].tolist()
    number: dict[Any, int] = {}
    codes = []
    for row in rows:
        value = values[row]
        if _missing(value):
            raise DataError(
                f"groups is {value!r} at row {row}: each row needs a group; give rows without one "
                "a group of their own, or remove them"
            )
        try:
            codes.append(number.setdefault(value, len(number)))
        except TypeError as error:
            raise DataError(
                f"groups holds a {type(value).__name__} at row {row}: a group is a number, text or "
                "another hashable value"
            ) from error
    return None if len(number) == len(codes) else torch.tensor(codes, dtype=torch.long)


def read_times(time: Any, total: int, kept: Tensor | None = None) -> Tensor:
    """The rank of each row's time, [N]; rows of the same time have the same rank."""
    values = _values(time, "time", total)
    rows = range(total) if kept is None else kept.nonzero()[:, 0].tolist()
    for row in rows:
        value = values[row]
        if _missing(value) or (isinstance(value, float) and math.isinf(value)):
            raise DataError(
                f"time is {value!r} at row {row}: each row needs a time; remove rows without one"
            )
        if isinstance(value, str | bytes):
            raise DataError(
                f"time is {value!r} at row {row}, which is text: pass numbers or datetimes, for "
                "example pandas.to_datetime(column)"
            )
    used = [values[row] for row in rows]
    try:
        order = {value: rank for rank, value in enumerate(sorted(set(used)))}
    except TypeError as error:
        raise DataError(f"the values of time cannot be sorted: {error}") from error
    return torch.tensor([order[value] for value in used], dtype=torch.long)


def _values(given: Any, what: str, total: int) -> list[Any]:
    """The values as a list of plain objects, one per row."""
    if isinstance(given, Tensor):
        given = given.detach().cpu().numpy()
    elif hasattr(given, "to_numpy"):
        given = given.to_numpy()
    if isinstance(given, np.ndarray):
        if given.ndim == 2 and given.shape[1] == 1:
            given = given[:, 0]
        if given.ndim != 1:
            raise ShapeError(f"{what} has shape {given.shape}, expected ({total},)")
        if given.dtype.kind in "mM":  # without the value NaT, whose integer is a number
            given = np.where(np.isnat(given), None, given.astype(np.int64).astype(object))
        values = given.tolist()
    elif isinstance(given, str | bytes) or not hasattr(given, "__len__"):
        raise DataError(f"{what} must hold one value per row, not {given!r}")
    else:
        values = list(given)
    if len(values) != total:
        raise ShapeError(f"{what} has {len(values)} values, but the data have {total} rows")
    return values


def _missing(value: Any) -> bool:
    """Whether a value is None, NaN, or the missing value of a data frame."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(value != value)


def group_sizes(group: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row, counted from 0 by first appearance, and the number of rows of each
    group."""
    _, code, counts = group.unique(return_inverse=True, return_counts=True)
    first = torch.full((len(counts),), len(group)).scatter_reduce(
        0, code, torch.arange(len(group)), "amin"
    )
    order = first.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return place[code], counts[order]


def effective_groups(weight: Tensor | None, group: Tensor) -> float:
    """(Σ_g w_g)²/Σ_g w_g² of the sums of the weights of each group."""
    totals = _sums(torch.ones(len(group)) if weight is None else weight, group)
    if len(totals) == 0:
        return 0.0
    each = totals / totals.max()
    return float(each.sum().square() / each.square().sum())


def clustered_error(values: Tensor, weight: Tensor | None, group: Tensor) -> float:
    """The standard error of the weighted mean of values [N], with one error per group; infinite for
    one group."""
    each = values.detach().double().cpu()
    w = torch.ones_like(each) if weight is None else weight.detach().double().cpu()
    residual = _sums(w * (each - (w * each).sum() / w.sum()), group)
    count = len(residual)
    if count < 2:
        return math.inf
    return math.sqrt(float(residual.square().sum()) * count / (count - 1)) / float(w.sum())


def _sums(values: Tensor, group: Tensor) -> Tensor:
    """The sum of the values of each group."""
    code = group.cpu().unique(return_inverse=True)[1]
    total = torch.zeros(int(code.max()) + 1 if len(code) else 0, dtype=torch.float64)
    return total.index_add(0, code, values.detach().double().cpu())


def group_parts(group: Tensor, parts: int, generator: torch.Generator) -> Tensor:
    """The part of each row, [N]: each group in one part, and about as many rows in each part.

    The groups, in random order and then by falling number of rows, are put one after the other into
    the part with the fewest rows so far."""
    code, counts = group_sizes(group)
    order = torch.randperm(len(counts), generator=generator)
    order = order[counts[order].argsort(descending=True, stable=True)]
    rows = [0] * parts
    part = torch.empty_like(counts)
    for g in order.tolist():
        least = min(range(parts), key=rows.__getitem__)
        part[g] = least
        rows[least] += int(counts[g])
    return part[code]


def group_share(group: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """The mask of random whole groups with about a fraction `size` of the rows; at least one group
    is held out, and one is not."""
    code, counts = group_sizes(group)
    order = torch.randperm(len(counts), generator=generator)
    total = counts[order].cumsum(0)
    away = (total - size * len(group)).abs()
    held = order[: min(int(away.argmin()) + 1, len(counts) - 1)]
    return torch.isin(code, held)


def share_of_time(rows: int) -> float:
    """The fraction of the rows that evaluates, and of those that stop: a tenth, or 60 rows of fewer
    than 600, at most a fifth."""
    return min(0.2, max(0.1, 60 / max(rows, 1)))


def time_cuts(
    time: Tensor, share: float, group: Tensor | None, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the rows: those to train on, the ones after them, which stop the training, and the
    last ones, which evaluate.

    A cut lies between two times. With groups, the groups are ordered by their first row, in random
    order where these are at the same time. The last groups evaluate, the ones before stop, and each
    group has rows in one of the three parts only: its other rows are in none."""
    ranks, counts = time.unique(return_counts=True)
    if len(ranks) < 3:
        raise DataError(
            f"the rows of a run have {len(ranks)} different times, and three are needed: to train "
            "on, to stop the training and to evaluate"
        )
    after = len(time) - counts.cumsum(0).double()  # rows after each time
    last = _nearest(after[:-1], share * len(time), 1)
    before = _nearest(after[:last], 2 * share * len(time), 0)
    trained, stops, evaluates = time <= ranks[before], time <= ranks[last], time > ranks[last]
    stops = stops & ~trained
    if group is None:
        return trained, stops, evaluates
    code, sizes = group_sizes(group)
    if len(sizes) < 3:
        raise DataError(
            f"the rows of a run have {len(sizes)} groups: with groups and time, three are needed, "
            "to train on, to stop the training and to evaluate"
        )
    first = torch.full((len(sizes),), int(time.max())).scatter_reduce(0, code, time, "amin")
    order = torch.randperm(len(sizes), generator=generator)
    order = order[first[order].argsort(stable=True)]
    count = max(1, round(SHARE_OF_GROUPS * len(sizes)))
    latest, middle = order[-count:], order[-2 * count : -count]
    of_latest, of_middle = torch.isin(code, latest), torch.isin(code, middle)
    found = trained & ~of_latest & ~of_middle, stops & of_middle, evaluates & of_latest
    if not all(bool(mask.any()) for mask in found):
        raise DataError(
            "no later rows of other groups exist: with groups and time, some groups need rows late "
            "in the data; pass groups or time alone"
        )
    return found


def _nearest(after: Tensor, target: float, least: int) -> int:
    """The time after which there are about as many rows as the target."""
    return max(least, int((after - target).abs().argmin()))
