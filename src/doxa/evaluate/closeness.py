"""How close two predictive distributions are: a method's against a reference posterior's.

Izmailov et al. (2021) ask what Bayesian networks' posteriors are really like by running HMC until
it has converged and comparing every cheaper method's predictions with it:

    agreement        (1/N) Σ_i 1[argmax_c p_ic = argmax_c q_ic]
    total variation  (1/N) Σ_i ½ Σ_c |p_ic − q_ic|;   for densities ½ ∫ |p_i(y) − q_i(y)| dy
    W2               (1/N) Σ_i (∫₀¹ (F_i⁻¹(u) − G_i⁻¹(u))² du)^½

W2 of regressions is the one of Wilson et al. (2022): between the distributions of y, row by row,
in the units of y. Classes have no distance between them, so that there W2 is between the
distributions of the *probabilities* over the posterior's draws: the mean over rows and classes of
the one-dimensional W2 of a class's probability. It sees what the average hides: a posterior that
is sure of 0.5 and one torn between 0 and 1 have the same mean. All are symmetric, and 0 for the
same prediction. Densities are compared on bins: see `overlap`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import DataError, ModelError, ShapeError
from doxa.evaluate.overlap import binned_distance, binned_variation, tabulate
from doxa.likelihoods import Bernoulli
from doxa.predictive import Predictive

_CHUNK = 1 << 22  # elements of a table of sorted draws at a time


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
    if isinstance(p.likelihood, Bernoulli):
        return torch.stack([1.0 - probs, probs], 1)
    return probs


def _class_draws(p: Predictive) -> Tensor:
    """[S, N, C, ...]: each draw's probabilities. A Bernoulli's second class mirrors its first."""
    logits = p.samples.double()
    return logits.sigmoid() if isinstance(p.likelihood, Bernoulli) else logits.softmax(2)


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
