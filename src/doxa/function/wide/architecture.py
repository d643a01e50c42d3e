"""A whole architecture, and its kernels between rows, block by block.

    Architecture.fully_connected(depth=3, activation="relu")
    read(nn.Sequential(...))                                   see `reading.py`

A block of rows of x by rows of x' goes through all layers before the next, so that memory beyond
the result is bounded; with gradients, what a block needs is computed again on the way back. K of
rows with themselves is symmetric, and half of its blocks are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from doxa import store
from doxa.errors import ModelError, ShapeError
from doxa.function.wide import covariance
from doxa.function.wide.covariance import Kernels, Scale
from doxa.function.wide.layers import Activation, Conv, Dense, Layer, Residual, through

_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # of one tensor: what stays in a CPU's cache


@store.register("wide-architecture")
@dataclass(frozen=True)
class Architecture:
    """Layers from the input to the output, which a dense layer gives."""

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
        """How many axes its images have; 0 where rows are vectors."""
        sizes = {len(layer.size) for layer in _all(self.layers) if isinstance(layer, Conv)}
        if len(sizes) > 1:
            raise ModelError(f"convolutions over {sorted(sizes)} axes in one network")
        return sizes.pop() if sizes else 0

    @property
    def paired(self) -> bool:
        """Whether all pairs of pixels are needed."""
        return any(layer.pools for layer in _all(self.layers))

    def kernels(self, x: Tensor, other: Tensor, weight_std: Scale, bias_std: Scale) -> Kernels:
        """All at once: x [N, ...], other [N', ...]; scales are numbers, or [M] with a result
        [M, N, N']."""
        if self.space and x.ndim < 2 + self.space:
            raise ShapeError(
                f"the network convolves over {self.space} axes: x must be [N, channels, "
                f"{'height, width' if self.space == 2 else 'length'}], not {list(x.shape)}"
            )
        start = covariance.inputs(x, other, self.space, self.paired)
        return through(self.layers, start, weight_std, bias_std)

    def matrix(
        self, x: Tensor, other: Tensor | None, weight_std: Scale, bias_std: Scale,
        kind: str = "nngp",
    ) -> Tensor:  # fmt: skip
        """K ("nngp") or Θ ("ntk") [..., N, N'] between rows, or of x with itself, by blocks."""
        right = x if other is None else other
        rows, columns = self._block(x, right)

        def one(a: Tensor, b: Tensor, w: Scale, v: Scale) -> Tensor:
            k = self.kernels(a, b, w, v)
            return k.nngp if kind == "nngp" else k.ntk

        differentiated = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, right, weight_std, bias_std)
        )
        if differentiated:
            strips = [
                torch.cat(
                    [
                        checkpoint(one, a, b, weight_std, bias_std, use_reentrant=False)
                        for _, b in _blocks(right, columns)
                    ],
                    -1,
                )
                for _, a in _blocks(x, rows)
            ]
            return torch.cat(strips, -2)
        members = weight_std.shape if isinstance(weight_std, Tensor) else ()
        found = x.new_empty(*members, len(x), len(right))
        for i, a in _blocks(x, rows):
            for j, b in _blocks(right, columns):
                if other is None and j.stop <= i.start:
                    continue
                part = one(a, b, weight_std, bias_std)
                found[..., i, j] = part
                if other is None:
                    found[..., j, i] = part.mT
        return found

    def diagonal(self, x: Tensor, weight_std: Scale, bias_std: Scale) -> Tensor:
        """K(x, x) of each row, [..., N]."""
        rows, _ = self._block(x, x[:1])
        parts = [
            self.kernels(a, a[:1], weight_std, bias_std).left for _, a in _blocks(x, rows)
        ]
        return torch.cat(parts, -1)

    def _block(self, x: Tensor, other: Tensor) -> tuple[int, int]:
        """Rows of x and of x' in a block."""
        size = _BLOCK_BYTES["cuda" if x.is_cuda else "cpu"] // x.element_size()
        pixels = x.shape[-self.space :].numel() if self.space else 1
        size = max(1, size // pixels ** (2 if self.paired else 1))
        columns = min(len(other), max(1, size // min(len(x), 64)))
        return max(1, size // columns), columns


def _blocks(x: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        yield part, x[part]


def _all(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        if isinstance(layer, Residual):
            yield from _all(layer.block + layer.shortcut)


def _check_gaussian(layers: tuple[Layer, ...], gaussian: bool) -> bool:
    """The formulas of activations and norms are of Gaussian units: sums over many weights."""
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
                "doxa.function.wide.empirical_ntk takes any network"
            )
        else:
            gaussian = {"made": True, "lost": False}.get(layer.gaussian, gaussian)
    return gaussian
