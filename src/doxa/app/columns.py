"""One input column: what it means, and the numbers that it becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.cells import Array, gaps, labels_of, numbers_of
from doxa.app.dates import LAYOUTS, PARTS, days_of, part_of

if TYPE_CHECKING:
    import pandas as pd

MISSING = "missing"  # the category of cells that are empty


@dataclass(frozen=True)
class Column:
    """A number; a category, with those seen when fitting; or a date, with the parts used."""

    name: str
    categories: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    layout: str | None = None  # how a date is written
    fill: float | None = None  # stands in for a missing number or date: the median when fitting
    indicator: bool = False  # one more number says where cells were missing

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Column:
        """Also of a schema that knew fewer fields."""
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()
        }
        return cls(**given)

    @property
    def sound(self) -> bool:
        """Whether every field holds what a column may have, as one from a file may not."""
        categories, parts, fill = self.categories, self.parts, self.fill
        return (
            isinstance(self.name, str)
            and isinstance(self.indicator, bool)
            and (categories is None or (isinstance(categories, tuple) and len(categories) > 0))
            and all(isinstance(category, str) for category in categories or ())
            and (parts is None or (isinstance(parts, tuple) and set(parts) <= set(PARTS)))
            and (parts is None or (self.layout in (None, *LAYOUTS) and len(parts) > 0))
            and (fill is None or (isinstance(fill, int | float) and math.isfinite(fill)))
            and not (fill is None and self.indicator)
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """What each of its numbers is called."""
        if self.categories is not None:
            return tuple(f"{self.name} = {category}" for category in self.categories)
        names = [f"{self.name} ({part})" for part in self.parts or ()] or [self.name]
        return (*names, f"{self.name} (missing)") if self.indicator else tuple(names)

    @property
    def width(self) -> int:
        return len(self.inputs)

    def encode(self, values: pd.Series) -> tuple[Array, list[str]]:
        """The numbers [N, width], and what to tell the user."""
        empty = gaps(values)
        if self.categories is not None:
            return self._one_hot(values, empty)
        notes = []
        numbers = numbers_of(values) if self.parts is None else days_of(values, self.layout or "")
        if empty:  # there is a value to fill in, or these cells would have been refused
            numbers[empty] = self.fill
            if not self.indicator:
                notes.append(
                    f"column {self.name!r}: {_cells(len(empty))} missing, none when fitting; "
                    "filled with its median"
                )
        shown = [numbers] if self.parts is None else [part_of(numbers, p) for p in self.parts]
        if self.indicator:
            shown.append(values.isna().to_numpy().astype(np.float64))
        return np.stack(shown, axis=1), notes

    def _one_hot(self, values: pd.Series, empty: list[int]) -> tuple[Array, list[str]]:
        assert self.categories is not None
        labels = labels_of(values)
        labels[empty] = MISSING
        hot = np.stack([labels == category for category in self.categories], axis=1)
        unseen = sorted(set(labels) - set(self.categories))
        notes = []
        if unseen:
            rows = int(np.isin(labels, unseen).sum())
            shown = ", ".join(map(repr, unseen[:3])) + (", ..." if len(unseen) > 3 else "")
            notes.append(
                f"column {self.name!r}: {shown} not seen when fitting ({rows} "
                f"row{'s' * (rows != 1)}); encoded as no category"
            )
        return hot.astype(np.float64), notes


def with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}


def _cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"
