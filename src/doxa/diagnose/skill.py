"""Did it learn anything, and does it hold on rows it has not seen?

The yardstick is the best constant: the mean and spread of y, the frequencies of its classes, the
average count, from the training rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.diagnose.advice import (
    MORE_ROWS,
    NEW_ROWS,
    any_of,
    calmer,
    early_stopping,
    ensemble,
    longer,
    narrower_prior,
    standardise,
)  # fmt: skip
from doxa.diagnose.finding import Finding, bad, good, number, skipped
from doxa.diagnose.patient import Head, Patient
from doxa.diagnose.scored import Scored
from doxa.diagnose.significance import ALPHA, mean_above_zero, normal_quantile

_LEAST_ROWS = 10
_GAP = 0.5  # nats a row
_CLEAR = 0.05  # chance of so large a gain over a constant where there is none
_UNAWARE = 1.5  # of the squared errors that were announced


def skill(patient: Patient, head: Head) -> Finding:
    """Better than a constant, on the test rows where there are any."""
    scored = head.unseen
    gain = scored.log_prob - constant_scores(head.train, scored)
    mean = float(gain.mean())
    where = "test" if head.test is not None else "training"
    if not bool(torch.isfinite(gain).all()):
        return bad(
            f"predictions at the {where} rows are not finite, or rule out what happened",
            calmer(patient),
        )
    told = f"{number(abs(mean))} nats a row {'better' if mean > 0 else 'worse'} than a constant"
    if mean <= 0 and mean_above_zero(-gain) < ALPHA:
        return bad(
            f"predictions at the {where} rows are {told}",
            any_of(standardise(patient), longer(patient), MORE_ROWS),
            mean,
        )
    if not mean_above_zero(gain) < _CLEAR:  # also of a single row, which has no spread
        few = f"{len(gain)} {where} rows cannot tell whether it learned anything"
        return skipped(f"{few}: on them it is {told}, which may be chance", MORE_ROWS, mean)
    return good(f"predictions at the {where} rows are {told}", mean)


def constant_scores(train: Scored, scored: Scored) -> Tensor:
    """log p of each row under the best constant of the training rows; rows have one element, or
    as many alike."""
    y, seen = scored.y.double(), train.y.double()
    elements = max(1, scored.targets[0].numel())
    if scored.classifies:
        classes = scored.probs.shape[1]
        counts = torch.bincount(train.y.long(), minlength=classes).double() + 0.5
        each = (counts / counts.sum()).log()[scored.y.long()]
    elif scored.likelihood.discrete:
        rate = seen.mean().clamp_min(1e-3)
        each = y * rate.log() - rate - torch.lgamma(y + 1)
    else:
        spread = seen.std(correction=0).clamp_min(1e-12)
        each = torch.distributions.Normal(seen.mean(), spread).log_prob(y)
    return each * elements


def overfitting(patient: Patient, head: Head) -> Finding:
    """Much worse on new rows than on its own, and not aware of it.

    A gap alone is no fault: what is flexible knows its own rows better. It is one where the
    posterior announced smaller errors than it makes."""
    test = head.test
    if test is None:
        return skipped("there are no test rows", NEW_ROWS)
    if len(test) < _LEAST_ROWS:
        return skipped(f"{len(test)} test rows are too few to see overfitting on", MORE_ROWS)
    gap = float(head.train.log_prob.mean() - test.log_prob.mean())
    both = (head.train.log_prob.var() / len(head.train) + test.log_prob.var() / len(test)).sqrt()
    unaware, told = _unaware(test)
    words = f"test rows score {number(gap)} nats below the training rows"
    if gap > _GAP and gap > normal_quantile(1 - ALPHA) * float(both) and unaware:
        return bad(
            f"it has learned its rows by heart: {words}, and {told}",
            any_of(early_stopping(patient), ensemble(patient), narrower_prior(patient), MORE_ROWS),
            gap,
        )
    return good(f"{words}; {told}", gap)


def _unaware(test: Scored) -> tuple[bool, str]:
    """Whether errors are larger than announced."""
    if test.classifies:
        confidence, top = test.probs.max(1)
        excess = float(confidence.mean() - (top == test.y).double().mean())
        return excess > 0.05, f"it is {excess:+.1%} surer than it is right"
    ratio = float(test.z.square().mean())
    return ratio > _UNAWARE, f"squared errors are {number(ratio)} of what it announces"
