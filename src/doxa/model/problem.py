"""What is being fitted: a network, a bare log density, or functions of the method's own.

    Network        a `Model` and rows: log p(θ) + Σ log p(y | f(x; θ))
    LogDensity     any log density of a flat vector; there are no rows
    OwnFunctions   nothing but what the method brings (a GP, a linear model, a neural process)

Each may carry `modules` that the method brought besides (a flow, an auxiliary network, a kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa.errors import MethodError
from doxa.linalg.layout import Layout
from doxa.model import Model
from doxa.model.functional import Functional
from doxa.model.subset import Subset

_Modules = Mapping[str, Functional]


@dataclass(frozen=True)
class Problem:
    """What every kind of problem answers."""

    model: Model | None = field(default=None, kw_only=True)  # the network, where there is one
    modules: _Modules = field(default_factory=dict, kw_only=True)

    compared: ClassVar[str] = "functions"  # what chains are compared by
    missing: ClassVar[str] = "this method needs a network, and there is none"

    @property
    def net(self) -> Model:
        """The network, for a method that needs one."""
        if self.model is None:
            raise MethodError(self.missing)
        return self.model

    @property
    def layout(self) -> Layout:
        """How the weights lie in a flat row."""
        return Layout(()) if self.model is None else self.model.layout

    @property
    def batch_norm(self) -> bool:
        return self.model is not None and self.model.batch_norm

    @property
    def joins_rows(self) -> bool:
        """Whether a training pass depends on which rows are in it together: BatchNorm, or another
        buffer that is learned from a batch."""
        return self.batch_norm or (self.model is not None and bool(self.model.tracked))

    @property
    def partial(self) -> bool:
        """Whether only some weights are uncertain."""
        return self.model is not None and self.model.subset != "all"

    def bring(self, **modules: nn.Module) -> Any:
        """The same problem with modules of the method's own. They get a layout, members, device,
        type and checkpoints as a network's weights do: each is an entry of `run.init_modules()`."""
        own = {name: Functional(module) for name, module in modules.items()}
        return replace(self, modules={**self.modules, **own})

    def to(self, device: torch.device, dtype: torch.dtype) -> Any:
        model = None if self.model is None else self.model.to(device, dtype)
        moved = {name: module.to(device, dtype) for name, module in self.modules.items()}
        return replace(self, model=model, modules=moved)


@dataclass(frozen=True)
class Network(Problem):
    """A network, its likelihood and its prior."""

    model: Model = field()  # not to be left out

    def rewrite(
        self, rule: Callable[[str, nn.Module], nn.Module | None], subset: Subset | None = None
    ) -> Network:
        """With layers of a copy of the network replaced: see `Model.rewrite`."""
        return replace(self, model=self.model.rewrite(rule, subset))

    def freeze(self, subset: Subset) -> Network:
        """With the weights of a subset alone: see `Model.freeze`."""
        return replace(self, model=self.model.freeze(subset))


@dataclass(frozen=True)
class LogDensity(Problem):
    """A bare log density: [M, P] to [M]."""

    function: Callable[[Tensor], Tensor]
    flat: Layout

    compared = "parameters"
    missing = (
        "this method needs a network and data; a bare log density can be sampled with "
        "methods that only ask for its value and gradient: hmc, nuts, metropolis"
    )

    @property
    def layout(self) -> Layout:
        return self.flat


@dataclass(frozen=True)
class OwnFunctions(Problem):
    """What the method brings, and no network.

    inputs, targets: the shapes of one row of x (a tree of them) and of y.
    """

    inputs: Any = None
    targets: Any = None
