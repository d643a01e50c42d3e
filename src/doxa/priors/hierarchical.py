"""Gaussians that share an unknown scale, integrated out: a density of each tensor's norm alone.

    p(w) = ∫ N(w; 0, σ² I_n) p(σ) dσ = exp F(r²),   r² = |w|²
    ∇ log p = −τ w,   τ(r²) = −2 F′(r²) = E[1/σ² | w]

σ² ~ InvGamma(a, b) gives the multivariate Student-t,

    F = log Γ(a + n/2) − log Γ(a) + a log b − n/2 log 2π − (a + n/2) log(b + r²/2),

and, given the weights, σ² ~ InvGamma(a + n/2, b + r²/2).

For half-Cauchy and log-normal scales, the integral has no elementary form:

    F(r²) = log ∫ exp(−n u − r² e^(−2u) / 2) p(u) du − n/2 log 2π,   u = log σ

This is a function of one number for each n and shape; a scale s only shifts it, F(r²/s²) − n log s.
It is tabulated once, by the trapezoid rule in t with u = mode + (2n)^−½ sinh t, exact to rounding.
Between the values, F is a cubic polynomial in log r² with matching values and slopes. The score is
the derivative of these polynomials, so that a sampler's force is the slope of its energy.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor

from doxa.errors import ModelError
from doxa.linalg.layout import Entry
from doxa.priors.base import (
    HALF_LOG_2PI,
    Family,
    Prior,
    Values,
    check_positive,
    normal,
    uniform,
)

TINY = 1e-300


class SharedScale(Family):
    """Elements of a tensor under one unknown scale. `exact["group"]` numbers the tensors."""

    grouped = True

    def __init__(self, exact: Values, device: torch.device, dtype: torch.dtype) -> None:
        group = exact["group"].reshape(-1, exact["group"].shape[-1])[:1].flatten()
        _, place, sizes = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
        self.sizes = sizes.tolist()  # n of each group
        self.count = sizes.double()  # [G]
        self.place = place.to(device)  # the group of each element, [p]
        firsts = torch.cumsum(sizes, 0) - sizes
        self.scale, self.shape = exact["scale"][..., firsts], exact["shape"][..., firsts]
        super().__init__(exact, device, dtype)

    def derive(self, *, group: Tensor, scale: Tensor, shape: Tensor) -> Values:  # type: ignore[override]
        return {"scale": scale, **self.radial()}

    @abstractmethod
    def radial(self) -> Values:
        """What F is made of, from `count` [G], `scale` and `shape` [*runs, G]."""

    @abstractmethod
    def value(self, square: Tensor) -> Tensor:
        """F at r² [..., G]."""

    @abstractmethod
    def precision(self, square: Tensor) -> tuple[Tensor, Tensor]:
        """τ at r² [..., G], and its derivative by r²."""

    @abstractmethod
    def sample_scales(self, n: int, generator: Generator) -> Tensor:
        """σ before any weight is seen, [n, *runs, G]."""

    @abstractmethod
    def scales(self, x: Tensor, generator: Generator) -> Tensor:
        """σ given weights, a draw for each row: [..., p] to [..., G], in float64 on the CPU."""

    def squares(self, x: Tensor) -> Tensor:
        """r² of each group, [..., p] to [..., G]."""
        return torch.stack([part.square().sum(-1) for part in x.split(self.sizes, -1)], -1)

    def log_prob(self, x: Tensor) -> Tensor:
        return self.value(self.squares(x)).sum(-1) if self.sizes else x.sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -x * self.precision(self.squares(x))[0][..., self.place] if self.sizes else x

    def curvature(self, x: Tensor) -> Tensor:
        if not self.sizes:
            return x
        tau, slope = self.precision(self.squares(x))
        return tau[..., self.place] + 2.0 * x.square() * slope[..., self.place]

    def sample(self, n: int, generator: Generator) -> Tensor:
        like = self.at["scale"]
        sigma = self.sample_scales(n, generator).to(like)
        return sigma[..., self.place] * normal(n, like, generator)


class InverseGammaScale(SharedScale):
    """σ² ~ InvGamma(a, b) with a the shape and b = a · scale²."""

    def radial(self) -> Values:
        half, b = self.shape + 0.5 * self.count, self.shape * self.scale.square()
        norm = torch.lgamma(half) - torch.lgamma(self.shape) + self.shape * b.log()
        return {"half": half, "b": b, "norm": norm - self.count * HALF_LOG_2PI}

    def value(self, square: Tensor) -> Tensor:
        return self.at["norm"] - self.at["half"] * torch.log(self.at["b"] + 0.5 * square)

    def precision(self, square: Tensor) -> tuple[Tensor, Tensor]:
        width = self.at["b"] + 0.5 * square
        tau = self.at["half"] / width
        return tau, -0.5 * tau / width

    def sample_scales(self, n: int, generator: Generator) -> Tensor:
        shape = self.shape.expand(n, *self.shape.shape)
        return self.scale * (shape / _gamma(shape, generator)).sqrt()

    def scales(self, x: Tensor, generator: Generator) -> Tensor:
        width = self.shape * self.scale.square() + 0.5 * self.squares(x.double().cpu())
        half = (self.shape + 0.5 * self.count).expand(width.shape)
        return (width / _gamma(half, generator)).sqrt()


def _gamma(shape: Tensor, generator: Generator) -> Tensor:
    return torch._standard_gamma(shape.contiguous(), generator).clamp_min(TINY)


_BELOW, _ABOVE, _STEP = 36.0, 24.0, 0.0625  # of log(r²/n)
_CELLS = round((_BELOW + _ABOVE) / _STEP)
_NODES, _REACH = 241, 60.0  # of the integral: how many, and how far from the mode in log σ


class Tabulated(SharedScale):
    """F by a table over ρ = log r²: in each cell F = Σ_k c_k t^k with t in [0, 1]."""

    @staticmethod
    @abstractmethod
    def log_hyper(u: Tensor, shape: Tensor) -> Tensor:
        """log p(u) of u = log σ at scale 1; concave."""

    def radial(self) -> Values:
        shape = self.shape.expand(self.scale.shape)
        pairs = torch.stack([self.count.expand(shape.shape), shape], -1)  # [*runs, G, 2]
        distinct, self.pair = torch.unique(pairs.reshape(-1, 2), dim=0, return_inverse=True)
        tables = [_table(type(self), float(n), float(a)) for n, a in distinct]
        empty = torch.empty(0, _CELLS, 4, dtype=torch.float64)
        self.pair = self.pair.reshape(shape.shape).to(self.place.device)  # each group's table
        return {
            "table": torch.stack(tables) if tables else empty,
            "inverse": self.scale**-2,
            "start": self.count.log() - _BELOW,
            "norm": -self.count * self.scale.log(),
        }

    def _cell(self, square: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ρ but not below the table, how far it lies above it, t, and the c_k [..., G, 4]."""
        tiny = torch.finfo(square.dtype).tiny
        rho = torch.log((square * self.at["inverse"]).clamp_min(tiny))
        place = (rho - self.at["start"]).clamp(min=0.0) / _STEP
        inside = place.clamp(max=float(_CELLS))
        index = inside.detach().long().clamp(0, _CELLS - 1)  # also of what is not a number
        table = self.at["table"][self.pair, index]
        return self.at["start"] + _STEP * place, place - inside, inside - index, table

    def value(self, square: Tensor) -> Tensor:
        _, beyond, t, table = self._cell(square)
        c0, c1, c2, c3 = table.unbind(-1)
        last = (c1 + 2 * c2 + 3 * c3) * beyond  # on along the tangent
        return self.at["norm"] + c0 + t * (c1 + t * (c2 + t * c3)) + last

    def precision(self, square: Tensor) -> tuple[Tensor, Tensor]:
        rho, beyond, t, table = self._cell(square)
        _, c1, c2, c3 = table.unbind(-1)
        slope = (c1 + t * (2 * c2 + 3 * c3 * t)) / _STEP  # dF/dρ
        bend = torch.where(beyond > 0, torch.zeros_like(t), (2 * c2 + 6 * c3 * t) / _STEP**2)
        width = torch.exp(-rho) * self.at["inverse"]  # 1/r²
        return -2.0 * slope * width, -2.0 * (bend - slope) * width.square()

    def scales(self, x: Tensor, generator: Generator) -> Tensor:
        """By the inverse of the distribution function on a grid of log σ."""
        square = self.squares(x.double().cpu()) / self.scale.square()
        shape = self.shape.expand(square.shape)
        u, log_mass = _integrand(type(self), square, self.count.expand(square.shape), shape)
        mass = torch.exp(log_mass - log_mass.amax(0))
        share = 0.5 * (mass[1:] + mass[:-1])
        grown = share.cumsum(0)
        wanted = torch.rand(square.shape, generator=generator, dtype=torch.float64) * grown[-1]
        panel = (grown < wanted).sum(0, keepdim=True).clamp(max=len(share) - 1)
        own = share.gather(0, panel)[0]
        part = ((wanted - grown.gather(0, panel)[0]) / own.clamp_min(TINY) + 1).clamp(0, 1)
        left, right = u.gather(0, panel)[0], u.gather(0, panel + 1)[0]
        return self.scale * torch.exp(left + part * (right - left))


