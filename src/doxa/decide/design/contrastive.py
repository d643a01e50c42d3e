"""Expected information gain by comparing a draw of θ with other draws of the prior.

    NMC   E log p(y | θ₀, d) − log (1/L) Σ_{l=1..L} p(y | θ_l, d)          an upper bound
    PCE   E log p(y | θ₀, d) − log (1/(L+1)) Σ_{l=0..L} p(y | θ_l, d)      a lower bound

with θ₀, θ₁, … ~ p(θ) and y ~ p(y | θ₀, d). NMC is Rainforth et al. (2018); its excess is
Var p(y | θ)/(2 L p(y)²) to first order, which is estimated beside it. That estimate cannot exceed
½; where contrasts are too few for it, the excess is stated as NMC − PCE on the same draws, which it
does not exceed in expectation: the truth lies between the bounds. To first order NMC − PCE is twice
the excess, so a larger ratio shows where that is. PCE is Foster et al. (2020) and never exceeds
log(L + 1). Outer draws come in groups; the contrasts θ₁..θ_L are shared within a
group and new in each, so that they cost next to nothing and the standard error counts them. Where
outcomes are discrete and few, log p(y | θ_l, d) is a table: contrasts are evaluated once an
outcome, not once a draw.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from doxa.decide.design.draws import source, uniform
from doxa.decide.design.estimate import EIG, LOWER, UPPER, from_groups
from doxa.decide.design.experiment import Experiment
from doxa.errors import NumericalError

GROUPS = 32
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # log densities held at a time


class Terms(NamedTuple):
    """Of each outer draw under each design, [G, n, D]."""

    own: Tensor  # log p(y | θ₀, d)
    pool: Tensor  # log Σ_{l=1..L} p(y | θ_l, d)
    excess: Tensor  # Var_l p(y | θ_l, d) / (2 L p̂²)
    pathwise: bool  # whether the gradient by the design runs through y


def contrast(
    experiment: Experiment, designs: Tensor, outer: int, inner: int, seed: object
) -> Terms:
    """The terms of both bounds, from `outer` draws against `inner` contrasts."""
    groups = min(outer, max(GROUPS, outer // (4 * inner)))  # few contrasts are shared less
    n = math.ceil(outer / groups)
    generator = source(designs.device, "contrast", seed)
    theta = experiment.prior.draw(groups * n, generator, designs)
    others = experiment.prior.draw(groups * inner, generator, designs)
    experiment.outcome(theta[:1].unsqueeze(1), designs)  # says so where there is no likelihood
    table = experiment.outcomes(theta, designs)
    if table is not None:
        return _discrete(experiment, designs, table, theta, others, groups, generator)
    y = experiment.simulate(theta, designs, generator)  # [N, D, *event]
    own = experiment.log_prob(y, theta.unsqueeze(1), designs)
    split = lambda v: v.unflatten(0, (groups, -1))  # noqa: E731
    width = max(1, math.prod(theta.shape[1:]), math.prod(y.shape[2:]))
    block = _BLOCK.get(designs.device.type, 1 << 17)
    each = inner * len(designs) * width
    step, several = max(1, block // each), max(1, block // (each * n))  # draws, or whole groups
    parts = [
        [_pooled(experiment.log_prob(some, _against(few), designs)) for some in many.split(step, 1)]
        for many, few in zip(split(y).split(several), split(others).split(several), strict=True)
    ]
    pool, excess = (
        torch.cat([torch.cat([pair[i] for pair in row], 1) for row in parts]) for i in (0, 1)
    )
    pathwise = not designs.requires_grad or y.requires_grad
    return Terms(split(own), pool, excess, pathwise)


def _against(contrasts: Tensor) -> Tensor:
    """[g, L, ...] to [L, g, 1, 1, ...]: beside draws [g, n, D, ...]."""
    return contrasts.transpose(0, 1).unsqueeze(2).unsqueeze(2)


def _pooled(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ p over the contrasts [L, ...], and the relative variance of their mean, halved."""
    top = log_p.detach().amax(0).clamp_min(-1e30)
    p = (log_p - top).exp()
    total = p.sum(0)
    some = total > 0  # no contrast may allow an outcome: −∞, without a gradient
    total = torch.where(some, total, 1.0)
    excess = p.detach().square().sum(0) / total.detach().square() - 1 / len(p)
    return torch.where(some, total.log() + top, -torch.inf), 0.5 * excess


