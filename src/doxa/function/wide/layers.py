"""Layers of an architecture as plain data: what they do to covariances, and what they ask for.

A layer without a scale of its own has the architecture's. They can be compared, printed and saved.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from doxa import store
from doxa.errors import ModelError
from doxa.function.wide import activations, covariance, images
from doxa.function.wide.covariance import Kernels, Scale


class Layer:
    """A map of covariances. Its class says whether its units are Gaussian: "made" so by sums over
    many weights, "asked" of its input and kept, "lost", or "kept" as they are."""

    gaussian: ClassVar[str] = "kept"
    pools: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        """Covariances after it, with the architecture's scales."""


@store.register("wide-dense")
@dataclass(frozen=True)
class Dense(Layer):
    """σ_w/√n Wφ + σ_b b."""

    weight_std: float | None = None
    bias_std: float | None = None
    gaussian: ClassVar[str] = "made"

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return covariance.dense(k, *scales(self, weight_std, bias_std))


@store.register("wide-conv")
@dataclass(frozen=True)
class Conv(Layer):
    """A convolution; one size, stride, padding and dilation for each axis of the image."""

    size: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    circular: bool = False
    weight_std: float | None = None
    bias_std: float | None = None
    gaussian: ClassVar[str] = "made"

    def __post_init__(self) -> None:
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            given = getattr(self, name) or (default,) * len(self.size)
            if len(given) != len(self.size):
                raise ModelError(f"a convolution of size {self.size} has {name} {given}")
            object.__setattr__(self, name, tuple(given))

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return images.convolve(
            k, self.size, *scales(self, weight_std, bias_std), stride=self.stride,
            padding=self.padding, dilation=self.dilation, circular=self.circular,
        )  # fmt: skip


@store.register("wide-activation")
@dataclass(frozen=True)
class Activation(Layer):
    """One of `activations.NAMED`. slope: of "relu" below zero."""

    name: str = "relu"
    slope: float = 0.0
    gaussian: ClassVar[str] = "lost"

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        if self.name == "relu":
            return activations.rectified(k, self.slope)
        return activations.activate(k, self.name)


@store.register("wide-layer-norm")
@dataclass(frozen=True)
class LayerNorm(Layer):
    """Over channels, or over channels and pixels."""

    eps: float = 1e-5
    over_pixels: bool = False
    gaussian: ClassVar[str] = "asked"

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return covariance.layer_norm(k, self.eps, self.over_pixels)


@store.register("wide-average")
@dataclass(frozen=True)
class Average(Layer):
    """Average pooling; size () is over all pixels."""

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    pools: ClassVar[bool] = True

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        if not self.size:
            return images.global_average(k)
        return images.average(k, self.size, self.stride or self.size)


@store.register("wide-flatten")
@dataclass(frozen=True)
class Flatten(Layer):
    """An image as one vector."""

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return images.flatten(k)


@store.register("wide-residual")
@dataclass(frozen=True)
class Residual(Layer):
    """x + block(x), or shortcut(x) + block(x)."""

    block: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return covariance.add(
            through(self.block, k, weight_std, bias_std),
            through(self.shortcut, k, weight_std, bias_std),
        )


def through(layers: tuple[Layer, ...], k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
    for layer in layers:
        k = layer(k, weight_std, bias_std)
    return k


def scales(layer: Dense | Conv, weight_std: Scale, bias_std: Scale) -> tuple[Scale, Scale]:
    """A layer's own, else the architecture's."""
    return (
        weight_std if layer.weight_std is None else layer.weight_std,
        bias_std if layer.bias_std is None else layer.bias_std,
    )