def _integrand(
    kind: type[Tabulated], square: Tensor, count: Tensor, shape: Tensor
) -> tuple[Tensor, Tensor]:
    """Nodes u [nodes, ...] around the mode of p(w | u) p(u), which bisection finds, and the log of
    that density times du/dt, at r² of any shape."""

    def density(u: Tensor) -> Tensor:
        spread = 0.5 * square * torch.exp(-2.0 * u)
        return kind.log_hyper(u, shape) - count * (u + HALF_LOG_2PI) - spread

    low, high = torch.full_like(square, -2 * _REACH), torch.full_like(square, 2 * _REACH)
    for _ in range(50):
        middle = 0.5 * (low + high)
        with torch.enable_grad():
            at = middle.detach().requires_grad_()
            slope = torch.autograd.grad(density(at).sum(), at)[0]
        low, high = torch.where(slope > 0, middle, low), torch.where(slope > 0, high, middle)
    width = torch.rsqrt(2.0 * count)
    t = torch.linspace(-1.0, 1.0, _NODES, dtype=torch.float64).reshape(-1, *(1,) * square.ndim)
    t = t * torch.asinh(_REACH / width)
    u = 0.5 * (low + high) + width * torch.sinh(t)
    return u, density(u) + torch.log(width * torch.cosh(t))


