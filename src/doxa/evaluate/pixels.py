"""Segmentation: how well predicted label maps cover the true ones, from one confusion matrix.

With m_tc the number of pixels of true class t predicted as c:

    IoU_c = m_cc / (sum_t m_tc + sum_k m_ck - m_cc)          accuracy_c = m_cc / sum_k m_ck

(Long, Shelhamer and Darrell, 2015). Pixels whose truth is the ignored class count nowhere. A class
that is neither in the truth nor predicted has no IoU: it is NaN, not part of the mean; one that
is predicted but never true has IoU 0 and no accuracy. The ignored class itself, where it is one of
the classes, is scored nowhere, but predicting it elsewhere is an error of the true class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError
from doxa.evaluate.paired import check_predicted
from doxa.predictive import Predictive


@dataclass(frozen=True)
class Segmentation:
    """Counts of pixels, and what follows from them. Sets that come in batches add up: `a + b`."""

    confusion: Tensor
    """[C, C]: the row is the true class, the column the predicted one."""
    ignore_index: int | None = None

    def __add__(self, other: Segmentation) -> Segmentation:
        same = self.confusion.shape == other.confusion.shape
        if not same or self.ignore_index != other.ignore_index:
            raise DataError("two segmentations add up only over the same classes")
        return Segmentation(self.confusion + other.confusion, self.ignore_index)

    @property
    def pixel_accuracy(self) -> float:
        return float(self._right.sum() / self._true.sum())

    @property
    def class_accuracy(self) -> Tensor:
        """[C]: the share of each class's pixels that were found; NaN for classes never true."""
        return self._scored(self._right / self._true)

    @property
    def mean_class_accuracy(self) -> float:
        return float(self.class_accuracy.nanmean())

    @property
    def iou(self) -> Tensor:
        """[C]: intersection over union; NaN for classes neither true nor predicted."""
        predicted = self.confusion.sum(0).double()
        return self._scored(self._right / (self._true + predicted - self._right))

    @property
    def mean_iou(self) -> float:
        return float(self.iou.nanmean())

    @property
    def frequency_weighted_iou(self) -> float:
        """The IoU of each class weighted by its share of the true pixels."""
        share = self._true / self._true.sum()
        return float((share * self.iou).nansum())

    @property
    def _right(self) -> Tensor:
        return self.confusion.diagonal().double()

    @property
    def _true(self) -> Tensor:
        return self.confusion.sum(1).double()

    def _scored(self, values: Tensor) -> Tensor:
        ignored = self.ignore_index
        if ignored is not None and 0 <= ignored < len(values):
            values = values.clone()
            values[ignored] = torch.nan
        return values


def segmentation(
    predicted: Predictive | Tensor,
    y: Any,
    classes: int | None = None,
    ignore_index: int | None = None,
) -> Segmentation:
    """Score label maps.

    Parameters
    ----------
    predicted
        A predictive whose probs are [N, C, *site] (or Bernoulli: two classes), or label maps in
        the shape of y.
    y
        True label maps [N, *site].
    classes
        Number of classes; not needed for a predictive.
    ignore_index
        True labels with this value count nowhere; that of the predictive's likelihood when None.
    """
    if isinstance(predicted, Predictive):
        probs = check_predicted(predicted.probs, "probability")
        if predicted.likelihood.binary:
            labels, known = (probs > 0.5).long(), 2
        else:
            labels, known = probs.argmax(1), probs.shape[1]
        if ignore_index is None:
            ignore_index = predicted.likelihood.ignore_index
        if classes not in (None, known):
            raise DataError(f"the predictive has {known} classes, not {classes}")
        classes = known
    else:
        labels = torch.as_tensor(predicted)
    if classes is None:
        raise DataError("pass classes=, how many classes there are: label maps do not contain it")
    truth = torch.as_tensor(y).to(labels.device)
    if truth.shape != labels.shape:
        raise ShapeError(
            f"predicted label maps of shape {list(labels.shape)} do not fit true ones of shape "
            f"{list(truth.shape)}"
        )
    truth, labels = _whole("true", truth), _whole("predicted", labels)
    if ignore_index is not None:
        counted = truth != ignore_index
        truth, labels = truth[counted], labels[counted]
    if truth.numel() == 0:
        raise DataError("there is no pixel to score: none was given, or all are ignored")
    for name, values in (("true", truth), ("predicted", labels)):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= classes:
            wrong = low if low < 0 else high
            raise DataError(f"a {name} label is {wrong}, but classes are 0 to {classes - 1}")
    cells = truth.flatten() * classes + labels.flatten()
    matrix = torch.bincount(cells, minlength=classes * classes).reshape(classes, classes)
    return Segmentation(matrix, ignore_index)


def _whole(what: str, labels: Tensor) -> Tensor:
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise DataError(f"{what} labels must be whole numbers")
    return labels.long()
