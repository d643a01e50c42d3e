"""Who knows the labels: a table of them, a function, or a person (nobody yet)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from doxa.data import as_tensor
from doxa.errors import DataError

Oracle = Callable[[Tensor], Any]


class Table:
    """Labels that are all at hand: asking again costs nothing."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __call__(self, asked: Tensor) -> Tensor:
        return self.labels[asked]


def oracle_of(given: Any, rows: int) -> Oracle | None:
    """A function from rows [k] to labels [k, …]; None where a person will answer."""
    if given is None or callable(given):
        return given
    table = as_tensor(given, "the oracle's table").cpu()
    if table.ndim == 0 or len(table) != rows:
        raise DataError(f"the oracle's table has shape {list(table.shape)}, the pool {rows} rows")
    return Table(table)


def labels_of(oracle: Oracle, asked: list[int]) -> dict[int, Any]:
    """{row: label} from an oracle, one for each row."""
    given = oracle(torch.tensor(asked))
    labels = as_tensor(given, "what the oracle gave").cpu()
    if labels.ndim == 0 or len(labels) != len(asked):
        count = 1 if labels.ndim == 0 else len(labels)
        raise DataError(
            f"the oracle gave {count} labels for {len(asked)} rows (the first: row {asked[0]})"
        )
    bad = ~torch.isfinite(labels.double()).reshape(len(labels), -1).all(1)
    if bool(bad.any()):
        raise DataError(
            f"the oracle's label for row {asked[int(bad.nonzero()[0, 0])]} is no number"
        )
    return dict(zip(asked, labels.tolist(), strict=True))
