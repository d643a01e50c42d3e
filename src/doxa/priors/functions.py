"""Priors over functions, with draws at any inputs.

    Gaussian process   f ~ GP(0, k): draws, log density and score in closed form
    implicit process   f = g(·, z), z ~ N(0, I): any function g of noise z
                       (Ma, Li & Hernández-Lobato, 2019)

Both have `sample(x, n)`. Kernels are those below, times a variance v; "linear" is
v Σ_d x_d x'_d / ℓ_d², with lengthscales, and the period p is the same in every column.

Kernels are computed from one matrix product, for all members at once.

    rbf        exp(−½ r²),  r² = Σ_d (x_d − x'_d)²/ℓ_d²        linear      xᵀx'
    matern12   exp(−r)                                         polynomial2 (xᵀx' + c)²
    matern32   (1 + √3 r) exp(−√3 r)                           polynomial3 (xᵀx' + c)³
    matern52   (1 + √5 r + 5r²/3) exp(−√5 r)                   constant    1
    rq         (1 + r²/2α)^−α
    periodic   exp(−2 Σ_d sin²(π(x_d − x'_d)/p_d)/ℓ_d²)
    cosine     the mean over d of cos(2π(x_d − x'_d)/p_d)

    relu1, relu2, relu3   of an infinitely wide network with so many hidden layers: K ← 2E[φφ'] by
               the closed form below, from K₀ = 1 + Σ_d x_d x'_d/ℓ_d² (Cho & Saul, 2009)

"matern" is matern52. Rasmussen & Williams (2006), ch. 4. Their gradients are such products, too.
Gaussian processes compose them (`doxa/function/kernels.py`); a prior over functions has one kernel.

A Gaussian process with unknown hyperparameters, which each function draws separately:

    log ℓ_d ~ N(log lengthscale_d, spread²),   log v ~ N(log variance, spread²),   f ~ GP(0, k_ℓ,v)

The target of Tran, Rossi, Milios & Filippone (2022) on tables, with spread 1. A function may then
be flat in some columns and steep in others, and its size is known up to a factor of about e. This
is a much weaker assumption than fixed hyperparameters. The density has no closed form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from doxa import store
from doxa.errors import DataError, ModelError, ShapeError, did_you_mean
from doxa.noise import Noise

# Squared distances below this share of the largest squared length count as equal rows.
_SAME = {torch.float64: 1e-14}
_SAME_SINGLE = 1e-6


class Place(NamedTuple):
    """The rows of both arguments: a [..., N, D], b [..., N', D]; with `diag`, row by row."""

    a: Tensor
    b: Tensor
    diag: bool

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1) if self.diag else a @ b.mT

    def squared(self, scale: Tensor, exact: float = 0.0) -> Tensor:
        """r² = Σ_d (a_d − b_d)²/scale_d², by a matrix product of centred rows, for precision."""
        if self.diag:
            return ((self.a - self.b) / scale).square().sum(-1)
        centre = self.b.mean(-2, keepdim=True)
        a, b = (self.a - centre) / scale, (self.b - centre) / scale
        own, other = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
        a = torch.cat([-2.0 * a, own, torch.ones_like(own)], -1)
        b = torch.cat([b, torch.ones_like(other), other], -1)
        squared = a @ b.mT
        return squared - exact * other.detach().amax(-2, keepdim=True) if exact else squared

    def distance(self, scale: Tensor) -> Tensor:
        """r; it is zero, with zero gradient, where rows are equal up to rounding."""
        squared = self.squared(scale, _SAME.get(self.a.dtype, _SAME_SINGLE))
        equal = squared <= 0
        return squared.masked_fill(equal, 1.0).sqrt().masked_fill(equal, 0.0)

    def waves(self, period: Tensor, weight: Tensor) -> Tensor:
        """Σ_d weight_d cos(2π(a_d − b_d)/period)."""
        a, b = (2 * math.pi * side / period for side in (self.a, self.b))
        left = torch.cat([weight * a.cos(), weight * a.sin()], -1)
        return self.dot(left, torch.cat([b.cos(), b.sin()], -1))


Values = dict[str, Tensor]  # each [..., 1, columns]


def _each(value: Tensor, place: Place) -> Tensor:
    """A value for each column: [..., 1, D]."""
    return value.expand(*value.shape[:-1], place.a.shape[-1])


