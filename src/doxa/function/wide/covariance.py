"""What an infinitely wide layer passes on: covariances between rows, and how they are combined.

    K(x, x')  covariance of one unit's value at x and x', over the initial weights      (NNGP)
    Θ(x, x')  inner product of its gradients with respect to all weights below it       (NTK)

Both are the same for all units of a layer, and units are independent: Neal (1996), Lee et al.
(2018), Jacot et al. (2018). A layer maps `Kernels` to `Kernels`. Images have K for each pixel (what
a flattening readout needs) or for each pair of pixels (what pooling needs): Novak et al. (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import ModelError

Scale = float | Tensor  # one number, or [M], one for each member


class Kernels(NamedTuple):
    """K and Θ between rows of two batches, and K of each row with itself.

    nngp, ntk: [..., N, N', *pixels]. left: [..., N, *pixels]. right: [..., N', *pixels].
    space: how many axes an image has (0: rows are vectors). paired: pixel axes are there twice,
    those of x before those of x'. Without ntk, only K is followed.
    """

    nngp: Tensor
    ntk: Tensor | None
    left: Tensor
    right: Tensor
    space: int = 0
    paired: bool = False

    @property
    def pixel_axes(self) -> int:
        return self.space * (2 if self.paired else 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> Kernels:
        """The same linear map of all four."""
        return self._replace(
            nngp=function(self.nngp), ntk=None if self.ntk is None else function(self.ntk),
            left=function(self.left), right=function(self.right),
        )  # fmt: skip


def inputs(
    x: Tensor, other: Tensor, space: int = 0, paired: bool = False, ntk: bool = True
) -> Kernels:
    """Covariances of the inputs: xᵀx'/D of rows [..., N, D], or by pixels of [..., N, C, *P]."""
    if space == 0:
        nngp = x @ other.mT / x.shape[-1]
        left, right = (t.square().mean(-1) for t in (x, other))
        return Kernels(nngp, torch.zeros_like(nngp) if ntk else None, left, right)
    channels = x.shape[-1 - space]
    here = "hwd"[:space]
    there = here.upper() if paired else here
    pixels = here + there if paired else here
    cross = torch.einsum(f"...nc{here},...mc{there}->...nm{pixels}", x, other) / channels
    own = [torch.einsum(f"...nc{here},...nc{there}->...n{pixels}", t, t) for t in (x, other)]
    left, right = (t / channels for t in own)
    start = torch.zeros_like(cross) if ntk else None
    return Kernels(cross, start, left, right, space, paired)


def across(value: Scale, axes: int) -> Scale:
    """A number for each member, before `axes` further axes."""
    return value.reshape(*value.shape, *(1,) * axes) if isinstance(value, Tensor) else value


def own(k: Kernels, t: Tensor) -> Tensor:
    """K(x, x) at each pixel, [..., N, *P], of `left` or `right`."""
    return pixel_diagonal(t, k.space) if k.paired else t


def between(k: Kernels, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of each row and pixel of x and x', such that they broadcast against `nngp`."""
    rows = left.ndim - 1 - k.space
    left, right = left.unsqueeze(rows + 1), right.unsqueeze(rows)
    return _both_pixels(left, right, k.space) if k.paired else (left, right)


def within(k: Kernels, t: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of each row and pixel, such that they broadcast against `left` or `right`."""
    return _both_pixels(t, t, k.space) if k.paired else (t, t)


def _both_pixels(first: Tensor, second: Tensor, space: int) -> tuple[Tensor, Tensor]:
    for _ in range(space):
        first, second = first.unsqueeze(-1), second.unsqueeze(-1 - space)
    return first, second


def pixel_diagonal(t: Tensor, space: int) -> Tensor:
    """Pairs of pixels [..., *P, *P] to those of a pixel with itself [..., *P]."""
    shape = t.shape[t.ndim - space :]
    count = shape.numel()
    flat = t.reshape(*t.shape[: t.ndim - 2 * space], count, count)
    return flat.diagonal(dim1=-2, dim2=-1).reshape(*flat.shape[:-2], *shape)


def dense(k: Kernels, weight_std: Scale = 1.0, bias_std: Scale = 0.0) -> Kernels:
    """f = σ_w/√n W φ + σ_b b:  K ← σ_w²K + σ_b²,  Θ ← K + σ_w²Θ."""
    if k.space:
        raise ModelError("a dense layer needs rows of vectors: flatten or pool the image first")
    return weighted(k, weight_std, bias_std)


def weighted(k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
    """A sum with independent weights over inputs whose mean covariances are k."""
    axes = k.pixel_axes
    w, b = weight_std * weight_std, bias_std * bias_std
    wide = across(w, axes + 2)
    nngp = wide * k.nngp + across(b, axes + 2)
    left, right = (across(w, axes + 1) * t + across(b, axes + 1) for t in (k.left, k.right))
    ntk = None if k.ntk is None else nngp + wide * k.ntk
    return k._replace(nngp=nngp, ntk=ntk, left=left, right=right)


def add(k: Kernels, other: Kernels) -> Kernels:
    """A residual sum of independent branches."""
    if (k.space, k.paired) != (other.space, other.paired) or k.left.shape != other.left.shape:
        raise ModelError("the branches of a residual sum have different shapes")
    ntk = None if k.ntk is None or other.ntk is None else k.ntk + other.ntk
    return k._replace(
        nngp=k.nngp + other.nngp, ntk=ntk,
        left=k.left + other.left, right=k.right + other.right,
    )  # fmt: skip


def layer_norm(k: Kernels, eps: float = 1e-5, over_pixels: bool = False) -> Kernels:
    """(f − mean)/std over channels, or over channels and pixels; its gain and offset stay 1 and 0.

    Of units with mean zero, K ← K/√(K(x, x) K(x', x')): what leaves a dense or convolutional layer.
    """

    def inverse(t: Tensor) -> Tensor:
        v, pixels = own(k, t), tuple(range(-k.space, 0))
        if over_pixels and pixels:
            v = v.mean(pixels, keepdim=True).expand_as(v)
        return (v + eps).rsqrt()

    left, right = inverse(k.left), inverse(k.right)
    first, second = between(k, left, right)
    factor = first * second
    (a, b), (c, d) = within(k, left), within(k, right)
    return k._replace(
        nngp=k.nngp * factor, ntk=None if k.ntk is None else k.ntk * factor,
        left=k.left * a * b, right=k.right * c * d,
    )  # fmt: skip
