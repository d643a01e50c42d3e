"""Class probabilities of functions that were drawn from Gaussians whose centres are known.

Averages over S draws have no tails: a class that one function in a thousand votes for has next to
no probability after a hundred. Of Gaussian logits, f ~ N(m, V), the log odds of a class against all
others are nearly Gaussian too, and one integral gives its probability:

    l_c = f_c − log Σ_{k≠c} e^{f_k},    p_c ∝ ∫ σ(l) N(l; E l_c, Var l_c) dl

Moments of l_c are taken over the draws, moved so that their mean is m. With two classes l_c is
Gaussian, and nothing is left but the error of its variance. Of ten or more draws a member it is
several times nearer to the integral over f than their average is; of fewer, the average is taken.
The draws themselves stay what they are, and say how much of the doubt is about the function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from doxa.likelihoods import Bernoulli, Heads, Likelihood
from doxa.noise import generator
from doxa.predictive.class_table import ClassTable
from doxa.predictive.form import Form
from doxa.predictive.mixture import Mixture
from doxa.predictive.summary import HeadsForm

_FEWEST = 10  # draws of a member
_NUMBERS = 1 << 22  # at a time, in float64; what is computed from them is a few times as large
_NODES, _FARTHEST = 129, 7.0  # of the integral: a trapezium, out to so many standard deviations


def averaged(form: Form, likelihood: Likelihood, centres: Any, counts: Sequence[int]) -> Form:
    """A mixture of drawn logits with their integral, where there are draws enough; any other form
    as it is. `centres` are the network's outputs at the Gaussians' own, [K, N, *output], of which
    there are `counts` draws each."""
    if isinstance(form, HeadsForm) and isinstance(likelihood, Heads):
        heads = zip(form.heads, likelihood.likelihoods, centres, strict=True)
        return HeadsForm(form.likelihood, [averaged(*head, counts) for head in heads])
    if not (isinstance(form, Mixture) and likelihood.classifies and min(counts) >= _FEWEST):
        return form
    return Odds(form, likelihood.location(centres, 1), counts)


def drawn(form: Form) -> Form:
    """The plain mixture of the functions, where probabilities were integrated."""
    return form.base if isinstance(form, Odds) else form


class Odds(ClassTable):
    """Functions f [S, N, *output], so many of each of K Gaussians about their centres."""

    base: Mixture

    def __init__(self, base: Mixture, centres: Tensor, counts: Sequence[int]) -> None:
        super().__init__(base, _log_table(base, centres, counts))

    @property
    def samples(self) -> Tensor:
        return self.base.samples

    @property
    def weights(self) -> Tensor:
        return self.base.weights

    def votes(self) -> Tensor:
        return self.base.votes()

    def sample(self, n: int, seed: int) -> Tensor:
        """What one function gives at all rows, of which as few labels as need be are drawn again:
        c is kept with probability min(1, q_c/p_c), q the table and p the draws' average, so that
        each row has its own probabilities."""
        y, source = self.base.sample(n, seed), generator(seed, "predictive", "again")
        ours, drawn = self.class_table(), self.base.class_table()
        kept = (ours / drawn).expand(n, *ours.shape).gather(2, y.long().unsqueeze(2)).squeeze(2)
        chance = torch.rand(kept.shape, generator=source, dtype=kept.dtype).to(kept.device)
        others = (ours - drawn).clamp_min(torch.finfo(ours.dtype).tiny).log()
        return torch.where(chance < kept, y, self.labels(others, n, source))

    def targets(self, y: Any) -> Tensor:
        return self.base.targets(y)

    def log_prob(self, y: Tensor) -> Tensor:
        """Of one label a row. Several are not independent: they are right or wrong together, as a
        function is, and averaged over the draws."""
        one = math.prod(y.shape[1:]) == 1
        return super().log_prob(y) if one else self.base.log_prob(y)


def _log_table(base: Mixture, centres: Tensor, counts: Sequence[int]) -> Tensor:
    """log p with the classes on axis 1, in float64, some rows at a time."""
    numbers = max(sum(counts), _NODES) * max(1, centres[0, :1].numel())
    step = max(1, _NUMBERS // numbers)
    share = torch.tensor(counts, dtype=torch.float64, device=centres.device).div(sum(counts)).log()
    parts = []
    for start in range(0, max(1, centres.shape[1]), step):
        rows, each = slice(start, start + step), []
        for centre, own in zip(centres, base.f.split(tuple(counts)), strict=True):
            f, middle = own[:, rows].double(), centre[rows].double()
            odds = log_odds(f - f.mean(0) + middle, base.likelihood)
            each.append(integral(odds.mean(0), odds.var(0)))
        logs = torch.stack(each)
        parts.append(torch.logsumexp(logs + share.reshape(-1, *[1] * (logs.ndim - 1)), 0))
    return torch.cat(parts)


def log_odds(f: Tensor, likelihood: Likelihood) -> Tensor:
    """Of each class against all others: [S, N, C, *site] for logits of that shape, [S, N, 2,
    *event] for Bernoulli."""
    if isinstance(likelihood, Bernoulli):
        return torch.stack([-f, f], 2)
    top, first = f.max(2, keepdim=True)
    shares = (f - top).exp()
    total = shares.sum(2, keepdim=True)
    # Without the first, whose share of the total may leave nothing of the others when taken off.
    others = torch.logsumexp(f.scatter(2, first, -torch.inf), 2, keepdim=True)
    against = top + (total - shares).log()
    return f - against.scatter(2, first, others)


def integral(mean: Tensor, variance: Tensor) -> Tensor:
    """log E σ(l) over l ~ N(mean, variance), made to sum to 1 over the classes, axis 1."""
    t = torch.linspace(-_FARTHEST, _FARTHEST, _NODES, dtype=mean.dtype, device=mean.device)
    log_weight = torch.log_softmax(-0.5 * t.square(), 0)
    at = mean.unsqueeze(-1) + variance.clamp_min(0.0).sqrt().unsqueeze(-1) * t
    return torch.log_softmax(torch.logsumexp(logsigmoid(at) + log_weight, -1), 1)
