"""How wide the belief was before the data: the variance of functions drawn from the prior."""

from __future__ import annotations

from torch import Tensor

from doxa.diagnose.patient import Head, Patient
from doxa.likelihoods import Categorical

_DRAWS = 400


def prior_variance(patient: Patient, head: Head) -> Tensor:
    """The mean variance of E[y | f] over functions of the prior, at the training rows."""
    base, scored = patient.base, head.train
    f = base.prior_functions(patient.few.x, _DRAWS, seed=0)
    means = (
        f if base.base_likelihood.scales_targets else base.base_likelihood.plain().mean(f, {}, 1)
    )
    variance = means.double().var(0, correction=0)
    if isinstance(scored.likelihood, Categorical):
        variance = variance.sum(1)
    return scored.one(variance).mean()
