"""The continuous ranked probability score: how far the whole predictive lies from what came true.

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
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.evaluate.paired import check_count, check_predicted, predicted_mean
from doxa.predictive import Predictive

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
        Poisson), where the result carries sampling noise and depends on the seed.
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
