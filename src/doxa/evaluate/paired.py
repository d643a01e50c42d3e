"""Checked pairs of predictions and targets, and bins of probabilities: the input of every metric.

Undefined input raises a `DataError` that names the place: a NaN among the predictions, class
probabilities that are not a distribution, no rows, or no rows after the ignored ones are removed.
All results are float64, on the device of the predictive.

Bins of equal width: bin k of B holds k/B < p <= (k+1)/B, and 0 is in the first, as in Guo et al.
(2017) and scikit-learn. Equal mass: without ties the label of rank i (from 0) of L goes to bin
floor(B (i + 1/2) / L); equal probabilities are never split: the middle of their ranks determines
their bin. Bins may then be fewer or unequal, and the result does not depend on the order of the
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.predictive import Predictive

_SUM_TOLERANCE = 1e-3  # what half-precision softmax leaves; the same as Predictive.from_probs


@dataclass(frozen=True)
class Labelled:
    """One row for each label that counts, whatever the shape it had."""

    probs: Tensor
    """[L, C] float64. Two columns (no, yes) for Bernoulli."""
    label: Tensor
    """[L] int64, the class that came true."""
    binary: bool
    """Bernoulli: scores that are about one event look at the second column only."""
    decimals: int
    """How far probabilities are trusted when they are compared."""

    @property
    def top(self) -> Tensor:
        """[L]: the likeliest class, the first of several equally likely."""
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """[L]: the probability of the likeliest class."""
        return self.probs.amax(1)

    @property
    def hit(self) -> Tensor:
        """[L] float64: 1 where the likeliest class came true."""
        return (self.top == self.label).double()

    def comparable(self, probs: Tensor) -> Tensor:
        """Probabilities to be ranked or binned: a softmax leaves equal ones different in their
        last digits, so that they are rounded (12 decimals; 6 of single precision)."""
        return torch.round(probs, decimals=self.decimals)


def labelled(p: Predictive, y: Any) -> Labelled:
    """Class probabilities and labels, with sites flattened into rows and ignored ones removed."""
    check_predictive(p)
    probs, label = check_predicted(p.probs, "probability"), p.targets(y)
    check_some(label)
    decimals = 12 if probs.dtype == torch.float64 else 6
    if p.likelihood.binary:
        yes = probs.double().flatten()
        _check_distribution(yes.unsqueeze(1), (yes < 0) | (yes > 1))
        return Labelled(torch.stack([1.0 - yes, yes], 1), label.flatten().long(), True, decimals)
    table = probs.movedim(1, -1).reshape(-1, probs.shape[1]).double()
    label = label.flatten()
    counted = counted_labels(p, label)
    if counted is not None:
        table, label = table[counted], label[counted]
    wrong = (table < 0).any(1) | ((table.sum(1) - 1.0).abs() > _SUM_TOLERANCE)
    _check_distribution(table, wrong)
    return Labelled(table, label, False, decimals)


def counted_labels(p: Predictive, label: Tensor) -> Tensor | None:
    """A mask of the labels that are not ignored; None when all count."""
    ignored = p.likelihood.ignore_index
    if ignored is None:
        return None
    counted = label != ignored
    if not bool(counted.any()):
        raise DataError(f"every label is the ignored one ({ignored}): there is nothing to score")
    return None if bool(counted.all()) else counted


def predicted_mean(p: Predictive, y: Any) -> tuple[Tensor, Tensor]:
    """(mean, y), both [N, *event] float64, for targets that are numbers."""
    check_numeric(p)
    target = p.targets(y)
    check_some(target)
    return check_predicted(p.mean, "mean").double(), target.double()


def check_predictive(p: Any) -> None:
    if not isinstance(p, Predictive):
        raise DataError(
            f"metrics score predictions: pass posterior.predict(x), a Predictive, not "
            f"{type(p).__name__}; Predictive.from_samples and from_probs take anyone's"
        )


def check_numeric(p: Predictive) -> None:
    check_predictive(p)
    if p.likelihood.classifies:
        raise DataError(
            f"this metric is for numbers and the predictive is {p.likelihood.name}, about classes: "
            "use accuracy, brier, ece or log_likelihood"
        )


def check_some(values: Tensor) -> None:
    if values.numel() == 0:
        raise DataError(f"there is nothing to score: targets have shape {list(values.shape)}")


def check_predicted(values: Tensor, what: str, finite: bool = True) -> Tensor:
    """Predictions [N, ...] without NaN; without infinities too where `finite`."""
    bad = ~torch.isfinite(values) if finite else torch.isnan(values)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = values[tuple(where)].item()
        raise DataError(
            f"the predicted {what} at row {where[0]} is {value}: metrics need predictions that are "
            "defined everywhere; look at posterior.status, or drop such rows"
        )
    return values


def check_count(what: str, value: int, least: int = 1) -> int:
    if value < least:
        raise DataError(f"{what} must be at least {least}, got {value}")
    return value


def check_levels(levels: Any) -> list[float]:
    """A non-empty list of probabilities strictly between 0 and 1."""
    each = torch.as_tensor(levels, dtype=torch.float64).flatten()
    if each.numel() == 0 or not bool(((each > 0) & (each < 1)).all()):
        raise DataError(f"levels must be one or more numbers between 0 and 1, got {levels}")
    return [float(level) for level in each.tolist()]


def _check_distribution(table: Tensor, wrong: Tensor) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"the class probabilities of label {row} are no distribution (negative, or they sum "
            f"to {float(table[row].sum()):.4g}): normalise them first"
        )


def edges(bins: int, device: torch.device) -> Tensor:
    """[B + 1] from 0 to 1."""
    return torch.arange(bins + 1, dtype=torch.float64, device=device) / bins


def bin_of(probs: Tensor, bins: int) -> Tensor:
    """The equal-width bin of each probability, int64, in its shape."""
    check_count("bins", bins)
    inner = edges(bins, probs.device)[1:-1]
    return torch.bucketize(probs.double().contiguous(), inner)


def mass_bin_of(probs: Tensor, bins: int) -> Tensor:
    """The equal-mass bin of each probability of [L], or of each column of [L, C]."""
    check_count("bins", bins)
    if probs.ndim == 2:
        return torch.stack([mass_bin_of(column, bins) for column in probs.unbind(1)], 1)
    _, group, count = torch.unique(probs, return_inverse=True, return_counts=True)
    last = count.cumsum(0)  # ranks of a group: last - count ... last - 1
    twice_middle = 2 * last - count
    return (bins * twice_middle // (2 * len(probs)))[group]


def bin_sums(cell: Tensor, cells: int, *values: Tensor) -> tuple[Tensor, ...]:
    """Labels in each cell, and the sum of each of the values there: [cells] float64."""
    flat = cell.reshape(-1)
    count = torch.bincount(flat, minlength=cells).double()
    sums = [
        torch.bincount(flat, weights=each.double().reshape(-1), minlength=cells) for each in values
    ]
    return count, *sums
