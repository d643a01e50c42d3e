"""Calibration of class probabilities and of numeric predictions.

A calibrated predictive gives probability q to events that occur in a share q of the cases.

The expected calibration error (Naeini et al., 2015; Guo et al., 2017) over bins k of L labels,
with confidence z (the probability of the likeliest class) and hit h (1 if it is the true class):

    ECE = sum_k n_k/L |mean_k h - mean_k z| = (1/L) sum_k |sum_(l in k) (h_l - z_l)|

Empty bins count nothing. `kind` selects a variant:

- "top-label": the above, bins of equal width.
- "adaptive": the above, bins of equal mass (Nguyen and O'Connor, 2015); ties are never split.
- "class-wise": of every class's probability, averaged over the classes (Kull et al., 2019).
- "adaptive-class-wise": the same with bins of equal mass (Nixon et al., 2019).
- "debiased": the root of the squared error less its expected value by chance in each bin,
  sum_k n_k/L [(o_k - z_k)^2 - o_k (1 - o_k) / (n_k - 1)], cut at 0 (Bröcker, 2012; Kumar, Liang
  and Ma, 2019). A root mean square: compare it with no other kind. A bin of one label keeps
  its gap.
- "kde": no bins, see `kernel_ece`.

All but the debiased one are biased upwards in small sets: a perfectly calibrated predictive has an
ECE above 0. `ece_interval` estimates how much of it is chance.

`kernel_ece`, calibration error without bins, is a kernel regression of hits on confidence: the
estimator of Popordanoska, Sayer and Blaschko (2022) in its top-label form, a leave-one-out
Nadaraya-Watson estimate with the beta kernel (Chen, 1999), whose support is [0, 1],

    ECE = (1/L) sum_j | sum_(i != j) k(z_j; z_i) h_i / sum_(i != j) k(z_j; z_i)  -  z_j |
    k(z; z_i) = Beta(z; z_i/b + 1, (1 - z_i)/b + 1)

with bandwidth b. As in the paper, b is chosen among a few candidates by the leave-one-out
likelihood of the confidences. The cost is quadratic in L.

`ece_interval` is a confidence interval for the expected calibration error that is valid whether the
error is 0 or not. With fixed bins let D_k be the mean over all labels of (h - z) in bin k, δ_k its
value with infinitely many labels, and ε_k = D_k - δ_k. The estimate is e = Σ|D_k|, the truth
θ = Σ|δ_k|. The estimate is biased upwards by an amount that depends on the δ_k, and a bootstrap of
e itself does not estimate this bias (at δ = 0 it is not even consistent). But for every δ

    Σ sign(δ_k) ε_k  <=  e - θ  <=  Σ_(k clear) sign(δ_k) ε_k + Σ_(k unclear) |ε_k|

so that the ends need the law of ε alone. A bin is clear where |D_k| is so large that the sign of
δ_k is known (all at once, but for a tenth of 1 - level). The right side is bootstrapped, ε* = D* -
D; the left one is normal, with the variance that the worst signs would give. The interval holds
*at least* at its level where the normal law does, which takes some misses and hits in the bins
that count; and `low` is above 0 only where e is also more than the labels of a calibrated
predictive would give, drawn from its own probabilities: of these, whatever their number, at most
(1 - level)/2 are reported as miscalibrated.

Numbers: the probability integral transform u = F(y) is uniform if the predictive is correct (Dawid,
1984); for counts u = F(y-1) + v (F(y) - F(y-1)) with uniform v (Czado, Gneiting and Held, 2009). A
histogram of u shaped like a U shows a predictive that is too narrow, a hump one that is too wide, a
slope one that is biased. Two statistics test whether it differs from uniform by more than chance:

    D = sup |F_L(u) - u|,  P(D) = 2 sum_j (-1)^(j-1) exp(-2 j^2 t^2),
                           t = (sqrt L + 0.12 + 0.11 / sqrt L) D
    X^2 = sum_k (n_k - L/B)^2 / (L/B),  chi-squared with B - 1 degrees of freedom

(Kolmogorov and Smirnov, with the small-sample correction of Stephens, 1970; Pearson). Elements of
one row are taken as independent, which several outputs seldom are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from doxa.errors import DataError
from doxa.evaluate.paired import (
    Labelled,
    bin_of,
    bin_sums,
    check_count,
    check_levels,
    check_predicted,
    edges,
    labelled,
    mass_bin_of,
    predicted_mean,
)
from doxa.evaluate.scores import LEVELS
from doxa.noise import generator
from doxa.predictive import Predictive

BANDWIDTHS = tuple(10.0 ** (-4.0 + 0.5 * k) for k in range(7))  # 1e-4 ... 0.1
_EDGE = 1e-6  # the kernel's logarithm is infinite at 0 and 1
_PILOT = 2000  # evenly spaced order statistics that choose the bandwidth
_KERNEL_BLOCK = 1 << 22


def kernel_ece(confidence: Tensor, hit: Tensor, bandwidth: float | None = None) -> float:
    """The kernel calibration error of confidences [L] and hits [L] (0 or 1)."""
    if len(confidence) < 2:
        raise DataError("the kernel calibration error leaves one label out: it needs two or more")
    if bandwidth is not None and not 0.0 < bandwidth < math.inf:
        raise DataError(f"bandwidth must be positive and finite, got {bandwidth}")
    z = confidence.double().clamp(_EDGE, 1.0 - _EDGE)
    b = best_bandwidth(z) if bandwidth is None else bandwidth
    came = torch.where(hit > 0.5, 0.0, -torch.inf).double()
    total = 0.0
    for at, kernel in _log_kernels(z, b):
        every = torch.logsumexp(kernel, 1)
        share = torch.exp(torch.logsumexp(kernel + came, 1) - every)
        total += float((share - confidence[at].double()).abs().sum())
    return total / len(z)


def best_bandwidth(z: Tensor) -> float:
    """The candidate with the largest leave-one-out log-likelihood of z, in (0, 1)."""
    if len(z) > _PILOT:
        places = torch.linspace(0, len(z) - 1, _PILOT, dtype=torch.float64).round().long()
        z = z.sort().values[places.to(z.device)]
    scores = [
        sum(float(torch.logsumexp(kernel, 1).sum()) for _, kernel in _log_kernels(z, b))
        for b in BANDWIDTHS
    ]
    return BANDWIDTHS[scores.index(max(scores))]


def _log_kernels(z: Tensor, b: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of (rows j, log k(z_j; z_i) [J, L] with minus infinity where i = j)."""
    first, second = z / b, (1.0 - z) / b
    norm = math.lgamma(1.0 / b + 2.0) - torch.lgamma(first + 1.0) - torch.lgamma(second + 1.0)
    up, down = z.log(), torch.log1p(-z)
    for at in torch.arange(len(z), device=z.device).split(max(1, _KERNEL_BLOCK // len(z))):
        kernel = norm + torch.outer(up[at], first) + torch.outer(down[at], second)
        kernel[torch.arange(len(at), device=z.device), at] = -torch.inf
        yield at, kernel


Kind = Literal["top-label", "adaptive", "class-wise", "adaptive-class-wise", "debiased", "kde"]


def ece(p: Predictive, y: Any, kind: Kind = "top-label", bins: int = 15) -> float:
    """The expected calibration error; 0 is calibrated, lower is better."""
    return ece_of(labelled(p, y), kind, bins)


def ece_of(table: Labelled, kind: Kind = "top-label", bins: int = 15) -> float:
    """See `ece`, of labels that are at hand already."""
    if kind not in get_args(Kind):
        raise DataError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    if kind == "kde":
        return kernel_ece(table.confidence, table.hit)
    if kind == "debiased":
        z, h = table.confidence, table.hit
        count, z_sum, h_sum = bin_sums(bin_of(table.comparable(z), bins), bins, z, h)
        some = count.clamp_min(1.0)
        share = h_sum / some
        chance = share * (1.0 - share) / (count - 1.0).clamp_min(1.0)
        squares = count * ((share - z_sum / some).square() - chance)
        return float((squares.sum() / len(z)).clamp_min(0.0).sqrt())
    cell, gap = cells(table, kind, bins)
    _, sums = bin_sums(cell, bins * gap.shape[1], gap)
    return float(sums.abs().sum() / gap.numel())


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: one bar a bin, NaN where a bin is empty."""

    confidence: Tensor
    """[B]: the mean predicted probability."""
    accuracy: Tensor
    """[B]: the share that came true."""
    count: Tensor
    """[B]: labels in the bin."""
    edges: Tensor
    """[B + 1]"""


def reliability(
    p: Predictive, y: Any, bins: int = 15, *, of_class: int | None = None
) -> Reliability:
    """Over bins of equal width, of the likeliest class; or of the event that `of_class` comes
    true. For numbers see `quantile_reliability`."""
    table = labelled(p, y)
    z, h = table.confidence, table.hit
    if of_class is not None:
        if not 0 <= of_class < table.probs.shape[1]:
            raise DataError(f"of_class must be 0 to {table.probs.shape[1] - 1}, got {of_class}")
        z, h = table.probs[:, of_class], (table.label == of_class).double()
    count, z_sum, h_sum = bin_sums(bin_of(table.comparable(z), bins), bins, z, h)
    return Reliability(z_sum / count, h_sum / count, count.long(), edges(bins, z.device))


def cells(table: Labelled, kind: str, bins: int) -> tuple[Tensor, Tensor]:
    """(the bin of each label and event, what came true minus its probability), both [L, K]."""
    z = _events(table, kind)
    sort = mass_bin_of if kind.startswith("adaptive") else bin_of
    cell = sort(table.comparable(z), bins)
    cell = cell + bins * torch.arange(z.shape[1], device=z.device)
    return cell, gaps(table, kind, table.label)


def gaps(table: Labelled, kind: str, label: Tensor) -> Tensor:
    """What came true minus its probability, of labels [..., L]: [..., L, K]."""
    z = _events(table, kind)
    if kind in ("top-label", "adaptive"):
        return (label == table.top).double().unsqueeze(-1) - z
    return one_hot(label, z.shape[1]).double() - z


def _events(table: Labelled, kind: str) -> Tensor:
    """The probabilities that are evaluated, [L, K]: of the likeliest class, or of every class."""
    top = kind in ("top-label", "adaptive")
    return table.confidence.unsqueeze(1) if top else table.probs


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


def pit(p: Predictive, y: Any, *, seed: int = 0) -> Tensor:
    """u of each element, [N, *event] float64; counts are randomised from `seed`."""
    predicted_mean(p, y)
    target = p.targets(y)
    upper = check_predicted(p.cdf(target), "distribution function").double()
    if not p.likelihood.discrete:
        return upper
    lower = p.cdf((target - 1).clamp_min(0)).double()
    lower = torch.where(target > 0, lower, 0.0)
    source = generator(seed, "evaluate", "pit")
    v = torch.rand(upper.shape, generator=source, dtype=torch.float64).to(upper.device)
    return lower + v * (upper - lower)


@dataclass(frozen=True)
class PitHistogram:
    """How often u fell into each of B bins of equal width, and whether that is flat."""

    count: Tensor
    """[B]"""
    density: Tensor
    """[B]: 1 is flat."""
    edges: Tensor
    """[B + 1]"""
    ks: float
    ks_pvalue: float
    chi2: float
    chi2_pvalue: float


def pit_histogram(p: Predictive, y: Any, bins: int = 10, *, seed: int = 0) -> PitHistogram:
    """The histogram of `pit` with the two tests of uniformity."""
    check_count("bins", bins, 2)
    u = pit(p, y, seed=seed).flatten()
    ends = edges(bins, u.device)
    count = torch.bincount(torch.bucketize(u, ends[1:-1], right=True), minlength=bins)
    expected = len(u) / bins
    chi2 = (count.double() - expected).square().sum() / expected
    freedom = torch.full_like(chi2, 0.5 * (bins - 1))
    ks, ks_pvalue = kolmogorov_smirnov(u)
    return PitHistogram(
        count,
        count.double() / expected,
        ends,
        ks,
        ks_pvalue,
        float(chi2),
        float(torch.special.gammaincc(freedom, 0.5 * chi2)),
    )


def kolmogorov_smirnov(u: Tensor) -> tuple[float, float]:
    """The distance D of values in [0, 1] from uniform, and its p-value (within 0.03 of the
    exact one from 10 values on, 0.01 from 50)."""
    size = len(u)
    ranked = u.double().sort().values
    place = torch.arange(size, dtype=torch.float64, device=u.device)
    above, below = (place + 1.0) / size - ranked, ranked - place / size
    distance = float(torch.maximum(above.amax(), below.amax()))
    t = (size**0.5 + 0.12 + 0.11 / size**0.5) * distance
    if t < 0.2:  # the series converges slowly there and is 1 to 12 digits
        return distance, 1.0
    j = torch.arange(1, 101, dtype=torch.float64)
    signs = 1.0 - 2.0 * ((j - 1) % 2)
    tail = 2.0 * (signs * torch.exp(-2.0 * j.square() * t * t)).sum()
    return distance, float(tail.clamp(0.0, 1.0))


@dataclass(frozen=True)
class QuantileReliability:
    """A reliability diagram for numbers; both [K], equal when calibrated."""

    level: Tensor
    observed: Tensor
    """The share of y at or below the predicted quantile of that level."""

    @property
    def error(self) -> float:
        """The mean distance from the diagonal."""
        return float((self.observed - self.level).abs().mean())


def quantile_reliability(
    p: Predictive, y: Any, levels: Sequence[float] = LEVELS, *, seed: int = 0
) -> QuantileReliability:
    """How often F(y) <= q, for each level q (Kuleshov, Fenner and Ermon, 2018)."""
    each = check_levels(levels)
    u = pit(p, y, seed=seed).flatten().sort().values
    at = torch.tensor(each, dtype=torch.float64, device=u.device)
    below = torch.searchsorted(u, at, right=True)
    return QuantileReliability(at, below.double() / len(u))
