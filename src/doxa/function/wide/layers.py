"""The layers of an architecture as plain data, and the maps of covariances that they define.

Layers can be compared, printed and saved. A layer without its own scale has that of the
architecture.

**Covariances** (`Kernels`). An infinitely wide layer passes on covariances between rows:

    K(x, x')  covariance of one unit's value at x and x', over the initial weights      (NNGP)
    Θ(x, x')  inner product of its gradients with respect to all weights below it       (NTK)

Both are the same for all units of a layer, and units are independent: Neal (1996), Lee et al.
(2018), Jacot et al. (2018). A layer maps `Kernels` to `Kernels`. Images have K for each pixel
(which a flattening readout needs) or for each pair of pixels (which pooling needs): Novak et al.
(2019).

**Activations** (`activate`) map the covariances by

    K ← E[φ(u)φ(v)],  Θ ← Θ · E[φ'(u)φ'(v)],    (u, v) ~ N(0, [[K(x, x), K], [K, K(x', x')]])

There are closed forms for rectified units with a slope s below zero (Cho & Saul 2009) and for erf
(Williams 1997). With θ the angle between x and x', cos θ = K/√(K(x, x) K(x', x')),

    relu    E[φφ] = (√(vv' − K²) + (π − θ)K)/2π,         E[φ'φ'] = (π − θ)/2π
    erf     E[φφ] = (2/π) asin(2K/√((1 + 2v)(1 + 2v'))),  E[φ'φ'] = (4/π)/√((1 + 2v)(1 + 2v') − 4K²)

For any smooth φ, its Hermite coefficients at each row's variance are computed by Gauss–Hermite
quadrature. The map is then a power series in the correlation ρ (Daniely et al. 2016), so that an
entry costs some fifty multiplications and not a double integral:

    E[φφ] = Σ_k c_k(v) c_k(v') ρ^k,    c_k(v) = E[φ(√v z) h_k(z)]
    E[φ'φ'] = Σ_k k c_k(v) c_k(v') ρ^(k−1)/√(vv')

**Images** pass through convolutions, pooling and flattening.

    convolution   K(p, p') ← σ_b² + σ_w² mean_δ K(p + δ, p' + δ)     of pixels p, p'; shifts δ
    pooling       K(p, p') ← mean_{δ, δ'} K(p + δ, p' + δ')
    flattening    K ← mean_p K(p, p)          global pooling   K ← mean_{p, p'} K(p, p')

Novak et al. (2019), Arora et al. (2019). A convolution combines only pairs of pixels with the same
offset. So without pooling each pixel is needed with itself only; pooling needs all pairs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from doxa import store
from doxa.errors import ModelError
from doxa.priors import functions

Scale = float | Tensor  # one number, or [M], one for each member


class Kernels(NamedTuple):
    """K and Θ between rows of two batches, and K of each row with itself.

    nngp, ntk: [..., N, N', *pixels]. left: [..., N, *pixels]. right: [..., N', *pixels].
    space: the number of axes of an image (0: rows are vectors). paired: whether pixel axes occur
    twice, those of x before those of x'. Without ntk, only K is computed.
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


def input_covariance(
    x: Tensor, other: Tensor, space: int = 0, paired: bool = False, ntk: bool = True
) -> Kernels:
    """Covariances of the inputs: xᵀx'/D of rows [..., N, D], or per pixel of [..., N, C, *P]."""
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
    """One number per member, with `axes` axes after it."""
    return value.reshape(*value.shape, *(1,) * axes) if isinstance(value, Tensor) else value


def own(k: Kernels, t: Tensor) -> Tensor:
    """K(x, x) at each pixel, [..., N, *P], of `left` or `right`."""
    return pixel_diagonal(t, k.space) if k.paired else t


