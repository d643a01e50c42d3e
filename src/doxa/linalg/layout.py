"""The positions of the tensors of a parameter dict in one flat vector.

Every stacked state in doxa holds parameters as `[M, P]`: one row per member. A row is the
concatenation of all trainable tensors, so an optimiser step, a norm, a momentum or a noise
draw is one operation for all tensors of all members.
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

LARGE = 1_000_000  # weights of a network from which nothing of the size of a row is copied


@dataclass(frozen=True)
class Entry:
    """One tensor of the parameter dict."""

    name: str
    shape: tuple[int, ...]
    fan_in: int = 1
    centre: float = 0.0  # the centre of its prior: 1 for normalisation scales

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class NeedsRow(Exception):
    """Rows of weights of which only the tensors are given (`SplitRow`) were used as rows."""


class SplitRow(Tensor):
    """Rows of weights [..., P] of which only the tensors in `parts` have gradients.

    `Layout.unflatten` returns these tensors. The rows have a shape and a type, and `detach` returns
    their values. Any other operation raises `NeedsRow`, because its gradient would be lost.
    """

    parts: Params

    @staticmethod
    def of(flat: Tensor, layout: Layout) -> SplitRow:
        """Rows without a gradient, split into tensors that are views of them."""
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
    """An ordered list of entries, with conversions between dicts and flat vectors."""

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
        """[..., P] to {name: [..., *shape]}. `split` keeps the backward pass a single `cat`."""
        if isinstance(flat, SplitRow):
            return dict(flat.parts)
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return {
            entry.name: part.reshape(lead + entry.shape)
            for entry, part in zip(self.entries, parts, strict=True)
        }

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """{name: [..., *shape]} to [..., P]."""
        parts = []
        for entry in self.entries:
            value = params[entry.name]
            lead = value.shape[: value.ndim - len(entry.shape)]
            parts.append(value.reshape((*lead, entry.size)))
        return torch.cat(parts, dim=-1)

    def index(self, names: Iterable[str]) -> Tensor:
        """Positions in the flat vector of the named entries, in layout order."""
        wanted = set(names)
        ranges = [torch.arange(s.start, s.stop) for n, s in self.slices.items() if n in wanted]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)

    def select(self, names: Sequence[str]) -> Layout:
        wanted = set(names)
        return Layout(tuple(entry for entry in self.entries if entry.name in wanted))

    def per_element(self, values: Iterable[float]) -> Tensor:
        """One number per entry, repeated for its elements: [P]."""
        return torch.repeat_interleave(
            torch.tensor(list(values), dtype=torch.float64), torch.tensor(self.sizes)
        )
