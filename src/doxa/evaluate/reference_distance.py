"""Distance of two predictive distributions, for example of a method and of a reference posterior.

Izmailov et al. (2021) run HMC until it has converged and compare the predictions of cheaper methods
with it:

    agreement        (1/N) Σ_i 1[argmax_c p_ic = argmax_c q_ic]
    total variation  (1/N) Σ_i ½ Σ_c |p_ic − q_ic|;   for densities ½ ∫ |p_i(y) − q_i(y)| dy
    W2               (1/N) Σ_i (∫₀¹ (F_i⁻¹(u) − G_i⁻¹(u))² du)^½

W2 of regressions is that of Wilson et al. (2022): between the distributions of y, per row, in the
units of y. There is no distance between classes, so W2 of classifications is between the
distributions of the *probabilities* over the draws of the posterior: the mean over rows and classes
of the one-dimensional W2 of the probability of a class. It shows a difference that the average
hides: draws that are all 0.5, and draws that are 0 or 1, have the same mean. All three are
symmetric; the distances are 0 for equal predictions.

Densities are compared on shared bins. Each of the two distributions contributes equal steps between
its quantiles at 5 % and 95 %, at 0.1 % and 99.9 %, and at 10⁻⁶ and 1 − 10⁻⁶, so that a narrow one
beside a broad one and a heavy tail are resolved; values beyond these are in two more bins. The
total variation of binned distributions is never above the true one. W2 spreads the mass of each bin
evenly (for counts: puts it at the integer). For two normals both are within 10⁻³ of the closed
form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import DataError, ModelError, ShapeError, Unavailable
from doxa.likelihoods.gaussian import standard_normal_cdf
from doxa.predictive import Predictive
from doxa.predictive.form import mix

_STEPS = {0.05: 32, 1e-3: 64, 1e-6: 32}  # {what lies below and above: bins in between}
_CHUNK = 1 << 22  # elements of a table of components at a time


class Binned(NamedTuple):
    """Cumulative probabilities at shared edges, [G, N, *event]."""

    edges: Tensor
    p: Tensor
    q: Tensor
    discrete: bool


def tabulate(p: Predictive, q: Predictive) -> Binned:
    """Both at the same edges, each contributing its own."""
    own = []
    for each in (p, q):
        for tail, steps in _STEPS.items():
            low, high = (t.double().to(p.mean.device) for t in each.quantile([tail, 1.0 - tail]))
            share = torch.linspace(0.0, 1.0, steps + 1, dtype=low.dtype, device=low.device)
            own.append(low + (high - low) * share.reshape(-1, *[1] * low.ndim))
    edges = torch.cat(own).sort(0).values
    if p.likelihood.discrete:
        edges = edges.floor()
    if not bool(torch.isfinite(edges).all()):
        raise DataError("the quantiles of these predictives are not finite: nothing to compare")
    return Binned(edges, _cdfs(p, edges), _cdfs(q, edges), p.likelihood.discrete)


def _cdfs(p: Predictive, edges: Tensor) -> Tensor:
    """P(Y <= edge) of each edge, [G, N, *event]: of a mixture of normals many at a time."""
    at = edges.to(p.mean)  # in its own precision
    try:
        weights, means, stds = p.normals()
    except Unavailable:
        each = [p.cdf(edge).double() for edge in at]
    else:
        size = max(1, _CHUNK // means.numel())
        each = []
        for part in at.split(size):
            z = (part.unsqueeze(0) - means.unsqueeze(1)) / stds.unsqueeze(1)  # [S, G, N, ...]
            each += mix(standard_normal_cdf(z), weights).double()
    # Rounding must not take a step down.
    return torch.stack(each).cummax(0).values.to(edges.device)


def binned_variation(binned: Binned) -> Tensor:
    """½ Σ over bins and the two tails of |P(bin) − Q(bin)|: [N, *event]."""
    away = binned.p - binned.q  # 0 at both infinities
    return 0.5 * (away[0].abs() + away.diff(dim=0).abs().sum(0) + away[-1].abs())


def binned_distance(binned: Binned) -> Tensor:
    """W2 of two distributions with piecewise linear cdfs: [N, *event].

    Between the merged levels u both quantile functions are straight lines, and so is their
    difference: ∫ (d₀ + (d₁ − d₀) t)² dt = (d₀² + d₀ d₁ + d₁²) / 3. The tails' mass is put at the
    outermost edges.
    """
    edges, p, q = (t.flatten(1).T.contiguous() for t in binned[:3])  # [R, G]
    levels = torch.cat([p, q], 1).sort(1).values
    levels = torch.cat([torch.zeros_like(p[:, :1]), levels, torch.ones_like(p[:, :1])], 1)
    start, stop = levels[:, :-1], levels[:, 1:]
    middle = 0.5 * (start + stop)  # identifies the linear piece, also beside a jump
    ends = [
        _inverse(p, edges, middle, level, binned.discrete)
        - _inverse(q, edges, middle, level, binned.discrete)
        for level in (start, stop)
    ]
    first, last = ends
    pieces = (stop - start) * (first.square() + first * last + last.square()) / 3.0
    return pieces.sum(1).sqrt().reshape(binned.p.shape[1:])


def _inverse(cdf: Tensor, edges: Tensor, middle: Tensor, level: Tensor, step: bool) -> Tensor:
    """y at `level` on the straight piece of the cdf that holds `middle`, or on its step."""
    right = torch.searchsorted(cdf, middle)
    left, right = (right - 1).clamp_min(0), right.clamp_max(cdf.shape[1] - 1)
    u0, u1 = cdf.gather(1, left), cdf.gather(1, right)
    y0, y1 = edges.gather(1, left), edges.gather(1, right)
    if step:
        return y1
    share = ((level - u0) / (u1 - u0)).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
    return y0 + share * (y1 - y0)


class Closeness(NamedTuple):
    """Three distances between two predictives; `agreement` is None for regression."""

    agreement: float | None
    total_variation: float
    wasserstein2: float


def closeness(p: Predictive, q: Predictive) -> Closeness:
    """All three at once, which for regression costs no more than one of them."""
    _check(p, q)
    if p.likelihood.classifies:
        return Closeness(agreement(p, q), total_variation(p, q), wasserstein2(p, q))
    binned = tabulate(p, q)
    return Closeness(None, _mean(binned_variation(binned)), _mean(binned_distance(binned)))


def agreement(p: Predictive, q: Predictive) -> float:
    """The share of labels for which both have the same likeliest class (the first of equals)."""
    _check(p, q)
    if not p.likelihood.classifies:
        raise ModelError(
            f"agreement is about the likeliest class, and these are {p.likelihood.name} "
            "predictives; use total_variation or wasserstein2"
        )
    same = _class_table(p).argmax(1) == _class_table(q).argmax(1)
    return _mean(same)


def total_variation(p: Predictive, q: Predictive) -> float:
    """Between 0 (the same) and 1 (never overlapping): how much probability would have to move.

    The mean over rows, and over the elements of y where a row has several.
    """
    _check(p, q)
    if p.likelihood.classifies:
        return _mean(0.5 * (_class_table(p) - _class_table(q)).abs().sum(1))
    return _mean(binned_variation(tabulate(p, q)))


def wasserstein2(p: Predictive, q: Predictive) -> float:
    """Regression: of the distributions of y, in its units. Classes: of the draws' probabilities,
    between 0 and 1, for predictives that kept their draws."""
    _check(p, q)
    if p.likelihood.classifies:
        return _mean(sample_wasserstein2(_class_draws(p), _class_draws(q), p.weights, q.weights))
    return _mean(binned_distance(tabulate(p, q)))


def sample_wasserstein2(
    a: Tensor, b: Tensor, a_weights: Tensor | None = None, b_weights: Tensor | None = None
) -> Tensor:
    """The exact one-dimensional W2 of weighted samples a [S, ...] and b [T, ...]: [...].

    Both quantile functions are steps; their squared difference is summed over the pieces between
    the merged steps. Weights [S] and [T] are equal when None.
    """
    if a.shape[1:] != b.shape[1:] or 0 in (a.shape[0], b.shape[0]):
        raise ShapeError(
            f"samples of shapes {list(a.shape)} and {list(b.shape)}: they need the same trailing "
            "axes, and at least one sample each"
        )
    shape = a.shape[1:]
    one, two = (t.double().reshape(t.shape[0], -1).T for t in (a, b))  # [R, S], [R, T]
    size = max(1, _CHUNK // (one.shape[1] + two.shape[1]))
    pairs = zip(one.split(size), two.split(size), strict=True)
    parts = [_merged(s, t, _weights(a_weights, s), _weights(b_weights, t)) for s, t in pairs]
    return torch.cat(parts).reshape(shape)


def _merged(a: Tensor, b: Tensor, a_weights: Tensor, b_weights: Tensor) -> Tensor:
    """[R, S], [R, T] to [R]."""
    steps, values = [], []
    for sample, weights in ((a, a_weights), (b, b_weights)):
        ordered, order = sample.sort(1)
        values.append(ordered)
        steps.append(weights[order].cumsum(1))
    merged = torch.cat(steps, 1).sort(1).values.clamp_max(1.0)
    width = merged.diff(dim=1, prepend=merged.new_zeros(len(merged), 1))
    middle = merged - 0.5 * width
    at = [
        v.gather(1, torch.searchsorted(s.contiguous(), middle).clamp_max(v.shape[1] - 1))
        for v, s in zip(values, steps, strict=True)
    ]
    return (width * (at[0] - at[1]).square()).sum(1).sqrt()


def _weights(given: Tensor | None, like: Tensor) -> Tensor:
    if given is None:
        return torch.full_like(like[0], 1.0 / like.shape[1])
    weights = given.to(like)
    if weights.shape != like.shape[1:]:
        raise ShapeError(f"{like.shape[1]} samples, but weights of shape {list(weights.shape)}")
    return weights / weights.sum()


def _class_table(p: Predictive) -> Tensor:
    """[N, C, ...] in float64; a Bernoulli's one number becomes two."""
    probs = p.probs.double()
    if p.likelihood.binary:
        return torch.stack([1.0 - probs, probs], 1)
    return probs


def _class_draws(p: Predictive) -> Tensor:
    """[S, N, C, ...]: each draw's probabilities. A Bernoulli's second class mirrors its first."""
    logits = p.samples.double()
    return logits.sigmoid() if p.likelihood.binary else logits.softmax(2)


def _check(p: Predictive, q: Predictive) -> None:
    kinds = [(each.likelihood.classifies, each.likelihood.discrete) for each in (p, q)]
    if kinds[0] != kinds[1]:
        raise ModelError(
            f"a {p.likelihood.name} and a {q.likelihood.name} predictive are about different "
            "kinds of targets and cannot be compared"
        )
    if p.mean.shape != q.mean.shape:
        raise ShapeError(
            f"predictives of shapes {list(p.mean.shape)} and {list(q.mean.shape)}: they must be "
            "at the same rows, with the same outputs"
        )
    if p.mean.shape[0] == 0:
        raise DataError("there are no rows to compare (N = 0)")
    for name, each in (("first", p), ("second", q)):
        broken = ~torch.isfinite(each.mean.reshape(len(each.mean), -1)).all(1)
        if bool(broken.any()):
            row = int(broken.nonzero()[0])
            raise DataError(f"the {name} predictive is not finite at row {row}")


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
