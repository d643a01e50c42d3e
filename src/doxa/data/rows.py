"""Rows from what people pass: tensors, arrays, frames, memmaps, datasets; checked.

Frames: tables whose columns and rows have names, of whichever library.

Nothing is imported for them: a frame is what has `columns`, `to_numpy` and columns by name.

Inputs that come in batches: a Dataset or a DataLoader, joined in the order of its rows.

Weights of rows: which rows there are, how many rows they stand for, and averages under them.

A row of weight 0 is no row: `fit` removes it before it looks at anything else. In a posterior n is
Σw. What is counted in rows (whether rows are enough, degrees of freedom, standard errors) is

    m = (Σw)² / Σw²

the effective number of rows (Kish 1965): it does not change where all weights are multiplied by a
number, and is the number of rows where weights are equal. Weights that are equal change no average;
what is computed from them is then, to the bit, what is computed without weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
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

from doxa.errors import DataError, MemoryBudgetError, ShapeError


def check_weights(weight: Tensor, total: int) -> Tensor:
    """One finite, nonnegative weight for each of so many rows, not all of them zero; float64."""
    if weight.shape != (total,):
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}, expected ({total},)")
    weight = weight.detach().to("cpu", torch.float64)
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(
            f"sample_weight is {weight[row].item()} at row {row}; weights are finite and "
            "nonnegative"
        )
    if total and not bool(positive(weight).any()):
        raise DataError("the sample weights are all zero: nothing is left to fit")
    return weight


def positive(weight: Tensor) -> Tensor:
    """Which rows count: a weight that is 0 in single precision is 0."""
    return weight.float() > 0


def equal(weight: Tensor | None) -> bool:
    """Whether all rows count alike."""
    return weight is None or weight.numel() == 0 or bool((weight == weight.flatten()[0]).all())


def effective_rows(weight: Tensor) -> float:
    """m = (Σw)²/Σw² of weights [N]; N where they are equal."""
    if equal(weight):
        return float(len(weight))
    each = weight.double() / weight.double().max()  # no square is too large or too small
    return float(each.sum().square() / each.square().sum())


def per_effective_row(weight: Tensor | None) -> Tensor | None:
    """Weights in proportion to those given, [N], that add up to the effective number of rows; None
    where they are equal, and all would be 1."""
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


def number_of_rows(values: Tensor, weight: Tensor | None) -> float:
    """The effective number of rows of values [N, ...]."""
    return float(len(values)) if weight is None else effective_rows(weight)


def standard_error(values: Tensor, weight: Tensor | None, correction: int = 0) -> float:
    """Of the mean of values [N]."""
    return weighted_std(values, weight, correction) / math.sqrt(number_of_rows(values, weight))


_MOST = 12  # names in a message


@dataclass(frozen=True)
class Names:
    """What a table's columns and rows are called, where it says so."""

    columns: tuple[str, ...] | None = None
    index: Any = None  # row labels, by position

    @classmethod
    def of(cls, value: Any) -> Names:
        """Of a frame or a series; of anything else, none."""
        if not hasattr(value, "to_numpy"):
            return cls()
        index = getattr(value, "index", None)
        return cls(columns_of(value), None if callable(index) else index)

    def row(self, i: int) -> str:
        """ "row 3", counted from 0, with its label where that is another."""
        label = i if self.index is None else self.index[i]
        return f"row {i}" if label == i else f"row {i} (index {_plain(label)!r})"

    def place(self, i: int, at: Sequence[int]) -> str:
        """A row and what is in it: "row 3, column 'age'"."""
        if not at:
            return self.row(i)
        if len(at) == 1 and self.columns is not None:
            return f"{self.row(i)}, column {self.columns[at[0]]!r}"
        return f"{self.row(i)}, column {at[0] if len(at) == 1 else list(at)}"


def _plain(label: Any) -> Any:
    """A label as Python shows it, not as its library does; dates as text."""
    value = label.item() if isinstance(label, np.generic) else label
    return value if isinstance(value, int | float | str | tuple) else str(value)


def is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def columns_of(value: Any) -> tuple[str, ...] | None:
    """The names of a frame's columns; None where they are no words, such as 0, 1, 2."""
    if not is_frame(value):
        return None
    names = tuple(value.columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def in_order(frame: Any, columns: Sequence[str] | None, what: str = "x") -> Any:
    """A frame with the columns of the fit, in its order; what has no names is taken by position."""
    given = columns_of(frame)
    if columns is None or given is None or given == tuple(columns):
        return frame
    check_once(given, what)
    missing = [name for name in columns if name not in given]
    extra = [name for name in given if name not in columns]
    lacks = f"lacks the column{'s' if len(missing) > 1 else ''} {_listed(missing)}"
    said = [lacks] if missing else []
    said += [f"has {_listed(extra)}, which the fit did not see"] if extra else []
    if said:
        advice = "" if missing else f"; select what it saw: {what}[posterior.columns]"
        raise DataError(f"{what} {' and '.join(said)}{advice}")
    return frame[list(columns)]


def numbers(frame: Any, what: str) -> np.ndarray[Any, Any]:
    """A frame as an array; columns that are no numbers are named, all at once."""
    check_once(tuple(frame.columns), what)
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
            f"{'it' if one else 'them'} first, or fit the file from the shell, which does"
        )
    return np.column_stack(list(parts.values()))


