"""What goes in: rows, checked, standardised and handed out in batches.

`Data` holds inputs and targets for R runs. Small data lies on the device and is indexed there;
datasets and arrays beyond a quarter of the free memory stay where they are and are read by the
batch. The batch at step t is a pure function of (seed, stage, member, t).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from doxa.errors import DataError, ShapeError
from doxa.noise import generator

log = logging.getLogger("doxa")

Inputs = Any
_BLOCK_BYTES = 32 << 20  # how much is gathered at once


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can be had on a device now."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


@dataclass
class Batch:
    """Rows for one step. `shared` rows have no member axis: x [B, ...]; otherwise x [M, B, ...]."""

    x: Inputs
    y: Any
    scale: Tensor  # [M], rows in the data set / rows in the batch
    weight: Tensor | None = None  # [B] or [M, B]
    shared: bool = True

    def members(self, s: slice) -> Batch:
        """The rows of some members."""
        if self.shared:
            weight = self.weight
            if weight is not None and weight.ndim == 2:
                weight = weight[s]
            return replace(self, scale=self.scale[s], weight=weight)
        pick: Callable[[Any], Any] = lambda tree: tree_map(lambda t: t[s], tree)  # noqa: E731
        weight = None if self.weight is None else self.weight[s]
        return Batch(pick(self.x), pick(self.y), self.scale[s], weight, shared=False)


@dataclass(frozen=True)
class Standardisation:
    """Locations and scales of one run: fitted value = (value − loc) / scale. None leaves it alone."""

    x_loc: Any = None
    x_scale: Any = None
    y_loc: Any = None
    y_scale: Any = None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Standardisation:
        trees = (self.x_loc, self.x_scale, self.y_loc, self.y_scale)
        return Standardisation(
            *(None if v is None else tree_map(lambda t: t.to(device, dtype), v) for v in trees)
        )

    def x(self, x: Inputs, dtype: torch.dtype | None = None) -> Inputs:
        """Inputs in fitted units, floats in `dtype` (default: their own)."""
        if self.x_loc is None:
            return x
        return tree_map(
            lambda t, loc, scale: _scale(t, loc, scale, dtype), x, self.x_loc, self.x_scale
        )

    def y(self, y: Any, dtype: torch.dtype | None = None) -> Any:
        return y if self.y_loc is None else _scale(y, self.y_loc, self.y_scale, dtype)


def _scale(t: Tensor, loc: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """(t − loc) / scale in double precision, since an offset may take all digits of a float32."""
    if not t.is_floating_point():
        return t
    dtype = dtype or t.dtype
    loc, scale = (v.to(t.device, torch.float64) for v in (loc, scale))
    step = _rows_a_block(t)
    if t.shape[0] <= step:
        return ((t.double() - loc) / scale).to(dtype)
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    for start in range(0, t.shape[0], step):
        out[start : start + step] = (t[start : start + step].double() - loc) / scale
    return out


def _rows_a_block(t: Tensor) -> int:
    return max(1, _BLOCK_BYTES // (8 * max(1, math.prod(t.shape[1:]))))


class _Rows(Dataset[Any]):
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
            raise DataError(f"{what} is a {kind} tensor, which holds no dense rows to read")
        return _real(value.detach(), what)
    if hasattr(value, "to_numpy"):  # pandas
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
        return _real(torch.as_tensor(array), what)


def _real(t: Tensor, what: str) -> Tensor:
    if t.is_complex():
        raise DataError(f"{what} holds {t.dtype} values; pass real and imaginary parts as columns")
    return t


def as_tensors(value: Any, what: str) -> Any:
    """`as_tensor` of every array of a dict or tuple (a list of arrays becomes a tuple)."""
    if isinstance(value, dict):
        return {key: as_tensors(part, what) for key, part in value.items()}
    if _is_pack(value):
        return tuple(as_tensors(part, what) for part in value)
    return as_tensor(value, what)


def _is_pack(value: Any) -> bool:
    """Several arrays, rather than one written as nested lists."""
    if not isinstance(value, tuple | list) or not value:
        return isinstance(value, dict)
    return getattr(value[0], "ndim", 0) > 0 or _is_pack(value[0])


def parse(data: Any) -> tuple[Any, Any, _Rows | None]:
    """(x, y, source): tensors, or a source to read from when the rows should stay where they are."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset):
            raise DataError(
                "a DataLoader over an IterableDataset has no rows to pick: batches here are a "
                "function of the step; pass a map-style Dataset"
            )
        collates = data.batch_size is not None
        source = _Rows(data.dataset, data.collate_fn if collates else default_collate)
    elif isinstance(data, IterableDataset):
        raise DataError("an IterableDataset has no rows to pick: pass a map-style Dataset")
    elif isinstance(data, Dataset):
        source = _Rows(data, default_collate)
    elif isinstance(data, tuple | list) and len(data) == 2:
        return as_tensors(data[0], "x"), as_tensors(data[1], "y"), None
    else:
        raise DataError(
            f"data must be a pair (x, y), a Dataset or a DataLoader, not {type(data).__name__}"
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
    leaves = tree_flatten(tree)[0]
    if not leaves:
        raise ShapeError(f"{what} is empty: it holds no array")
    if any(leaf.ndim == 0 for leaf in leaves):
        raise ShapeError(f"{what} is a scalar; the first axis must be the rows")
    lengths = {leaf.shape[0] for leaf in leaves}
    if len(lengths) != 1:
        raise ShapeError(f"the parts of {what} have different lengths: {sorted(lengths)}")
    return int(lengths.pop())


def check_finite(
    tree: Any, what: str, numbers: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Raise naming the first row and column that is NaN or infinite, or would be in `dtype`.

    `numbers` are the rows' own numbers, where they are not 0, 1, 2…
    """
    for leaf in tree_flatten(tree)[0]:
        if not leaf.is_floating_point() or leaf.numel() == 0:
            continue
        step = _rows_a_block(leaf)
        for start in range(0, leaf.shape[0], step):
            bad = ~torch.isfinite(leaf[start : start + step].to(dtype or leaf.dtype))
            if bad.any():
                place = [int(i) for i in bad.nonzero()[0]]
                row, column = start + place[0], place[1:]
                value = leaf[(row, *column)].item()
                row = row if numbers is None else int(numbers[row])
                where = f", column {column[0] if len(column) == 1 else column}" if column else ""
                if math.isfinite(value):
                    advice = f"that is infinite in {dtype}: scale the column first"
                else:
                    advice = "remove or fill missing values first"
                raise DataError(f"{what} is {value} at row {row}{where}; {advice}")


@dataclass
class Data:
    """Rows of R runs, on a device.

    x, y: tensors [N, ...], or [R·N, ...] when every run has its own scales (`banked`).
    rows: the row numbers of each run; validation: those held out of each run.
    """

    x: Inputs
    y: Any
    rows: list[Tensor]
    scales: list[Standardisation]
    device: torch.device
    dtype: torch.dtype
    total: int
    validation: list[Tensor] | None = None
    weight: Tensor | None = None  # [N] or [M, N]
    banked: bool = False
    lazy: bool = False  # x and y lie as they were given: cast and standardised by the batch
    source: _Rows | None = None
    prepare_y: Callable[[Any], Any] = field(default=lambda y: y)

    @property
    def runs(self) -> int:
        return len(self.rows)

    def take(self, index: Tensor, run: Tensor | None = None) -> tuple[Inputs, Any]:
        """Rows by number, in fitted units; `run` (broadcastable to index) says whose scales."""
        if self.source is not None:
            x, y = self.source.take(index)
            shape = tuple(index.shape)
            x = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(x))
            y = self.prepare_y(y)
            y = tree_map(lambda t: t.reshape(shape + t.shape[1:]), self._place(y))
            return self.scales[0].x(x), self.scales[0].y(y)
        if self.banked and run is not None:
            index = index + run * self.total
        place = tree_flatten(self.x)[0][0].device
        index = index.to(place)
        x, y = (tree_map(lambda t: t[index], tree) for tree in (self.x, self.y))
        if self.lazy:
            x, y = self._standardised(x, y, index.ndim, torch.tensor(0) if run is None else run)
        return self._place(x), self._place(y)

    def _standardised(self, x: Inputs, y: Any, axes: int, run: Tensor) -> tuple[Inputs, Any]:
        """Rows by the scales of their runs; `axes` of the rows come from the index."""
        count = len(self.scales)

        def scale(t: Tensor, *pairs: Tensor) -> Tensor:
            own = pairs[0].ndim
            shape = (*run.shape, *pairs[0].shape, *(1,) * (t.ndim - axes - own))
            loc, width = (torch.stack(p)[run].reshape(shape) for p in (pairs[:count], pairs[count:]))  # fmt: skip
            return _scale(t, loc, width, self.dtype) if t.is_floating_point() else t

        if self.scales[0].x_loc is not None:
            each = [s.x_loc for s in self.scales] + [s.x_scale for s in self.scales]
            x = tree_map(scale, x, *each)
        if self.scales[0].y_loc is not None:
            each = [s.y_loc for s in self.scales] + [s.y_scale for s in self.scales]
            y = tree_map(scale, y, *each)
        return x, y

    def _place(self, tree: Any) -> Any:
        return tree_map(lambda t: cast(t, self.device, self.dtype), tree)

    def of_run(self, r: int) -> tuple[Inputs, Any]:
        """All training rows of one run, in fitted units."""
        return self.take(self.rows[r], torch.tensor(r))

    def held_out(self, r: int) -> tuple[Inputs, Any]:
        assert self.validation is not None
        return self.take(self.validation[r], torch.tensor(r))

    def total_weight(self, run_of: Sequence[int]) -> Tensor:
        """n for each member: the sum of its rows' weights, [M]."""
        totals = []
        for m, r in enumerate(run_of):
            if self.weight is None:
                totals.append(float(len(self.rows[r])))
            else:
                w = self.weight if self.weight.ndim == 1 else self.weight[m]
                totals.append(float(w[self.rows[r].to(w.device)].sum()))
        return torch.tensor(totals, device=self.device, dtype=self.dtype)


def cast(t: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Floats to the model's type; integers and booleans pass."""
    return t.to(device, dtype) if t.is_floating_point() else t.to(device)


def standardise(x: Inputs, y: Any, rows: Sequence[Tensor], scale_y: bool) -> list[Standardisation]:
    """Scales of each run from its own training rows: columns for matrices, one number beyond."""

    def moments(t: Tensor, index: Tensor, name: str) -> tuple[Tensor, Tensor]:
        if not t.is_floating_point():
            return torch.zeros(()), torch.ones(())
        loc, scale = _mean_and_std(t, index)
        constant = scale <= 1e-12 * (loc.abs() + 1e-300)
        if constant.any():
            columns = constant.nonzero().flatten().tolist() if constant.ndim else "all"
            log.warning("%s: constant column %s gets scale 1", name, columns)
        return loc, torch.where(constant, torch.ones_like(scale), scale)

    scales = []
    leaves, spec = tree_flatten(x)
    for index in rows:
        pairs = [moments(t, index, "x") for t in leaves]
        x_loc, x_scale = (tree_unflatten([p[i] for p in pairs], spec) for i in range(2))
        y_loc = y_scale = None
        if scale_y and isinstance(y, Tensor):
            y_loc, y_scale = moments(y, index, "y")
        scales.append(Standardisation(x_loc, x_scale, y_loc, y_scale))
    return scales


def _mean_and_std(t: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column of some rows (of everything beyond matrices), a block of rows at a time."""
    axes = [0] if t.ndim <= 2 else list(range(t.ndim))
    step = _rows_a_block(t)
    parts = [index[start : start + step].to(t.device) for start in range(0, len(index), step)]
    share = [len(part) / len(index) for part in parts]
    loc = sum(t[part].double().mean(axes) * w for part, w in zip(parts, share, strict=True))
    square = sum(
        (t[part].double() - loc).square().mean(axes) * w
        for part, w in zip(parts, share, strict=True)
    )
    return torch.as_tensor(loc), torch.as_tensor(square).sqrt()


class Batches:
    """Minibatches for stacked members: `batch(t)`, gathered a block of steps at a time."""

    def __init__(
        self, data: Data, run_of: Sequence[int], keys: Sequence[object], size: int,
        seed: int, stage: str,
    ) -> None:  # fmt: skip
        self.data = data
        self.run_of = list(run_of)
        self.keys = list(keys)
        self.counts = [len(data.rows[r]) for r in self.run_of]
        self.sizes = [max(1, min(size, count)) for count in self.counts]  # of each member's own
        self.size = max(self.sizes)
        self.per_epoch = [c // own for c, own in zip(self.counts, self.sizes, strict=True)]
        self.seed = seed
        self.stage = stage
        self.scale = torch.tensor(
            [c / own for c, own in zip(self.counts, self.sizes, strict=True)],
            device=data.device, dtype=data.dtype,
        )  # fmt: skip
        self._real: Tensor | None = None  # [M, B], 0 where a short run is padded
        if min(self.sizes) < self.size:
            real = torch.arange(self.size) < torch.tensor(self.sizes)[:, None]
            self._real = real.to(data.device, data.dtype)
        self._runs = torch.tensor(self.run_of)
        self._orders: dict[tuple[int, int], Tensor] = {}
        self._block: tuple[int, Any, Any, Tensor | None] | None = None
        x, y = data.take(data.rows[0][:1], torch.tensor(0))
        row = sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
        self.block = max(1, min(64, _BLOCK_BYTES // max(1, row * self.size * len(self.keys))))

    def epoch_steps(self) -> int:
        return max(self.per_epoch)

    def _order(self, m: int, epoch: int) -> Tensor:
        """The rows of member m in the order of an epoch."""
        key = (m, epoch)
        if key not in self._orders:
            self._orders = {k: v for k, v in self._orders.items() if k[1] >= epoch - 1}
            g = generator("batches", self.seed, self.stage, self.keys[m], epoch)
            rows = self.data.rows[self.run_of[m]]
            self._orders[key] = rows[torch.randperm(self.counts[m], generator=g)]
        return self._orders[key]

    def index(self, t: int, steps: int) -> Tensor:
        """Row numbers of steps t … t + steps − 1: [steps, M, B]."""
        columns = []
        for m, (per_epoch, size) in enumerate(zip(self.per_epoch, self.sizes, strict=True)):
            parts, at, left = [], t, steps
            while left > 0:
                epoch, step = divmod(at, per_epoch)
                count = min(left, per_epoch - step)
                order = self._order(m, epoch)
                parts.append(order[step * size : (step + count) * size])
                at, left = at + count, left - count
            own = torch.cat(parts).reshape(steps, size)
            columns.append(torch.cat([own, own[:, :1].expand(-1, self.size - size)], 1))
        return torch.stack(columns, dim=1)

    def batch(self, t: int) -> Batch:
        if self._block is None or not self._block[0] <= t < self._block[0] + self.block:
            start = t - t % self.block
            index = self.index(start, self.block)
            x, y = self.data.take(index, self._runs[None, :, None])
            weight = _gather_weight(self.data, index)
            if self._real is not None:
                weight = self._real.expand(index.shape) if weight is None else weight * self._real
            self._block = (start, x, y, weight)
        start, x, y, weight = self._block
        j = t - start
        shared = len(self.keys) == 1
        pick = (lambda v: v[j, 0]) if shared else (lambda v: v[j])
        return Batch(
            tree_map(pick, x), tree_map(pick, y), self.scale,
            None if weight is None else weight[j], shared,
        )  # fmt: skip


class Pass:
    """Every row exactly once, in order: `steps` batches; short runs are padded with weight 0."""

    def __init__(self, data: Data, run_of: Sequence[int], size: int | None = None) -> None:
        self.data = data
        self.run_of = list(run_of)
        counts = [len(data.rows[r]) for r in self.run_of]
        self.longest = max(counts)
        self.size = self.longest if size is None else max(1, min(size, self.longest))
        self.steps = math.ceil(self.longest / self.size)
        self.single = len(set(self.run_of)) == 1
        self.scale = torch.ones(len(self.run_of), device=data.device, dtype=data.dtype)
        self._cache: Batch | None = None

    def batch(self, t: int) -> Batch:
        if self._cache is not None:
            return self._cache
        start = t % self.steps * self.size  # "all" repeats the one batch at every step
        stop = min(start + self.size, self.longest)
        if self.single:
            run = self.run_of[0]
            index = self.data.rows[run][start:stop]
            x, y = self.data.take(index, torch.tensor(run))
            members = index.expand(len(self.run_of), -1)
            batch = Batch(x, y, self.scale, _gather_weight(self.data, members))
        else:
            index, real = self._padded(start, stop)
            x, y = self.data.take(index, torch.tensor(self.run_of)[:, None])
            weight = _gather_weight(self.data, index)
            real = real.to(self.data.device, self.data.dtype)
            if weight is not None:
                real = real * weight
            padded = weight is not None or not bool(real.all())
            batch = Batch(x, y, self.scale, real if padded else None, shared=False)
        if self.steps == 1:
            self._cache = batch
        return batch

    def _padded(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        index = torch.zeros(len(self.run_of), stop - start, dtype=torch.long)
        real = torch.zeros(index.shape, dtype=torch.bool)
        for m, r in enumerate(self.run_of):
            rows = self.data.rows[r][start:stop]
            index[m, : len(rows)] = rows
            index[m, len(rows) :] = self.data.rows[r][0]
            real[m, : len(rows)] = True
        return index, real


def _gather_weight(data: Data, index: Tensor) -> Tensor | None:
    """Weights of rows [..., M, B]."""
    if data.weight is None:
        return None
    index = index.to(data.weight.device)
    if data.weight.ndim == 1:
        return data.weight[index]
    members = torch.arange(data.weight.shape[0], device=index.device)[:, None]
    return data.weight[members, index]