def scalar(value: Tensor, place: Place) -> Tensor:
    return value.squeeze(-1) if place.diag else value


def _matern(place: Place, scale: Tensor, terms: int) -> Tensor:
    r = math.sqrt(2 * terms + 1) * place.distance(scale)
    front = (torch.ones_like(r), 1 + r, 1 + r + r.square() / 3)[terms]
    return front * (-r).exp()


def _rq(place: Place, v: Values) -> Tensor:
    alpha = scalar(v["alpha"], place)
    return (
        -alpha * torch.log1p(place.squared(v["lengthscale"]).clamp_min(0.0) / (2 * alpha))
    ).exp()


def _periodic(place: Place, v: Values) -> Tensor:
    weight = _each(v["lengthscale"].square().reciprocal(), place)  # −2 sin²(u/2) = cos u − 1
    return (place.waves(v["period"], weight) - scalar(weight.sum(-1, keepdim=True), place)).exp()


def _cosine(place: Place, v: Values) -> Tensor:
    weight = _each(torch.ones_like(v["period"]), place) / place.a.shape[-1]
    return place.waves(v["period"], weight)


def _polynomial(place: Place, v: Values, degree: int) -> Tensor:
    return (place.dot(place.a, place.b) + scalar(v["offset"], place)) ** degree


def rectified(c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """E[φ(a)φ(b)] and E[φ'(a)φ'(b)] of φ = max(·, 0), for normal a, b with variances v, w and
    covariance c: (√(vw − c²) + (π − θ)c)/2π and (π − θ)/2π, θ the angle between them."""
    # For equal rows θ is 0, but rounding would make it 1e-8; and the square root has no derivative
    # at 0.
    kind = torch.finfo(c.dtype)
    across = (v * w * (1.0 - 16 * kind.eps) - c * c).clamp_min(kind.tiny).sqrt()
    rest = math.pi - torch.atan2(across, c)
    return (across + rest * c) / (2 * math.pi), rest / (2 * math.pi)


def _relu(place: Place, scale: Tensor, layers: int) -> Tensor:
    """2E[φφ'] keeps the variances, so that every layer has the variances of the input."""
    a, b = place.a / scale, place.b / scale
    v, w = (1 + side.square().sum(-1) for side in (a, b))
    if not place.diag:
        v, w = v.unsqueeze(-1), w.unsqueeze(-2)
    c = 1 + place.dot(a, b)
    for _ in range(layers):
        c = 2 * rectified(c, v, w)[0]
    return c


class Kind(NamedTuple):
    """A kernel: the names of its parameters, and its values."""

    parameters: tuple[str, ...]
    of: Callable[[Place, Values], Tensor]


KINDS = {
    "rbf": Kind(("lengthscale",), lambda p, v: (-0.5 * p.squared(v["lengthscale"])).exp()),
    "matern": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 2)),
    "matern12": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 0)),
    "matern32": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 1)),
    "matern52": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 2)),
    "rq": Kind(("lengthscale", "alpha"), _rq),
    "periodic": Kind(("lengthscale", "period"), _periodic),
    "cosine": Kind(("period",), _cosine),
    "linear": Kind((), lambda p, v: p.dot(p.a, p.b)),
    "polynomial2": Kind(("offset",), lambda p, v: _polynomial(p, v, 2)),
    "polynomial3": Kind(("offset",), lambda p, v: _polynomial(p, v, 3)),
    "relu1": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 1)),
    "relu2": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 2)),
    "relu3": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 3)),
    "constant": Kind((), lambda p, v: torch.ones_like(p.dot(p.a, p.b))),
}


KERNELS = ("rbf", "matern", "periodic", "linear")
_JITTER = 1e-6  # relative to the variance: below the single precision of a draw


