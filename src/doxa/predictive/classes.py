"""Class probabilities that are not a plain average over draws.

`ClassTable`: a table of class probabilities q, and the form (with average p̄) from which it was
made. The table alone does not determine the split of its uncertainty. So the proportions of the
base are kept,

    I' = H[q] · I / H[p̄],    epistemic' = q (1 - q) · epistemic / variance,

so that the parts still add up, and 0 <= I' <= H[q]. The table determines the total uncertainty; the
base determines which share of it is epistemic.

`Odds`: class probabilities of functions that were drawn from Gaussians with known means. An average
over S draws is poor in the tails: a class that only one function in a thousand predicts has almost
no probability after a hundred draws. For Gaussian logits, f ~ N(m, V), the log odds of one class
against all others are nearly Gaussian too, and one integral gives the probability:

    l_c = f_c − log Σ_{k≠c} e^{f_k},    p_c ∝ ∫ σ(l) N(l; E l_c, Var l_c) dl

The moments of l_c are those of the draws, shifted so that the mean of f is m. With two classes l_c
is Gaussian, and the only error is that of its variance. With ten or more draws per member, the
result is several times nearer to the integral over f than the average of the draws. With fewer, the
average is used. The draws do not change, and give the epistemic share of the uncertainty.

`Averaged`, `Dirichlets`: class probabilities in closed form, without draws. For each of K members
there are the probabilities of one row, averaged over its functions (`Averaged`), or a Dirichlet
over them (`Dirichlets`). With a Dirichlet the uncertainty splits in closed form:

    m = α/α₀,    Var[p] = m (1 − m)/(α₀ + 1),    E H[p] = ψ(α₀ + 1) − Σ_c m_c ψ(α_c + 1)

The members are mixed. Labels of one row are independent given the member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from doxa.errors import Unavailable
from doxa.likelihoods import Heads, Likelihood
from doxa.noise import generator
from doxa.predictive.form import Derived, Form, HeadsForm, KeepsDraws, check_rows, mix
from doxa.predictive.mixture import Mixture


class ClassTable(Derived):
    """Log-probabilities [N, C, *site] in float64 (of 0 and 1 on axis 1 for Bernoulli), and the form
    from which they were made. Labels of one row are independent."""

    def __init__(self, base: Form, log_table: Tensor) -> None:
        super().__init__(base)
        self.log_table = log_table

    @property
    def mean(self) -> Tensor:
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        table = self.log_table.exp()
        chosen = table[:, 1] if self.likelihood.binary else table
        return chosen.to(self.base.mean.dtype)

    def class_table(self) -> Tensor:
        return self.log_table.exp()

    @property
    def aleatoric(self) -> Tensor:
        return self.mean * (1.0 - self.mean) - self.epistemic

    @property
    def epistemic(self) -> Tensor:
        return self.mean * (1.0 - self.mean) * share(self.base.epistemic, self.base.variance)

    @property
    def expected_entropy(self) -> Tensor:
        return self.marginal_entropy * (1.0 - self._known_share)

    @property
    def mutual_information(self) -> Tensor:
        return self.marginal_entropy * self._known_share

    @cached_property
    def _known_share(self) -> Tensor:
        return share(self.base.mutual_information, self.base.marginal_entropy)

    def targets(self, y: Any) -> Tensor:
        ready = self.likelihood.prepare_targets(y, tuple(self.mean.shape[1:]))
        return check_rows(ready.to(self.log_table.device), self.mean.shape[0])

    def log_prob(self, y: Tensor) -> Tensor:
        each = self.by_label(y)
        return each.reshape(len(each), math.prod(each.shape[1:])).sum(1).to(self.mean.dtype)

    def by_label(self, y: Tensor) -> Tensor:
        """log p of each label, in the shape of y; 0 for ignored labels."""
        index, counted = y.long(), torch.ones_like(y, dtype=torch.bool)
        if self.likelihood.ignore_index is not None:
            counted = index != self.likelihood.ignore_index
            index = torch.where(counted, index, 0)
        each = self.log_table.gather(1, index.unsqueeze(1)).squeeze(1)
        return torch.where(counted, each, 0.0)

    def labels(self, log_table: Tensor, n: int, source: Generator) -> Tensor:
        """n labels for each row independently, with these probabilities: [n, N, *event]."""
        binary = self.likelihood.binary
        logits = log_table[:, 1] - log_table[:, 0] if binary else log_table
        drawn = self.likelihood.sample(logits.expand(n, *logits.shape), {}, source, 1)
        return drawn.to(self.mean.dtype) if drawn.is_floating_point() else drawn


def share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in [0, 1]; 0 where `whole` is 0."""
    return torch.where(whole > 0, part / whole, 0.0).clamp(0.0, 1.0)


_FEWEST = 10  # smallest number of draws per member
_NUMBERS = 1 << 22  # numbers per block, in float64; temporaries are a few times as large
_NODES, _FARTHEST = 129, 7.0  # of the trapezoidal rule; its range in standard deviations


def averaged(form: Form, likelihood: Likelihood, centres: Any, counts: Sequence[int]) -> Form:
    """The `Odds` of a mixture of drawn logits, where there are enough draws; any other form is
    returned unchanged.

    `centres` [K, N, *output] are the means of the K Gaussians, and `counts` their numbers of draws.
    """
    if isinstance(form, HeadsForm) and isinstance(likelihood, Heads):
        heads = zip(form.heads, likelihood.likelihoods, centres, strict=True)
        return HeadsForm(form.likelihood, [averaged(*head, counts) for head in heads])
    if not (isinstance(form, Mixture) and likelihood.classifies and min(counts) >= _FEWEST):
        return form
    return Odds(form, likelihood.location(centres, 1), counts)


