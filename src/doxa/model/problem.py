"""What is being fitted: a network, a bare log density, or functions of the method's own.

    Network        a `Model` and rows: log p(θ) + Σ log p(y | f(x; θ))
    LogDensity     any log density of a flat vector; there are no rows
    OwnFunctions   nothing but what the method brings (a GP, a linear model, a neural process)

Each may carry `modules` that the method brought besides (a flow, an auxiliary network, a kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from doxa.errors import MethodError
from doxa.linalg.layout import Layout
from doxa.model import Model
from doxa.model.functional import Functional

_Modules = Mapping[str, Functional]


@dataclass(frozen=True)
class Problem:
    """What every kind of problem answers."""

    modules: _Modules = field(default_factory=dict, kw_only=True)

    compared = "functions"  # what chains are compared by

    @property
    def model(self) -> Model | None:
        """The network, where there is one."""
        return None

    @property
    def net(self) -> Model:
        """The network, for a method that needs one."""
        raise MethodError("this method needs a network, and there is none")

    @property
    def layout(self) -> Layout:
        """How the weights lie in a flat row."""
        return Layout(())

    @property
    def tracked(self) -> tuple[str, ...]:
        """Buffers that training changes."""
        return ()

    @property
    def batch_norm(self) -> bool:
        return False

    @property
    def partial(self) -> bool:
        """Whether only some weights are uncertain."""
        return False

    def bring(self, **modules: nn.Module) -> Any:
        """The same problem with modules of the method's own. They get a layout, members, device,
        type and checkpoints as a network's weights do: each is an entry of `run.init_modules()`."""
        own = {name: Functional(module) for name, module in modules.items()}
        return replace(self, modules={**self.modules, **own})

    def to(self, device: torch.device, dtype: torch.dtype) -> Any:
        moved = {name: module.to(device, dtype) for name, module in self.modules.items()}
        return replace(self, modules=moved)


@dataclass(frozen=True)
class Network(Problem):
    """A network, its likelihood and its prior."""

    believed: Model

    @property
    def model(self) -> Model:
        return self.believed

    @property
    def net(self) -> Model:
        return self.believed

    @property
    def layout(self) -> Layout:
        return self.believed.layout

    @property
    def tracked(self) -> tuple[str, ...]:
        return self.believed.tracked

    @property
    def batch_norm(self) -> bool:
        return self.believed.batch_norm

    @property
    def partial(self) -> bool:
        return self.believed.subset != "all"

    def rewrite(self, rule: Callable[[str, nn.Module], nn.Module | None]) -> Network:
        """With layers of a copy of the network replaced: see `Model.rewrite`."""
        return replace(self, believed=self.believed.rewrite(rule))

    def to(self, device: torch.device, dtype: torch.dtype) -> Network:
        return replace(super().to(device, dtype), believed=self.believed.to(device, dtype))


@dataclass(frozen=True)
class LogDensity(Problem):
    """A bare log density: [M, P] to [M]."""

    function: Callable[[Tensor], Tensor]
    flat: Layout

    compared = "parameters"

    @property
    def layout(self) -> Layout:
        return self.flat

    @property
    def net(self) -> Model:
        raise MethodError(
            "this method needs a network and data; a bare log density can be sampled with "
            "methods that only ask for its value and gradient: hmc, nuts, metropolis"
        )


@dataclass(frozen=True)
class OwnFunctions(Problem):
    """What the method brings, and no network."""
