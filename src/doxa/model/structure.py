"""A copy of a network, and what is known of it: where each weight lies, what layers take and give.

`Structure` is what a `Model` knows; what it computes is in `doxa.model.model`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from doxa import likelihoods, nets
from doxa.errors import ModelError
from doxa.linalg.layout import Entry, Layout, Params
from doxa.model.inspection import (
    Start,
    draws_itself,
    duplicate,
    fresh_rows,
    look,
    trainable,
)
from doxa.model.layers import Shape, Site, swap_dropout, unfuse_attention
from doxa.model.outputs import Name, output_name
from doxa.model.plan import Plan
from doxa.model.subset import Subset, chosen
from doxa.priors import BoundPrior, Normal, bind


class _Turn:
    """A lock that a copy has anew, and that the same thread may take again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return _Turn, ()


class Structure:
    """A network of its own, never the user's, with the likelihood and the prior of its weights.
    The arguments are those of `Model`."""

    def __init__(
        self,
        net: nn.Module,
        likelihood: Any = None,
        prior: Any = None,
        subset: Subset = "all",
        *,
        output: Name = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            given = f"the class {net.__name__}" if isinstance(net, type) else type(net).__name__
            raise ModelError(f"net must be a torch.nn.Module, an object, not {given}")
        self.assumed = likelihood is None  # nobody said what the outputs mean
        self.likelihood = likelihoods.likelihood("gaussian" if self.assumed else likelihood)
        self.prior = Normal(1.0) if prior is None else prior
        self.default_prior = prior is None  # nobody chose it: a method may find its scale
        self.subset = subset
        self.named = None if output is None else output_name(output)
        self.builder = nets.builder_of(net)
        self.net = duplicate(net).eval()
        swap_dropout(self.net)
        unfuse_attention(self.net)
        self.output: Any = None  # the shape of one row's output, once seen
        self.rows_first = True  # every layer with noise, or trainables of its own, sees rows first
        self.sites: dict[str, Site] = {}  # the noise that layers take, by buffer
        self.masked: dict[str, str] = {}  # the parametrised layer that each dropout layer feeds
        self.head: str | None = None  # the trainable layer that ran last
        self.last: str | None = None  # the layer with weights that ran last, perhaps a frozen one
        self.widths: list[tuple[str, int]] = []  # numbers each layer gives for one row, in order
        self.calls: dict[str, tuple[Shape | None, ...]] = {}  # each layer's inputs for one row
        self.written: tuple[str, ...] = ()  # buffers that training writes, beside BatchNorm's
        self.drew = False  # whether a training pass drew random numbers of its own
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        kinds = {p.dtype for p in trainable}
        if len(kinds) > 1:
            raise ModelError(
                f"parameters of mixed types {sorted(map(str, kinds))}; cast the network"
            )
        self.dtype = kinds.pop() if kinds else torch.get_default_dtype()
        first = next(chain(self.net.parameters(), self.net.buffers()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._derive()

    def _derive(self) -> None:
        """What follows from the network alone, where it is another one."""
        self.turn = _Turn()  # a pass puts its tensors into the network: one thread at a time
        self.fixed, self.terms, self.momenta, self.batch_norm = look(self.net)
        # buffers that training changes: each member has its own
        self.tracked = (*self.momenta, *(name for name in self.written if name in self.fixed))
        self.draws = self.drew or draws_itself(self.net)
        self.forget("layout", "layers", "plan", "bound_prior")

    def forget(self, *names: str) -> None:
        """What is found again when asked for; by default what depends on the likelihood."""
        for name in names or ("layout", "bound_prior"):
            self.__dict__.pop(name, None)

    def unseen(self) -> Self:
        """A copy with a network of its own, that has seen no row."""
        new = copy.copy(self)
        new.net, new.output = duplicate(self.net), None
        new._derive()
        return new

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """A copy on another device and in another floating type; itself, if it lies there."""
        tensors = [*self.net.parameters(), *self.net.buffers()]
        cast = (t.dtype for t in tensors if t.is_floating_point() or t.is_complex())
        if {self.dtype, *cast} == {dtype} and {t.device for t in tensors} == {torch.device(device)}:
            return self
        moved = copy.copy(self)
        moved.net = duplicate(self.net).to(device=device, dtype=dtype)
        moved.device, moved.dtype = torch.empty(0, device=device).device, dtype
        moved._derive()
        return moved

    def meaning(self, likelihood: Any) -> Self:
        """A copy whose outputs mean something else."""
        changed = copy.copy(self)
        changed.likelihood, changed.assumed = likelihoods.likelihood(likelihood), False
        changed.forget()
        return changed

    @cached_property
    def layout(self) -> Layout:
        """Where each weight lies; the likelihood's own parameters come last."""
        entries, _ = trainable(self.net)
        for name, value in self._likelihood_parameters().items():
            entries.append(Entry(name, tuple(value.shape)))
        if not entries:
            raise ModelError(
                "the network has no trainable parameter: requires_grad is False on all"
            )
        return Layout(tuple(entries))

    @cached_property
    def layers(self) -> Layout:
        """Trainables that rewritten layers brought, which are no weights."""
        return Layout(tuple(trainable(self.net)[1]))

    def _likelihood_parameters(self) -> Params:
        output = (1,) if self.output is None else self.output
        return {f"likelihood.{k}": v for k, v in self.likelihood.parameters(output).items()}

    @cached_property
    def plan(self) -> Plan | None:
        if self.tracked:  # a replayed graph would not write them
            return None
        return Plan.of(self.net)

    @cached_property
    def bound_prior(self) -> BoundPrior:
        return bind(self.prior, self.layout).to(self.device, self.dtype)

    @property
    def subset_names(self) -> tuple[str, ...]:
        """Names of the network's parameters that are uncertain, in layout order."""
        names = [name for name in self.layout.names if not name.startswith("likelihood.")]
        return chosen(self.subset, names, self.head)

    def width(self, layers: Collection[str] | None = None) -> int:
        """Numbers in the widest activation of one row, from the first of some layers on."""
        if not layers:
            return max((size for _, size in self.widths), default=1)
        names = [name for name, _ in self.widths]
        first = min((names.index(n) for n in layers if n in names), default=0)
        return max((size for _, size in self.widths[first:]), default=1)

    def given(self) -> Tensor:
        """The network's own weights and the likelihood's starting values, flat [P]."""
        named = dict(self.net.named_parameters())
        values = {name: named[name].detach() for name in self.layout.names if name in named}
        values |= self._likelihood_parameters()
        return self.layout.flatten({k: v.to(self.device, self.dtype) for k, v in values.items()})

    def fresh(self, starts: Sequence[Start]) -> Tensor:
        """Newly initialised weights for each (seed, member id), [M, P]."""
        own = {k: v.to(self.dtype) for k, v in self._likelihood_parameters().items()}
        rows = fresh_rows(self.net, self.layout, starts, own)
        return rows.to(self.device, self.dtype)

    def fresh_layers(self, starts: Sequence[Start]) -> Tensor:
        """The same of what layers brought, [M, Q]."""
        return fresh_rows(self.net, self.layers, starts).to(self.device, self.dtype)
