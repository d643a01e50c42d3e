"""Scores of predictions: log-likelihood, errors, intervals, Brier score, CRPS, risk and coverage.

    log likelihood = (1/N) sum_n log p(y_n | x_n, data)        higher is better

in nats and in the units of y: the one proper score that every kind of target has. For numbers it
is a mean over rows, each the joint density of its outputs (one value per row; values of two and of
four outputs are not comparable). For classes it is a mean over labels, each by its own marginal
probability, so for a segmentation it is per pixel; for one label per row both definitions agree.

Scores of numbers: errors of the mean, intervals, quantiles. Means over rows and elements.

    pinball_q(y)    = max(q (y - z_q), (q - 1) (y - z_q))               z_q the q-quantile
    interval_a(y)   = (u - l) + 2/a [(l - y)^+ + (y - u)^+]              a = 1 - level

Both are proper: the true quantiles minimise them (Gneiting and Raftery, 2007, who give the
interval score after Winkler, 1972). Coverage and width are read together: any coverage can be
had by intervals wide enough.

Scores of classes: hits, the Brier score and what it is made of, the confusion matrix.

    Brier = (1/L) sum_l sum_c (p_lc - 1[y_l = c])^2          of one class of several: 0 to 2
    Brier = (1/L) sum_l (p_l - y_l)^2                        Bernoulli: 0 to 1, half of the above

Means run over the labels that count: rows, sites, elements; ignored ones are excluded. Of several
classes equally likely the first is the prediction.

For one event with probabilities p sorted into bins k of n_k labels, mean probability p_k and
frequency o_k, and overall frequency o, Murphy's (1973) parts and the two terms that Stephenson,
Coelho and Jolliffe (2008) add for probabilities that vary inside a bin sum up exactly:

    Brier = sum_k n_k/L (p_k - o_k)^2 - sum_k n_k/L (o_k - o)^2 + o (1 - o)
            + (1/L) sum_(k, l in k) (p_l - p_k)^2 - (2/L) sum_(k, l in k) (o_l - o_k) (p_l - p_k)

Of several classes the parts are summed over the classes.

The continuous ranked probability score: how far the whole predictive lies from what came true.

    CRPS(F, y) = integral (F(x) - 1[x >= y])^2 dx = E|X - y| - E|X - X'| / 2

in units of y, lower is better, |y - m| for a point mass at m. Both expectations are closed for a
mixture of normals (Grimit, Gneiting, Berrocal and Johnson, 2006): with

    A(m, s) = E|N(m, s^2)| = 2 s phi(m/s) + m (2 Phi(m/s) - 1)

    CRPS = sum_i w_i A(y - m_i, s_i) - 1/2 sum_ij w_i w_j A(m_i - m_j, sqrt(s_i^2 + s_j^2))

The double sum costs S^2. It is also the integral of F (1 - F), an analytic function that vanishes
at both ends, for which the trapezoidal rule converges geometrically (Trefethen and Weideman,
2014): at steps of half the smallest s_i its error is below 1e-15, so the cheaper of the two is
taken. From draws x_(1) <= ... <= x_(S) with weights w and their running sums W,

    1/2 sum_ij w_i w_j |x_i - x_j| = sum_i w_(i) x_(i) (W_i + W_(i-1) - 1)

which costs a sort. The *fair* form divides it by 1 - sum w_i^2 and is unbiased for the CRPS of the
distribution behind the draws (Ferro, 2014); the plain form is the CRPS of the draws themselves.

Selective prediction: the error that remains when the least certain predictions are refused.

Accept predictions in the order of their certainty; after the first k the *coverage* is k/L and the
*risk* the mean loss of those accepted. Equally certain ones enter together: the curve has a point
only where the certainty changes, so that it does not depend on the order of the rows. The area
under it (Geifman and El-Yaniv, 2017; Geifman, Uziel and El-Yaniv, 2019) and what exceeds the area
of the best order, by the losses themselves:

    AURC = sum_g (c_g - c_(g-1)) r_g,      E-AURC = AURC - (1/L) sum_k mean of the k least losses
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.evaluate.paired import (
    Labelled,
    bin_of,
    bin_sums,
    check_count,
    check_levels,
    check_numeric,
    check_predicted,
    check_predictive,
    check_some,
    counted_labels,
    labelled,
    predicted_mean,
)
from doxa.predictive import Predictive
from doxa.predictive.classes import ClassTable
from doxa.predictive.mixture import Mixture

LEVELS = tuple(k / 20 for k in range(1, 20))  # 0.05, 0.10, ... 0.95


def rmse(p: Predictive, y: Any) -> float:
    """The root of the mean squared error of `p.mean`."""
    mean, target = predicted_mean(p, y)
    return float((target - mean).square().mean().sqrt())


def mae(p: Predictive, y: Any) -> float:
    """The mean absolute error of `p.mean` (of the mean, not of the median)."""
    mean, target = predicted_mean(p, y)
    return float((target - mean).abs().mean())


def coverage(p: Predictive, y: Any, level: float = 0.95) -> float:
    """The share of y inside the central interval, its ends included; `level` is right. For
    counts the interval holds at least `level`, so that a little more is right."""
    low, high, target = interval_and_target(p, y, level)
    return float(((low <= target) & (target <= high)).double().mean())


def width(p: Predictive, level: float = 0.95) -> float:
    """The mean width of the central interval, in units of y."""
    low, high = _interval(p, level)
    return float((high - low).mean())


def interval_score(p: Predictive, y: Any, level: float = 0.95) -> float:
    """The mean interval (Winkler) score of the central interval; lower is better."""
    return float(interval_score_each(p, y, level).mean())


def interval_score_each(p: Predictive, y: Any, level: float = 0.95) -> Tensor:
    """[N, *event]: the interval score of each element."""
    low, high, target = interval_and_target(p, y, level)
    miss = (low - target).clamp_min(0.0) + (target - high).clamp_min(0.0)
    return high - low + 2.0 / (1.0 - level) * miss


@dataclass(frozen=True)
class CoverageCurve:
    """What central intervals of several levels hold, and how wide they are; all [K]."""

    level: Tensor
    coverage: Tensor
    width: Tensor


def coverage_curve(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> CoverageCurve:
    """Coverage and width at each level."""
    each = check_levels(levels)
    held, wide = [], []
    for level in each:
        low, high, target = interval_and_target(p, y, level)
        held.append(((low <= target) & (target <= high)).double().mean())
        wide.append((high - low).mean())
    at = torch.tensor(each, dtype=torch.float64, device=held[0].device)
    return CoverageCurve(at, torch.stack(held), torch.stack(wide))


def pinball(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> float:
    """The mean pinball (quantile) loss over the levels; lower is better. Over all levels from 0
    to 1 its mean is half the CRPS."""
    return float(pinball_each(p, y, levels).mean())


def pinball_each(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> Tensor:
    """[N, *event]: the pinball loss of each element, averaged over the levels."""
    _, target = predicted_mean(p, y)
    each = check_levels(levels)
    total = torch.zeros_like(target)
    for level in each:
        gap = target - check_predicted(p.quantile(level), "quantile", finite=False).double()
        total += torch.maximum(level * gap, (level - 1.0) * gap)
    return total / len(each)


def interval_and_target(p: Predictive, y: Any, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, y), each [N, *event] float64."""
    _, target = predicted_mean(p, y)
    return *_interval(p, level), target


