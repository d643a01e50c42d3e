"""A module as a pure function of a flat row of its parameters.

The modules of a method besides the network (a flow, an encoder, a kernel, an auxiliary network) are
wrapped in a `Functional`. It has a layout, is initialised for each member, and is called on stacked
rows [M, P].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doxa.errors import StoreError
from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.inspection import Start, fresh_rows, look


def made_small(make: Callable[[], Functional], most: int) -> Functional:
    """The module that `make` builds, on the meta device, where tensors have shapes but no memory.
    An error if it has more than `most` numbers: stored settings could describe a module that is too
    large to build."""
    try:
        with torch.device("meta"):
            made = make()
    except NotImplementedError:  # an operation that the meta device does not support
        made = make()
    size = sum(t.numel() for t in made.net.parameters())
    if size > most:
        raise StoreError(f"a module of {size:,} numbers, of which the artefact holds {most:,}")
    return made


class Functional:
    """A copy of a module, called with its parameters as an argument."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)

    @cached_property
    def layout(self) -> Layout:
        named = self.net.named_parameters()
        return Layout(tuple(Entry(n, tuple(p.shape)) for n, p in named if p.requires_grad))

    @cached_property
    def fixed(self) -> Params:
        """Frozen parameters and buffers, the same for all members."""
        return look(self.net).fixed

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Functional:
        moved = Functional(self.net)
        moved.net = moved.net.to(device=device, dtype=dtype)
        return moved

    def forward(self, params: Mapping[str, Tensor], *args: Any) -> Any:
        """The output for one member's tensors."""
        return functional_call(self.net, {**self.fixed, **params}, args)

    def given(self) -> Tensor:
        """The module's current values, flat [P]."""
        return self.layout.flatten({n: p.detach() for n, p in self.net.named_parameters()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised values for each (seed, member id), [M, P]."""
        like = next(iter(self.net.parameters()))
        return fresh_rows(self.net, self.layout, starts).to(like)