class FunctionPrior(ABC):
    """A prior over functions."""

    @abstractmethod
    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        """The shape of the standard normals of one draw."""

    @abstractmethod
    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        """Draws [M, n, N, outputs] at x [M, N, ...] from normals eps [M, n, *noise_shape]: pure
        tensor code, which may be differentiated, recorded and captured."""

    def score(self, x: Tensor, f: Tensor, noise: float) -> Tensor | None:
        """∇ log p of f [M, n, N, O] at x [M, N, ...], where independent noise of this standard
        deviation was added to the functions; None where the density is not known."""
        return None

    def sample(self, x: Any, n: int, seed: int = 0, outputs: int = 1) -> Tensor:
        """n functions at the rows of x, [N, ...] (or [N], one column): [n, N, outputs]. The j-th
        function depends on the seed, not on n."""
        x = torch.as_tensor(x)
        if x.ndim == 0 or len(x) == 0:
            raise DataError("a prior over functions is drawn at the rows of x: there are none")
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        x = x.unsqueeze(1) if x.ndim == 1 else x
        noise = Noise(seed, "functions", range(n), x.device, x.dtype)
        eps = noise.normal(self.noise_shape(len(x), outputs))
        return self.functions(x.unsqueeze(0), eps.unsqueeze(0), outputs)[0]


@store.register("gp-prior")
@dataclass(frozen=True)
class GPPrior(FunctionPrior):
    """A Gaussian process with mean 0; outputs are independent.

    Parameters
    ----------
    kernel : str
        "rbf", "matern", "periodic" or "linear".
    lengthscale : float or sequence of float
        ℓ, one number or one for each column of x. All values are in the units of the fit
        (standardised units with `standardize=True`).
    variance : float
        v.
    period : float
        p.

    Examples
    --------
    >>> import torch
    >>> prior = GPPrior("rbf", lengthscale=0.5)
    >>> prior.sample(torch.linspace(0, 1, 20), n=3).shape
    torch.Size([3, 20, 1])
    """

    kernel: str = "rbf"
    lengthscale: float | tuple[float, ...] = 1.0
    variance: float = 1.0
    period: float = 1.0

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            hint = did_you_mean(str(self.kernel), KERNELS)
            raise ModelError(
                f"kernel must be one of {', '.join(KERNELS)}, not {self.kernel!r}{hint}"
            )
        if isinstance(self.lengthscale, Sequence):
            object.__setattr__(self, "lengthscale", tuple(self.lengthscale))
        for name in ("lengthscale", "variance", "period"):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, Real) or not 0 < float(number) < math.inf:
                    raise ModelError(f"{name} must be positive and finite, got {value!r}")

    def hyper(self, columns: int) -> Tensor:
        """log (ℓ of each column, v, p), [columns + 2], float64."""
        scales = self.lengthscale if isinstance(self.lengthscale, tuple) else (self.lengthscale,)
        if len(scales) not in (1, columns):
            raise ShapeError(
                f"the prior has {len(scales)} lengthscales, but x has {columns} columns: give one, "
                "or one for each column"
            )
        scales = scales * columns if len(scales) == 1 else scales
        return torch.tensor([*scales, self.variance, self.period], dtype=torch.float64).log()

    def covariance(self, a: Tensor, b: Tensor, hyper: Tensor | None = None) -> Tensor:
        """k(a, b) [..., N, N'] of a [..., N, D] and b [..., N', D]; with `hyper` [..., D + 2] in
        place of the prior's own numbers."""
        if hyper is None:
            hyper = self.hyper(a.shape[-1]).to(a)
        own = hyper.exp()
        scale, variance = own[..., None, :-2], own[..., -2, None, None]
        place = Place(a, b, False)
        if self.kernel == "linear":
            place = Place(a / scale, b / scale, False)
        values = {"lengthscale": scale, "period": own[..., None, -1:]}
        return variance * KINDS[self.kernel].of(place, values)

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return rows, outputs

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        return self.root(flat_inputs(x)).unsqueeze(1) @ eps

    def root(self, x: Tensor, noise: float = 0.0, hyper: Tensor | None = None) -> Tensor:
        """The Cholesky factor of k(x, x) + noise² I, [..., N, N]."""
        k = self.covariance(x, x, hyper)
        size = k.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].detach()
        eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        least = _JITTER if k.dtype == torch.float64 else 10 * _JITTER
        root: Tensor = torch.linalg.cholesky_ex(k + (least * size + noise**2) * eye).L
        return root

    def score(
        self, x: Tensor, f: Tensor, noise: float, hyper: Tensor | None = None
    ) -> Tensor | None:
        root = self.root(flat_inputs(x), noise, hyper)  # [M, N, N]
        flat = f.transpose(1, 2).flatten(2)  # [M, N, n·O]
        solved: Tensor = torch.cholesky_solve(flat, root).unflatten(2, (f.shape[1], f.shape[3]))
        return -solved.transpose(1, 2)


