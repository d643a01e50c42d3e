"""Classes by regression: targets as numbers, and functions as logits.

    p(c | x) = E[softmax(f(x)/T)_c],   f ~ the process conditioned on one-hot rows

The temperature T is the one under which leave-one-out predictions, which a Gaussian process has in
closed form (Rasmussen & Williams 2006, eq. 5.12), are likeliest: with P = (K + σ²I)⁻¹,

    f_i | y_{−i} ~ N(y_i − [Py]_i/P_ii, 1/P_ii − σ²)

and E[softmax] by MacKay's approximation, softmax(m/√(T² + πv/8)). T is at least σ√3/π, at which the
logistic noise of a logit is as wide as the noise of the regression.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.exact.targets import event_of
from doxa.function.evidence import Solved
from doxa.function.glance import glance
from doxa.likelihoods import Bernoulli, Categorical, Likelihood
from doxa.method import Run

_TIMES = torch.logspace(0.0, 3.0, 61, dtype=torch.float64)  # the least temperature: those tried


def outputs_of(run: Run) -> tuple[int, ...]:
    """The shape of one function value."""
    if not isinstance(run.likelihood, Categorical):
        return event_of(run)
    output = tuple(run.output)
    if len(output) != 1 or run.likelihood.ignore_index is not None or run.likelihood.tempered:
        raise MethodError(
            "classes are regressed on: one class a row, without class weights and ignore_index"
        )
    return output


def as_numbers(run: Run, y: Tensor, lead: int = 1) -> Tensor:
    """Targets as numbers [..., N, O], with `lead` axes up to the rows."""
    return coded(y, run.likelihood, outputs_of(run), lead)


def coded(y: Tensor, likelihood: Likelihood, outputs: tuple[int, ...], lead: int = 1) -> Tensor:
    if isinstance(likelihood, Categorical):
        return torch.nn.functional.one_hot(y.long(), outputs[0]).double() - 1.0 / outputs[0]
    y = y.reshape(*y.shape[:lead], -1).double()
    return 2.0 * y - 1.0 if isinstance(likelihood, Bernoulli) else y


def spread_of(run: Run) -> Tensor:
    """The standard deviation of each member's targets, 1 where they are all the same, [M]."""
    seen = glance(run)
    y = as_numbers(run, seen.y, 2)
    share = (seen.shares(y) / y.shape[2]).unsqueeze(2)
    away = y - (share * y).sum((1, 2), keepdim=True)
    found = (away.square() * share).sum((1, 2)).sqrt()
    return torch.where(found > 0, found, torch.ones_like(found))


def temperatures(solved: Solved, log_noise: Tensor, likelihood: Likelihood) -> Tensor:
    """T of each member, for log σ [K]: [K]; rows count by their weights."""
    y, root, factor, solution = (part[:, 0] for part in solved)  # one level of noise
    precision = torch.cholesky_inverse(factor).diagonal(0, -2, -1) * root.square()  # P_ii [K, N]
    counts = root > 0
    precision = torch.where(counts, precision, torch.ones_like(precision))
    mean = y - root.unsqueeze(-1) * solution / precision.unsqueeze(-1)  # [K, N, C]
    noise = torch.where(counts, root, torch.ones_like(root)).square().reciprocal()
    variance = (1.0 / precision - noise).clamp_min(0.0).unsqueeze(-1)
    least = log_noise.exp() * (math.sqrt(3.0) / math.pi)
    tried = _TIMES.to(least)[:, None] * least  # [61, K]
    weight = (root / root.amax(-1, keepdim=True)).square()  # 1 where all rows count alike
    found = []
    for t in tried:
        logits = mean / (t.square()[:, None, None] + math.pi / 8 * variance).sqrt()
        if isinstance(likelihood, Bernoulli):
            each = torch.nn.functional.logsigmoid(y * logits).sum(-1)
        else:
            each = (logits * (y > 0)).sum(-1) - logits.logsumexp(-1)
        found.append((each * weight).sum(-1))
    best = torch.stack(found).argmax(0)
    return tried.gather(0, best[None])[0]
