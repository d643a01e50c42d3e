"""Rows held out for calibration: predictions beside what came true, checked."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.data import rows_of
from doxa.errors import DataError, MethodError
from doxa.likelihoods import Categorical
from doxa.posterior import Posterior, PredictiveTransform
from doxa.predictive import Predictive
from doxa.predictive.calibrated import CalibratedClasses, log_probs
from doxa.predictive.form import check_rows
from doxa.predictive.summary import HeadsForm


@dataclass(frozen=True)
class Labelled:
    """n labels and the logarithms of their averaged class probabilities."""

    log_probs: Tensor  # [n, C], float64
    y: Tensor  # [n]

    def check_classes(self, kind: str) -> None:
        """Every class must occur where each gets parameters of its own."""
        counts = self.y.bincount(minlength=self.log_probs.shape[1])
        absent = (counts == 0).nonzero().flatten().tolist()
        if not absent:
            return
        named = ", ".join(map(str, absent[:10])) + (", ..." if len(absent) > 10 else "")
        raise DataError(
            f"no calibration row is of class {named}: {kind!r} would give it no probability; add "
            "rows, or use kind='temperature', which has one parameter for all classes"
        )


class ClassMap(PredictiveTransform):
    """A recalibration of class probabilities: from log p̄ to log q, on axis 1."""

    @abstractmethod
    def map(self, table: Tensor) -> Tensor:
        """[N, C, *site] to [N, C, *site], float64."""

    def __call__(self, p: Predictive) -> Predictive:
        form = p._form
        return p.of_form(CalibratedClasses(form, self.map(log_probs(form))))


def pair(data: Any) -> tuple[Any, Any]:
    """(x, y) as given."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("calibration data is a pair (x, y) of rows that the fit has not seen")
    return data[0], data[1]


def check_unseen(posterior: Posterior, x: Any, y: Any, instead: str = "") -> None:
    """Rows that the fit used look better predicted than new ones are."""
    used, n = posterior.count_fitted(x, y), rows_of(posterior.read(x), "x")
    if used:
        raise DataError(
            f"{used} of the {n} calibration rows were used by the fit, to train on or to stop by: "
            "predictions look better at them than at new rows. Give rows that were not passed to "
            f"fit{instead}"
        )


def check_one_head(p: Predictive) -> None:
    if isinstance(p._form, HeadsForm):
        raise MethodError(
            f"this posterior has {len(p._form.heads)} heads; only predictions of one head can be "
            "recalibrated or made conformal"
        )


def labelled(p: Predictive, y: Any) -> Labelled:
    """Every label that counts, of all sites, with its probabilities."""
    table = log_probs(p._form)
    bad = ~torch.isfinite(table).reshape(len(table), -1).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    target = p.likelihood.prepare_targets(y, tuple(p._form.mean.shape[1:])).to(table.device)
    label = check_rows(target, len(table)).long().flatten()
    rows = table.movedim(1, -1).reshape(len(label), table.shape[1])
    if isinstance(p.likelihood, Categorical) and p.likelihood.ignore_index is not None:
        counted = label != p.likelihood.ignore_index
        rows, label = rows[counted], label[counted]
    if len(label) == 0:
        raise DataError("every calibration label is ignored: there is nothing to fit to")
    return Labelled(rows, label)


def residuals(p: Predictive, y: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, standard deviation) [n, *event] in float64, finite."""
    mean, std = p._form.mean.double(), p._form.std.double()
    bad = ~(torch.isfinite(mean) & torch.isfinite(std)).reshape(len(mean), -1).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    return p._form.targets(y).double(), mean, std
