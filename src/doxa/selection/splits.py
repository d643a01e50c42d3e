"""Random splits of a data set into training and held-out rows, and results over splits.

The choice of rows is a function of the seed, the number of rows and the class labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from doxa.data.rows import shuffled
from doxa.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]


class Split(NamedTuple):
    """The row numbers of a split."""

    train: Array
    test: Array


def random_splits(
    n: int, fraction: float, splits: int, seed: int, labels: Array | None = None
) -> list[Split]:
    """`splits` random splits of n rows, each with the same number of held-out rows.

    With class labels, each class is held out in proportion, so that a rare class is in both parts.
    """
    if splits < 1:
        raise DataError(f"splits must be at least 1, not {splits}")
    if not 0.0 < fraction < 1.0:
        raise DataError(f"test_fraction must be between 0 and 1, not {fraction}")
    held = round(n * fraction)
    if held < 1 or n - held < 1:
        raise DataError(f"{n} rows cannot be split with test_fraction={fraction}")
    made = []
    for k in range(splits):
        order = shuffled(n, np.random.default_rng([seed, k]), labels)
        made.append(Split(np.sort(order[held:]), np.sort(order[:held])))
    return made


def indexable(values: Any) -> Any:
    """An array or tensor that row numbers index: lists and frames become arrays."""
    return values if isinstance(values, np.ndarray | torch.Tensor) else np.asarray(values)


def rows_in(x: Any, y: Any) -> int:
    """The number of rows of x and y, at least two."""
    if len(x) != len(y):
        raise DataError(f"x has {len(x)} rows and y {len(y)}")
    if len(x) < 2:
        raise DataError(f"{len(x)} rows cannot be split into training and held-out ones")
    return len(x)


def worst_status(posteriors: Sequence[Any]) -> tuple[str, str]:
    """ "ok", or the first other status with the number of splits, and its reason."""
    wrong = [posterior.status for posterior in posteriors if posterior.status != "ok"]
    if not wrong:
        return "ok", ""
    worst = min(wrong, key=lambda status: status.rank)
    status, count = str(worst), len(posteriors)
    return status if count == 1 else f"{status} ({len(wrong)} of {count})", worst.reason


def standard_error(values: Array) -> float:
    """s/√n; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
