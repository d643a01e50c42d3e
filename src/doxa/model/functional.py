"""A module as a pure function of one flat row of its trainables.

What a method brings besides a network (a flow, an encoder, a kernel, an auxiliary network) becomes
a `Functional`: it has a layout, starts anew for each member, and is called on stacked rows [M, P].
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.inspection import reset
from doxa.noise import digest

log = logging.getLogger("doxa")

Start = tuple[int, object]  # a seed and a member's id


class Functional:
    """A copy of a module, called with its trainables as an argument."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net)

    @cached_property
    def layout(self) -> Layout:
        named = self.net.named_parameters()
        return Layout(tuple(Entry(n, tuple(p.shape)) for n, p in named if p.requires_grad))

    @cached_property
    def fixed(self) -> Params:
        """Frozen parameters and buffers, the same for all members."""
        return fixed_tensors(self.net)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Functional:
        moved = Functional(self.net)
        moved.net = moved.net.to(device=device, dtype=dtype)
        return moved

    def forward(self, params: Mapping[str, Tensor], *args: Any) -> Any:
        """The output for one member's tensors."""
        return functional_call(self.net, {**self.fixed, **params}, args)

    def given(self) -> Tensor:
        """The module's own values, flat [P]."""
        return self.layout.flatten({n: p.detach() for n, p in self.net.named_parameters()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised values for each (seed, member id), [M, P]."""
        like = next(iter(self.net.parameters()))
        return fresh_rows(self.net, self.layout, starts).to(like)


def fixed_tensors(net: nn.Module) -> Params:
    frozen = {n: p.detach() for n, p in net.named_parameters() if not p.requires_grad}
    return frozen | dict(net.named_buffers())


def fresh_rows(
    net: nn.Module,
    layout: Layout,
    starts: Sequence[Start],
    others: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """What is in the layout of a newly initialised net, for each (seed, member id), [M, P]; the
    global RNG is left as it was. `others` are entries of the layout that are not the net's."""
    net = copy.deepcopy(net).cpu()
    missed: set[str] = set()
    rows = []
    with torch.random.fork_rng(devices=[]):
        for seed, member in starts:
            # not torch.manual_seed, which would reseed the GPUs' generators too
            torch.default_generator.manual_seed(digest("init", seed, member) & 0xFFFFFFFF)
            missed = reset(net)
            values = {n: p.detach() for n, p in net.named_parameters()} | dict(others or {})
            rows.append(layout.flatten(values).clone())
    missed &= set(layout.names)
    if missed:
        log.warning(
            "init='fresh' cannot re-initialise %s: no reset_parameters sets them, so every "
            "member starts there from the given values", ", ".join(sorted(missed))
        )  # fmt: skip
    return torch.stack(rows)
