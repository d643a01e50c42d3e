"""The Gaussian nearest to the posterior of a linearised classifier, not the one at its mode.

Rows that are told apart with hardly a doubt stop pushing: their posterior is skewed, away from
doubt, and a Gaussian at the maximum θ* reaches as far to the other side. Its average gradient is
not zero there. Of the linearised network, f + J(m + δ) with δ ~ N(0, Σ), it is at the minimum of

    F(m) = Σ_i E[−log p(y_i | f_i + J_i(m + δ))] + sᵀJm + ½ mᵀΛm,    s = ∂ log p(y | f)/∂f at θ*

which is the Kullback–Leibler divergence to that network's posterior as a function of the Gaussian's
mean, but for s, which leaves θ* where there is no spread, whether or not it is a maximum. F is
convex. The average is over fixed draws ±δ, and conjugate gradients preconditioned by Σ go down: a
product with J and one with Jᵀ a round, and a line search on outputs alone. The width of the nearest
Gaussian is that of its average curvature,

    Σ⁻¹ = Λ + Σ_i J_iᵀ E[C(f_i + J_i(m + δ))] J_i,

so that m and Σ are found in turns (Khan et al. 2019; Immer, Korzepa & Bauer 2021).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.data import Pass, batch_rows
from doxa.errors import MethodError
from doxa.laplace.linearised import Linearised
from doxa.laplace.outputs import Outputs
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg import Embedded, Structure
from doxa.method import Run

log = logging.getLogger("doxa")

_WIDTHS = 1  # how often the width is found again
_DRAWS = 256  # half of them the other half's negatives
_NUMBERS = 1 << 24  # of outputs over rows and draws, at the most
_ROUNDS = 100
_TRIES = 12  # of a step's length
_FLAT = 0.1  # of the slope at its start
_LONGEST = 4.0  # in steps of Newton's method at θ*
_ARRIVED = 1e-6  # of gᵀΣg, of that at θ*,
_NEAR = 1e-3  # or of gᵀΣg itself: to a thirtieth of a standard deviation

# Σ with the curvature averaged over outputs f + d, by d [M, S, B, O]
Width = Callable[[Tensor], Structure]


def move(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None, asked: bool
) -> None:
    """Moves its Gaussians; those without a `width` to be found stay as wide as they are. Where
    nobody asked, and the network has no forward derivatives, they stay in their place, too."""
    try:
        m, spread = nearest(run, posterior, prior, width)
    except MethodError as error:
        if asked:
            raise
        log.info("laplace: the Gaussian stays at the mode: %s", error)
        return
    posterior.at, posterior.covariance = posterior.mean, spread
    posterior.mean = posterior.mean.index_add(1, run.subset_index, m.to(run.dtype))


def nearest(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None
) -> tuple[Tensor, Structure]:
    """m of each member, [M, p] over the uncertain weights, and Σ; `prior` are Λ's entries."""
    batch = Pass(run.rows, run.split_of).batch(0)
    line = Linearised(posterior._jacobians(), batch)
    outputs = Outputs(run.likelihood, run.constants, batch, run.net.output, "ggn")
    spread = posterior.covariance
    if isinstance(spread, Embedded):  # weights that are points do not move
        prior = spread.put(prior)
    count = batch_rows(batch) * line.jacobians.outputs
    half = max(1, min(_DRAWS, _NUMBERS // (count * run.size)) // 2)
    keys = [f"{k}/{j}" for k in posterior.ids for j in range(half)]
    m = torch.zeros_like(prior, dtype=torch.float64)
    for left in reversed(range(1 if width is None else 1 + _WIDTHS)):
        f, away = line.along(posterior._away(spread, keys, seed=0))
        average = _Average(outputs, f, torch.cat([away, -away], 1))
        m, at = _lowest(line, average, spread, prior, m)
        if left and width is not None:
            spread = width(average.away + at.unsqueeze(1))
    return m, spread


def _lowest(
    line: Linearised, average: _Average, spread: Structure, prior: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Where F is least, [M, p], from a start, and Jm there, [M, B, O]."""

    def slopes(m: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """−∇F, the step of Newton's method at θ*, and their product."""
        downhill = line.back(average.pull(at)).double() - prior * m
        natural = spread.matmul(downhill.to(at.dtype)).double()
        return downhill, natural, (downhill * natural).sum(1)

    m, at = torch.zeros_like(start), torch.zeros_like(average.f)
    downhill, step, first = slopes(m, at)
    size = first
    if bool(start.any()):
        m, at = start, line.push(start)
        downhill, step, size = slopes(m, at)
    for _ in range(_ROUNDS):
        away = size > (_ARRIVED * first).clamp_min(_NEAR)
        if not bool(away.any()):
            break
        turn = line.push(step)
        length = _length(average, at, turn, prior, m, step)
        length = torch.where(away, length, 0.0)  # who has arrived stays
        m, at = m + length[:, None] * step, at + length[:, None, None].to(at.dtype) * turn
        before, last = downhill, size
        downhill, natural, size = slopes(m, at)
        share = (size - (before * natural).sum(1)) / last.clamp_min(1e-300)  # Polak & Ribière
        step = natural + share.clamp_min(0.0)[:, None] * step
    return m, at


def _length(
    average: _Average, at: Tensor, turn: Tensor, prior: Tensor, m: Tensor, step: Tensor
) -> Tensor:
    """[M]: how far to go until F stops falling along the step, to a tenth of its slope at the
    start: between lengths at which it falls and rises, where a line through both slopes is zero."""
    linear, square = (prior * m * step).sum(1), (prior * step.square()).sum(1)

    def falls(t: Tensor) -> Tensor:
        here = at + t[:, None, None].to(at.dtype) * turn
        return (average.pull(here) * turn).double().sum((1, 2)) - linear - t * square

    low, high = torch.zeros_like(m[:, 0]), torch.full_like(m[:, 0], math.inf)
    start = falling = falls(low)
    rising, t = torch.full_like(low, -math.inf), torch.ones_like(low)
    before = torch.zeros_like(low)
    for _ in range(_TRIES):
        slope = falls(t)
        more = slope > 0
        low, high = torch.where(more, t, low), torch.where(more, high, t)
        # an end that stays a second time counts half, so that the other comes nearer (Illinois)
        stays = 0.5 * (slope * before > 0) + 1.0 * (slope * before <= 0)
        falling = torch.where(more, slope, falling * stays)
        rising = torch.where(more, rising * stays, slope)
        before = slope
        near = slope.abs() <= _FLAT * start
        between = low + (high - low) * falling / (falling - rising)
        t = torch.where(near, t, torch.where(high.isinf(), 2.0 * t, between)).clamp(max=_LONGEST)
        if bool(near.all()):
            break
    return t


@dataclass(frozen=True)
class _Average:
    """Scores averaged over the draws Jδ, `away` [M, S, B, O], about f [M, B, O]."""

    outputs: Outputs
    f: Tensor
    away: Tensor

    def pull(self, at: Tensor) -> Tensor:
        """w E[s(f + Jm + Jδ)] − w s(f) for Jm [M, B, O]: [M, B, O]."""
        members, draws = self.away.shape[:2]
        drawn = ((self.f + at).unsqueeze(1) + self.away).flatten(0, 1)
        several = self.outputs.times(draws).score(drawn)
        change = several.unflatten(0, (members, draws)).mean(1) - self.outputs.score(self.f)
        weight = self.outputs.part.weight
        return change if weight is None else change * weight[..., None].to(change.dtype)