def _column(series: Any) -> np.ndarray[Any, Any]:
    """One column; numbers that may be missing are NaN where they are."""
    column = np.asarray(series)
    if column.dtype.kind == "O" and getattr(series.dtype, "kind", "O") in "biuf":
        return np.asarray(series.to_numpy(dtype=float, na_value=np.nan))
    return column


def check_once(names: Sequence[Any], what: str) -> None:
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{what} has several columns called {_listed(twice)}; rename them")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST])) + (", …" if len(names) > _MOST else "")


Inputs = Any


BLOCK_BYTES = 32 << 20  # how much is gathered at once


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can be had on a device now: on a CPU what the system calls available, file caches
    included, and no more than what a container or a limit on this process leaves."""
    device = torch.device(device)
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    found = [_system_memory(), _container_memory(), _process_memory()]
    return max(0, min(part for part in found if part is not None))


def _system_memory() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(_start_of("/proc/meminfo").partition(b"MemAvailable:")[2].split()[0]) << 10
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 << 30


def _start_of(path: str) -> bytes:
    """The first bytes of a file: every prediction asks, and a `Path` takes ten times as long."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)


@cache
def _container_limit() -> int | None:
    """The memory limit of a control group (cgroup v2); None where there is none."""
    with suppress(OSError, ValueError):
        return int(_start_of("/sys/fs/cgroup/memory.max"))
    return None


def _container_memory() -> int | None:
    """What that limit leaves; file caches can be given back."""
    limit = _container_limit()
    if limit is None:
        return None
    with suppress(OSError, ValueError):
        used = int(_start_of("/sys/fs/cgroup/memory.current"))
        stat = Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii")
        caches = dict(line.split() for line in stat.splitlines())
        return limit - used + int(caches.get("inactive_file", 0))
    return None


def _process_memory() -> int | None:
    """What a limit on this process's addresses leaves (`ulimit -v`)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(_start_of("/proc/self/statm").split()[0])
            return limit - pages * os.sysconf("SC_PAGE_SIZE")
    return None


def rows_a_block(t: Tensor) -> int:
    return max(1, BLOCK_BYTES // (8 * max(1, math.prod(t.shape[1:]))))


class Rows(Dataset[Any]):
    """Reads rows of a map-style dataset by index."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self.kept: Tensor | None = None  # the rows of the dataset that there are; None: all

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
    """The memory of a read-only array, such as a mapped file, of which torch would warn: nothing
    here writes into what the caller passed. (Filters of warnings belong to all threads.)"""

    def __init__(self, array: Any) -> None:
        self._array = array  # kept as long as its memory is used
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


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


class Read(NamedTuple):
    """Tensors, or a source to read from when the rows stay where they are, and their weights.

    Rows of weight 0 are not among them: `kept` [N] says which of those that were passed are, None
    where that is all of them.
    """

    x: Any
    y: Any
    source: Rows | None
    weight: Tensor | None = None  # float64
    kept: Tensor | None = None


def parse(data: Any) -> tuple[Any, Any, Rows | None]:
    """(x, y, source): tensors, or a source to read from when the rows stay where they are."""
    return read(data)[:3]


def read(data: Any, sample_weight: Any = None) -> Read:
    """Rows of whatever people pass, without those of weight 0, which are not looked at."""

    def weighed(total: int) -> tuple[Tensor | None, Tensor | None]:
        """The weights of the rows that have one, and which these are, where some have none."""
        if sample_weight is None:
            return None, None
        weight = check_weights(as_tensor(sample_weight, "sample_weight"), total)
        kept = positive(weight)
        return (weight, None) if bool(kept.all()) else (weight[kept], kept)

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
        weight, kept = weighed(len(data))
        x, y = (data if kept is None else data.some(kept)).padded()
        return Read(x, y, None, weight, kept)
    elif isinstance(data, tuple | list) and len(data) == 2:
        x, y = as_tensors(data[0], "x"), as_tensors(data[1], "y")
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
        advice = "; files of tables are fitted from the shell: doxa fit FILE --target y"
        raise DataError(
            "data must be a pair (x, y), a Dataset, a DataLoader or Tasks, not "
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
    """A share of the rows of arrays, which may lie on disk, can be copied into memory."""
    size = share * sum(t.numel() * t.element_size() for t in tree_flatten(tree)[0])
    if size > free_memory() // 2:
        raise MemoryBudgetError(
            f"rows of weight 0 are removed by a copy of the others, of {size / 2**30:.3g} GiB, and "
            f"{free_memory() / 2**30:.3g} GiB are free: write these rows to a file of their own, "
            "or pass a Dataset, which is read by the batch"
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
    """There are rows, and as many of y as of x."""
    total = rows_of(x, "x")
    if total == 0:
        raise DataError("x has no rows (N = 0)")
    if rows_of(y, "y") != total:
        raise ShapeError(f"x has {total} rows and y {rows_of(y, 'y')}")


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
