"""Reading and checking rows: tensors, arrays, data frames, memory maps, datasets and loaders.

A data frame is any object with `columns`, `to_numpy` and columns by name; no library is imported
for it. The inputs of a Dataset or a DataLoader are joined in the order of its rows
(`join_batches`).

The file also checks the weights of rows, and computes weighted averages. `fit` removes rows of
weight 0 before anything else. In a posterior, n is Σw. Statistics that depend
on a number of rows (minimum numbers of rows, degrees of freedom, standard errors) use

    m = (Σw)² / Σw²

the effective number of rows (Kish 1965). It does not change if all weights are multiplied by a
constant, and is the number of rows if all weights are equal. With equal weights, all averages are
equal, to the bit, to those without weights.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from doxa.data.dependence import clustered_error, effective_groups
from doxa.data.tokens import collate, joined, labels_of, pad, split_labels, without_labels
from doxa.errors import DataError, MemoryBudgetError, ShapeError


def check_weights(weight: Tensor, total: int) -> Tensor:
    """Check that there is one finite, nonnegative weight per row, and not all are zero; float64."""
    if weight.shape != (total,):
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}, expected ({total},)")
    weight = weight.detach().to("cpu", torch.float64)
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(
            f"sample_weight is {weight[row].item()} at row {row}; weights must be finite and "
            "nonnegative"
        )
    if total and not bool(positive(weight).any()):
        raise DataError("the sample weights are all zero: nothing is left to fit")
    return weight


def positive(weight: Tensor) -> Tensor:
    """The mask of rows with weight above 0; a weight that is 0 in single precision is 0."""
    return weight.float() > 0


def equal(weight: Tensor | None) -> bool:
    """Whether all rows have the same weight."""
    return weight is None or weight.numel() == 0 or bool((weight == weight.flatten()[0]).all())


def effective_rows(weight: Tensor) -> float:
    """m = (Σw)²/Σw² of weights [N]; N if they are equal."""
    if equal(weight):
        return float(len(weight))
    each = weight.double() / weight.double().max()  # avoids overflow and underflow of squares
    return float(each.sum().square() / each.square().sum())


def per_effective_row(weight: Tensor | None, group: Tensor | None = None) -> Tensor | None:
    """The weights, [N], scaled to add up to the effective number of rows; None if they are equal,
    because all would be 1. A `group` of rows counts as one row."""
    if group is not None:
        each = torch.ones(len(group)) if weight is None else weight
        each = each.double()
        return each * (number_of_rows(each, weight, group) / each.sum())
    if equal(weight):
        return None
    assert weight is not None
    each = weight.double()
    return each * (effective_rows(each) / each.sum())


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w v / Σ w of values [N, ...]."""
    if equal(weight):
        return values.mean() if values.ndim == 1 else values.mean(0)
    assert weight is not None
    share = weight.to(values) / weight.to(values).sum()
    return torch.tensordot(share, values, 1)


def weighted_std(values: Tensor, weight: Tensor | None, correction: int = 0) -> float:
    """√(Σ w (v − v̄)²/Σ w · m/(m − correction)) of values [N]."""
    if equal(weight):
        return float(values.std(correction=correction))
    assert weight is not None
    rows = effective_rows(weight)
    spread = float(weighted_mean((values - weighted_mean(values, weight)).square(), weight))
    return math.sqrt(spread * rows / (rows - correction)) if rows > correction else math.nan


def number_of_rows(values: Tensor, weight: Tensor | None, group: Tensor | None = None) -> float:
    """The effective number of rows of values [N, ...]. A `group` of rows counts as one row."""
    if group is not None:
        return effective_groups(weight, group)
    return float(len(values)) if weight is None else effective_rows(weight)


def standard_error(
    values: Tensor, weight: Tensor | None, correction: int = 0, group: Tensor | None = None
) -> float:
    """The standard error of the mean of values [N]; if rows belong to groups, it is clustered by
    group."""
    if group is not None:
        return clustered_error(values, weight, group)
    return weighted_std(values, weight, correction) / math.sqrt(number_of_rows(values, weight))


_MOST = 12  # names in a message, at most