@store.register("implicit-prior")
@dataclass(frozen=True)
class ImplicitPrior(FunctionPrior):
    """A prior that is defined by a function of noise: f = g(·, z), z ~ N(0, I).

    Parameters
    ----------
    function : callable
        g(x, z), from the rows x [N, ...] and `numbers` standard normals z to the values of one
        function, [N] or [N, outputs], in fitted units. It runs under `vmap`, so it must be torch
        code without branches on values (`torch.where` instead of `if`). To save a posterior with
        this prior, make it a frozen dataclass with `__call__`, registered with
        `doxa.store.register(name)`.
    numbers : int
        The number of normals in z.

    Examples
    --------
    >>> import torch
    >>> lines = ImplicitPrior(lambda x, z: z[0] + z[1] * x[:, 0], numbers=2)
    >>> lines.sample(torch.linspace(0, 1, 20), n=3).shape
    torch.Size([3, 20, 1])
    """

    function: Callable[[Tensor, Tensor], Tensor]
    numbers: int

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ModelError(f"function must be g(x, z), not {self.function!r}")
        if not isinstance(self.numbers, int) or isinstance(self.numbers, bool) or self.numbers < 1:
            raise ModelError(f"numbers must be a whole number above 0, not {self.numbers!r}")

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return (self.numbers,)

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        each = vmap(vmap(self.function, (None, 0)), (0, 0))(x, eps)  # [M, n, N] or [M, n, N, O]
        each = each.unsqueeze(-1) if each.ndim == 3 else each
        wanted = (*eps.shape[:2], x.shape[1], outputs)
        if tuple(each.shape) != wanted:
            raise ShapeError(
                f"the prior's function gave values of shape {list(each.shape[2:])} for "
                f"{x.shape[1]} rows; {list(wanted[2:])} are needed"
            )
        return each


def flat_inputs(x: Any) -> Tensor:
    """Inputs [M, N, ...] as the rows of a kernel, [M, N, D]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError("a Gaussian-process prior needs x as one array of real numbers")
    return x.unsqueeze(-1) if x.ndim == 2 else x.flatten(2)


@store.register("hierarchical-gp-prior")
@dataclass(frozen=True)
class HierarchicalGP(GPPrior):
    """Gaussian processes with mean 0, where every function draws its own lengthscales and variance.

    Parameters
    ----------
    kernel, period
        As in `GPPrior`.
    lengthscale, variance : float
        Their medians. One lengthscale is shared by all columns of x; a sequence has one for each
        column, drawn independently.
    spread : float
        The standard deviation of their logarithms.

    Examples
    --------
    >>> import torch
    >>> prior = HierarchicalGP("rbf", lengthscale=(0.5, 2.0))
    >>> prior.sample(torch.rand(20, 2), n=3).shape
    torch.Size([3, 20, 1])
    """

    spread: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.spread < 10:
            raise ModelError(f"spread must be above 0 and below 10, got {self.spread!r}")

    @property
    def _lengths(self) -> int:
        return len(self.lengthscale) if isinstance(self.lengthscale, tuple) else 1

    def noise_shape(self, rows: int, outputs: int) -> tuple[int, ...]:
        return (self._lengths + 1 + rows * outputs,)

    def functions(self, x: Tensor, eps: Tensor, outputs: int) -> Tensor:
        x = flat_inputs(x)  # [M, N, D]
        lengths, power, rest = eps.split([self._lengths, 1, x.shape[1] * outputs], -1)
        lengths = lengths.expand(*lengths.shape[:-1], x.shape[-1])
        moved = torch.cat([lengths, power, torch.zeros_like(power)], -1)  # [M, n, D + 2]
        hyper = self.hyper(x.shape[-1]).to(x) + self.spread * moved
        root = self.root(x.unsqueeze(1), hyper=hyper)  # [M, n, N, N]
        each: Tensor = rest.unflatten(-1, (x.shape[1], outputs))
        return root @ each

    def score(
        self, x: Tensor, f: Tensor, noise: float, hyper: Tensor | None = None
    ) -> Tensor | None:
        return None
