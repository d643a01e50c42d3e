"""The rows that a fit used, as one 64-bit hash per row, to test whether given rows are among them.

Recalibration and conformal prediction need rows that the fit has not used. Rows are compared by x
and y together, rounded to float32. Equal rows may also occur by chance, as in a table of a few
categories. Their fraction q among new rows is estimated from the fitted rows, as the fraction of
rows with a duplicate among the other rows (Good and Turing: a row that is held out is a new row for
the others), plus a margin for the uncertainty of the estimate,

    q = (d + 6 √(d + 1)) / k,    d rows of k have a duplicate.

Duplicates occur in pairs and larger groups, so the margin is larger than for d independent rows.
With it, new rows of tables with 20 to 20,000 kinds of rows are taken for fitted rows in less than
0.3 % of fits to 20 rows, and almost never in fits to more rows.

Of n given rows, m match. If s is the fraction of the fitted rows whose hashes are kept, then

    E[m] = n q + u s (1 − q)

where u of the n rows are fitted rows. The n rows count as fitted if m exceeds n q by three standard
deviations, and the estimate of u is at least a tenth of n.

`reference_of` keeps sorted values of the inputs, which `doxa.evaluate.Watch` compares the inputs of
new rows with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 2**20  # rows whose hashes are kept, at most
MOST_NUMBERS = 2**24  # numbers of x and y that are hashed, at most; of more, a random part
MOST_REFERENCE = 1000  # values that are kept of each input, at most
MOST_INPUTS = 30  # inputs that are kept, at most
_BLOCK = 2**21  # numbers that are hashed at a time
_SHARE = 0.1  # fraction of the given rows; fewer fitted rows change a calibration little


@dataclass(frozen=True)
class FittedRows:
    """Hashes of fitted rows: sorted, int64 [k], of `total` rows."""

    hashes: Tensor
    total: int

    @classmethod
    def of(cls, x: Any, y: Any, index: Tensor | None = None) -> FittedRows:
        """The hashes of trees of tensors with rows first; `index` has the numbers of used rows."""
        parts = [*_leaves(x), *_leaves(y)]
        rows = torch.arange(len(parts[0])) if index is None else index.cpu()
        total, width = len(rows), sum(math.prod(part.shape[1:]) for part in parts)
        most = max(1, min(MOST_ROWS, MOST_NUMBERS // max(1, width)))
        if total > most:
            source = torch.Generator().manual_seed(0)
            rows = rows[torch.randperm(total, generator=source)[:most]]
        return cls(row_hashes(x, y, rows).sort().values, total)

    def plus(self, other: FittedRows) -> FittedRows:
        hashes = torch.cat([self.hashes.cpu(), other.hashes.cpu()]).sort().values
        return FittedRows(hashes, self.total + other.total)

    @property
    def share(self) -> float:
        return len(self.hashes) / self.total

    def overlap(self, x: Any, y: Any) -> int:
        """The estimated number of these rows that the fit used; 0 if chance can explain it."""
        hashes = self.hashes.cpu()
        given = row_hashes(x, y)
        n, k = len(given), len(hashes)
        if n == 0 or k == 0:
            return 0
        place = torch.searchsorted(hashes, given).clamp_max(k - 1)
        matches = int((hashes[place] == given).sum())
        twin = torch.zeros(k, dtype=torch.bool)
        same = hashes[1:] == hashes[:-1]
        twin[1:] |= same
        twin[:-1] |= same
        d = int(twin.sum())
        q = (d + 6.0 * math.sqrt(d + 1.0)) / k
        if q >= 1.0 or matches - n * q <= 3.0 * math.sqrt(n * q * (1.0 - q)):
            return 0
        used = (matches - n * q) / (self.share * (1.0 - q))
        if used < _SHARE * n:
            return 0
        return matches if self.share == 1.0 else max(matches, min(n, round(used)))


def row_hashes(x: Any, y: Any, index: Tensor | None = None) -> Tensor:
    """Hashes of rows of x and y, int64 [N]: Σ_j w_j a_j mod 2⁶⁴ over the numbers w of a row, with
    fixed odd multipliers a. The value w of a number does not depend on its type."""
    parts = [*_leaves(x), *_leaves(y)]
    rows = torch.arange(len(parts[0])) if index is None else index
    total = torch.zeros(len(rows), dtype=torch.int64)
    before = 0
    for part in parts:
        width = math.prod(part.shape[1:])
        factors = _multipliers(before, width)
        step = max(1, _BLOCK // max(1, width))
        for start in range(0, len(rows), step):
            some = part[rows[start : start + step].to(part.device)].detach().cpu()
            total[start : start + step] += (_words(some).reshape(-1, width) * factors).sum(1)
        before += width
    return total


def _words(values: Tensor) -> Tensor:
    """The bits of numbers as float64; floats are first rounded to float32. Both halves are
    combined, because the lower one is mostly zero."""
    values = values.float() if values.is_floating_point() else values
    bits = (values.double() + 0.0).view(torch.int64)  # −0 becomes 0
    return bits ^ (bits >> 32)


def _multipliers(first: int, count: int) -> Tensor:
    """Odd int64 [count], by number: the steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (torch.arange(first + 1, first + count + 1)) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    return z | 1


def _leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree; those of a dict in alphabetical order of the keys."""
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from _leaves(tree[name])
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree


def input_columns(x: Any) -> Tensor | None:
    """The columns of a table of numbers, [N, K], as they are compared; at most `MOST_INPUTS`,
    evenly spaced. None if x is no such table."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point() or not x.shape[1]:
        return None
    return rounded(x[:, watched_inputs(x.shape[1])])


def watched_inputs(columns: int) -> list[int]:
    """The numbers of the columns that are compared."""
    chosen = torch.linspace(0, columns - 1, min(columns, MOST_INPUTS))
    return [int(number) for number in chosen.round()]


def rounded(scores: Tensor) -> Tensor:
    """Numbers as they are stored and compared: finite float32 on the CPU."""
    most = torch.finfo(torch.float32).max
    return scores.detach().cpu().double().clamp(-most, most).float() + 0.0  # −0 becomes 0


def reference_of(scores: Tensor | None) -> Tensor | None:
    """The values that new rows are compared with: each column of scores [N, K], sorted by itself,
    so that no row is stored. At most `MOST_REFERENCE` rows, evenly spaced."""
    if scores is None or not len(scores):
        return None
    rows = torch.linspace(0, len(scores) - 1, min(len(scores), MOST_REFERENCE)).round().long()
    return scores[rows].sort(0).values.contiguous()
