"""Rows from what people pass: tensors, arrays, frames, memmaps, datasets; checked."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from doxa.data.frames import Names, is_frame
from doxa.data.frames import numbers as frame_numbers
from doxa.errors import DataError, ShapeError

Inputs = Any


BLOCK_BYTES = 32 << 20  # how much is gathered at once


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can be had on a device now."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def rows_a_block(t: Tensor) -> int:
    return max(1, BLOCK_BYTES // (8 * max(1, math.prod(t.shape[1:]))))


class Rows(Dataset[Any]):
    """Reads rows of a map-style dataset by index."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def take(self, index: Tensor) -> tuple[Inputs, Any]:
        numbers = index.flatten()
        items = [self.dataset[int(i)] for i in numbers]
        try:
            rows = self.collate(items)
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"the dataset's rows cannot be put into one batch: {error}") from error
        if not isinstance(rows, tuple | list) or len(rows) != 2:
            raise DataError(
                "a dataset must give pairs (x, y); several inputs go in a dict or tuple"
            )
        x, y = as_tensors(rows[0], "x"), as_tensors(rows[1], "y")
        check_finite(x, "x", numbers)
        check_finite(y, "y", numbers)
        return x, y


def as_tensor(value: Any, what: str) -> Tensor:
    """A tensor from what people pass; memmaps are not read."""
    if isinstance(value, Tensor):
        if value.is_meta or value.layout != torch.strided:
            kind = "meta" if value.is_meta else str(value.layout)
            instead = "" if value.is_meta else f": pass {what}.to_dense()"
            raise DataError(
                f"{what} is a {kind} tensor, which holds no dense rows to read{instead}"
            )
        found = value.detach()
    else:
        found = _from_array(value, what)
    if found.is_complex():
        raise DataError(
            f"{what} holds {found.dtype} values; pass real and imaginary parts as columns"
        )
    return found


def _from_array(value: Any, what: str) -> Tensor:
    if value is None:
        raise DataError(f"{what} is None: it must be an array of numbers, one row an example")
    if hasattr(value, "toarray") and hasattr(value, "nnz"):  # scipy
        raise DataError(f"{what} is a sparse {type(value).__name__}: pass {what}.toarray()")
    if is_frame(value):
        value = frame_numbers(value, what)
    elif hasattr(value, "to_numpy"):  # a series
        value = value.to_numpy()
    try:
        array = np.asarray(value) if not isinstance(value, np.ndarray) else value
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} is not a table of numbers: {error}") from error
    if array.dtype.kind not in "biufc":
        raise DataError(f"{what} holds {array.dtype} values; encode them as numbers first")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    with warnings.catch_warnings():  # nothing here writes into what the caller passed
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)


def as_tensors(value: Any, what: str) -> Any:
    """`as_tensor` of every array of a dict or tuple (a list of arrays becomes a tuple)."""
    if isinstance(value, dict):
        return {key: as_tensors(part, what) for key, part in value.items()}
    if isinstance(value, tuple | list) and _is_pack(value):
        return tuple(as_tensors(part, what) for part in value)
    return as_tensor(value, what)


def _is_pack(value: Any) -> bool:
    """Several arrays, rather than one written as nested lists."""
    if not isinstance(value, tuple | list) or not value:
        return isinstance(value, dict)
    return getattr(value[0], "ndim", 0) > 0 or _is_pack(value[0])


def parse(data: Any) -> tuple[Any, Any, Rows | None]:
    """(x, y, source): tensors, or a source to read from when the rows stay where they are."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            raise DataError(
                "a DataLoader over an IterableDataset has no rows to pick: batches here are a "
                "function of the step; pass a map-style Dataset"
            )
        collates = data.batch_size is not None
        source = Rows(data.dataset, data.collate_fn if collates else default_collate)
    elif isinstance(data, IterableDataset):
        raise DataError("an IterableDataset has no rows to pick: pass a map-style Dataset")
    elif isinstance(data, Dataset):
        source = Rows(data, default_collate)
    elif hasattr(data, "padded"):  # tasks
        return *data.padded(), None
    elif isinstance(data, tuple | list) and len(data) == 2:
        return as_tensors(data[0], "x"), as_tensors(data[1], "y"), None
    else:
        file = isinstance(data, str | os.PathLike)
        advice = "; files of tables are fitted from the shell: doxa fit FILE --target y"
        raise DataError(
            "data must be a pair (x, y), a Dataset, a DataLoader or Tasks, not "
            f"{type(data).__name__}{advice if file else ''}"
        )
    n = len(source)
    if n == 0:
        raise DataError("the dataset is empty (N = 0)")
    one = source.take(torch.tensor([0]))
    size = n * sum(t.numel() * t.element_size() for t in tree_flatten(one)[0])
    if size <= min(free_memory() // 8, 2 << 30):
        x, y = source.take(torch.arange(n))
        return x, y, None
    return one[0], one[1], source


def rows_of(tree: Any, what: str) -> int:
    leaves = [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]
    if not leaves:
        raise ShapeError(f"{what} is empty: it holds no array")
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ShapeError(f"{what} is a scalar; the first axis must be the rows")
    lengths = {leaf.shape[0] for leaf in leaves}
    if len(lengths) != 1:
        raise ShapeError(f"the parts of {what} have different lengths: {sorted(lengths)}")
    return int(lengths.pop())


def check_finite(
    tree: Any, what: str, numbers: Tensor | None = None, dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> None:  # fmt: skip
    """Raise naming the first row and column that is NaN or infinite, or would be in `dtype`.

    `numbers` are the rows' own numbers, where they are not 0, 1, 2…; `names` what a frame calls
    its rows and columns.
    """
    for leaf in [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]:
        if not leaf.is_floating_point() or leaf.numel() == 0:
            continue
        step = rows_a_block(leaf)
        for start in range(0, leaf.shape[0], step):
            bad = ~torch.isfinite(leaf[start : start + step].to(dtype or leaf.dtype))
            if bad.any():
                place = [int(i) for i in bad.nonzero()[0]]
                row, column = start + place[0], place[1:]
                value = leaf[(row, *column)].item()
                row = row if numbers is None else int(numbers[row])
                where = (names or Names()).place(row, column)
                if math.isfinite(value):
                    advice = f"that is infinite in {dtype}: scale the column first"
                else:
                    advice = "remove or fill missing values first"
                raise DataError(f"{what} is {value} at {where}; {advice}")


def cast(t: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Floats to the model's type; integers and booleans pass."""
    return t.to(device, dtype) if t.is_floating_point() else t.to(device)
