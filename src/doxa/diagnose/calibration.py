"""Checks of calibration: coverage, probability integral transforms (PIT), class probabilities.

Observed targets are compared with replicas drawn from the posterior predictive, one function per
replica, so that the tests allow for errors that all rows share. Consistency resampling of the
calibration error: Bröcker & Smith (2007), Vaicenavicius et al. (2019). Training rows allow only a
one-sided test: the residuals of a fit are smaller than those of new rows, so too many misses are a
fault there too, but too few prove nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.diagnose.advice import MORE_ROWS, NEW_ROWS, Advice, any_of, ensemble, recalibrate
from doxa.diagnose.data import (
    ALPHA,
    DiagnosticData,
    Head,
    Scored,
    binomial,
    kolmogorov,
    monte_carlo,
    normal_quantile,
    normal_upper,
    two_sided,
)
from doxa.diagnose.finding import Finding, bad, by_chance, good, skipped, slight, warning
from doxa.errors import Unavailable
from doxa.noise import generator

BINS = 15  # of equal width, as in `doxa.evaluate.ece`
_LEAST_ROWS = 20
_OFF = 0.05  # in expected calibration error
_WARPED = 0.083  # distance from uniform if the variance of a normal is wrong by a factor of two
_FAR_OFF = 0.15


def coverage(case: DiagnosticData, head: Head) -> Finding:
    """The share of targets inside their central interval, by an exact binomial test."""
    scored = head.unseen
    if scored.classifies:
        return skipped("classes have no intervals; see calibration")
    if len(scored) < _LEAST_ROWS:
        return skipped(f"{len(scored)} rows are too few to estimate coverage")
    bounds = tuple(scored.one(bound) for bound in scored.p.interval(case.level))
    inside = (scored.y >= bounds[0]) & (scored.y <= bounds[1])
    share, n = float(inside.double().mean()), len(scored)
    level = _attainable(scored, bounds, case.level)
    p = max(binomial(int(inside.sum()), n, level), _shared(scored, bounds, share))
    where = "test" if head.test is not None else "training"
    message = f"{share:.0%} of {n} {where} targets lie in their {case.level:.0%} interval"
    if share > level and head.test is None:
        return good(f"{message}, but training rows prove little", share)
    return evaluated_coverage(share, level, p, message, _advice(case))


def evaluated_coverage(
    share: float, level: float, p: float, message: str, advice: Advice
) -> Finding:
    """The finding for a share of targets inside intervals of a level, with p-value p."""
    low, high = _tolerated(level, 2.0)
    side = "wide" if share > level else "narrow"
    if p > ALPHA:
        return by_chance(message, p, share)
    if low < share < high:
        small = "by less than the effect of a variance that is wrong by a factor of two"
        text = f"intervals are a little too {side}, {small}: {message} (p = {p:.1g})"
        return slight(text, advice, share)
    grade = bad if share < _tolerated(level, 4.0)[0] else warning
    return grade(f"intervals are too {side}: {message} (p = {p:.1g})", advice, share)


def _advice(case: DiagnosticData) -> Advice:
    return any_of(recalibrate(case.posterior), ensemble(case), MORE_ROWS)


def _tolerated(level: float, factor: float) -> tuple[float, float]:
    """The coverage of normal intervals whose variance is too small, or too large, by a factor."""
    half = normal_quantile(0.5 * (1 + level))
    sides = half / factor**0.5, half * factor**0.5
    low, high = (1 - 2 * normal_upper(side) for side in sides)
    return low, high


def _held(scored: Scored, bounds: tuple[Tensor, ...]) -> Tensor:
    """The share of each replica inside the intervals: [R]."""
    inside = (scored.replicas >= bounds[0]) & (scored.replicas <= bounds[1])
    return inside.double().mean(1)


def _attainable(scored: Scored, bounds: tuple[Tensor, ...], level: float) -> float:
    """The level of the intervals. Intervals of counts cannot have every level: theirs is the mean
    coverage of the replicas."""
    if not scored.likelihood.discrete:
        return level
    return min(0.9999, float(_held(scored, bounds).mean()))


def _shared(scored: Scored, bounds: tuple[Tensor, ...], share: float) -> float:
    """p-value from replicas; unlike the binomial test it does not assume independent rows."""
    try:
        return two_sided(torch.tensor(share, dtype=torch.float64), _held(scored, bounds))
    except Unavailable:
        return 0.0


def calibration(case: DiagnosticData, head: Head) -> Finding:
    """PIT of continuous targets and counts, expected calibration error of classes."""
    scored = head.unseen
    if len(scored) < _LEAST_ROWS:
        return skipped(f"{len(scored)} rows are too few to evaluate calibration")
    if scored.classifies:
        return _of_classes(case, scored, head.test is not None)
    if head.test is None:
        return skipped("calibration needs held-out rows", NEW_ROWS)
    return _of_numbers(case, scored)


def _of_classes(case: DiagnosticData, scored: Scored, unseen: bool) -> Finding:
    confidence, top = scored.probs.max(1)
    right = (top == scored.y).double()
    replicas = _calibration_error(confidence, (scored.replicas == top).double())
    error = _calibration_error(confidence, right.unsqueeze(0))[0]
    p = monte_carlo(error, replicas)
    excess = float((confidence - right).mean())
    where = "test" if unseen else "training"
    message = (
        f"at {len(scored)} {where} rows confidence is {float(confidence.mean()):.0%}, accuracy "
        f"{float(right.mean()):.0%}; expected calibration error {float(error):.3f}"
    )
    off = float(error - replicas.mean())  # less the error expected by chance
    if excess < 0 and not unseen:
        return good(f"{message}, but training rows prove little", float(error))
    if p > ALPHA:
        return by_chance(message, p, float(error))
    grade = slight if off < _OFF else bad if off > _FAR_OFF else warning
    kind = ("a little " if off < _OFF else "") + ("over" if excess > 0 else "under") + "confident"
    return grade(f"probabilities are {kind}: {message} (p = {p:.1g})", _advice(case), float(error))


def _calibration_error(confidence: Tensor, right: Tensor) -> Tensor:
    """Σ_b |B_b|/N · |accuracy − confidence| over bins (b/B, (b+1)/B]; right [R, N] to [R]."""
    gaps = right - confidence
    inner = torch.arange(1, BINS, dtype=torch.float64) / BINS
    cell = torch.bucketize(
        confidence.round(decimals=6), inner
    )  # rounded, so that equal values share a bin
    sums = gaps.new_zeros(len(gaps), BINS).index_add_(1, cell, gaps)
    return sums.abs().sum(1) / gaps.shape[1]


def _of_numbers(case: DiagnosticData, scored: Scored) -> Finding:
    """The distance of the probability integral transforms from uniform, against replicas.

    The transform of a target is its rank among its replicas; that of a replica is its rank among
    the target and the other replicas. Ties, which counts have, are broken at random."""
    replicas = scored.replicas
    together = torch.cat([scored.y.double().unsqueeze(0), replicas])  # [R + 1, N]
    source = generator(case.seed, "doctor", "ties")
    lot = torch.rand(together.shape, generator=source)
    order = lot.argsort(0)  # shuffle, then sort stably
    ranks = torch.sort(together.gather(0, order), dim=0, stable=True).indices
    place = order.gather(0, ranks).argsort(0)
    u = (place.double() + 0.5) / len(together)
    distances = kolmogorov(u)
    p = monte_carlo(distances[0], distances[1:])
    value = float(distances[0])
    excess = value - float(distances[1:].mean())
    message = (
        f"probability integral transforms of {len(scored)} test targets are {value:.2f} from "
        "uniform"
    )
    if p > ALPHA:
        return by_chance(message, p, value)
    grade = slight if excess < _WARPED else bad if excess > _FAR_OFF else warning
    shift = float(u[0].mean()) - 0.5
    extreme = float(((u[0] - 0.5).abs() > 0.45).double().mean())
    if abs(shift) > 0.1:
        kind = f"targets lie {'above' if shift > 0 else 'below'} the predictions"
    elif extreme > 0.1:
        kind = "predictions are overconfident"
    else:
        kind = "predictions have the wrong shape or are underconfident"
    kind = f"{kind}, but only a little" if excess < _WARPED else kind
    return grade(f"{kind}: {message} (p = {p:.1g})", _advice(case), value)
