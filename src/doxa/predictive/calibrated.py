"""Class probabilities that were recalibrated: one distribution a label, made of the average.

A recalibration acts on log p̄, the logarithm of the *averaged* probabilities, because they are what
is scored, and changes how much is unknown, not where the lack of knowledge comes from
(`class_table.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from doxa.errors import Unavailable
from doxa.likelihoods import Bernoulli
from doxa.noise import generator
from doxa.predictive.blend import Blend
from doxa.predictive.class_table import ClassTable
from doxa.predictive.conformal import Conformal
from doxa.predictive.form import Form
from doxa.predictive.mixture import Mixture


class CalibratedClasses(ClassTable):
    """A table that was made of the base's average: of its draws nothing is left."""

    def votes(self) -> Tensor:
        raise self.unavailable("votes")

    def sample(self, n: int, seed: int) -> Tensor:
        return self.labels(self.log_table, n, generator(seed, "predictive", "sample"))

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
    if isinstance(form, ClassTable):
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
