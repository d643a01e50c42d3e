"""Estimators of the expected information gain: learned bounds, and contrastive bounds.

Learned bounds hold for any q or u; training makes them tighter.

    BA        E log q(θ | y, d) − log p(θ)                                    lower
    marginal  E log p(y | θ, d) − log q(y | d)                                upper
    VNMC      E log p(y | θ, d) − log (1/L) Σ p(y | θ_l, d) p(θ_l)/q(θ_l | y, d),  θ_l ~ q   upper
    InfoNCE   E u(θ₀, y) − log (1/(L+1)) Σ_{l=0..L} exp u(θ_l, y)             lower

Barber & Agakov (2003), Foster et al. (2019), van den Oord et al. (2018). q is a mixture of
Gaussians whose parameters a network gives from y; u is a product of two embeddings. Every design
has its own, trained side by side on separate draws; the bound is then evaluated on new draws. BA
needs the density of the prior, InfoNCE only draws.

Contrastive bounds compare a draw of θ with other draws of the prior:

    NMC   E log p(y | θ₀, d) − log (1/L) Σ_{l=1..L} p(y | θ_l, d)          an upper bound
    PCE   E log p(y | θ₀, d) − log (1/(L+1)) Σ_{l=0..L} p(y | θ_l, d)      a lower bound

with θ₀, θ₁, … ~ p(θ) and y ~ p(y | θ₀, d). NMC is Rainforth et al. (2018); its excess is
Var p(y | θ)/(2 L p(y)²) to first order, which is estimated beside it. That estimate cannot exceed
½; where contrasts are too few for it, the excess is stated as NMC − PCE on the same draws, which it
does not exceed in expectation: the truth lies between the bounds. To first order NMC − PCE is twice
the excess, so a larger ratio shows where that is. PCE is Foster et al. (2020) and never exceeds
log(L + 1). Outer draws come in groups; the contrasts θ₁..θ_L are shared within a
group and new in each, so that they cost next to nothing and the standard error counts them. Where
outcomes are discrete and few, log p(y | θ_l, d) is a table: contrasts are evaluated once per
outcome, not once per draw.

Each design has its own small network. Their weights are [D, in, out]: one batched product evaluates
the networks of all designs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from doxa.decide.design.draws import EIG, LOWER, UPPER, from_groups, source, uniform
from doxa.decide.design.experiment import Experiment
from doxa.errors import MethodError, NumericalError

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
    experiment.outcome(theta[:1].unsqueeze(1), designs)  # raises an error if there is no likelihood
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


WIDTH = 32


class Net(NamedTuple):
    """x [D, B, in] to [D, B, out], through one hidden layer and a way past it."""

    into: Tensor
    into_bias: Tensor
    out: Tensor
    past: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        hidden = torch.baddbmm(self.into_bias, x, self.into).tanh()
        return torch.baddbmm(torch.baddbmm(self.bias, x, self.past), hidden, self.out)


def fresh(designs: int, inputs: int, outputs: int, generator: torch.Generator, like: Tensor) -> Net:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

    return Net(
        normal(designs, inputs, WIDTH) / inputs**0.5, normal(designs, 1, WIDTH) * 0.3,
        normal(designs, WIDTH, outputs) * 0.1 / WIDTH**0.5,
        like.new_zeros(designs, inputs, outputs), normal(designs, 1, outputs) * 0.3,
    )  # fmt: skip


def trained(
    weights: list[Tensor], loss: Callable[[int], Tensor], steps: int, rate: float = 0.02
) -> None:
    """Adam on the sum over designs of `loss(t)` [D], with a rate that falls to zero."""
    with torch.enable_grad():
        for weight in weights:
            weight.requires_grad_()
        optimiser = torch.optim.Adam(weights, lr=rate)
        for t in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * t / steps))
            optimiser.zero_grad()
            loss(t).sum().backward()
            optimiser.step()
    for weight in weights:
        weight.requires_grad_(False)


class Mixture(NamedTuple):
    """Σ_k π_k N(μ_k, (WᵀW)⁻¹) over vectors of size P, for any axes in front: W whitens, so that a
    density is a product and no solve."""

    log_share: Tensor  # [..., K]
    mean: Tensor  # [..., K, P]
    whiten: Tensor  # W [..., K, P, P], lower triangular

    def log_prob(self, x: Tensor) -> Tensor:
        """[...] of [..., P]"""
        away = x.unsqueeze(-2) - self.mean
        z = (self.whiten * away.unsqueeze(-2)).sum(-1)
        log_det = self.whiten.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = 0.5 * x.shape[-1] * math.log(2 * math.pi)
        return (self.log_share - 0.5 * z.square().sum(-1) + log_det - constant).logsumexp(-1)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """[n, ..., P]"""
        shares = self.log_share.exp()
        front, size = shares.shape[:-1], self.mean.shape[-1]
        pick = torch.multinomial(shares.reshape(-1, shares.shape[-1]), n, True, generator=generator)
        pick = pick.T.reshape(n, *front, 1, 1)  # [n, ..., 1, 1]
        mean = self.mean.expand(n, *self.mean.shape).gather(-2, pick.expand(*pick.shape[:-1], size))
        whiten = self.whiten.expand(n, *self.whiten.shape).gather(
            -3, pick.unsqueeze(-1).expand(*pick.shape[:-2], 1, size, size)
        )
        z = torch.randn(
            (n, *front, size, 1), generator=generator, dtype=mean.dtype, device=mean.device
        )
        away = torch.linalg.solve_triangular(whiten.squeeze(-3), z, upper=False)
        return mean.squeeze(-2) + away.squeeze(-1)


def mixture_size(parts: int, size: int) -> int:
    return parts * (1 + size + size * (size + 1) // 2)


def mixture_of(raw: Tensor, parts: int, size: int) -> Mixture:
    """From unconstrained numbers [..., mixture_size]."""
    share, mean, rest = raw.split([parts, parts * size, parts * size * (size + 1) // 2], -1)
    rest = rest.unflatten(-1, (parts, -1))
    row, column = torch.tril_indices(size, size, device=raw.device)
    whiten = raw.new_zeros(*rest.shape[:-1], size * size)
    diagonal = row == column
    values = torch.where(diagonal, torch.nn.functional.softplus(rest + 0.5) + 1e-3, rest)
    index = (row * size + column).expand_as(values)
    whiten = whiten.scatter(-1, index, values).unflatten(-1, (size, size))
    return Mixture(share.log_softmax(-1), mean.unflatten(-1, (parts, size)), whiten)


PARTS, BATCH, EMBEDDED = 4, 128, 16
_POOL = 8192  # draws that networks are trained on


class Pairs(NamedTuple):
    """θ [N, ...] and y [N, D, ...], with both as flat vectors: [D, N, P] and [D, N, E]."""

    theta: Tensor
    y: Tensor
    theta_flat: Tensor
    y_flat: Tensor


class Setting:
    """What the estimators share: the draws, standardised, and where more come from."""

    def __init__(self, experiment: Experiment, designs: Tensor, seed: int, purpose: str) -> None:
        if designs.requires_grad:
            raise MethodError(
                "what is learned is learned at given designs: for gradients by the design use "
                "'pce', 'nmc', 'enumerated' or 'exact'"
            )
        self.experiment, self.designs = experiment, designs
        self.generator = source(designs.device, purpose, seed)
        first = experiment.prior.draw(2, self.generator, designs)
        self.outcomes = experiment.outcomes(first, designs)
        theta, y = self._draw(_POOL)
        flat = self._theta(theta)
        self.theta_centre, self.theta_scale = flat.mean(0), _scale(flat)
        raw = self._y(y)
        self.y_centre, self.y_scale = raw.mean(0), _scale(raw)
        self.pool = self._pairs(theta, y)

    def _draw(self, n: int) -> tuple[Tensor, Tensor]:
        theta = self.experiment.prior.draw(n, self.generator, self.designs)
        return theta, self.experiment.simulate(theta, self.designs, self.generator)

    def _theta(self, theta: Tensor) -> Tensor:
        return theta.reshape(len(theta), -1).to(self.designs)

    def _y(self, y: Tensor) -> Tensor:
        """As vectors [N, D, E]; a label as zeros and a one."""
        if self.outcomes is not None and self.outcomes.ndim == 1 and len(self.outcomes) > 2:
            return (y.unsqueeze(-1) == self.outcomes).to(self.designs)
        return y.reshape(*y.shape[:2], -1).to(self.designs)

    def _pairs(self, theta: Tensor, y: Tensor) -> Pairs:
        flat = (self._theta(theta) - self.theta_centre) / self.theta_scale
        own = (self._y(y) - self.y_centre) / self.y_scale
        return Pairs(theta, y, flat.expand(len(self.designs), *flat.shape), own.transpose(0, 1))

    def pairs(self, n: int) -> Pairs:
        """New ones."""
        return self._pairs(*self._draw(n))

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        start = t * BATCH % _POOL
        rows = slice(start, start + BATCH)
        return self.pool.theta_flat[:, rows], self.pool.y_flat[:, rows]

    def net(self, inputs: int, outputs: int) -> Net:
        return fresh(len(self.designs), inputs, outputs, self.generator, self.designs)

    def posterior(self, steps: int) -> tuple[Net, int]:
        """A network that gives q(θ | y, d), trained by maximum likelihood."""
        size = self.pool.theta_flat.shape[-1]
        net = self.net(self.pool.y_flat.shape[-1], mixture_size(PARTS, size))

        def loss(t: int) -> Tensor:
            theta, y = self.batch(t)
            return -mixture_of(net(y), PARTS, size).log_prob(theta).mean(1)

        trained(list(net), loss, steps)
        return net, size

    def log_prior(self, theta: Tensor) -> Tensor:
        """Of θ [..., *shape], where a proposal may leave the prior's support."""
        value = self.experiment.prior.log_prob(theta)
        return torch.where(torch.isnan(value), torch.full_like(value, -torch.inf), value)


