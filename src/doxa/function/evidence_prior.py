"""The kernel of a Gaussian-process prior, by the evidence of mini-batches of real targets.

    log p(y_B) = log N(y_B; 0, K + σ²W⁻¹),   W the rows' weights

The noise σ is fitted by the evidence, too. It is the noise of y with f integrated out, not the
residual of a fitted f. Functions are compared at measurement points: some rows of a batch, and
points drawn in a box around the data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch, batch_rows
from doxa.errors import DataError
from doxa.function.evidence import sample_rows
from doxa.likelihoods import Likelihood
from doxa.method import Clock, Run, Stage, State, optimise
from doxa.optim import Adam
from doxa.priors.functions import GPPrior, flat_inputs

LOOKED_AT = 1024  # rows for the box, and for a kernel's first lengthscales


class Measured(NamedTuple):
    """Inputs at which functions are computed, and which of them are measurement points.

    x: the rows of the batch and then the points of the box, [N, ...] if all members share them,
    else [M, N, ...]. where: positions in x, [M, K].
    """

    x: Any
    shared: bool
    where: Tensor

    def inputs(self) -> Tensor:
        """The measurement points, [M, K, ...]; x must be one array."""
        if self.shared:
            return self.x[self.where]
        return self.x[torch.arange(len(self.x), device=self.x.device).unsqueeze(1), self.where]

    def values(self, f: Tensor) -> Tensor:
        """The values at the measurement points, [M, S, K, O], of functions at x, [M, S, N, O]."""
        index = self.where[:, None, :, None].expand(-1, f.shape[1], -1, f.shape[3])
        return f.gather(2, index)


def box(run: Run, margin: float) -> State:
    """The box of each member: the range of each column of x, wider by this fraction of it on each
    side."""
    x = sample_rows(run, LOOKED_AT).x
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(
            "measurement points are drawn in a box around x, which has to be one array of real "
            "numbers; with points=0 functions are compared at the rows of a batch alone"
        )
    least, most = x.amin(1), x.amax(1)
    wider = margin * (most - least)
    return {"low": (least - wider).to(run.device), "high": (most + wider).to(run.device)}


def measured(params: State, batch: Batch, clock: Clock, rows: int, points: int) -> Measured:
    """A number of rows of the batch, and of uniform points of the box. Rows are drawn by their
    weights with systematic sampling: each once if there are as many, and rows of weight 0 never."""
    members = len(batch.scale)
    x, count = batch.x, batch_rows(batch)
    weight = batch.scale.new_ones(count) if batch.weight is None else batch.weight
    upto = weight.cumsum(-1).expand(members, -1).contiguous()
    place = torch.arange(rows, device=upto.device, dtype=upto.dtype) + clock.uniform(1)  # [M, rows]
    where = torch.searchsorted(upto, place / rows * upto[:, -1:]).clamp_max(count - 1)
    if not points:
        return Measured(x, batch.shared, where)
    low, high = params["low"].unsqueeze(1), params["high"].unsqueeze(1)
    drawn = torch.lerp(low, high, clock.uniform(points, *low.shape[2:]))
    own = x.expand(members, *x.shape) if batch.shared else x
    more = torch.arange(count, count + points, device=where.device).expand(members, -1)
    x, where = torch.cat([own, drawn], 1), torch.cat([where, more], 1)
    return Measured(x[0], True, where) if members == 1 else Measured(x, False, where)


_NOISE = "likelihood.log_noise"


def prior_variance(likelihood: Likelihood) -> float:
    """The prior variance of functions: 1 for standardised targets, and 8 for logits, the target of
    Tran et al. (2022) for classes. With logits of variance 1, labels are mostly chance, and
    predictions of separable classes are far too uncertain."""
    return 8.0 if likelihood.classifies else 1.0


def first_kernel(run: Run) -> State:
    """The initial values: "kernel", log (ℓ of each column, v, p) [M, D + 2]; "kernel_noise",
    log σ."""
    seen = sample_rows(run, LOOKED_AT)
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
    """The stage that fits the kernel."""

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
    """The positions of learned Gaussian noise among the weights; None if there is none."""
    learned = [name for name in run.layout.names if name == _NOISE]
    return run.layout.index(learned).to(run.device) if learned else None


def with_noise_of_evidence(stage: Stage, name: str, index: Tensor) -> Stage:
    """The stage, with the noise of the evidence written to these positions of the weights `name` at
    its start."""
    begin = stage.enter

    def enter(run: Run, state: State) -> State:
        assert begin is not None
        noise = state["kernel_noise"].expand(-1, len(index))
        return begin(run, {**state, name: state[name].index_copy(1, index, noise)})

    return replace(stage, enter=enter)
