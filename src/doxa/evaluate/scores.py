"""What any predictive has: the log-likelihood of what came true, and how sharp it is.

    log likelihood = (1/N) sum_n log p(y_n | x_n, data)        higher is better

in nats and in the units of y: the one proper score that every kind of target has. For numbers it
is a mean over rows, each the joint density of its outputs (one value a row; two of four outputs
are not comparable). For classes it is a mean over labels, each by its own marginal probability,
so that a segmentation's is per pixel; for one label a row the two readings agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from doxa.evaluate.paired import check_predicted, check_predictive, check_some, counted_labels
from doxa.likelihoods import Bernoulli
from doxa.predictive import Predictive
from doxa.predictive.class_table import ClassTable
from doxa.predictive.mixture import Mixture


def log_likelihood(p: Predictive, y: Any) -> float:
    """The mean of `log_likelihood_each`. Minus infinity where a class that was given no
    probability came true."""
    return float(log_likelihood_each(p, y).mean())


def nll(p: Predictive, y: Any) -> float:
    """The negative log-likelihood: -log_likelihood."""
    return -log_likelihood(p, y)


def log_likelihood_each(p: Predictive, y: Any) -> Tensor:
    """log p(y) in float64: [N] by rows, or by labels that count for classes."""
    check_predictive(p)
    target = p.targets(y)
    check_some(target)
    if not p.likelihood.classifies:
        return _defined(p.log_prob(target))
    label = target.flatten()
    counted = counted_labels(p, label)
    each = _defined(p.log_prob(target) if len(label) == len(target) else _by_site(p, target))
    return each if counted is None else each[counted]


def sharpness(p: Predictive) -> float:
    """How narrow the predictions are, whatever came true: the mean predictive standard deviation
    for numbers (smaller is sharper), the mean confidence for classes (larger is sharper)."""
    check_predictive(p)
    if not p.likelihood.classifies:
        check_some(p.std)
        return float(check_predicted(p.std, "standard deviation", finite=False).double().mean())
    probs = check_predicted(p.probs, "probability").double()
    check_some(probs)
    if isinstance(p.likelihood, Bernoulli):
        return float(torch.maximum(probs, 1.0 - probs).mean())
    return float(probs.amax(1).mean())


def _defined(each: Tensor) -> Tensor:
    return check_predicted(each, "log density", finite=False).double()


def _by_site(p: Predictive, y: Tensor) -> Tensor:
    """[L]: the log marginal probability of each label, ignored ones included (any value)."""
    form = p._form
    if isinstance(form, ClassTable):
        return form.by_label(y).flatten()
    if not isinstance(form, Mixture):
        return _probability_of(p, y).log()
    # By way of logits: a probability that rounds to 0 still has a logarithm.
    total: Tensor | None = None
    for f, weight in zip(form.f, form.weights, strict=True):
        if not bool(weight > 0):
            continue
        if isinstance(p.likelihood, Bernoulli):
            each = logsigmoid((2.0 * y - 1.0).to(f.dtype) * f)
        else:
            index = y.clamp(0, f.shape[1] - 1).unsqueeze(1)
            each = f.gather(1, index).squeeze(1) - torch.logsumexp(f, 1)
        each = each.double() + weight.double().log()
        total = each if total is None else torch.logaddexp(total, each)
    assert total is not None
    return total.flatten()


def _probability_of(p: Predictive, y: Tensor) -> Tensor:
    """[L]: the predicted probability of each label."""
    probs = p.probs.double()
    if isinstance(p.likelihood, Bernoulli):
        return torch.where(y > 0.5, probs, 1.0 - probs).flatten()
    index = y.clamp(0, probs.shape[1] - 1).unsqueeze(1)
    return probs.gather(1, index).squeeze(1).flatten()