def _interval(p: Predictive, level: float) -> tuple[Tensor, Tensor]:
    check_numeric(p)
    low, high = p.interval(level)
    return (
        check_predicted(low, "interval's end", finite=False).double(),
        check_predicted(high, "interval's end", finite=False).double(),
    )


def accuracy(p: Predictive, y: Any) -> float:
    """The share of labels whose likeliest class came true."""
    return float(labelled(p, y).hit.mean())


def top_k_accuracy(p: Predictive, y: Any, k: int = 5) -> float:
    """The share of labels that are among the k likeliest classes; of equally likely classes the
    first ones are taken, so that exactly k are."""
    table = labelled(p, y)
    classes = table.probs.shape[1]
    if not 1 <= k <= classes:
        raise DataError(f"k must be 1 to {classes}, the number of classes; got {k}")
    own = table.probs.gather(1, table.label.unsqueeze(1))
    earlier = torch.arange(classes, device=own.device) < table.label.unsqueeze(1)
    before = (table.probs > own) | ((table.probs == own) & earlier)
    return float((before.sum(1) < k).double().mean())


def brier(p: Predictive, y: Any) -> float:
    """The mean Brier score; lower is better."""
    return float(brier_each(labelled(p, y)).mean())


def brier_each(table: Labelled) -> Tensor:
    """[L]"""
    if table.binary:
        return (table.probs[:, 1] - table.label).square()
    own = table.probs.gather(1, table.label.unsqueeze(1)).squeeze(1)
    rest = table.probs.square().sum(1) - own.square()
    return rest + (1.0 - own).square()


