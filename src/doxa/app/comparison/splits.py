"""Which rows are learnt from and which are held out, split by split."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from doxa.app.held_out import shuffled
from doxa.app.tables import Array
from doxa.errors import DataError


class Split(NamedTuple):
    """Row numbers."""

    train: Array
    test: Array


def random_splits(
    n: int, fraction: float, splits: int, seed: int, labels: Array | None = None
) -> list[Split]:
    """`splits` random divisions of n rows, each holding out the same number.

    With class labels each class is held out in proportion, so that a rare one is on both sides.
    """
    if splits < 1:
        raise DataError(f"--splits must be at least 1, not {splits}")
    if not 0.0 < fraction < 1.0:
        raise DataError(f"--test-fraction must be between 0 and 1, not {fraction}")
    held = round(n * fraction)
    if held < 1 or n - held < 1:
        raise DataError(f"{n} rows cannot be split with --test-fraction {fraction}")
    made = []
    for k in range(splits):
        order = shuffled(n, np.random.default_rng([seed, k]), labels)
        made.append(Split(np.sort(order[held:]), np.sort(order[:held])))
    return made


def indexable(values: Any) -> Any:
    """Something that row numbers index: lists and frames become arrays."""
    return values if isinstance(values, np.ndarray | torch.Tensor) else np.asarray(values)


def rows_in(x: Any, y: Any) -> int:
    """How many rows both have, at least two."""
    if len(x) != len(y):
        raise DataError(f"x has {len(x)} rows and y {len(y)}")
    if len(x) < 2:
        raise DataError(f"{len(x)} rows cannot be split into training and held-out ones")
    return len(x)
