"""Class probabilities that were recalibrated: one distribution a label, made of the average.

A recalibration acts on log p̄, the logarithm of the *averaged* probabilities, because they are what
is scored. What it gives is no longer an average over draws, so that the split of its uncertainty
does not follow from it; the base's proportions are kept,

    I' = H[q] · I / H[p̄],    epistemic' = q (1 - q) · epistemic / variance,

with which the parts still add up and 0 <= I' <= H[q]: recalibration changes how much is unknown,
not where the lack of knowledge comes from.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from doxa.errors import Unavailable
from doxa.likelihoods import Bernoulli, Categorical
from doxa.noise import generator
from doxa.predictive.blend import Blend
from doxa.predictive.conformal import Conformal
from doxa.predictive.form import Form, check_rows
from doxa.predictive.mixture import Mixture


class CalibratedClasses(Form):
    """Log-probabilities [N, C, *site] in float64 (no and yes on axis 1 for Bernoulli), and the
    form they were made from. Labels of one row are independent."""

    def __init__(self, base: Form, log_table: Tensor) -> None:
        self.base, self.log_table = base, log_table
        self.likelihood = base.likelihood

    @property
    def splits(self) -> bool:
        return self.base.splits

    @property
    def mean(self) -> Tensor:
        return self._mean

    @cached_property
    def _mean(self) -> Tensor:
        table = self.log_table.exp()
        chosen = table[:, 1] if isinstance(self.likelihood, Bernoulli) else table
        return chosen.to(self.base.mean.dtype)

    def class_table(self) -> Tensor:
        return self.log_table.exp()

    @property
    def aleatoric(self) -> Tensor:
        return self.mean * (1.0 - self.mean) - self.epistemic

    @property
    def epistemic(self) -> Tensor:
        return self.mean * (1.0 - self.mean) * _share(self.base.epistemic, self.base.variance)

    @property
    def expected_entropy(self) -> Tensor:
        return self.marginal_entropy * (1.0 - self._known_share)

    @property
    def mutual_information(self) -> Tensor:
        return self.marginal_entropy * self._known_share

    @cached_property
    def _known_share(self) -> Tensor:
        return _share(self.base.mutual_information, self.base.marginal_entropy)

    def votes(self) -> Tensor:
        raise self.unavailable("votes")

    def targets(self, y: Any) -> Tensor:
        ready = self.likelihood.prepare_targets(y, tuple(self.mean.shape[1:]))
        return check_rows(ready.to(self.log_table.device), self.mean.shape[0])

    def log_prob(self, y: Tensor) -> Tensor:
        index, counted = y.long(), torch.ones_like(y, dtype=torch.bool)
        if isinstance(self.likelihood, Categorical) and self.likelihood.ignore_index is not None:
            counted = index != self.likelihood.ignore_index
            index = torch.where(counted, index, 0)
        each = self.log_table.gather(1, index.unsqueeze(1)).squeeze(1)
        each = torch.where(counted, each, 0.0).reshape(len(each), math.prod(each.shape[1:]))
        return each.sum(1).to(self.mean.dtype)

    def sample(self, n: int, seed: int) -> Tensor:
        logits = self.log_table
        if isinstance(self.likelihood, Bernoulli):
            logits = logits[:, 1] - logits[:, 0]
        source = generator(seed, "predictive", "sample")
        drawn = self.likelihood.sample(logits.expand(n, *logits.shape), {}, source, 1)
        return drawn.to(self.mean.dtype) if drawn.is_floating_point() else drawn

    def unavailable(self, quantity: str, instead: str = "") -> Unavailable:
        return super().unavailable(
            quantity,
            instead
            or "recalibration acts on the averaged probabilities; the draws are those of "
            "the posterior's base: posterior.base.predict(x)",
        )


def log_probs(form: Form) -> Tensor:
    """log p̄ of the averaged probabilities, [N, C, *site] in float64, by way of logits where there
    are some: 1e-5000 still has a logarithm. A probability of exactly 0 counts as the smallest
    normal number of its type, so that all are finite unless predictions are not."""
    table = _log_probs(form)
    smallest = math.log(torch.finfo(form.mean.dtype).tiny)
    return torch.where(table == -torch.inf, smallest, table)


def _log_probs(form: Form) -> Tensor:
    if isinstance(form, CalibratedClasses):
        return form.log_table
    if isinstance(form, Conformal):
        return _log_probs(form.base)
    if isinstance(form, Blend):
        each = torch.stack([_log_probs(part) for part in form.parts])
        return _average(each, form.part_weights)
    if isinstance(form, Mixture):
        chunks = [_average(_log_tables(part), part.weights) for part in form._chunks()]
        return torch.logsumexp(torch.stack(chunks), 0)
    return form.class_table().log()


def _log_tables(form: Mixture) -> Tensor:
    """[S, N, C, *site]: each draw's."""
    f = form.f.double()
    if isinstance(form.likelihood, Bernoulli):
        return torch.stack([logsigmoid(-f), logsigmoid(f)], 2)
    return torch.log_softmax(f, 2)


def _average(each: Tensor, weights: Tensor) -> Tensor:
    """log of the weighted sum over the first axis, which may be part of a whole."""
    weights = weights.double().reshape(-1, *[1] * (each.ndim - 1))
    # What counts nothing may be undefined.
    return torch.logsumexp(torch.where(weights > 0, each + weights.log(), -torch.inf), 0)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole in [0, 1]; 0 where there is nothing to share."""
    return torch.where(whole > 0, part / whole, 0.0).clamp(0.0, 1.0)