def confusion(p: Predictive, y: Any) -> Tensor:
    """[C, C] counts: the row is the class that came true, the column the predicted one."""
    table = labelled(p, y)
    classes = table.probs.shape[1]
    cells = table.label * classes + table.top
    return torch.bincount(cells, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class BrierParts:
    """What a Brier score is made of; `brier` is their sum with the signs of the formula."""

    reliability: float
    """How far frequencies lie from probabilities: 0 is calibrated, lower is better."""
    resolution: float
    """How far frequencies of the bins lie from the overall one: higher is better."""
    uncertainty: float
    """The Brier score of always saying the overall frequency: the data's own."""
    within_variance: float
    within_covariance: float
    """The variance of the probabilities inside the bins and twice their covariance with what
    came true: 0 when each bin holds one probability."""

    @property
    def brier(self) -> float:
        return (
            self.reliability
            - self.resolution
            + self.uncertainty
            + self.within_variance
            - self.within_covariance
        )


def brier_decomposition(p: Predictive, y: Any, bins: int = 15) -> BrierParts:
    """The Brier score in parts, over `bins` bins of equal width; empty ones count nothing."""
    table = labelled(p, y)
    if table.binary:
        probs, came = table.probs[:, 1:], table.label.unsqueeze(1).double()
    else:
        probs, came = table.probs, one_hot(table.label, table.probs.shape[1]).double()
    rows, classes = probs.shape
    column = torch.arange(classes, device=probs.device)
    cell = bin_of(table.comparable(probs), bins) + bins * column  # [L, C]
    count, p_sum, o_sum = bin_sums(cell, bins * classes, probs, came)
    some = count.clamp_min(1.0)
    p_mean, o_mean = p_sum / some, o_sum / some
    overall = came.mean(0)
    p_off, o_off = probs - p_mean[cell], came - o_mean[cell]
    return BrierParts(
        float((count * (p_mean - o_mean).square()).sum() / rows),
        float((count * (o_mean - overall.repeat_interleave(bins)).square()).sum() / rows),
        float((overall * (1.0 - overall)).sum()),
        float(p_off.square().sum() / rows),
        float(2.0 * (p_off * o_off).sum() / rows),
    )


def set_coverage_each(p: Predictive, y: Any) -> Tensor:
    """[L]: whether the conformal set holds the label."""
    sets, label = _conformal_sets(p, y)
    return sets.gather(1, label.unsqueeze(1)).squeeze(1).double()


def set_size_each(p: Predictive, y: Any) -> Tensor:
    """[L]: the number of classes in the conformal set."""
    return _conformal_sets(p, y)[0].sum(1).double()


def _conformal_sets(p: Predictive, y: Any) -> tuple[Tensor, Tensor]:
    """(sets [L, C], labels [L]) of the labels that count."""
    if p.guaranteed_level is None:
        raise Unavailable("this predictive has no conformal set: see doxa.evaluate.conformal")
    sets, label = p.prediction_set().movedim(1, -1), p.targets(y).flatten().long()
    sets, counted = sets.reshape(len(label), -1), counted_labels(p, label)
    return (sets, label) if counted is None else (sets[counted], label[counted])


Kind = Literal["auto", "closed", "normal", "draws"]
_BLOCK = 1 << 22  # numbers of one intermediate result
_TAIL = 9.0  # standard deviations past the outermost mean, where F (1 - F) is below 1e-18


def crps(p: Predictive, y: Any, kind: Kind = "auto", *, draws: int = 1000, seed: int = 0) -> float:
    """The mean of `crps_each`."""
    return float(crps_each(p, y, kind, draws=draws, seed=seed).mean())


def crps_each(
    p: Predictive, y: Any, kind: Kind = "auto", *, draws: int = 1000, seed: int = 0
) -> Tensor:
    """[N, *event] float64.

    Parameters
    ----------
    kind
        "closed": of the mixture of normals. "normal": of the normal with the same mean and
        variance, which the deep-ensembles paper scores. "draws": estimated from `draws` draws
        of y, fair. "auto": closed where y is a mixture of normals, else draws (Student-t,
        counts), where the result carries sampling noise and depends on the seed.
    """
    mean, target = predicted_mean(p, y)
    if kind not in ("auto", "closed", "normal", "draws"):
        raise DataError(f"kind must be auto, closed, normal or draws, got {kind!r}")
    if kind == "normal":
        std = check_predicted(p.std, "standard deviation").double()
        return crps_normals(mean.new_ones(1), mean.unsqueeze(0), std.unsqueeze(0), target)
    if kind != "draws":
        try:
            weights, means, stds = p.normals()
        except Unavailable:
            if kind == "closed":
                raise
        else:
            return crps_normals(weights, means, stds, target)
    sample = p.sample(check_count("draws", draws, 2), seed)
    return crps_draws(sample, target, fair=True)


def crps_normals(weights: Tensor, means: Tensor, stds: Tensor, y: Tensor) -> Tensor:
    """Of y [*shape] under mixtures of S normals: weights [S], means and stds [S, *shape]."""
    used = weights > 0  # what counts nothing may be undefined
    weights, means, stds = weights[used].double(), means[used].double(), stds[used].double()
    check_predicted(means.transpose(0, 1), "mean")
    check_predicted(stds.transpose(0, 1), "standard deviation")
    shape, count = y.shape, len(weights)
    m, s = means.reshape(count, -1), stds.reshape(count, -1)  # [S, E]
    flat = y.double().reshape(-1)
    parts = []
    step = max(1, _BLOCK // (4 * count))
    for some in torch.arange(len(flat), device=flat.device).split(step):
        centre = m[:, some]
        near = weights @ _expected_distance(flat[some] - centre, s[:, some])
        parts.append(near - _half_spread(weights, centre, s[:, some]))
    # Rounding may take a difference of equals below zero, where it can never be.
    return torch.cat(parts).clamp_min(0.0).reshape(shape)


def crps_draws(draws: Any, y: Any, weights: Any = None, *, fair: bool = False) -> Tensor:
    """Of y [*shape] from draws [S, *shape] with weights [S], equal when None."""
    x, target = torch.as_tensor(draws).double(), torch.as_tensor(y)
    target = target.double().to(x.device)
    if x.ndim < 1 or x.shape[1:] != target.shape or x.shape[0] == 0:
        raise ShapeError(
            f"draws of shape {list(x.shape)} do not fit targets of shape {list(target.shape)}: "
            "they need one more axis, in front"
        )
    if not bool(torch.isfinite(x).all() & torch.isfinite(target).all()):
        raise DataError("draws and targets must be finite")
    w = torch.full((len(x),), 1.0 / len(x), dtype=x.dtype, device=x.device)
    if weights is not None:
        w = torch.as_tensor(weights).double().to(x.device)
        if w.shape != (len(x),) or not bool((w >= 0).all() & (w.sum() > 0) & w.isfinite().all()):
            raise DataError(f"{len(x)} draws need as many weights, non-negative and not all zero")
        w = w / w.sum()
    gap, order = (x - target).reshape(len(x), -1).sort(0)  # [S, E]
    own = w[order]
    above = own.cumsum(0)
    spread = (own * gap * (2.0 * above - own - 1.0)).sum(0)
    if fair:
        rest = 1.0 - float(w.square().sum())
        if rest <= 1e-12:
            raise DataError("the fair CRPS needs two draws or more that count")
        spread = spread / rest
    return ((own * gap.abs()).sum(0) - spread).reshape(target.shape)


def _expected_distance(m: Tensor, s: Tensor) -> Tensor:
    """A(m, s) = E|N(m, s^2)|, which is |m| at s = 0."""
    z = m / s.clamp_min(torch.finfo(s.dtype).tiny)
    density = torch.exp(-0.5 * z.square()) * math.sqrt(2.0 / math.pi)
    return s * density + m * torch.special.erf(z * math.sqrt(0.5))


def _half_spread(w: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """[E]: E|X - X'| / 2 of each mixture; m and s are [S, E]."""
    count = len(w)
    low, high = (m - _TAIL * s).amin(0), (m + _TAIL * s).amax(0)
    finest = float((2.0 * (high - low) / s.amin(0)).amax()) if bool((s > 0).all()) else math.inf
    if finest + 2.0 < (count - 1) / 2:
        return _spread_by_trapezoids(w, m, s, low, high, math.ceil(finest) + 2)
    total = w.square() @ s / math.sqrt(math.pi)  # A(0, sqrt(2) s) / 2
    for lag in range(1, count):  # each unordered pair once, all of one distance in the list at once
        gap, both = m[lag:] - m[:-lag], torch.hypot(s[lag:], s[:-lag])
        total = total + (w[lag:] * w[:-lag]) @ _expected_distance(gap, both)
    return total


def _spread_by_trapezoids(
    w: Tensor, m: Tensor, s: Tensor, low: Tensor, high: Tensor, points: int
) -> Tensor:
    step = (high - low) / (points - 1)
    total = torch.zeros_like(low)
    for k in range(points):
        below = w @ torch.special.ndtr((low + k * step - m) / s)
        total = total + below * (1.0 - below)
    return total * step


def log_likelihood(p: Predictive, y: Any) -> float:
    """The mean of `log_likelihood_each`. Minus infinity where a class that was given no
    probability came true."""
    return float(log_likelihood_each(p, y).mean())


def nll(p: Predictive, y: Any) -> float:
    """The negative log-likelihood: -log_likelihood."""
    return -log_likelihood(p, y)


def log_likelihood_each(p: Predictive, y: Any) -> Tensor:
    """log p(y) in float64: [N] by rows, or by labels that count for classes."""
    check_predictive(p)
    target = p.targets(y)
    check_some(target)
    if not p.likelihood.classifies:
        return _defined(p.log_prob(target))
    label = target.flatten()
    counted = counted_labels(p, label)
    each = _defined(p.log_prob(target) if len(label) == len(target) else _by_site(p, target))
    return each if counted is None else each[counted]


def sharpness(p: Predictive) -> float:
    """How narrow the predictions are, whatever came true: the mean predictive standard deviation
    for numbers (smaller is sharper), the mean confidence for classes (larger is sharper)."""
    check_predictive(p)
    if not p.likelihood.classifies:
        check_some(p.std)
        return float(check_predicted(p.std, "standard deviation", finite=False).double().mean())
    probs = check_predicted(p.probs, "probability").double()
    check_some(probs)
    if p.likelihood.binary:
        return float(torch.maximum(probs, 1.0 - probs).mean())
    return float(probs.amax(1).mean())


def _defined(each: Tensor) -> Tensor:
    return check_predicted(each, "log density", finite=False).double()


def _by_site(p: Predictive, y: Tensor) -> Tensor:
    """[L]: the log marginal probability of each label, ignored ones included (any value)."""
    form = p.form
    if isinstance(form, ClassTable):
        return form.by_label(y).flatten()
    if not isinstance(form, Mixture):
        return _probability_of(p, y).log()
    # By way of logits: a probability that rounds to 0 still has a logarithm.
    total: Tensor | None = None
    for f, weight in zip(form.f, form.weights, strict=True):
        if not bool(weight > 0):
            continue
        if p.likelihood.binary:
            each = logsigmoid((2.0 * y - 1.0).to(f.dtype) * f)
        else:
            index = y.clamp(0, f.shape[1] - 1).unsqueeze(1)
            each = f.gather(1, index).squeeze(1) - torch.logsumexp(f, 1)
        each = each.double() + weight.double().log()
        total = each if total is None else torch.logaddexp(total, each)
    assert total is not None
    return total.flatten()


def _probability_of(p: Predictive, y: Tensor) -> Tensor:
    """[L]: the predicted probability of each label."""
    probs = p.probs.double()
    if p.likelihood.binary:
        return torch.where(y > 0.5, probs, 1.0 - probs).flatten()
    index = y.clamp(0, probs.shape[1] - 1).unsqueeze(1)
    return probs.gather(1, index).squeeze(1).flatten()


@dataclass(frozen=True)
class RiskCoverage:
    """Points of the curve, from the most certain on; all [G]."""

    coverage: Tensor
    """The share accepted; the last is 1."""
    risk: Tensor
    """The mean loss of those accepted; the last is that of all."""
    uncertainty: Tensor
    """Accepted are those with at most this uncertainty."""
    area: float
    """AURC; lower is better."""
    excess: float
    """E-AURC: 0 when certainty orders the losses perfectly."""


def risk_coverage(p: Predictive, y: Any, uncertainty: Tensor | None = None) -> RiskCoverage:
    """The risk-coverage curve: the share of errors for classes, by 1 - confidence; the squared
    error of each element for numbers, by predictive variance. `uncertainty`, one for each label
    that counts or each element, replaces those (p.entropy, p.epistemic, p.mutual_information)."""
    if p.likelihood.classifies:
        table = labelled(p, y)
        loss, own = 1.0 - table.hit, 1.0 - table.comparable(table.confidence)
    else:
        mean, target = predicted_mean(p, y)
        loss = (target - mean).square().flatten()
        own = loss if uncertainty is not None else p.variance.double().flatten()
    if uncertainty is not None:
        own = uncertainty.flatten().to(loss.device)
    return risk_coverage_of(own, loss)


def risk_coverage_of(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Of uncertainties [L] and losses [L] at hand."""
    if uncertainty.shape != loss.shape or loss.ndim != 1:
        raise ShapeError(
            f"uncertainties of shape {list(uncertainty.shape)} for losses of shape "
            f"{list(loss.shape)}: one for each is needed"
        )
    if len(loss) == 0:
        raise DataError("there is nothing to score: no losses")
    check_predicted(uncertainty, "uncertainty", finite=False)
    loss = check_predicted(loss, "loss").double()
    level, group, count = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    accepted = count.cumsum(0).double()
    risk = torch.bincount(group, weights=loss, minlength=len(level)).cumsum(0) / accepted
    area = float((count * risk).sum() / len(loss))
    place = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    best = float((loss.sort().values.cumsum(0) / place).mean())
    # Rounding may take the difference of equal areas below zero.
    return RiskCoverage(accepted / len(loss), risk, level, area, max(area - best, 0.0))