@dataclass(frozen=True)
class Names:
    """The names of a table's columns and rows, if it has any."""

    columns: tuple[str, ...] | None = None
    index: Any = None  # row labels, by position

    @classmethod
    def of(cls, value: Any) -> Names:
        """The names of a frame or a series; other objects have none."""
        if not hasattr(value, "to_numpy"):
            return cls()
        index = getattr(value, "index", None)
        return cls(columns_of(value), None if callable(index) else index)

    def row(self, i: int) -> str:
        """ "row 3", counted from 0, with its label if that is different."""
        label = i if self.index is None else self.index[i]
        return f"row {i}" if label == i else f"row {i} (index {_plain(label)!r})"

    def place(self, i: int, at: Sequence[int]) -> str:
        """A position as text: "row 3, column 'age'"."""
        if not at:
            return self.row(i)
        if len(at) == 1 and self.columns is not None:
            return f"{self.row(i)}, column {self.columns[at[0]]!r}"
        return f"{self.row(i)}, column {at[0] if len(at) == 1 else list(at)}"


def _plain(label: Any) -> Any:
    """A label as a plain Python object; dates as text."""
    value = label.item() if isinstance(label, np.generic) else label
    return value if isinstance(value, int | float | str | tuple) else str(value)


def is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def columns_of(value: Any) -> tuple[str, ...] | None:
    """The names of a frame's columns; None if they are not strings, such as 0, 1, 2."""
    if not (is_frame(value) or isinstance(value, RowsByWindow)) or value.columns is None:
        return None
    names = tuple(value.columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def reorder_columns(frame: Any, columns: Sequence[str] | None, what: str = "x") -> Any:
    """A frame with the columns of the fit, in the order of the fit. Without names, columns are used
    by position."""
    given = columns_of(frame)
    if columns is None or given is None or given == tuple(columns):
        return frame
    check_unique(given, what)
    missing = [name for name in columns if name not in given]
    extra = [name for name in given if name not in columns]
    lacks = f"lacks the column{'s' if len(missing) > 1 else ''} {_listed(missing)}"
    problems = [lacks] if missing else []
    problems += [f"has {_listed(extra)}, which the fit did not use"] if extra else []
    if problems:
        advice = "" if missing else f"; select the columns of the fit: {what}[posterior.columns]"
        raise DataError(f"{what} {' and '.join(problems)}{advice}")
    return frame[list(columns)]


def numbers(frame: Any, what: str) -> np.ndarray[Any, Any]:
    """A frame as an array; the error names all columns that are not numeric."""
    check_unique(tuple(frame.columns), what)
    array = np.asarray(frame.to_numpy())
    if array.dtype.kind in "biufc":
        return array
    parts = {name: _column(frame[name]) for name in frame.columns}
    bad = [
        f"{name!r} ({getattr(frame[name], 'dtype', part.dtype)})"
        for name, part in parts.items() if part.dtype.kind not in "biufc"
    ]  # fmt: skip
    if bad:
        one = len(bad) == 1
        raise DataError(
            f"{what} has {'a column' if one else 'columns'} of other things than numbers: "
            f"{', '.join(bad[:_MOST])}{', …' if len(bad) > _MOST else ''}; encode "
            f"{'it' if one else 'them'} first, or use doxa.fit_table, which encodes columns"
        )
    return np.column_stack(list(parts.values()))


def _column(series: Any) -> np.ndarray[Any, Any]:
    """One column; missing numbers are NaN."""
    column = np.asarray(series)
    if column.dtype.kind == "O" and getattr(series.dtype, "kind", "O") in "biuf":
        return np.asarray(series.to_numpy(dtype=float, na_value=np.nan))
    return column


def check_unique(names: Sequence[Any], what: str) -> None:
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{what} has several columns called {_listed(twice)}; rename them")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST])) + (", …" if len(names) > _MOST else "")


Inputs = Any


BLOCK_BYTES = 32 << 20  # bytes that are gathered at once


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes of memory that are available on a device. On a CPU this is the system's available
    memory, with file caches, limited by the container and by the limits of this process."""
    device = torch.device(device)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    found = [_system_memory(), _container_memory(), _process_memory()]
    return max(0, min(part for part in found if part is not None))


def _system_memory() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_read_start("/proc/meminfo").partition(b"MemAvailable:")[2].split()[0]) << 10
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def _read_start(path: str) -> bytes:
    """The first bytes of a file. Each prediction calls this, and `Path` is ten times slower."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)


@cache
def _container_limit() -> int | None:
    """The memory limit of a control group (cgroup v2); None if there is none."""
    with suppress(OSError, ValueError):
        return int(_read_start("/sys/fs/cgroup/memory.max"))
    return None


def _container_memory() -> int | None:
    """The memory left under that limit; file caches count as available."""
    limit = _container_limit()
    if limit is None:
        return None
    with suppress(OSError, ValueError):
        used = int(_read_start("/sys/fs/cgroup/memory.current"))
        stat = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii")
        caches = dict(line.split() for line in stat.splitlines())
        return limit - used + int(caches.get("inactive_file", 0))
    return None


def _process_memory() -> int | None:
    """The memory left under the address-space limit of this process (`ulimit -v`)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(_read_start("/proc/self/statm").split()[0])
            return limit - pages * os.sysconf("SC_PAGE_SIZE")
    return None


def rows_per_block(t: Tensor) -> int:
    return max(1, BLOCK_BYTES // (8 * max(1, math.prod(t.shape[1:]))))


class RowsByWindow:
    """Rows that are read by windows: the base of `doxa.data.Stream`."""

    columns: tuple[str, ...] | None

    @abstractmethod
    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Any, Any]]:
        """The rows in order, at most `rows` at a time: their numbers, x and y."""


class Rows(Dataset[Any]):
    """Reads rows of a map-style dataset by index."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self.kept: Tensor | None = None  # numbers of the rows of the dataset in use; None: all

    def __len__(self) -> int:
        return len(self.dataset) if self.kept is None else len(self.kept)  # type: ignore[arg-type]

    def take(self, index: Tensor) -> tuple[Inputs, Any]:
        numbers = index.flatten()
        if self.kept is not None:
            numbers = self.kept[numbers.cpu()]
        items = [self.dataset[int(i)] for i in numbers]
        try:
            rows = self.collate(items)
        except (RuntimeError, TypeError, ValueError) as error:
            advice = ""
            if isinstance(items[0], Mapping):
                advice = "; a DataLoader with collate_fn=doxa.text.pad pads sequences of tokens"
            raise DataError(
                f"the dataset's rows cannot be put into one batch: {error}{advice}"
            ) from error
        if isinstance(rows, Mapping):
            rows = split_labels(as_tensors(rows, "the batch"))
        if not isinstance(rows, tuple | list) or len(rows) != 2:
            raise DataError(
                "a dataset must return pairs (x, y), or dicts with labels; put several inputs into "
                "a dict or tuple"
            )
        x, y = as_tensors(rows[0], "x"), as_tensors(rows[1], "y")
        check_finite(x, "x", numbers)
        check_finite(y, "y", numbers)
        return x, y


def as_tensor(value: Any, what: str) -> Tensor:
    """A tensor from an array-like object; memory maps are not read."""
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
        raise DataError(f"{what} is None: it must be an array of numbers, one row per example")
    if hasattr(value, "toarray") and hasattr(value, "nnz"):  # scipy
        raise DataError(f"{what} is a sparse {type(value).__name__}: pass {what}.toarray()")
    if is_frame(value):
        value = numbers(value, what)
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
    return torch.as_tensor(array if array.flags.writeable else np.asarray(_Readable(array)))


class _Readable:
    """The memory of a read-only array, such as a mapped file, without torch's warning: this library
    never writes into the caller's arrays. (A warning filter would affect all threads.)"""

    def __init__(self, array: Any) -> None:
        self._array = array  # referenced as long as its memory is used
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def as_tensors(value: Any, what: str) -> Any:
    """`as_tensor` of every array of a dict or tuple (a list of arrays becomes a tuple)."""
    if isinstance(value, Mapping):  # a dict, or a batch of a tokeniser
        return {key: as_tensors(part, what) for key, part in value.items()}
    if isinstance(value, tuple | list) and _is_pack(value):
        return tuple(as_tensors(part, what) for part in value)
    return as_tensor(value, what)


def _is_pack(value: Any) -> bool:
    """Whether a value is several arrays, and not one array as nested lists."""
    if not isinstance(value, tuple | list) or not value:
        return isinstance(value, dict)
    return getattr(value[0], "ndim", 0) > 0 or _is_pack(value[0])


class Read(NamedTuple):
    """Tensors, or a source to read rows from, and the weights of the rows.

    Rows of weight 0 are removed. `kept` [N] is the mask of the rows that remain, or None if all
    remain.
    """

    x: Any
    y: Any
    source: Any  # Rows, or a Stream (`data/streams.py`)
    weight: Tensor | None = None  # float64
    kept: Tensor | None = None


def is_columns(data: Any) -> bool:
    """Whether it is a table of named columns with rows by number, like a Dataset of the package
    datasets, which is no Dataset of torch."""
    rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return rows and hasattr(data, "column_names") and hasattr(data, "set_format")


def only_iterates(data: Any) -> bool:
    """Whether it returns its rows in turn, and none by number: an `IterableDataset`, a `DataLoader`
    over one, or a streaming set of the package datasets."""
    inner = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(inner, IterableDataset):
        return True
    streaming = hasattr(inner, "column_names") and hasattr(inner, "__iter__")
    return streaming and not hasattr(inner, "__len__")


def parse(data: Any) -> tuple[Any, Any, Any]:
    """(x, y, source): tensors, or a source to read rows from."""
    return read(data)[:3]


def read(data: Any, sample_weight: Any = None) -> Read:
    """The rows of the data, without rows of weight 0, which are not checked."""

    def weighed(total: int) -> tuple[Tensor | None, Tensor | None]:
        """The weights above 0, and the mask of their rows (None if all rows have one)."""
        if sample_weight is None:
            return None, None
        weight = check_weights(as_tensor(sample_weight, "sample_weight"), total)
        kept = positive(weight)
        return (weight, None) if bool(kept.all()) else (weight[kept], kept)

    from doxa.data.streams import Stream, stream  # imported here: they import this module
    from doxa.data.tasks import Tasks

    if only_iterates(data):
        inner = data.dataset if isinstance(data, DataLoader) else data
        if not hasattr(inner, "__len__"):
            raise DataError(
                "an IterableDataset without a length may never end, and has no rows to pick by "
                "number: pass doxa.data.stream(dataset), which writes its rows to a temporary "
                "folder, or a map-style Dataset"
            )
        data = stream(data)
    if isinstance(data, Stream):
        if sample_weight is not None:
            raise DataError("a stream takes no sample_weight: fit a sample, stream.sample(10_000)")
        return Read(*data.head(), data)
    if isinstance(data, DataLoader):
        collates = data.batch_size is not None
        source = Rows(data.dataset, data.collate_fn if collates else default_collate)
    elif isinstance(data, Dataset):
        source = Rows(data, collate)
    elif is_columns(data):
        source = Rows(data, pad)
    elif isinstance(data, Tasks):
        weight, kept = weighed(len(data))
        x, y = (data if kept is None else data.some(kept)).padded()
        return Read(x, y, None, weight, kept)
    elif (isinstance(data, tuple | list) and len(data) == 2) or (
        isinstance(data, Mapping) and labels_of(data) is not None
    ):
        pair = split_labels(as_tensors(data, "the batch")) if isinstance(data, Mapping) else data
        x, y = as_tensors(pair[0], "x"), as_tensors(pair[1], "y")
        weight, kept = None, None
        if sample_weight is not None:
            check_lengths(x, y)
            weight, kept = weighed(rows_of(x, "x"))
        if kept is not None:
            index = kept.nonzero()[:, 0]
            _check_room((x, y), len(index) / len(kept))
            x, y = (tree_map(lambda t: t[index.to(t.device)], tree) for tree in (x, y))
        return Read(x, y, None, weight, kept)
    else:
        file = isinstance(data, str | os.PathLike)
        advice = "; for files of tables, use the command line: doxa fit FILE --target y"
        raise DataError(
            "data must be a pair (x, y), a dict with labels, a Dataset, a DataLoader or Tasks, not "
            f"{type(data).__name__}{advice if file else ''}"
        )
    if len(source) == 0:
        raise DataError("the dataset is empty (N = 0)")
    weight, kept = weighed(len(source))
    source.kept = None if kept is None else kept.nonzero()[:, 0]
    n = len(source)
    one = source.take(torch.tensor([0]))
    size = n * sum(t.numel() * t.element_size() for t in tree_flatten(one)[0])
    if size <= min(free_memory() // 8, 2 << 30):
        x, y = source.take(torch.arange(n))
        return Read(x, y, None, weight, kept)
    return Read(one[0], one[1], source, weight, kept)


def _check_room(tree: Any, share: float) -> None:
    """Check that a fraction of the rows, which may be on disk, fits into memory."""
    size = share * sum(t.numel() * t.element_size() for t in tree_flatten(tree)[0])
    if size > free_memory() // 2:
        raise MemoryBudgetError(
            f"removing rows of weight 0 needs a copy of the others, {size / 2**30:.3g} GiB, and "
            f"{free_memory() / 2**30:.3g} GiB are free: write these rows to another file, or pass "
            "a Dataset, which is read in batches"
        )


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


def check_lengths(x: Any, y: Any) -> None:
    """Check that there are rows, and as many of y as of x."""
    total = rows_of(x, "x")
    if total == 0:
        raise DataError("x has no rows (N = 0)")
    if rows_of(y, "y") != total:
        raise ShapeError(f"x has {total} rows and y {rows_of(y, 'y')}")


def check_finite(
    tree: Any, what: str, numbers: Tensor | None = None, dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> None:  # fmt: skip
    """Raise an error with the first row and column that is NaN or infinite, also after conversion
    to `dtype`.

    `numbers` are the numbers of the rows, if they are not 0, 1, 2…; `names` are the names of rows
    and columns of a frame.
    """
    for leaf in [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]:
        if not leaf.is_floating_point() or leaf.numel() == 0:
            continue
        step = rows_per_block(leaf)
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
    """Convert floats to the model's type; integers and booleans stay as they are."""
    return t.to(device, dtype) if t.is_floating_point() else t.to(device)


_SHUFFLES = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_BATCH = 1024


def join_batches(x: Any) -> Any:
    """The inputs of a Dataset or DataLoader, joined to tensors; any other value as it is.

    The first entry of a pair is x. It is an error if batches would change the order of the rows,
    drop rows, or never end.
    """
    if isinstance(x, RowsByWindow):
        raise MemoryBudgetError(
            f"all rows of {x!r} would be in memory: use posterior.predict_blocks(stream), or a "
            "sample, stream.sample(10_000)"
        )
    if not isinstance(x, DataLoader | Dataset) and not is_columns(x):
        return x
    length = _length(x.dataset if isinstance(x, DataLoader) else x)
    parts: list[Any] = []
    rows = 0
    for part in blocks(x, _BATCH):
        rows += rows_of(part, "a batch")
        if rows > length:
            raise DataError(
                f"the dataset returns more rows than its length, {length}: correct its __len__"
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
    padded = joined(parts)
    return tree_map(lambda *each: torch.cat(each), *parts) if padded is None else padded


def blocks(x: Any, rows: int) -> Iterator[Any]:
    """The inputs in order, `rows` at a time (a DataLoader: in its own batches). Only one block is
    in memory. The first entry of a dataset's pairs is x."""
    if isinstance(x, DataLoader):
        _check_order(x)
        yield from map(_inputs, _read(iter(x)))
    elif isinstance(x, Dataset):
        loader = DataLoader(x, batch_size=rows, collate_fn=collate)
        yield from map(_inputs, _read(iter(loader)))
    elif isinstance(x, RowsByWindow):
        for _, part, _ in x.blocks(rows):
            yield part
    elif is_columns(x):
        loader = DataLoader(x, batch_size=rows, collate_fn=pad)
        yield from map(_inputs, _read(iter(loader)))
    else:
        whole = x if is_frame(x) else as_tensors(x, "x")
        for start in range(0, rows_of(whole, "x"), rows):
            yield tree_map(lambda t, start=start: t[start : start + rows], whole)


def _check_order(loader: DataLoader[Any]) -> None:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, _SHUFFLES):
        raise DataError(
            "the DataLoader shuffles: predictions would be in another order than its rows; "
            "pass one with shuffle=False"
        )
    if loader.drop_last and loader.batch_size and _length(loader.dataset) % loader.batch_size:
        raise DataError(
            f"the DataLoader drops its last {_length(loader.dataset) % loader.batch_size} "
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
    """The batches; an exception of the dataset is raised as a `DataError`."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # whatever the user's dataset raises
            raise DataError(f"the dataset failed to return its rows: {error}") from error
        yield batch


def _inputs(batch: Any) -> Any:
    """x of (x, y), of (x,), or of a batch that is x itself."""
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise DataError(
                f"a batch has {len(batch)} parts, not x or (x, y); put several inputs into a dict "
                "or tuple"
            )
        batch = batch[0]
    return as_tensors(without_labels(batch) if isinstance(batch, Mapping) else batch, "x")


def shuffled(
    n: int, rng: np.random.Generator, labels: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """n row numbers in a random order; with labels, each class is spread evenly over it."""
    order = rng.permutation(n)
    if labels is None:
        return order
    # Every row's place within its own class, as a share: sorted by it, each class is spread
    # evenly over the order.
    _, label, counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    place = np.empty(n)
    for c, count in enumerate(counts):
        place[label == c] = (np.arange(count) + rng.uniform()) / count
    return order[np.argsort(place, kind="stable")]