class Odds(KeepsDraws, ClassTable):
    """Functions f [S, N, *output], `counts` of them from each of K Gaussians with given means."""

    base: Mixture

    def __init__(self, base: Mixture, centres: Tensor, counts: Sequence[int]) -> None:
        ClassTable.__init__(self, base, _log_table(base, centres, counts))

    @property
    def of_draws(self) -> Form:
        return self.base

    def sample(self, n: int, seed: int) -> Tensor:
        """Labels of one function at all rows, with as few labels drawn again as possible.

        A label c is kept with probability min(1, q_c/p_c), with q the table and p the average of
        the draws, so that each row has the probabilities of the table.
        """
        y, source = self.base.sample(n, seed), generator(seed, "predictive", "again")
        ours, drawn = self.class_table(), self.base.class_table()
        kept = (ours / drawn).expand(n, *ours.shape).gather(2, y.long().unsqueeze(2)).squeeze(2)
        chance = torch.rand(kept.shape, generator=source, dtype=kept.dtype).to(kept.device)
        others = (ours - drawn).clamp_min(torch.finfo(ours.dtype).tiny).log()
        return torch.where(chance < kept, y, self.labels(others, n, source))

    def log_prob(self, y: Tensor) -> Tensor:
        """Uses the table for one label per row. Several labels of a row are not independent,
        because they share a function; they are averaged over the draws."""
        one = math.prod(y.shape[1:]) == 1
        return super().log_prob(y) if one else self.base.log_prob(y)


def _log_table(base: Mixture, centres: Tensor, counts: Sequence[int]) -> Tensor:
    """log p with the classes on axis 1, in float64, computed in blocks of rows."""
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
    """Log odds of each class against all others: [S, N, C, *site] for logits of that shape,
    [S, N, 2, *event] for Bernoulli."""
    if likelihood.binary:
        return torch.stack([-f, f], 2)
    top, first = f.max(2, keepdim=True)
    shares = (f - top).exp()
    total = shares.sum(2, keepdim=True)
    # The sum is over the other classes only: subtracting one class from the total would cancel.
    others = torch.logsumexp(f.scatter(2, first, -torch.inf), 2, keepdim=True)
    against = top + (total - shares).log()
    return f - against.scatter(2, first, others)


def integral(mean: Tensor, variance: Tensor) -> Tensor:
    """log E σ(l) over l ~ N(mean, variance), normalised over the classes, axis 1."""
    t = torch.linspace(-_FARTHEST, _FARTHEST, _NODES, dtype=mean.dtype, device=mean.device)
    log_weight = torch.log_softmax(-0.5 * t.square(), 0)
    at = mean.unsqueeze(-1) + variance.clamp_min(0.0).sqrt().unsqueeze(-1) * t
    return torch.log_softmax(torch.logsumexp(logsigmoid(at) + log_weight, -1), 1)


class _NotDrawn(Mixture):
    """Logits [K, N, *output] of each member's averaged probabilities."""

    def __init__(self, likelihood: Likelihood, logits: Tensor) -> None:
        weights = logits.new_full((len(logits),), 1.0 / len(logits))
        super().__init__(likelihood.untempered(), logits, {}, weights, None)

    @property
    def has_samples(self) -> bool:
        return False

    @property
    def samples(self) -> Tensor:
        raise self.unavailable("samples")

    def votes(self) -> Tensor:
        raise self.unavailable("votes")

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity,
            instead
            or "its probabilities are averaged over the functions in closed form; draw functions "
            "with posterior.functions(x, n), or predict with link='log-odds'",
        )


class Averaged(_NotDrawn):
    """Averages alone; they do not separate epistemic from aleatoric uncertainty."""

    @property
    def splits(self) -> bool:
        return False

    aleatoric = Form.aleatoric  # not available, unlike in a mixture
    epistemic = Form.epistemic
    expected_entropy = Form.expected_entropy

    @property
    def mutual_information(self) -> Tensor:
        raise self.unavailable("mutual_information")


class Dirichlets(_NotDrawn):
    """Positive concentrations α [K, N, C, *site]; [K, N, 2, *event] for Bernoulli (of 0 and 1)."""

    def __init__(self, likelihood: Likelihood, concentration: Tensor) -> None:
        self.concentration = concentration
        binary = likelihood.binary
        alpha = concentration.log()
        super().__init__(likelihood, alpha[:, :, 1] - alpha[:, :, 0] if binary else alpha)
        self._total = concentration.sum(
            2, keepdim=not binary
        )  # α₀, with the number of axes of the mean

    @property
    def aleatoric(self) -> Tensor:
        return mix(self._spread() * self._total / (self._total + 1.0), self.weights)

    @property
    def epistemic(self) -> Tensor:
        within = self._spread() / (self._total + 1.0)
        return mix(within + (self._means() - self.mean).square(), self.weights)

    def _spread(self) -> Tensor:
        """m (1 − m) of each member, [K, N, ...]."""
        return self.likelihood.variance(self.f, {}, 1)

    @property
    def expected_entropy(self) -> Tensor:
        alpha, total = self.concentration, self.concentration.sum(2, keepdim=True)
        own = (alpha / total * torch.special.digamma(alpha + 1.0)).sum(2)
        return mix(torch.special.digamma(total + 1.0).squeeze(2) - own, self.weights)
