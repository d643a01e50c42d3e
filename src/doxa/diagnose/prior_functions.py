"""How wide the belief was before the data: the variance of functions drawn from the prior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.diagnose.patient import Head, Patient
from doxa.diagnose.scored import Scored
from doxa.errors import Unavailable
from doxa.likelihoods import Categorical
from doxa.noise import generator
from doxa.posterior import Posterior

_DRAWS = 100


def prior_variance(patient: Patient, head: Head) -> Tensor:
    """The mean variance of E[y | f] over functions of the prior, at the training rows."""
    base = patient.base
    if base.kind == "process":
        return _process(base, base.check_inputs(patient.few.x)) * _square_scale(base)
    if base.kind == "linear":
        return _linear(base, patient.few.x) * _square_scale(base)
    if base.model is None:
        raise Unavailable("there is no prior over functions to compare with")
    return _network(base, base.check_inputs(patient.few.x), head.train)


def _process(base: Posterior, x: Tensor) -> Tensor:
    """k(x, x), over rows and members."""
    from doxa.function.process import ProcessPosterior

    assert isinstance(base, ProcessPosterior)
    points = (x.unsqueeze(-1) if x.ndim == 1 else x).double()
    each = [base.kernel(hyper, points, points, True).mean() for hyper in base.hyper]
    return torch.stack(each).mean().detach().cpu()


def _linear(base: Posterior, x: Any) -> Tensor:
    """s² ‖φ(x)‖²."""
    from doxa.exact.linear_posterior import LinearPosterior

    assert isinstance(base, LinearPosterior)
    norm = base.features(x).double().square().sum(1).mean()
    return (norm * (2 * base.log_std.double()).exp().mean()).cpu()


def _square_scale(base: Posterior) -> Tensor:
    """From fitted units to those of y."""
    if base.scales.y_scale is None:
        return torch.ones((), dtype=torch.float64)
    return torch.as_tensor(base.scales.y_scale).double().square().mean().cpu()


def _network(base: Posterior, x: Any, scored: Scored) -> Tensor:
    """By drawing weights from the prior: biases, noise and all."""
    model = base.model
    assert model is not None
    flat = model.bound_prior.sample(_DRAWS, generator(0, "doctor", "prior"))
    means = []
    for row in flat.to(base.device, base.dtype):
        params = model.layout.unflatten(row)
        with torch.no_grad():
            f = model.forward(params, x)
        if not isinstance(f, Tensor):
            raise Unavailable("the prior of a model with several heads is not drawn")
        own = {k: v for k, v in params.items() if k.startswith("likelihood.")}
        theta = {k.removeprefix("likelihood."): v for k, v in own.items()}
        means.append(base.likelihood.mean(f, theta))
    variance = torch.stack(means).double().var(0, correction=0)
    if isinstance(scored.likelihood, Categorical):
        variance = variance.sum(1)
    return scored.one(variance).mean()
