"""Gaussians that share an unknown scale, integrated out: a density of each tensor's norm alone.

    p(w) = ∫ N(w; 0, σ² I_n) p(σ) dσ = exp F(r²),   r² = |w|²
    ∇ log p = −τ w,   τ(r²) = −2 F′(r²) = E[1/σ² | w]

σ² ~ InvGamma(a, b) gives the multivariate Student-t,

    F = log Γ(a + n/2) − log Γ(a) + a log b − n/2 log 2π − (a + n/2) log(b + r²/2),

and, given the weights, σ² ~ InvGamma(a + n/2, b + r²/2). Under other scales F is tabulated:
`tabulated.py`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Generator, Tensor

from doxa.priors.families import HALF_LOG_2PI, Family, Values, normal

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
