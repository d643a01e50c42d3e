"""Networks that can be rebuilt from a name and JSON settings.

A saved posterior holds numbers, not code. A network made by a registered builder remembers
(builder name, settings) in `doxa_builder`, so `doxa.load(path)` can make it again; any other
network is handed over by the user at `doxa.load(path, net=...)`.

    @register_net("two-layer")
    def two_layer(inputs: int, outputs: int, width: int = 64) -> nn.Module: ...
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn

from doxa.errors import ModelError, did_you_mean

__all__ = ["FilterResponseNorm", "build", "builder_of", "lenet5", "mlp", "register_net", "resnet20"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


P = ParamSpec("P")
Builder = tuple[str, dict[str, Any]]  # the registered name and its JSON-able settings

_BUILDERS: dict[str, Callable[..., nn.Module]] = {}

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky-relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
}


def register_net(name: str) -> Callable[[Callable[P, nn.Module]], Callable[P, nn.Module]]:
    """Make a builder's networks rebuildable under `name`. Its arguments must be JSON-able."""

    def decorate(builder: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
        known = _BUILDERS.get(name)
        if known is not None and inspect.unwrap(known).__qualname__ != builder.__qualname__:
            raise ModelError(f"a network builder named {name!r} is registered already")
        signature = inspect.signature(builder)

        @functools.wraps(builder)
        def build_and_remember(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            settings = _as_json(name, dict(bound.arguments))
            net = builder(*args, **kwargs)
            net.doxa_builder = (name, settings)  # type: ignore[assignment]
            return net

        _BUILDERS[name] = build_and_remember
        return build_and_remember

    return decorate


def build(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """The network that the builder registered as `name` makes from its settings."""
    if name not in _BUILDERS:
        raise ModelError(
            f"no network builder is registered as {name!r}{did_you_mean(name, sorted(_BUILDERS))} "
            "(import the module that registers it first, or hand over the network itself)"
        )
    try:
        return _BUILDERS[name](**kwargs)
    except TypeError as error:
        raise ModelError(
            f"network builder {name!r} does not take these settings: {error}"
        ) from error


def builder_of(net: nn.Module) -> Builder | None:
    """(name, settings) of a network made by a registered builder, else None."""
    return getattr(net, "doxa_builder", None)


def _as_json(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"network builder {name!r}: settings must be JSON-able; {error}"
        ) from error


@register_net("mlp")
def mlp(
    inputs: int,
    outputs: int,
    hidden: Sequence[int] = (50,),
    activation: str = "relu",
    dropout: float = 0.0,
) -> nn.Module:
    """A fully connected network; `dropout` > 0 puts a dropout layer after every activation."""
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise ModelError(f"mlp: hidden is a list of widths, such as (50,), not {hidden!r}")
    widths = [inputs, *hidden, outputs]
    if not all(isinstance(width, Integral) and width >= 1 for width in widths):
        raise ModelError(f"mlp: widths must be whole numbers, at least 1, not {widths}")
    if not 0.0 <= dropout < 1.0:
        raise ModelError(f"mlp: dropout must be in [0, 1), not {dropout}")
    nonlinearity = _activation(activation)
    layers: list[nn.Module] = []
    width = inputs
    for units in hidden:
        layers += [nn.Linear(width, units), nonlinearity()]
        if dropout > 0.0:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@register_net("lenet5")
def lenet5(
    inputs: int = 1, outputs: int = 10, size: int = 28, activation: str = "relu"
) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) for square images of `size` pixels and `inputs` channels."""
    after = (size // 2 - 4) // 2  # padded 5x5, pool, 5x5, pool
    if after < 1:
        raise ModelError(f"lenet5: images must be at least 12 pixels wide, not {size}")
    nonlinearity = _activation(activation)
    return nn.Sequential(
        nn.Conv2d(inputs, 6, 5, padding=2),
        nonlinearity(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nonlinearity(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * after * after, 120),
        nonlinearity(),
        nn.Linear(120, 84),
        nonlinearity(),
        nn.Linear(84, outputs),
    )


@register_net("resnet20")
def resnet20(
    inputs: int = 3, outputs: int = 10, width: int = 16, groups: int = 8, norm: str = "group"
) -> nn.Module:
    """ResNet-20 for small images (He et al. 2016), by default with GroupNorm.

    Without batch statistics a prediction depends on its own row only, as every method here needs;
    so it does with norm="frn" (filter response normalisation). norm="batch" is the paper's.
    """
    if norm not in _NORMS:
        raise ModelError(f"unknown norm {norm!r}{did_you_mean(norm, _NORMS)}")
    if norm == "group" and width % groups:
        raise ModelError(f"resnet20: groups={groups} must divide width={width}")
    make = functools.partial(_NORMS[norm], groups)
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, width, 3, padding=1, bias=False), make(width), nn.ReLU()
    ]  # fmt: skip
    channels = width
    for stage in range(3):
        for block in range(3):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_Residual(channels, width * 2**stage, stride, make))
            channels = width * 2**stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs)
    )


class FilterResponseNorm(nn.Module):
    """max(γ x / √(ν² + ε) + β, τ), with ν² the mean of x² over a channel's positions: each row by
    itself, and a threshold that is learned (Singh & Krishnan 2020)."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        shape = (channels, 1, 1)
        self.weight, self.bias, self.threshold = (
            nn.Parameter(torch.empty(shape)) for _ in range(3)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.threshold)

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.square().mean((-2, -1), keepdim=True) + self.eps).rsqrt()
        return torch.maximum(self.weight * x * scale + self.bias, self.threshold)


_NORMS: dict[str, Callable[[int, int], nn.Module]] = {
    "group": nn.GroupNorm,
    "batch": lambda groups, channels: nn.BatchNorm2d(channels),
    "frn": lambda groups, channels: FilterResponseNorm(channels),
}


class _Residual(nn.Module):
    """relu(shortcut(x) + body(x)); the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, make: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            make(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            make(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), make(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.body(x))


def _activation(name: str) -> type[nn.Module]:
    if name not in _ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r}{did_you_mean(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]
