"""Selective prediction: the error that remains when the least certain predictions are refused.

Accept predictions in the order of their certainty; after the first k the *coverage* is k/L and the
*risk* the mean loss of those accepted. Equally certain ones enter together: the curve has a point
only where the certainty changes, so that it does not depend on the order of the rows. The area
under it (Geifman and El-Yaniv, 2017; Geifman, Uziel and El-Yaniv, 2019) and what exceeds the area
of the best order, by the losses themselves:

    AURC = sum_g (c_g - c_(g-1)) r_g,      E-AURC = AURC - (1/L) sum_k mean of the k least losses
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError
from doxa.evaluate.paired import check_predicted, labelled, predicted_mean
from doxa.predictive import Predictive


@dataclass(frozen=True)
class RiskCoverage:
    """Points of the curve, from the most certain on; all [G]."""

    coverage: Tensor
    """The share accepted; the last is 1."""
    risk: Tensor
    """The mean loss of those accepted; the last is that of all."""
    uncertainty: Tensor
    """Accepted are those with at most this uncertainty."""
    area: float
    """AURC; lower is better."""
    excess: float
    """E-AURC: 0 when certainty orders the losses perfectly."""


def risk_coverage(p: Predictive, y: Any, uncertainty: Tensor | None = None) -> RiskCoverage:
    """The risk-coverage curve: the share of errors for classes, by 1 - confidence; the squared
    error of each element for numbers, by predictive variance. `uncertainty`, one for each label
    that counts or each element, replaces those (p.entropy, p.epistemic, p.mutual_information)."""
    if p.likelihood.classifies:
        table = labelled(p, y)
        loss, own = 1.0 - table.hit, 1.0 - table.comparable(table.confidence)
    else:
        mean, target = predicted_mean(p, y)
        loss = (target - mean).square().flatten()
        own = loss if uncertainty is not None else p.variance.double().flatten()
    if uncertainty is not None:
        own = uncertainty.flatten().to(loss.device)
    return risk_coverage_of(own, loss)


def risk_coverage_of(uncertainty: Tensor, loss: Tensor) -> RiskCoverage:
    """Of uncertainties [L] and losses [L] at hand."""
    if uncertainty.shape != loss.shape or loss.ndim != 1:
        raise ShapeError(
            f"uncertainties of shape {list(uncertainty.shape)} for losses of shape "
            f"{list(loss.shape)}: one for each is needed"
        )
    if len(loss) == 0:
        raise DataError("there is nothing to score: no losses")
    check_predicted(uncertainty, "uncertainty", finite=False)
    loss = check_predicted(loss, "loss").double()
    level, group, count = torch.unique(uncertainty, return_inverse=True, return_counts=True)
    accepted = count.cumsum(0).double()
    risk = torch.bincount(group, weights=loss, minlength=len(level)).cumsum(0) / accepted
    area = float((count * risk).sum() / len(loss))
    place = torch.arange(1, len(loss) + 1, dtype=torch.float64, device=loss.device)
    best = float((loss.sort().values.cumsum(0) / place).mean())
    # Rounding may take the difference of equal areas below zero.
    return RiskCoverage(accepted / len(loss), risk, level, area, max(area - best, 0.0))