def between(k: Kernels, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers per row and pixel of x and of x', in shapes that broadcast against `nngp`."""
    rows = left.ndim - 1 - k.space
    left, right = left.unsqueeze(rows + 1), right.unsqueeze(rows)
    return _both_pixels(left, right, k.space) if k.paired else (left, right)


def within(k: Kernels, t: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers per row and pixel, in a shape that broadcasts against `left` or `right`."""
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


def dense_covariance(k: Kernels, weight_std: Scale = 1.0, bias_std: Scale = 0.0) -> Kernels:
    """f = σ_w/√n W φ + σ_b b:  K ← σ_w²K + σ_b²,  Θ ← K + σ_w²Θ."""
    if k.space:
        raise ModelError("a dense layer needs rows of vectors: flatten or pool the image first")
    return weighted(k, weight_std, bias_std)


def weighted(k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
    """A sum with independent weights over inputs with the mean covariances k."""
    axes = k.pixel_axes
    w, b = weight_std * weight_std, bias_std * bias_std
    wide = across(w, axes + 2)
    nngp = wide * k.nngp + across(b, axes + 2)
    left, right = (across(w, axes + 1) * t + across(b, axes + 1) for t in (k.left, k.right))
    ntk = None if k.ntk is None else nngp + wide * k.ntk
    return k._replace(nngp=nngp, ntk=ntk, left=left, right=right)


def add_covariances(k: Kernels, other: Kernels) -> Kernels:
    """A residual sum of independent branches."""
    if (k.space, k.paired) != (other.space, other.paired) or k.left.shape != other.left.shape:
        raise ModelError("the branches of a residual sum have different shapes")
    ntk = None if k.ntk is None or other.ntk is None else k.ntk + other.ntk
    return k._replace(
        nngp=k.nngp + other.nngp, ntk=ntk,
        left=k.left + other.left, right=k.right + other.right,
    )  # fmt: skip


def layer_norm_covariance(k: Kernels, eps: float = 1e-5, over_pixels: bool = False) -> Kernels:
    """(f − mean)/std over channels, or over channels and pixels; its gain and offset stay 1 and 0.

    For units of mean zero, K ← K/√(K(x, x) K(x', x')): the output of a dense or convolutional
    layer.
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


Function = Callable[[Tensor], Tensor]
Pair = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_TERMS = 64  # of the power series
_NODES = 160  # of the quadrature behind its coefficients
_LEAST = 1e-12  # smaller variances count as 0: a row of zeros has no correlations

SMOOTH: dict[str, Function] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu-tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "sin": torch.sin,
}
NAMED = ("relu", "erf", *SMOOTH)


def activate(k: Kernels, name: str) -> Kernels:
    """The covariances after the activation of this name, one of `NAMED`."""
    if name == "relu":
        return rectified_activation(k)
    return erf(k) if name == "erf" else smooth(k, SMOOTH[name])


def rectified_activation(k: Kernels, slope: float = 0.0) -> Kernels:
    """max(z, 0) + slope · min(z, 0)."""

    def pair(c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        value, slopes = functions.rectified(c, v, w)
        if slope == 0.0:
            return value, slopes
        share = (1.0 - slope) ** 2
        return slope * c + share * value, slope + share * slopes

    return _applied(k, pair)


def erf(k: Kernels) -> Kernels:
    def pair(c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        size = (1 + 2 * v) * (1 + 2 * w)
        value = (2 / math.pi) * torch.asin(2 * c * size.rsqrt())
        return value, (4 / math.pi) * (size - 4 * c * c).rsqrt()

    return _applied(k, pair)


def smooth(k: Kernels, function: Function) -> Kernels:
    """Any function that is smooth on the scale of its inputs."""
    left, right = (own(k, t).clamp_min(_LEAST) for t in (k.left, k.right))
    first, second = coefficients(function, left), coefficients(function, right)

    def pair(c: Tensor, v: tuple[Tensor, ...], w: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (var, *a), (other, *b) = v, w
        inverse = (var * other).rsqrt()
        rho = c * inverse
        value, slopes = torch.zeros_like(rho), torch.zeros_like(rho)
        for i in range(_TERMS, -1, -1):  # Horner's rule, of the sum and of its derivative
            if k.ntk is not None:
                slopes = torch.addcmul(value, slopes, rho)
            value = torch.addcmul(a[i] * b[i], value, rho)
        return value, slopes * inverse

    def shaped(form: Callable[[Tensor], Tensor], v: Tensor, series: Tensor) -> tuple[Tensor, ...]:
        return (form(v), *(form(part) for part in series))

    def end(t: Tensor, v: Tensor, series: Tensor) -> Tensor:
        if not k.paired:
            return series.square().sum(0)  # ρ = 1
        first = shaped(lambda t: within(k, t)[0], v, series)
        return pair(t, first, shaped(lambda t: within(k, t)[1], v, series))[0]

    nngp, slopes = pair(
        k.nngp,
        shaped(lambda t: between(k, t, right)[0], left, first),
        shaped(lambda t: between(k, left, t)[1], right, second),
    )
    ends = end(k.left, left, first), end(k.right, right, second)
    ntk = None if k.ntk is None else k.ntk * slopes
    return k._replace(nngp=nngp, ntk=ntk, left=ends[0], right=ends[1])


def coefficients(function: Function, variance: Tensor) -> Tensor:
    """c_k of φ at each variance, [terms + 1, *variance.shape]. The last entry replaces all higher
    ones, so that E[φ²] is exact."""
    nodes, weights = (t.to(variance) for t in _quadrature())
    values = function(variance.sqrt().unsqueeze(-1) * nodes)  # [..., nodes]
    found = values @ weights.mT
    rest = values.square() @ weights[0] - found.square().sum(-1)
    rest = rest.clamp_min(torch.finfo(rest.dtype).tiny).sqrt()
    return torch.cat([found, rest.unsqueeze(-1)], -1).movedim(-1, 0)


@cache
def _quadrature() -> tuple[Tensor, Tensor]:
    """Nodes of N(0, 1), and their weights times the normalised Hermite polynomials there."""
    steps = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    nodes = torch.linalg.eigvalsh(torch.diag(steps, 1) + torch.diag(steps, -1))
    rows = [torch.ones_like(nodes), nodes]
    for i in range(2, _NODES):
        rows.append((nodes * rows[-1] - math.sqrt(i - 1) * rows[-2]) / math.sqrt(i))
    polynomials = torch.stack(rows)
    return nodes, polynomials[:_TERMS] / polynomials.square().sum(0)


def _applied(k: Kernels, pair: Pair) -> Kernels:
    """E[φφ] and E[φ'φ'] from a covariance and its two variances."""
    left, right = own(k, k.left), own(k, k.right)
    nngp, slopes = pair(k.nngp, *between(k, left, right))
    ends = [pair(t, *within(k, v))[0] for t, v in ((k.left, left), (k.right, right))]
    ntk = None if k.ntk is None else k.ntk * slopes
    return k._replace(nngp=nngp, ntk=ntk, left=ends[0], right=ends[1])


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


def average_pool(k: Kernels, size: Sizes, stride: Sizes) -> Kernels:
    """Average pooling."""
    _check_pairs(k)

    def mean(t: Tensor) -> Tensor:
        for axis in range(k.space):
            for one in _axes(k, axis):
                t = _windows(t, (one,), size[axis], stride[axis], 1) / size[axis]
        return t

    return k.map(mean)


def global_average_pool(k: Kernels) -> Kernels:
    """The mean over all pixels: rows become vectors of channels."""
    _check_pairs(k)
    axes = tuple(range(-2 * k.space, 0))
    return k.map(lambda t: t.mean(axes))._replace(space=0, paired=False)


def flatten_images(k: Kernels) -> Kernels:
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
    """The position of an axis of the image, from the end: one, or one for each pixel of a pair."""
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
    """The sum over the shifts of a window, with the same shift along all the axes."""
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


class Layer:
    """A map of covariances. `gaussian` is whether its units are Gaussian: "made" (by sums over many
    weights), "asked" (its input must be Gaussian, and its output is), "lost", or "kept" (the same
    as of its input)."""

    gaussian: ClassVar[str] = "kept"
    pools: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        """The covariances after the layer, with the architecture's scales."""


@store.register("wide-dense")
@dataclass(frozen=True)
class Dense(Layer):
    """σ_w/√n Wφ + σ_b b."""

    weight_std: float | None = None
    bias_std: float | None = None
    gaussian: ClassVar[str] = "made"

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return dense_covariance(k, *scales(self, weight_std, bias_std))


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
        return convolve(
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
            return rectified_activation(k, self.slope)
        return activate(k, self.name)


@store.register("wide-layer-norm")
@dataclass(frozen=True)
class LayerNorm(Layer):
    """Over channels, or over channels and pixels."""

    eps: float = 1e-5
    over_pixels: bool = False
    gaussian: ClassVar[str] = "asked"

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return layer_norm_covariance(k, self.eps, self.over_pixels)


@store.register("wide-average")
@dataclass(frozen=True)
class Average(Layer):
    """Average pooling; size () is over all pixels."""

    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    pools: ClassVar[bool] = True

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        if not self.size:
            return global_average_pool(k)
        return average_pool(k, self.size, self.stride or self.size)


@store.register("wide-flatten")
@dataclass(frozen=True)
class Flatten(Layer):
    """An image as one vector."""

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return flatten_images(k)


@store.register("wide-residual")
@dataclass(frozen=True)
class Residual(Layer):
    """x + block(x), or shortcut(x) + block(x)."""

    block: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    def __call__(self, k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
        return add_covariances(
            through(self.block, k, weight_std, bias_std),
            through(self.shortcut, k, weight_std, bias_std),
        )


def through(layers: tuple[Layer, ...], k: Kernels, weight_std: Scale, bias_std: Scale) -> Kernels:
    for layer in layers:
        k = layer(k, weight_std, bias_std)
    return k


def scales(layer: Dense | Conv, weight_std: Scale, bias_std: Scale) -> tuple[Scale, Scale]:
    """The scales of a layer, or else those of the architecture."""
    return (
        weight_std if layer.weight_std is None else layer.weight_std,
        bias_std if layer.bias_std is None else layer.bias_std,
    )
