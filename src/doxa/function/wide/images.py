"""Covariances of images through convolutions, pooling and flattening.

    convolution   K(p, p') ← σ_b² + σ_w² mean_δ K(p + δ, p' + δ)     of pixels p, p'; shifts δ
    pooling       K(p, p') ← mean_{δ, δ'} K(p + δ, p' + δ')
    flattening    K ← mean_p K(p, p)          global pooling   K ← mean_{p, p'} K(p, p')

Novak et al. (2019), Arora et al. (2019). A convolution keeps pairs of equal offset together, so
without pooling each pixel is needed with itself alone; pooling needs all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from doxa.errors import ModelError
from doxa.function.wide.covariance import Kernels, Scale, pixel_diagonal, weighted

Sizes = Sequence[int]  # one for each axis of an image


def convolve(
    k: Kernels, size: Sizes, weight_std: Scale = 1.0, bias_std: Scale = 0.0, *,
    stride: Sizes, padding: Sizes, dilation: Sizes, circular: bool = False,
) -> Kernels:  # fmt: skip
    """A convolution whose padding is zeros or, if `circular`, the other side of the image."""
    if k.space != len(size):
        raise ModelError(f"a convolution over {len(size)} axes was given rows with {k.space}")

    def mean(t: Tensor) -> Tensor:
        for axis in range(k.space):
            pair = _axes(k, axis)
            t = _padded(t, pair, padding[axis], circular)
            t = _windows(t, pair, size[axis], stride[axis], dilation[axis]) / size[axis]
        return t

    return weighted(k.map(mean), weight_std, bias_std)


def average(k: Kernels, size: Sizes, stride: Sizes) -> Kernels:
    """Average pooling."""
    _check_pairs(k)

    def mean(t: Tensor) -> Tensor:
        for axis in range(k.space):
            for one in _axes(k, axis):
                t = _windows(t, (one,), size[axis], stride[axis], 1) / size[axis]
        return t

    return k.map(mean)


def global_average(k: Kernels) -> Kernels:
    """The mean over all pixels: rows become vectors of channels."""
    _check_pairs(k)
    axes = tuple(range(-2 * k.space, 0))
    return k.map(lambda t: t.mean(axes))._replace(space=0, paired=False)


def flatten(k: Kernels) -> Kernels:
    """All channels and pixels as one vector."""
    if k.space == 0:
        return k
    axes = tuple(range(-k.space, 0))
    own = k.map(lambda t: pixel_diagonal(t, k.space)) if k.paired else k
    return own.map(lambda t: t.mean(axes))._replace(space=0, paired=False)


def _check_pairs(k: Kernels) -> None:
    if not k.paired:
        raise ModelError("pooling needs an image's covariances of all pairs of pixels")


def _axes(k: Kernels, axis: int) -> tuple[int, ...]:
    """Where an axis of the image lies, from the end: once, or for both pixels of a pair."""
    return (axis - 2 * k.space, axis - k.space) if k.paired else (axis - k.space,)


def _padded(t: Tensor, axes: tuple[int, ...], width: int, circular: bool) -> Tensor:
    for axis in axes:
        if width and circular:
            length = t.shape[axis]
            ends = (t.narrow(axis, length - width, width), t.narrow(axis, 0, width))
            t = torch.cat([ends[0], t, ends[1]], axis)
        elif width:
            shape = list(t.shape)
            shape[axis] = width
            t = torch.cat([t.new_zeros(shape), t, t.new_zeros(shape)], axis)
    return t


def _windows(t: Tensor, axes: tuple[int, ...], size: int, stride: int, dilation: int) -> Tensor:
    """The sum over the shifts of a window, by the same shift along all the axes."""
    length = t.shape[axes[0]]
    last = length - dilation * (size - 1)
    if last < 1:
        raise ModelError(f"a window of {size} (dilation {dilation}) exceeds {length} pixels")
    kept = torch.arange(0, last, stride, device=t.device)
    total = None
    for shift in range(size):
        part = t
        for axis in axes:
            part = part.narrow(axis, shift * dilation, last)
            if stride > 1:
                part = part.index_select(axis, kept)
        total = part if total is None else total + part
    assert total is not None
    return total
