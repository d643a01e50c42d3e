"""A confidence interval for the expected calibration error, that holds whether it is 0 or not.

With bins held as they are let D_k be the mean over all labels of (h - z) in bin k, δ_k what it
would be with infinitely many labels, and ε_k = D_k - δ_k. The estimate is e = Σ|D_k|, the truth
θ = Σ|δ_k|. The estimate is biased upwards, by how much depends on the δ_k, and no bootstrap of e
itself knows that (at δ = 0 it is not even consistent). But for every δ

    Σ sign(δ_k) ε_k  <=  e - θ  <=  Σ_(k clear) sign(δ_k) ε_k + Σ_(k unclear) |ε_k|

so that the ends need the law of ε alone. A bin is clear where |D_k| is so large that the sign of
δ_k is known (all at once, but for a tenth of 1 - level). The right side is bootstrapped, ε* = D* -
D; the left one is normal, with the variance that the worst signs would give. The interval holds
*at least* at its level where the normal law does, which takes some misses and hits in the bins
that count; and `low` is above 0 only where e is also more than the labels of a calibrated
predictive would give, drawn from its own probabilities: of these, whatever their number, at most
(1 - level)/2 are said to be miscalibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from doxa.errors import DataError
from doxa.evaluate.binning import bin_sums
from doxa.evaluate.calibration import Kind, cells, gaps
from doxa.evaluate.paired import Labelled, check_count, labelled
from doxa.noise import generator
from doxa.predictive import Predictive

_BLOCK = 1 << 23  # resampled labels at a time
_SIGNS = 0.1  # the share of 1 - level that is spent on knowing signs


@dataclass(frozen=True)
class EceInterval:
    """An estimate and its confidence interval."""

    estimate: float
    low: float
    high: float
    level: float


def ece_interval(
    p: Predictive,
    y: Any,
    kind: Kind = "top-label",
    bins: int = 15,
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> EceInterval:
    """An interval that holds the binned ECE of the population with probability `level` at least.

    `low` is 0 where the estimate may be chance. Labels are taken one by one (pixels of one image
    are not independent: the interval is then too narrow). Not for "debiased" and "kde".
    """
    table = labelled(p, y)
    if kind not in get_args(Kind) or kind in ("debiased", "kde"):
        raise DataError(f"no interval for kind {kind!r}: take a binned one")
    if not 0.0 < level < 1.0:
        raise DataError(f"level must lie between 0 and 1, got {level}")
    check_count("replicates", replicates, 2)
    cell, gap = cells(table, kind, bins)
    size = bins * gap.shape[1]
    source = generator(seed, "evaluate", "ece")
    own = _means(cell, gap, size)
    estimate = float(own.abs().sum())
    tail = 0.5 * (1.0 - _SIGNS) * (1.0 - level)
    clear = _clear(cell, gap, own, _SIGNS * (1.0 - level))

    def excess(means: Tensor) -> Tensor:
        error = means - own
        return torch.where(clear, own.sign() * error, error.abs()).sum(-1)

    resampled = _blocks(replicates, gap, lambda n: _rows_again(n, cell, gap, size, source))
    above = torch.cat([excess(means) for means in resampled])
    chance = _blocks(replicates, gap, lambda n: _labels_again(n, table, kind, cell, size, source))
    calibrated = torch.cat([means.abs().sum(-1) for means in chance])
    low = estimate - float(torch.quantile(above, 1.0 - tail))
    if estimate <= float(torch.quantile(calibrated, 1.0 - tail)):
        low = 0.0
    spread = float(gap.abs().mean(1).square().mean() / len(gap)) ** 0.5  # under the worst signs
    high = estimate + NormalDist().inv_cdf(1.0 - tail) * spread
    return EceInterval(estimate, max(low, 0.0), min(high, 1.0), level)


def _means(cell: Tensor, gap: Tensor, size: int) -> Tensor:
    """D [cells]: the sum of gaps in each cell, over labels × events."""
    return bin_sums(cell, size, gap)[1] / gap.numel()


def _clear(cell: Tensor, gap: Tensor, own: Tensor, share: float) -> Tensor:
    """Where the sign of δ is known, for all cells at once but for `share` (Bonferroni)."""
    count, squares = bin_sums(cell, len(own), gap.square())
    sums = own * gap.numel()
    spread = (squares - sums.square() / count.clamp_min(1.0)).clamp_min(0.0).sqrt()
    away = NormalDist().inv_cdf(1.0 - 0.5 * share / max(1, int((count > 0).sum())))
    return (sums.abs() > away * spread) & (count >= 20)


def _blocks(count: int, gap: Tensor, draw: Callable[[int], Tensor]) -> Iterator[Tensor]:
    step = max(1, _BLOCK // gap.numel())
    for start in range(0, count, step):
        yield draw(min(step, count - start))


def _rows_again(n: int, cell: Tensor, gap: Tensor, size: int, source: Generator) -> Tensor:
    """D [n, cells] of labels drawn with replacement from those at hand."""
    draw = torch.randint(len(gap), (n, len(gap)), generator=source).to(gap.device)
    return _means_of(cell[draw], gap[draw], size)


def _labels_again(
    n: int, table: Labelled, kind: str, cell: Tensor, size: int, source: Generator
) -> Tensor:
    """D [n, cells] of the same predictions with labels drawn from them."""
    u = torch.rand((n, len(cell)), generator=source, dtype=torch.float64).to(cell.device)
    bounds = table.probs.cumsum(1)
    bounds = bounds / bounds[:, -1:]
    label = torch.searchsorted(bounds, u.T.contiguous(), right=True).T  # [n, L]
    label = label.clamp_max(table.probs.shape[1] - 1)
    gap = gaps(table, kind, label)
    return _means_of(cell.expand(n, *cell.shape), gap, size)


def _means_of(cell: Tensor, gap: Tensor, size: int) -> Tensor:
    """The same of n data sets at once: [n, L, K] to [n, cells]."""
    offset = torch.arange(len(cell), device=cell.device)[:, None, None] * size
    sums = bin_sums(cell + offset, len(cell) * size, gap)[1]
    return sums.reshape(len(cell), size) / gap[0].numel()
