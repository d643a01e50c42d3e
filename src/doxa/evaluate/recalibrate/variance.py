"""Variance scaling: standard deviations times one factor for each output.

    s² = (1/n) Σ_n ((y_n - m_n) / σ_n)²

the maximum-likelihood factor of the Gaussian with the predictive's moments (Laves et al., 2020;
Levi et al., 2022). The predictive is stretched about its mean, whatever its shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.errors import DataError
from doxa.evaluate.recalibrate.rows import residuals
from doxa.posterior import PredictiveTransform
from doxa.predictive import Predictive
from doxa.predictive.rescaled import Rescaled


@store.register("recalibrate.variance")
@dataclass(frozen=True, eq=False)
class Variance(PredictiveTransform):
    """Standard deviations times `factor` [*event]."""

    factor: Tensor

    def __call__(self, p: Predictive) -> Predictive:
        return p.of_form(Rescaled(p._form, self.factor))


def fit_variance(p: Predictive, y: Any) -> Variance:
    target, mean, std = residuals(p, y)
    factor = ((target - mean) / std).square().mean(0).sqrt()
    if not bool((torch.isfinite(factor) & (factor > 0)).all()):
        raise DataError(
            "the calibration rows give no positive factor: a predicted standard deviation is 0, "
            "or every row is predicted exactly"
        )
    return Variance(factor)
