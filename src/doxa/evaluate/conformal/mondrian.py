"""Groups of rows that each have a threshold of their own: coverage within every group.

Mondrian conformal prediction (Vovk et al., 2005): rows are divided by something known of them, and
each part is calibrated by itself. By class the division is that of the label; by group it is that
of the inputs, through a column of x or a function of x.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.data import as_tensor
from doxa.errors import DataError, MethodError, ShapeError
from doxa.posterior import PredictiveTransform
from doxa.predictive import Predictive


class ByGroup(PredictiveTransform):
    """A transform with a threshold for each group of rows: subclasses are frozen dataclasses that
    say what a predictive becomes `_with` thresholds, one row of them a group, or one a row."""

    thresholds: Tensor
    groups: Groups | None

    def __call__(self, p: Predictive) -> Predictive:
        if self.groups is not None:
            raise MethodError("thresholds differ by group: predict with the posterior, which has x")
        return self._with(p, self.thresholds)

    def at(self, p: Predictive, x: Any) -> Predictive:
        if self.groups is None:
            return self(p)
        index = self.groups.index(x, self.thresholds.device)
        return self._with(p, self.thresholds[index])

    @abstractmethod
    def _with(self, p: Predictive, t: Tensor) -> Predictive: ...


@store.register("conformal.groups")
@dataclass(frozen=True)
class Groups:
    """Which group a row belongs to: `by` is a column of x, or a function from x to N labels;
    `labels` are those of the calibration rows, in order.

    Saving needs a column, or a function that is a registered frozen dataclass.
    """

    by: int | Callable[[Any], Any]
    labels: tuple[Hashable, ...]

    @classmethod
    def of(cls, by: Any, x: Any) -> Groups:
        if not callable(by) and (isinstance(by, bool) or not isinstance(by, int)):
            raise MethodError(f"groups are a column of x or a function of x, not {by!r}")
        found = set(_labels(by, x))
        try:
            ordered = sorted(found)
        except TypeError:  # labels of several types
            ordered = sorted(found, key=repr)
        return cls(by, tuple(ordered))

    @property
    def names(self) -> list[str]:
        return [f"group {label!r}" for label in self.labels]

    def index(self, x: Any, device: torch.device) -> Tensor:
        """[N]: the number of each row's group."""
        number = {label: g for g, label in enumerate(self.labels)}
        rows = []
        for i, label in enumerate(_labels(self.by, x)):
            if label not in number:
                raise DataError(
                    f"row {i} is of group {label!r}, of which there was no calibration row; known: "
                    f"{', '.join(map(repr, self.labels[:12]))}"
                )
            rows.append(number[label])
        return torch.tensor(rows, device=device)


def _labels(by: int | Callable[[Any], Any], x: Any) -> list[Any]:
    if callable(by):
        labels = by(x)
        return list(labels.tolist() if hasattr(labels, "tolist") else labels)
    table = as_tensor(x, "x")
    if table.ndim != 2 or not -table.shape[1] <= by < table.shape[1]:
        raise ShapeError(f"x of shape {list(table.shape)} has no column {by} to group by")
    return table[:, by].tolist()