@lru_cache(maxsize=256)
def _table(kind: type[Tabulated], n: float, a: float) -> Tensor:
    """The c_k of every cell, [cells, 4], at scale 1."""
    rho = math.log(n) - _BELOW + _STEP * torch.arange(_CELLS + 1, dtype=torch.float64)
    square, count = rho.exp(), torch.full_like(rho, n)
    u, log_mass = _integrand(kind, square, count, torch.full_like(rho, a))
    dt = 2.0 * math.asinh(_REACH * math.sqrt(2.0 * n)) / (_NODES - 1)
    value = torch.logsumexp(log_mass, 0) + math.log(dt)
    mean = (torch.softmax(log_mass, 0) * torch.exp(-2.0 * u)).sum(0)  # E[1/σ² | w]
    slope = -0.5 * square * mean * _STEP  # dF/dt
    rise, first, last = value[1:] - value[:-1], slope[:-1], slope[1:]
    return torch.stack(
        [value[:-1], first, 3 * rise - 2 * first - last, first + last - 2 * rise], -1
    )


class HalfCauchyScale(Tabulated):
    """p(σ) = 2 / (π s (1 + σ²/s²))"""

    @staticmethod
    def log_hyper(u: Tensor, shape: Tensor) -> Tensor:
        return math.log(2.0 / math.pi) + u - torch.logaddexp(torch.zeros_like(u), 2.0 * u)

    def sample_scales(self, n: int, generator: Generator) -> Tensor:
        away = 1.0 - uniform(n, self.scale, generator)
        return self.scale * torch.tan(0.5 * math.pi * away)


class LogNormalScale(Tabulated):
    """log σ ~ N(log s, shape²)"""

    @staticmethod
    def log_hyper(u: Tensor, shape: Tensor) -> Tensor:
        return -0.5 * (u / shape).square() - shape.log() - HALF_LOG_2PI

    def sample_scales(self, n: int, generator: Generator) -> Tensor:
        return self.scale * torch.exp(self.shape * normal(n, self.scale, generator))


HYPER: dict[str, type[Family]] = {
    "half-cauchy": HalfCauchyScale,
    "inverse-gamma": InverseGammaScale,
    "log-normal": LogNormalScale,
}


@dataclass(frozen=True)
class Hierarchical(Prior):
    """N(centre, σ²) on every element of a tensor, with one unknown σ for each tensor:

        "half-cauchy"     σ ~ C⁺(0, scale)                      shape is not used
        "inverse-gamma"   σ² ~ InvGamma(shape, shape · scale²)  a Student-t with 2 · shape degrees
        "log-normal"      log σ ~ N(log scale, shape²)

    σ is integrated out, so that every method supports it without additional parameters. MCMC
    samples the weights under all σ at once, without the funnel of the joint density of weights and
    σ (Neal, 2003). `doxa.prior_scales(posterior)` draws σ given the weights. Half-Cauchy: Gelman
    (2006).

    Parameters
    ----------
    scale : float
        The typical size of σ; divided by √fan_in if `fan_in` is True.
    """

    name = "hierarchical"

    hyper: str = "half-cauchy"
    scale: float = 1.0
    shape: float = 1.0
    fan_in: bool = False

    def __post_init__(self) -> None:
        if self.hyper not in HYPER:
            raise ModelError(f"Hierarchical: hyper is one of {', '.join(HYPER)}: {self.hyper!r}")
        if not isinstance(self.fan_in, bool):
            raise ModelError(f"Hierarchical: fan_in is True or False, got {self.fan_in!r}")
        check_positive(self, ("scale", "shape"))

    @property
    def family(self) -> type[Family]:
        return HYPER[self.hyper]

    def settings(self, entry: Entry) -> dict[str, float]:
        width = self.scale / math.sqrt(entry.fan_in) if self.fan_in else self.scale
        return {"scale": width, "shape": self.shape}
