"""The positions of the tensors of a parameter dict in one flat vector.

Every stacked state contains parameters as `[M, P]`, with one row per member. A row is the
concatenation of all trained tensors. An optimiser step, a norm, a momentum or a draw of noise is
therefore one operation for all tensors of all members.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]

LARGE = 1_000_000  # number of weights from which copies of whole rows are avoided


@dataclass(frozen=True)
class Entry:
    """One tensor of the parameter dict.

    Parameters
    ----------
    name : str
        Its name.
    shape : tuple of int
        Its shape, without a member axis.
    fan_in : int
        The number of inputs of each output of its layer.
    centre : float
        The centre of its prior, which is 1 for normalisation scales.
    """

    name: str
    shape: tuple[int, ...]
    fan_in: int = 1
    centre: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class NeedsRow(Exception):
    """Raised if an operation uses a `SplitRow` as a row, and not through its tensors."""


class SplitRow(Tensor):
    """Rows of weights [..., P] whose tensors, in `parts`, have gradients, but not the rows.

    `Layout.unflatten` returns the tensors. The shape and the type of the rows can be read, and
    `detach` returns their values. Any other operation on the rows raises `NeedsRow`, because its
    gradient would be lost.
    """

    parts: Params

    @staticmethod
    def of(flat: Tensor, layout: Layout) -> SplitRow:
        """Split rows `flat` without a gradient into tensors that are views of them."""
        row = flat.as_subclass(SplitRow)
        tensors = layout.unflatten(flat)
        row.parts = {name: part.detach().requires_grad_() for name, part in tensors.items()}
        return row

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _WITHOUT_GRADIENT:
            raise NeedsRow
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_WITHOUT_GRADIENT: set[Any] = {Tensor.detach, Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}
_WITHOUT_GRADIENT |= {getattr(Tensor, k).__get__ for k in ("shape", "ndim", "dtype", "device")}


class Layout:
    """An ordered list of entries, with conversions between dicts and flat vectors.

    Parameters
    ----------
    entries : tuple of Entry
        The tensors, in the order of the flat vector.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.names = tuple(entry.name for entry in entries)
        self.sizes = [entry.size for entry in entries]
        self.size = sum(self.sizes)  # P
        ends = itertools.accumulate(self.sizes)
        self.slices = {
            e.name: slice(end - e.size, end) for e, end in zip(entries, ends, strict=True)
        }

    def unflatten(self, flat: Tensor) -> Params:
        """Convert [..., P] to {name: [..., *shape]}. It uses `split`, whose backward pass is a
        single `cat`."""
        if isinstance(flat, SplitRow):
            return dict(flat.parts)
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return {
            entry.name: part.reshape(lead + entry.shape)
            for entry, part in zip(self.entries, parts, strict=True)
        }

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Convert {name: [..., *shape]} to [..., P]."""
        parts = []
        for entry in self.entries:
            value = params[entry.name]
            lead = value.shape[: value.ndim - len(entry.shape)]
            parts.append(value.reshape((*lead, entry.size)))
        return torch.cat(parts, dim=-1)

    def index(self, names: Iterable[str]) -> Tensor:
        """The positions of the named entries in the flat vector, in the order of the layout."""
        wanted = set(names)
        ranges = [torch.arange(s.start, s.stop) for n, s in self.slices.items() if n in wanted]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)

    def select(self, names: Sequence[str]) -> Layout:
        wanted = set(names)
        return Layout(tuple(entry for entry in self.entries if entry.name in wanted))

    def per_element(self, values: Iterable[float]) -> Tensor:
        """A vector [P] in which the number of each entry is repeated for its elements."""
        return torch.repeat_interleave(
            torch.tensor(list(values), dtype=torch.float64), torch.tensor(self.sizes)
        )
