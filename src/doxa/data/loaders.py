"""Inputs that come in batches: a Dataset or a DataLoader, joined in the order of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from doxa.data.frames import is_frame
from doxa.data.rows import as_tensors, free_memory, rows_of
from doxa.errors import DataError, MemoryBudgetError

_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BATCH = 1024


def gathered(x: Any) -> Any:
    """The inputs of a Dataset or DataLoader as tensors, batch after batch; anything else as it is.

    Of a pair the first is x. What would give predictions in another order than the rows, leave
    some out, or never end, is refused.
    """
    if not isinstance(x, DataLoader | Dataset):
        return x
    length = _length(x.dataset if isinstance(x, DataLoader) else x)
    parts: list[Any] = []
    rows = 0
    for part in blocks(x, _BATCH):
        rows += rows_of(part, "a batch")
        if rows > length:
            raise DataError(
                f"the dataset gives more rows than its length, {length}: where to stop?"
            )
        if not parts:
            size = length * sum(t[:1].nbytes for t in tree_flatten(part)[0])
            if size > free_memory() // 2:
                raise MemoryBudgetError(
                    f"x of {length} rows takes {size / 2**30:.3g} GiB; predict a part at a time"
                )
        parts.append(part)
    if not parts:
        raise DataError("the dataset is empty (N = 0)")
    return tree_map(lambda *each: torch.cat(each), *parts)


def blocks(x: Any, rows: int) -> Iterator[Any]:
    """The inputs in their order, so many rows at a time (a DataLoader: in its own batches), of
    which one block is held; of a dataset's pairs the first is x."""
    if isinstance(x, DataLoader):
        _check_order(x)
        yield from map(_inputs, _read(iter(x)))
    elif isinstance(x, Dataset):
        yield from map(_inputs, _read(iter(DataLoader(x, batch_size=rows))))
    else:
        whole = x if is_frame(x) else as_tensors(x, "x")
        for start in range(0, rows_of(whole, "x"), rows):
            yield tree_map(lambda t, start=start: t[start : start + rows], whole)


def _check_order(loader: DataLoader[Any]) -> None:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, _SHUFFLES):
        raise DataError(
            "the DataLoader shuffles: predictions would stand in another order than its rows; "
            "pass one with shuffle=False"
        )
    if loader.drop_last and loader.batch_size and _length(loader.dataset) % loader.batch_size:
        raise DataError(
            f"the DataLoader leaves out its last {_length(loader.dataset) % loader.batch_size} "
            "rows: pass one with drop_last=False"
        )


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise DataError(
            "an IterableDataset that has no length may never end: give it __len__, or predict "
            "batch by batch"
        )
    return len(dataset)


def _read(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches as they come, and what goes wrong on the way as an error of the data."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the user's dataset raises
            raise DataError(f"the dataset fails to give its rows: {error}") from error
        yield batch


def _inputs(batch: Any) -> Any:
    """x of (x, y), of (x,), or of a batch that is x itself."""
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise DataError(
                f"a batch has {len(batch)} parts, not x or (x, y); several inputs go in a dict or "
                "tuple"
            )
        batch = batch[0]
    return as_tensors(batch, "x")
