"""What a nonlinearity does to the covariances of infinitely wide layers.

    K ← E[φ(u)φ(v)],  Θ ← Θ · E[φ'(u)φ'(v)],    (u, v) ~ N(0, [[K(x, x), K], [K, K(x', x')]])

Closed forms: rectified units with a slope s below zero (Cho & Saul 2009) and erf (Williams 1997).
With θ the angle between x and x', cos θ = K/√(K(x, x) K(x', x')),

    relu    E[φφ] = (√(vv' − K²) + (π − θ)K)/2π,         E[φ'φ'] = (π − θ)/2π
    erf     E[φφ] = (2/π) asin(2K/√((1 + 2v)(1 + 2v'))),  E[φ'φ'] = (4/π)/√((1 + 2v)(1 + 2v') − 4K²)

Any smooth φ: its Hermite coefficients at each row's variance by Gauss–Hermite quadrature, and then
a power series in the correlation ρ (Daniely et al. 2016), so that an entry costs some fifty
multiplications and not a double integral:

    E[φφ] = Σ_k c_k(v) c_k(v') ρ^k,    c_k(v) = E[φ(√v z) h_k(z)]
    E[φ'φ'] = Σ_k k c_k(v) c_k(v') ρ^(k−1)/√(vv')
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from doxa.function.wide.covariance import Kernels, between, own, within
from doxa.priors import kernels

Function = Callable[[Tensor], Tensor]
Pair = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_TERMS = 64  # of the power series
_NODES = 160  # of the quadrature behind its coefficients
_LEAST = 1e-12  # a variance that stands for none: a row of zeros has no correlations

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
    """Through the activation of this name, one of `NAMED`."""
    if name == "relu":
        return rectified(k)
    return erf(k) if name == "erf" else smooth(k, SMOOTH[name])


def rectified(k: Kernels, slope: float = 0.0) -> Kernels:
    """max(z, 0) + slope · min(z, 0)."""

    def pair(c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        value, slopes = kernels.rectified(c, v, w)
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
    """c_k of φ at each variance, [terms + 1, *variance.shape]; the last stands for all the higher
    ones, such that E[φ²] is exact."""
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
