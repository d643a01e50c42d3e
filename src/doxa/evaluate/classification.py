"""Scores of classes: hits, the Brier score and what it is made of, the confusion matrix.

    Brier = (1/L) sum_l sum_c (p_lc - 1[y_l = c])^2          of one class of several: 0 to 2
    Brier = (1/L) sum_l (p_l - y_l)^2                        Bernoulli: 0 to 1, half of the above

Means run over the labels that count: rows, sites, elements; ignored ones are left out. Of several
classes equally likely the first is the prediction.

For one event with probabilities p sorted into bins k of n_k labels, mean probability p_k and
frequency o_k, and overall frequency o, Murphy's (1973) parts and the two terms that Stephenson,
Coelho and Jolliffe (2008) add for probabilities that vary inside a bin sum up exactly:

    Brier = sum_k n_k/L (p_k - o_k)^2 - sum_k n_k/L (o_k - o)^2 + o (1 - o)
            + (1/L) sum_(k, l in k) (p_l - p_k)^2 - (2/L) sum_(k, l in k) (o_l - o_k) (p_l - p_k)

Of several classes the parts are summed over the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from doxa.errors import DataError
from doxa.evaluate.binning import bin_of, bin_sums
from doxa.evaluate.paired import Labelled, labelled
from doxa.predictive import Predictive


def accuracy(p: Predictive, y: Any) -> float:
    """The share of labels whose likeliest class came true."""
    return float(labelled(p, y).hit.mean())


def top_k_accuracy(p: Predictive, y: Any, k: int = 5) -> float:
    """The share of labels that are among the k likeliest classes; of equally likely classes the
    first ones are taken, so that exactly k are."""
    table = labelled(p, y)
    classes = table.probs.shape[1]
    if not 1 <= k <= classes:
        raise DataError(f"k must be 1 to {classes}, the number of classes; got {k}")
    own = table.probs.gather(1, table.label.unsqueeze(1))
    earlier = torch.arange(classes, device=own.device) < table.label.unsqueeze(1)
    before = (table.probs > own) | ((table.probs == own) & earlier)
    return float((before.sum(1) < k).double().mean())


def brier(p: Predictive, y: Any) -> float:
    """The mean Brier score; lower is better."""
    return float(brier_each(labelled(p, y)).mean())


def brier_each(table: Labelled) -> Tensor:
    """[L]"""
    if table.binary:
        return (table.probs[:, 1] - table.label).square()
    own = table.probs.gather(1, table.label.unsqueeze(1)).squeeze(1)
    rest = table.probs.square().sum(1) - own.square()
    return rest + (1.0 - own).square()


def confusion(p: Predictive, y: Any) -> Tensor:
    """[C, C] counts: the row is the class that came true, the column the predicted one."""
    table = labelled(p, y)
    classes = table.probs.shape[1]
    cells = table.label * classes + table.top
    return torch.bincount(cells, minlength=classes * classes).reshape(classes, classes)


@dataclass(frozen=True)
class BrierParts:
    """What a Brier score is made of; `brier` is their sum with the signs of the formula."""

    reliability: float
    """How far frequencies lie from probabilities: 0 is calibrated, lower is better."""
    resolution: float
    """How far frequencies of the bins lie from the overall one: higher is better."""
    uncertainty: float
    """The Brier score of always saying the overall frequency: the data's own."""
    within_variance: float
    within_covariance: float
    """The variance of the probabilities inside the bins and twice their covariance with what
    came true: 0 when each bin holds one probability."""

    @property
    def brier(self) -> float:
        return (
            self.reliability
            - self.resolution
            + self.uncertainty
            + self.within_variance
            - self.within_covariance
        )


def brier_decomposition(p: Predictive, y: Any, bins: int = 15) -> BrierParts:
    """The Brier score in parts, over `bins` bins of equal width; empty ones count nothing."""
    table = labelled(p, y)
    if table.binary:
        probs, came = table.probs[:, 1:], table.label.unsqueeze(1).double()
    else:
        probs, came = table.probs, one_hot(table.label, table.probs.shape[1]).double()
    rows, classes = probs.shape
    column = torch.arange(classes, device=probs.device)
    cell = bin_of(table.comparable(probs), bins) + bins * column  # [L, C]
    count, p_sum, o_sum = bin_sums(cell, bins * classes, probs, came)
    some = count.clamp_min(1.0)
    p_mean, o_mean = p_sum / some, o_sum / some
    overall = came.mean(0)
    p_off, o_off = probs - p_mean[cell], came - o_mean[cell]
    return BrierParts(
        float((count * (p_mean - o_mean).square()).sum() / rows),
        float((count * (o_mean - overall.repeat_interleave(bins)).square()).sum() / rows),
        float((overall * (1.0 - overall)).sum()),
        float(p_off.square().sum() / rows),
        float(2.0 * (p_off * o_off).sum() / rows),
    )
