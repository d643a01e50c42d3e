"""Calibration of numbers: where y falls in its own predictive distribution.

The probability integral transform u = F(y) is uniform when the predictive is right (Dawid, 1984);
for counts u = F(y-1) + v (F(y) - F(y-1)) with uniform v (Czado, Gneiting and Held, 2009). A
histogram of u shaped like a U says that the predictive is too narrow, a hump that it is too wide,
a slope that it is biased. Two numbers say whether it differs from flat by more than chance:

    D = sup |F_L(u) - u|,  P(D) = 2 sum_j (-1)^(j-1) exp(-2 j^2 t^2),
                           t = (sqrt L + 0.12 + 0.11 / sqrt L) D
    X^2 = sum_k (n_k - L/B)^2 / (L/B),  chi-squared with B - 1 degrees of freedom

(Kolmogorov and Smirnov, with the small-sample correction of Stephens, 1970; Pearson). Elements of
one row are taken as independent, which several outputs seldom are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.evaluate.binning import edges
from doxa.evaluate.paired import check_count, check_levels, check_predicted, predicted_mean
from doxa.evaluate.regression import LEVELS
from doxa.noise import generator
from doxa.predictive import Predictive


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
