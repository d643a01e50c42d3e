"""Expected information gain by something learned: a bound for whatever has been learned.

    BA        E log q(θ | y, d) − log p(θ)                                    lower
    marginal  E log p(y | θ, d) − log q(y | d)                                upper
    VNMC      E log p(y | θ, d) − log (1/L) Σ p(y | θ_l, d) p(θ_l)/q(θ_l | y, d),  θ_l ~ q   upper
    InfoNCE   E u(θ₀, y) − log (1/(L+1)) Σ_{l=0..L} exp u(θ_l, y)             lower

Barber & Agakov (2003), Foster et al. (2019), van den Oord et al. (2018). q is a mixture of
Gaussians whose parameters a network gives from y; u is a product of two embeddings. Every design
has its own, trained side by side on draws of their own; the bound is then taken on other draws.
BA asks for the prior's density, InfoNCE for nothing but draws.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.decide.design.contrastive import GROUPS
from doxa.decide.design.draws import source
from doxa.decide.design.estimate import EIG, LOWER, UPPER, from_groups
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.stacked import Mixture, Net, fresh, mixture_of, mixture_size, trained
from doxa.errors import MethodError

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
    setting.experiment.prior.log_prob(theta[:1])  # says so where it is not known
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
