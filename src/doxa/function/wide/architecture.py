"""A whole architecture, and its kernels between rows, block by block.

    Architecture.fully_connected(depth=3, activation="relu")
    read(nn.Sequential(...))                                   see `reading.py`

Each block of rows of x by rows of x' passes through all layers before the next block, so that
memory beyond the result is bounded. With gradients, the tensors of a block are recomputed in the
backward pass. K of rows with themselves is symmetric: half of its blocks are copied.

`WideFunction` is the kernel of an architecture as a function of hyper-parameters, log σ_w and log
σ_b.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from doxa import store
from doxa.errors import ModelError, ShapeError
from doxa.function.wide import layers as covariance
from doxa.function.wide.layers import (
    Activation,
    Conv,
    Dense,
    Kernels,
    Layer,
    Residual,
    Scale,
    through,
)
from doxa.linalg.layout import Entry, Layout

_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # of one tensor: what stays in a CPU's cache


@store.register("wide-architecture")
@dataclass(frozen=True)
class Architecture:
    """Layers from the input to the output, which is a dense layer."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers or not isinstance(self.layers[-1], Dense):
            raise ModelError(
                "an infinitely wide network ends in a dense layer, whose outputs are Gaussian; "
                f"this one ends in {self.layers[-1] if self.layers else 'nothing'}"
            )
        _check_gaussian(self.layers, False)

    @classmethod
    def fully_connected(cls, depth: int = 3, activation: str = "relu") -> Architecture:
        """`depth` hidden layers."""
        return cls((*((Dense(), Activation(activation)) * depth), Dense()))

    @property
    def space(self) -> int:
        """The number of axes of its images; 0 if rows are vectors."""
        sizes = {len(layer.size) for layer in _all(self.layers) if isinstance(layer, Conv)}
        if len(sizes) > 1:
            raise ModelError(f"convolutions over {sorted(sizes)} axes in one network")
        return sizes.pop() if sizes else 0

    @property
    def paired(self) -> bool:
        """Whether all pairs of pixels are needed."""
        return any(layer.pools for layer in _all(self.layers))

    def kernels(
        self, x: Tensor, other: Tensor, weight_std: Scale, bias_std: Scale, ntk: bool = True
    ) -> Kernels:
        """K and Θ without blocks, of rows [..., N, D], or [..., N, C, *P] of images."""
        start = covariance.input_covariance(x, other, self.space, self.paired, ntk)
        return through(self.layers, start, weight_std, bias_std)

    def matrix(
        self, x: Tensor, other: Tensor | None = None, weight_std: Scale = 1.0,
        bias_std: Scale = 0.0, kind: str = "nngp", lead: int = 0,
    ) -> Tensor:  # fmt: skip
        """K ("nngp") or Θ ("ntk") between rows x [N, ...] and other [N', ...], or of x with itself.

        Scales are numbers, or [M]: then [M, N, N']. `lead` axes of x come before its rows.
        """
        left = self._rows(x, lead)
        right = left if other is None else self._rows(other, lead)
        rows, columns = self._block(left, right)

        def one(a: Tensor, b: Tensor, w: Scale, v: Scale) -> Tensor:
            k = self.kernels(a, b, w, v, kind == "ntk")
            return k.nngp if k.ntk is None else k.ntk

        scales = (weight_std, bias_std)
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, right, *scales)
        ):
            alone = rows >= left.shape[self._place] and columns >= right.shape[self._place]
            again: Any = one if alone else partial(checkpoint, one, use_reentrant=False)
            strips = [
                torch.cat([again(a, b, *scales) for _, b in self._blocks(right, columns)], -1)
                for _, a in self._blocks(left, rows)
            ]
            return torch.cat(strips, -2)
        shapes = [t.shape for t in scales if isinstance(t, Tensor)]
        members = torch.broadcast_shapes(left.shape[:lead], *shapes)
        place = self._place
        found = x.new_empty(*members, left.shape[place], right.shape[place])
        for i, a in self._blocks(left, rows):
            for j, b in self._blocks(right, columns):
                if other is None and j.stop <= i.start:
                    continue
                part = one(a, b, *scales)
                found[..., i, j] = part
                if other is None:
                    found[..., j, i] = part.mT
        return found

    def diagonal(
        self, x: Tensor, weight_std: Scale = 1.0, bias_std: Scale = 0.0, lead: int = 0
    ) -> Tensor:
        """K(x, x) of each row, [..., N]."""
        x = self._rows(x, lead)
        first = x.narrow(self._place, 0, 1)
        rows, _ = self._block(x, first)
        parts = [
            self.kernels(a, first, weight_std, bias_std, False).left
            for _, a in self._blocks(x, rows)
        ]
        return torch.cat(parts, -1)

    @property
    def _place(self) -> int:
        """The axis of the rows, counted from the end."""
        return -2 - self.space

    def _rows(self, x: Tensor, lead: int) -> Tensor:
        """[..., N, D], or [..., N, C, *P] of images."""
        if self.space == 0:
            return x.unsqueeze(-1) if x.ndim == lead + 1 else x.flatten(lead + 1)
        if x.ndim != lead + 2 + self.space:
            axes = "height, width" if self.space == 2 else "length"
            raise ShapeError(
                f"the network convolves over {self.space} axes: x must be [N, channels, {axes}], "
                f"not {list(x.shape)}"
            )
        return x

    def _block(self, x: Tensor, other: Tensor) -> tuple[int, int]:
        """The numbers of rows of x and of x' in a block."""
        size = _BLOCK_BYTES["cuda" if x.is_cuda else "cpu"] // x.element_size()
        pixels = x.shape[x.ndim - self.space :].numel()
        size = max(1, size // pixels ** (2 if self.paired else 1))
        rows, columns = x.shape[self._place], other.shape[self._place]
        columns = min(columns, max(1, size // min(rows, 64)))
        return max(1, size // columns), columns

    def _blocks(self, x: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
        total = x.shape[self._place]
        for start in range(0, total, rows):
            size = min(rows, total - start)
            yield slice(start, start + size), x.narrow(self._place, start, size)


def _all(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from _all(layer.block + layer.shortcut)


def _check_gaussian(layers: tuple[Layer, ...], gaussian: bool) -> bool:
    """Check that the inputs of activations and norms are Gaussian: sums over many weights."""
    for place, layer in enumerate(layers):
        if isinstance(layer, Residual):
            if not layer.block or not _check_gaussian(layer.block, gaussian):
                raise ModelError(
                    f"layer {place}: the block of a residual sum must end in weights of its own "
                    "(dense, convolution), which make it independent of the shortcut"
                )
            gaussian = _check_gaussian(layer.shortcut, gaussian)
        elif layer.gaussian in ("asked", "lost") and not gaussian:
            raise ModelError(
                f"layer {place}, {layer}, does not follow a dense layer or a convolution: what it "
                "is given is not Gaussian at any width, and there is no closed form; "
                "doxa.NTK(kernel='empirical') takes any network"
            )
        else:
            gaussian = {"made": True, "lost": False}.get(layer.gaussian, gaussian)
    return gaussian


@dataclass(frozen=True)
class WideFunction:
    """k(a, b) of rows [..., N, D], which are images of this shape if the network has
    convolutions."""

    architecture: Architecture
    shape: tuple[int, ...]
    kind: str = "nngp"
    layout: ClassVar[Layout] = Layout((Entry("weight_std", (1,)), Entry("bias_std", (1,))))

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        """flat [..., 2] to [..., N, N'], or K(a_i, a_i) [..., N]."""
        weight_std, bias_std = flat.exp().unbind(-1)
        left, lead = self._rows(a), a.ndim - 2
        if diag:
            return self.architecture.diagonal(left, weight_std, bias_std, lead)
        right = None if a is b else self._rows(b)
        return self.architecture.matrix(left, right, weight_std, bias_std, self.kind, lead)

    def _rows(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, self.shape) if self.architecture.space else x

    def to(self, device: torch.device) -> WideFunction:
        return self

    def named(self, flat: Tensor) -> dict[str, Any]:
        """Hyper-parameters by name: flat [..., 2]."""
        return {name: flat[..., i].exp().tolist() for i, name in enumerate(self.layout.names)}
