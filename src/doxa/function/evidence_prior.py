"""The kernel of a Gaussian-process prior, by the evidence of mini-batches of real targets.

    log p(y_B) = log N(y_B; 0, K + σ²W⁻¹),   W the rows' weights

Its noise σ is that of the evidence, too: what is left of y once f is integrated out, and not once
it is fitted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.function.glance import glance
from doxa.function.measurement import LOOKED_AT
from doxa.likelihoods import Likelihood
from doxa.method import Clock, Run, Stage, State, optimise
from doxa.optim import Adam
from doxa.priors.functions import GPPrior, flat_inputs

_NOISE = "likelihood.log_noise"


def prior_variance(likelihood: Likelihood) -> float:
    """Of functions before the data: 1 for standardised targets, and 8 for logits, the target of
    Tran et al. (2022) for classes. Logits of variance 1 say that labels are mostly chance, and
    classes that can be told apart come out much too unsure."""
    return 8.0 if likelihood.classifies else 1.0


def first_kernel(run: Run) -> State:
    """Where it starts: "kernel", log (ℓ of each column, v, p) [M, D + 2]; "kernel_noise", log σ."""
    seen = glance(run, LOOKED_AT)
    rows = flat_inputs(seen.x).double()
    span = (rows.amax(1) - rows.amin(1)).clamp_min(1e-6)  # [M, D]
    power = torch.full_like(span[:, :1], prior_variance(run.likelihood))
    if run.likelihood.scales_targets:
        each = seen.y.double().reshape(*seen.y.shape[:2], -1).square().mean(2)  # [M, n]
        found = (seen.shares(each) * each).sum(1, keepdim=True)
        power = torch.where(found > 0, found, power)
    # rows that lie evenly in their range are √(D/6) ranges apart
    scales = span * math.sqrt(span.shape[1] / 6)
    logs = torch.cat([scales, power, span.amax(1, keepdim=True) / 2], 1).log()
    kernel = logs.to(run.device, run.dtype)
    return {"kernel": kernel, "kernel_noise": torch.full_like(kernel[:, :1], math.log(0.3))}


def by_evidence(kernel: str, steps: int) -> Stage:
    """The stage that fits it."""

    def evidence(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        """Of a batch, [M], by the Cholesky factor of I + W^½ K W^½/σ²."""
        lead = batch.y.ndim - run.rows.y.ndim + 1
        y = batch.y.reshape(*batch.y.shape[:lead], -1)  # [(M,) B, O]
        x = flat_inputs(batch.x.unsqueeze(0) if batch.shared else batch.x)
        level = params["kernel_noise"]  # log σ, [M, 1]
        weight = torch.ones_like(x[..., 0]) if batch.weight is None else batch.weight
        root = (weight.sqrt() * (-level).exp()).unsqueeze(-1)  # [M, B, 1]
        k = GPPrior(kernel).covariance(x, x, params["kernel"])
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        factor = torch.linalg.cholesky_ex(eye + root * k * root.mT).L
        half = torch.linalg.solve_triangular(factor, root * y, upper=False)
        outputs = y.shape[-1]
        logdet = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        constant = (weight * (math.log(2 * math.pi) + 2 * level)).sum(-1)
        value = -0.5 * (half.square().sum((-2, -1)) + outputs * (logdet + constant))
        return value * batch.scale, {}

    return optimise(
        evidence, steps, ("kernel", "kernel_noise"), name="prior", optimizer=Adam(),
        validates=False,
    )  # fmt: skip


def noise_index(run: Run) -> Tensor | None:
    """Where learned Gaussian noise lies among the weights; None where there is none."""
    learned = [name for name in run.layout.names if name == _NOISE]
    return run.layout.index(learned).to(run.device) if learned else None


def with_noise_of_evidence(stage: Stage, name: str, index: Tensor) -> Stage:
    """A stage that begins with the noise of the evidence among the weights under a name, at these
    positions."""
    begin = stage.enter

    def enter(run: Run, state: State) -> State:
        assert begin is not None
        noise = state["kernel_noise"].expand(-1, len(index))
        return begin(run, {**state, name: state[name].index_copy(1, index, noise)})

    return replace(stage, enter=enter)