def _scale(values: Tensor) -> Tensor:
    return values.std(0).clamp_min(1e-6)


def _groups(outer: int) -> tuple[int, int]:
    groups = min(GROUPS, outer)
    return groups, math.ceil(outer / groups)


def _bound(terms: Tensor, setting: Setting, kind: str, name: str, note: str, **counts: int) -> EIG:
    """Of terms [D, N]."""
    groups = _groups(terms.shape[1])[0]
    split = terms.T.unflatten(0, (groups, -1))
    counts = {"outer": terms.shape[1], **counts}
    return from_groups(split, setting.designs, kind, name, note, counts)


def barber_agakov(
    experiment: Experiment, designs: Tensor, outer: int, steps: int, seed: int
) -> EIG:
    setting = Setting(experiment, designs, seed, "ba")
    _density_over_vectors(setting)
    net, size = setting.posterior(steps)
    theta, _, flat, y = setting.pairs(math.prod(_groups(outer)))
    log_q = mixture_of(net(y), PARTS, size).log_prob(flat) - setting.theta_scale.log().sum()
    terms = log_q - setting.log_prior(theta)
    return _bound(terms, setting, LOWER, "ba", "low by KL(p(θ|y) || q(θ|y))", steps=steps)


def variational_nested(
    experiment: Experiment, designs: Tensor, outer: int, inner: int, steps: int, seed: int
) -> EIG:
    setting = Setting(experiment, designs, seed, "vnmc")
    _density_over_vectors(setting)
    net, size = setting.posterior(steps)
    theta, y, _, seen = setting.pairs(math.prod(_groups(outer)))
    own = experiment.log_prob(y, theta.unsqueeze(1), designs)  # [N, D]
    raw = net(seen).transpose(0, 1)  # [N, D, ·]
    block = max(1, (1 << 18) // (inner * len(designs) * size * size))
    pool = [
        _proposed(setting, mixture_of(few, PARTS, size), some, theta.shape[1:], inner)
        for few, some in zip(raw.split(block), y.split(block), strict=True)
    ]
    terms = own - torch.cat(pool) + math.log(inner)
    note = "high by O(Var[p(y, θ)/q]/inner)"
    return _bound(terms.T, setting, UPPER, "vnmc", note, inner=inner, steps=steps)


def _proposed(setting: Setting, q: Mixture, y: Tensor, shape: torch.Size, inner: int) -> Tensor:
    """log Σ_l p(y, θ_l)/q(θ_l | y) [n, D], from θ_l ~ q."""
    flat = q.draw(inner, setting.generator)  # [L, n, D, P]
    log_q = q.log_prob(flat) - setting.theta_scale.log().sum()
    theta = (flat * setting.theta_scale + setting.theta_centre).reshape(*flat.shape[:-1], *shape)
    prior = setting.log_prior(theta)
    inside = (prior > -torch.inf).reshape(*prior.shape, *(1,) * len(shape))
    theta = torch.where(inside, theta, setting.pool.theta[0])  # weighs nothing, but is a θ
    log_p = setting.experiment.log_prob(y, theta, setting.designs) + prior
    return torch.nan_to_num(log_p - log_q, nan=-torch.inf).logsumexp(0)


def _density_over_vectors(setting: Setting) -> None:
    """A density of θ by mixtures of Gaussians: the prior must have one too."""
    theta = setting.pool.theta
    setting.experiment.prior.log_prob(theta[:1])  # raises an error if it is not known
    if len(theta.reshape(len(theta), -1).unique(dim=0)) < len(theta) // 2:
        raise MethodError("θ is discrete and has no density: use 'exact', 'enumerated' or 'pce'")


def marginal(experiment: Experiment, designs: Tensor, outer: int, steps: int, seed: int) -> EIG:
    setting = Setting(experiment, designs, seed, "marginal")
    theta, y, _, seen = setting.pairs(math.prod(_groups(outer)))
    own = experiment.log_prob(y, theta.unsqueeze(1), designs).T  # [D, N]
    if setting.outcomes is not None:  # the best table is the mean of the training draws'
        log_p = experiment.table(setting.outcomes, setting.pool.theta, designs)
        log_q = log_p.logsumexp(1)  # [Y, D]
        unseen = (log_q == -torch.inf).any(
            0
        )  # a table without zeros: one more draw, of any outcome
        more = torch.logaddexp(log_q, log_q.new_tensor(-math.log(len(log_q))))
        log_q = torch.where(unseen, more - math.log(_POOL + 1), log_q - math.log(_POOL))
        event = setting.outcomes.shape[1:]
        same = y.unsqueeze(0) == setting.outcomes.reshape(-1, 1, 1, *event)
        index = same.flatten(3).all(3) if event else same
        terms = own - torch.where(index, log_q.unsqueeze(1), 0.0).sum(0).T
        note = "high by O(1/draws it was learned from)"
    elif getattr(experiment.outcome(theta[:1, None], designs).support, "is_discrete", False):
        raise MethodError("outcomes are whole numbers without end, and q a density: use 'nmc'")
    else:
        size = seen.shape[-1]
        raw = fresh(len(designs), 1, mixture_size(PARTS, size), setting.generator, designs).bias

        def loss(t: int) -> Tensor:
            return -mixture_of(raw, PARTS, size).log_prob(setting.batch(t)[1]).mean(1)

        trained([raw], loss, steps)
        log_q = mixture_of(raw, PARTS, size).log_prob(seen)
        terms = own - log_q + setting.y_scale.log().sum(-1, keepdim=True)
        note = "high by KL(p(y) || q(y))"
    return _bound(terms, setting, UPPER, "marginal", note, steps=steps)


def info_nce(
    experiment: Experiment, designs: Tensor, outer: int, inner: int, steps: int, seed: int
) -> EIG:
    setting = Setting(experiment, designs, seed, "infonce")
    of_theta = setting.net(setting.pool.theta_flat.shape[-1], EMBEDDED)
    of_y = setting.net(setting.pool.y_flat.shape[-1], EMBEDDED)

    def bound(theta: Tensor, y: Tensor) -> Tensor:
        """[D, B]: each y against all θ of its batch."""
        score = of_y(y) @ of_theta(theta).transpose(1, 2)  # [D, B, B]
        own = score.diagonal(dim1=1, dim2=2)
        return own - score.logsumexp(2) + math.log(score.shape[2])

    trained([*of_theta, *of_y], lambda t: -bound(*setting.batch(t)).mean(1), steps)
    size = inner + 1
    batches = max(2, math.ceil(outer / size))
    _, _, theta, y = setting.pairs(batches * size)
    parts = [
        bound(some, few) for some, few in zip(theta.split(size, 1), y.split(size, 1), strict=True)
    ]
    note = f"never above log(inner + 1) = {math.log(size):.2f}, and low by what u has not learned"
    counts = {"outer": batches * size, "inner": inner, "steps": steps}
    return from_groups(torch.stack(parts).transpose(1, 2), designs, LOWER, "infonce", note, counts)
