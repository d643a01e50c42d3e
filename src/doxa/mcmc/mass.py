"""The mass matrix, estimated from a window of draws.

    M⁻¹ = n/(n+5) · [(1−λ) Σ̂ + λ diag Σ̂] + 10⁻³ · 5/(n+5) · diag Σ̂

with Σ̂ the variances, or the whole covariance, of the window's n draws of each chain, by Welford's
update. Every chain has its own. Two things differ from Stan, which adds the identity instead of the
last diag Σ̂ and has no λ. The identity drowns parameters that are small in their units, and the
narrow directions of correlated ones. And correlations of fewer draws than parameters are noise,
which a trajectory would have to follow: λ is the share of them that noise explains (Schäfer &
Strimmer, 2005), as far as there are fewer draws than P parameters,

    λ = (1 − n/P)₊ · min(1, Σ_{i<j} (1 − r_ij²)²/(n−1)  /  Σ_{i<j} r_ij²):

nothing for a few parameters, whose strong correlations it would blur, and near 1 for a network's
weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.mcmc.adaptation import windows
from doxa.mcmc.leapfrog import free
from doxa.method import Mark, Marks, State

KINDS = ("diagonal", "dense")


def start_mass(unfixed: Tensor, kind: str) -> State:
    """Unit mass for the parameters that move (`unfixed`, 1 or 0, [M, P]), and no draw seen."""
    metric = unfixed if kind == "diagonal" else torch.diag_embed(unfixed)
    return {"metric": metric.clone(), **_fresh(unfixed, metric)}


def _fresh(theta: Tensor, metric: Tensor) -> State:
    zero = torch.zeros_like(theta)
    return {
        "welford.count": zero[:, 0].clone(), "welford.mean": zero,
        "welford.square": torch.zeros_like(metric),
    }  # fmt: skip


def observe(state: State) -> State:
    """Add the current draw to the running mean and sum of squares (or of outer products)."""
    count = state["welford.count"] + 1
    away = state["theta"] - state["welford.mean"]
    mean = state["welford.mean"] + away / count.unsqueeze(1)
    rest = state["theta"] - mean
    square = state["welford.square"]
    square = square + away * rest if square.ndim == 2 else torch.baddbmm(
        square, away.unsqueeze(2), rest.unsqueeze(1)
    )  # fmt: skip
    return {"welford.count": count, "welford.mean": mean, "welford.square": square}


def forget(state: State) -> State:
    """Begin a window: what was seen before is dropped."""
    return {**state, **_fresh(state["theta"], state["metric"])}


def window_marks(burn_in: int, end: Callable[[int], Mark]) -> Marks:
    """The windows of a burn-in: what was seen before the first is forgotten, and `end` of the
    transition at which each ends."""
    bounds = windows(burn_in)
    if not bounds:
        return {}
    start, *ends = bounds
    return {start: lambda run, state: forget(state), **{t: end(t) for t in ends}}


def learn_mass(state: State) -> State:
    """End a window: the metric from its draws, and a new window begins. A chain of which some
    parameter stood still all along keeps its metric."""
    moving, square = free(state["metric"]), state["welford.square"]
    n = state["welford.count"].reshape(-1, *(1,) * (square.ndim - 1))
    spread = square / (n - 1).clamp(min=1)
    each = spread if square.ndim == 2 else spread.diagonal(dim1=1, dim2=2)  # variances, [M, P]
    shrunk, ridge = spread * (n / (n + 5)), 1e-3 * 5 / (n + 5)
    if square.ndim == 2:
        metric = (shrunk + ridge * each).sqrt() * moving
    else:
        fixed = (1 - moving).diag_embed()  # zeros on the diagonal would have no factor
        doubt = _doubt(spread, each, n)
        alone = shrunk.diagonal(dim1=1, dim2=2).diag_embed()
        whole = shrunk + doubt * (alone - shrunk) + ridge * each.diag_embed() + fixed
        factor, failed = torch.linalg.cholesky_ex(whole)
        scales = whole.diagonal(dim1=1, dim2=2).sqrt().diag_embed()
        broken = (failed > 0) | ~torch.isfinite(factor).all(2).all(1)
        metric = torch.where(broken[:, None, None], scales, factor) * moving.unsqueeze(2)
    moved = ((each > 0) | (moving == 0)).all(1)
    fine = torch.isfinite(metric).flatten(1).all(1) & moved
    fine = fine.reshape(-1, *(1,) * (metric.ndim - 1))
    return forget({**state, "metric": torch.where(fine, metric, state["metric"])})


def _doubt(spread: Tensor, variances: Tensor, n: Tensor) -> Tensor:
    """λ, how much of the correlations n draws may have made up: [M, 1, 1]."""
    scale = torch.where(variances > 0, variances.rsqrt(), 0.0)  # [M, P]
    squares = (spread * scale.unsqueeze(1) * scale.unsqueeze(2)).square().triu(1)
    pairs = ((scale.unsqueeze(1) * scale.unsqueeze(2)) > 0).triu(1)
    draws = n[:, 0, 0]
    noise = torch.where(pairs, (1 - squares).square(), 0.0).sum((1, 2)) / (draws - 1)
    share = (noise / squares.sum((1, 2))).nan_to_num(nan=1.0).clamp(max=1.0)
    few = (1 - draws / (scale > 0).sum(1).clamp(min=1)).clamp(min=0.0)
    return (few * share)[:, None, None]