def _discrete(
    experiment: Experiment, designs: Tensor, outcomes: Tensor, theta: Tensor, others: Tensor,
    groups: int, generator: torch.Generator,
) -> Terms:  # fmt: skip
    log_p = experiment.table(outcomes, theta, designs)  # [Y, N, D]
    u = uniform((log_p.shape[1], 1), designs, generator)  # the same for all designs
    seen = log_p.detach()[:-1].exp()
    index = u > seen[0] if len(seen) == 1 else (u > seen.cumsum(0)).sum(0)  # [N, D]
    if len(seen) > 1:  # a sum that is rounded below 1 does not reach an outcome that cannot be
        numbers = torch.arange(len(log_p), device=u.device).reshape(-1, 1, 1)
        index = torch.minimum(index, torch.where(log_p > -torch.inf, numbers, 0).amax(0))
    own = _chosen(log_p, index)
    shared = experiment.table(outcomes, others, designs)  # [Y, G·L, D]
    pool, excess = _pooled(shared.unflatten(1, (groups, -1)).transpose(0, 2))
    index = index.unflatten(0, (groups, -1))  # [G, n, D]
    pool, excess = (_chosen(v.transpose(0, 1).unsqueeze(2), index) for v in (pool, excess))
    return Terms(own.unflatten(0, (groups, -1)), pool, excess, not designs.requires_grad)


def _chosen(values: Tensor, index: Tensor) -> Tensor:
    """values[index[i, ...], i, ...], with the axes after the first broadcast."""
    if index.dtype == torch.bool:  # two outcomes: several times as fast
        return torch.where(index, values[1], values[0])
    return values.expand(-1, *index.shape).gather(0, index.unsqueeze(0))[0]


def _with_score(terms: Tensor, own: Tensor, pathwise: bool) -> Tensor:
    """The same values, whose gradient counts that the design changes which y are drawn:
    ∇E f = E ∇f + E f ∇log p(y | θ, d)."""
    if pathwise:
        return terms
    fixed = terms.detach()
    return terms + (own - own.detach()) * (fixed - fixed.mean((0, 1)))


def nested(
    experiment: Experiment, designs: Tensor, outer: int, inner: int, seed: int, name: str = "nmc"
) -> EIG:
    own, pool, excess, pathwise = contrast(experiment, designs, outer, inner, seed)
    ratio = own - pool
    gap = F.softplus(ratio.detach()).mean((0, 1)) - math.log1p(1 / inner)  # NMC − PCE
    if bool(torch.isinf(gap).any()):
        raise NumericalError(
            f"an outcome has probability 0 under all of its {inner} contrasts, so the upper bound "
            "is infinite: raise inner, or use 'pce', 'exact' or 'enumerated'"
        )
    terms = _with_score(ratio + math.log(inner), own, pathwise)
    first = excess.mean((0, 1))
    few = gap > 3 * first
    note = "too large by `bias` or so, which falls as 1/inner"
    if bool(few.any()):
        note = "too large by `bias` at most where contrasts are too few for 1/inner: raise inner"
    return from_groups(
        terms, designs, UPPER, name, note, {"outer": own.shape[0] * own.shape[1], "inner": inner},
        torch.where(few, gap, first),
    )  # fmt: skip


def prior_contrastive(
    experiment: Experiment, designs: Tensor, outer: int, inner: int, seed: int
) -> EIG:
    own, pool, _, pathwise = contrast(experiment, designs, outer, inner, seed)
    terms = _with_score(own - torch.logaddexp(own, pool) + math.log(inner + 1), own, pathwise)
    return from_groups(
        terms, designs, LOWER, "pce", f"never above log(inner + 1) = {math.log(inner + 1):.2f}",
        {"outer": own.shape[0] * own.shape[1], "inner": inner},
    )  # fmt: skip
