"""Leakage: columns by which rows belong together, found before a fit that holds out random rows.

If the rows of a person are in the training rows and in the held-out rows, a network may recognise
the person, and its held-out scores are those of known persons. Whether it can is measured. Cheap
models (`yardsticks.py`) are fitted to the rows without a part of them: once with parts that were
cut at random, and once with parts that have whole groups (values of the column), or consecutive
times. The part of a row is predicted by models without it. The loss of gain of row i is

    d_i = (s_i − c_i) with random parts − (s_i − c_i) with parts by the column

where s is the log predictive density of the model that is best with random parts, and c that of the
constant. A column leaks if the mean of d exceeds both 0.05 nats and t standard errors, which are
clustered by group, or by stretches of consecutive rows. t is 2, corrected for the number of columns
(Bonferroni) and for few clusters (Student's t).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data.dependence import clustered_error, group_parts, group_sizes
from doxa.driver.yardsticks import MOST_ROWS, why_untested, yardsticks
from doxa.likelihoods import Likelihood
from doxa.noise import generator

LOSS = 0.05  # nats per row
FEWEST_GROUPS = 8
MOST_COLUMNS = 6  # columns that are tested, at most
_PARTS = 5
_STRETCHES = 25  # of consecutive rows, as clusters of times
_TAIL = 0.02275  # P(z > 2)


class Column(NamedTuple):
    """A column by which rows may belong together.

    Parameters
    ----------
    name : str
        Its name.
    values : Tensor
        The group of each row, or the rank of its time, [N].
    ordered : bool
        Whether the values are times.
    inputs : Tensor
        The numbers of the inputs that the models use.
    """

    name: str
    values: Tensor
    ordered: bool
    inputs: Tensor


class Leak(NamedTuple):
    """A column that leaks: the mean loss of gain per row, in nats, and its standard error; the
    model that showed it; and the number of groups or times that were used."""

    name: str
    ordered: bool
    loss: float
    error: float
    model: str
    values: int


def find_leaks(
    x: Tensor, y: Tensor, likelihood: Likelihood, columns: Sequence[Column], seed: int = 0
) -> list[Leak]:
    """The columns that leak, of at most `MOST_COLUMNS`, in their order. None are found if there are
    no yardsticks for such rows."""
    if why_untested(x, y, likelihood):
        return []
    tested = [column for column in columns if len(column.values.unique()) >= FEWEST_GROUPS]
    tested = tested[:MOST_COLUMNS]
    found = [_leak(x, y, likelihood, column, len(tested), seed) for column in tested]
    return [leak for leak in found if leak is not None]


def _leak(
    x: Tensor, y: Tensor, likelihood: Likelihood, column: Column, tested: int, seed: int
) -> Leak | None:
    if column.ordered:
        rows, parts, clusters = _by_time(column.values)
    else:
        rows, parts, clusters = _by_group(column.values, generator("leakage", seed, column.name))
    if len(rows) < 2 * FEWEST_GROUPS or len(column.inputs) == 0:
        return None
    at_random = torch.randperm(len(rows), generator=generator("leakage", seed)) % _PARTS
    known, grouped = (
        {
            model.name: model.held_out
            for model in yardsticks(
                x[rows][:, column.inputs], y[rows], likelihood, None, seed, each, _classes(y)
            )
        }
        for each in (at_random, parts)
    )
    names = [name for name in known if name in grouped]
    if "constant" not in names:
        return None
    best = max(names, key=lambda name: float(known[name].mean()))
    loss = (known[best] - known["constant"]) - (grouped[best] - grouped["constant"])
    mean, error = float(loss.mean()), clustered_error(loss, None, clusters)
    if not mean > max(LOSS, threshold(tested, len(clusters.unique())) * error):
        return None
    count = len(column.values[rows].unique())
    return Leak(column.name, column.ordered, mean, error, best, count)


def threshold(columns: int, clusters: int) -> float:
    """The number of standard errors: that of a normal tail of `_TAIL` for one column and many
    clusters. The expansion of Student's t is that of Fisher and Cornish (1960)."""
    z = -float(torch.special.ndtri(torch.tensor(_TAIL / max(columns, 1), dtype=torch.float64)))
    nu = max(clusters - 1, 1)
    return z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)


def _classes(y: Any) -> int:
    return int(y.max()) + 1 if not y.is_floating_point() else 0


def _by_group(group: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of random groups, at most `MOST_ROWS`, with their parts and clusters. Of a large group
    some rows are used, so that there are many groups."""
    code, counts = group_sizes(group)
    most = max(8, MOST_ROWS // len(counts))
    order = torch.randperm(len(group), generator=random)
    order = order[code[order].argsort(stable=True)]  # by group, in random order inside
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts)[code[order]]
    order = order[place < most]
    kept = torch.randperm(len(counts), generator=random)
    total = counts.clamp(max=most)[kept].cumsum(0)
    rows = order[torch.isin(code[order], kept[total <= MOST_ROWS])].sort().values
    chosen = code[rows]
    if len(rows) == 0:
        return rows, rows, rows
    return rows, group_parts(chosen, _PARTS, random), chosen


def _by_time(time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced rows, at most `MOST_ROWS`, with their parts, which are consecutive, and
    clusters. Rows of the same time are together."""
    order = time.argsort(stable=True)
    count = min(len(order), MOST_ROWS)
    rows = order[torch.linspace(0, len(order) - 1, count).round().long()]
    _, rank, sizes = time[rows].unique(return_inverse=True, return_counts=True)
    share = ((sizes.cumsum(0) - 0.5 * sizes) / count)[rank]
    return rows, _number(share * _PARTS), _number(share * _STRETCHES)


def _number(value: Tensor) -> Tensor:
    """Whole parts, counted from 0 without gaps."""
    return value.floor().unique(return_inverse=True)[1]
