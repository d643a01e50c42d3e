"""Shared by exact Gaussian models: given noise, targets as a matrix, and units.

Targets [N, *event] are reshaped to [N, O]. Noise is given as a standard deviation in units of y,
and is divided by the scale of the standardisation. Densities are reported in units of y.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.data import as_tensor, check_finite, rows_of
from doxa.errors import MethodError, ShapeError
from doxa.likelihoods import Gaussian
from doxa.method import Method, Run
from doxa.posterior import Posterior

Shape = tuple[int, ...]


def event_of(run: Run) -> Shape:
    """The shape of one target."""
    return tuple(run.rows.y.shape[1:])


def check_gaussian(run: Run, name: str) -> Gaussian:
    if not isinstance(run.likelihood, Gaussian):
        raise MethodError(f"{name} needs a Gaussian likelihood, not {run.likelihood.name}")
    return run.likelihood


def given_noise(run: Run, method: Method) -> tuple[Gaussian, Tensor | None]:
    """The noise of a fit, if it is not learned.

    Parameters
    ----------
    run : Run
        The run. Its likelihood must be Gaussian.
    method : Method
        The method, which may have the setting `noise`.

    Returns
    -------
    tuple of (Gaussian, Tensor or None)
        The likelihood with this noise, and log σ per output in fitted units, [M, O]. None if the
        noise is learned.
    """
    likelihood = check_gaussian(run, method.name)
    outputs = math.prod(event_of(run))
    value = method.settings().get("noise")
    if value is None and "noise" not in run.hyper:
        if "log_noise" not in run.constants:
            return likelihood, None
        log_noise = run.constants["log_noise"].double()
        return likelihood, log_noise.reshape(run.size, -1).expand(run.size, outputs)
    noise = run.field(method, "noise").double()  # [M]
    scales = torch.stack([_scale(run.rows.scales[r].y_scale, outputs) for r in run.run_of])
    log_noise = noise[:, None].log() - scales.to(noise.device).log()
    return replace(likelihood, noise=float(noise[0]), per_output=False), log_noise


def _scale(scale: Any, outputs: int) -> Tensor:
    if scale is None:
        return torch.ones(outputs, dtype=torch.float64)
    return torch.as_tensor(scale).double().cpu().reshape(-1).expand(outputs)


def units_log_jacobian(posterior: Posterior, count: Tensor, outputs: int) -> Tensor:
    """log |d fitted / dy| summed over rows, [K]: the log density in units of y, minus that in
    fitted units. `count` [K] is the number of rows, or the sum of their weights, per member."""
    logs = _scale(posterior.scales.y_scale, outputs).log().sum()
    return -count * logs.to(count.device)


def new_targets(posterior: Posterior, x: Any, y: Any, event: Shape) -> tuple[Any, Tensor]:
    """Check further rows, and convert them to fitted units: x, and y as [N, O]."""
    x = posterior.check_inputs(x)
    y = as_tensor(y, "y")
    check_finite(y, "y")
    y = posterior.base_likelihood.prepare_targets(y, event)
    if rows_of(y, "y") != rows_of(x, "x"):
        raise ShapeError(f"x has {rows_of(x, 'x')} rows and y {rows_of(y, 'y')}")
    y = y.to(posterior.device)
    fitted = posterior.scales.y(y, posterior.dtype).to(posterior.dtype)
    return x, fitted.reshape(len(fitted), -1)
