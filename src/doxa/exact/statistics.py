"""What a linear model needs of its data: sums over rows, and their spectrum.

With ΦᵀΦ = V diag(λ) Vᵀ, b = Vᵀŵ of least squares, RSS its residual and ρ = s²/σ², for each output

    log p(y | σ, s) = −½ [n log 2πσ² + Σ_j log(1 + ρλ_j) + (RSS + Σ_j λ_j b_j² / (1 + ρλ_j)) / σ²]

which is log N(y; 0, σ²I + s²ΦΦᵀ) at the cost of a few sums, and good at any ratio ρ. So are the
posterior's moments, V diag(ρλ/(1 + ρλ)) b and V diag(s²/(1 + ρλ)) Vᵀ.

The sums are taken about a function Φw₀ near the data. About 0, RSS = yᵀy − … would lose what lies
below the last digit of yᵀy: all of it, once σ is under 1e-8 of y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Sums over rows, with e = y − Φw₀; all in float64.

    gram: ΦᵀΦ [K, F, F]. cross: Φᵀe [K, F, O]. square: eᵀe [K, O]. n: [K]. origin: w₀ [K, F, O].
    """

    gram: Tensor
    cross: Tensor
    square: Tensor
    n: Tensor
    origin: Tensor

    def plus(self, phi: Tensor, y: Tensor) -> Statistics:
        """With further rows φ [(K,) N, F] and y [N, O]."""
        e = y - phi @ self.origin  # [K, N, O]
        return Statistics(
            self.gram + phi.mT @ phi,
            self.cross + phi.mT @ e,
            self.square + e.square().sum(-2),
            self.n + len(y),
            self.origin,
        )


@dataclass(frozen=True)
class Spectrum:
    """The same in the eigenvectors of ΦᵀΦ.

    values: λ [M, F]. vectors: V [M, F, F]. best: b [M, F, O]. residual: RSS [M, O]. n: [M].
    resolution: what RSS would be of an exact fit, from rounded numbers [M, O]; RSS is no less.
    """

    values: Tensor
    vectors: Tensor
    best: Tensor
    residual: Tensor
    n: Tensor
    resolution: Tensor

    @classmethod
    def of(cls, data: Statistics, dtype: torch.dtype) -> Spectrum:
        """Of sums over rows that were given in `dtype`.

        Rounded to a relative ε, a row of y = Φŵ misses it by ε (|y| + Σ_f |φ_f ŵ_f|) at most; RSS
        itself is a difference of two numbers.
        """
        values, vectors = torch.linalg.eigh(data.gram)
        tiny, size = torch.finfo(values.dtype).eps, values.shape[-1]
        zero = values <= tiny * size * values.amax(-1, keepdim=True)
        values = values.masked_fill(zero, 0.0)
        inverse = torch.where(zero, 0.0, 1.0 / values.masked_fill(zero, 1.0))[..., None]
        cross = vectors.mT @ data.cross
        best = (vectors.mT @ data.origin + cross * inverse).masked_fill(zero[..., None], 0.0)
        square = data.square + (data.origin * (2 * data.cross + data.gram @ data.origin)).sum(1)
        features = data.gram.diagonal(dim1=-2, dim2=-1)[..., None]  # Σ φ_f²: [M, F, 1]
        terms = square.clamp(min=0.0) + size * (features * (vectors @ best).square()).sum(1)
        gain = (cross.square() * inverse).sum(1)
        resolution = torch.finfo(dtype).eps ** 2 * terms + tiny * gain + 1e-300
        residual = torch.maximum(data.square - gain, resolution)
        return cls(values, vectors, best, residual, data.n, resolution)

    @property
    def fitted(self) -> Tensor:
        """λb²: what each direction explains of yᵀy, [M, F, O]."""
        return self.values[..., None] * self.best.square()

    @property
    def square(self) -> Tensor:
        """yᵀy: [M, O]."""
        return self.residual + self.fitted.sum(1)

    def misfit(self, rho: Tensor) -> Tensor:
        """yᵀ (I + ρΦΦᵀ)⁻¹ y for ρ = s²/σ² [M, O or 1]: [M, O]."""
        shrink = 1.0 + rho.unsqueeze(1) * self.values[..., None]  # [M, F, ·]
        return self.residual + (self.fitted / shrink).sum(1)

    def complexity(self, rho: Tensor) -> Tensor:
        """log |I + ρΦΦᵀ|: [M, O or 1]."""
        return torch.log1p(rho.unsqueeze(1) * self.values[..., None]).sum(1)

    def log_evidence(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """Of each output, [M, O], at log σ [M, O or 1] and log s [M]."""
        rho = (2 * (log_std[:, None] - log_noise)).exp()
        quadratic = self.misfit(rho) * (-2 * log_noise).exp()
        constant = self.n[:, None] * (math.log(2 * math.pi) + 2 * log_noise)
        return -0.5 * (constant + self.complexity(rho) + quadratic)

    def mean(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """The posterior's, of the weights: [M, F, O]."""
        gain = (2 * (log_std[:, None] - log_noise)).exp().unsqueeze(1) * self.values[..., None]
        return self.vectors @ (self.best * (gain / (1.0 + gain)))

    def precision_root(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """A with AᵀA = ΦᵀΦ/σ² + I/s², the posterior's precision: [M, O or 1, F, F]."""
        ratio = (2 * (log_std[:, None] - log_noise)).exp()[..., None] * self.values[:, None]
        root = (1.0 + ratio).sqrt() * (-log_std).exp()[:, None, None]  # [M, ·, F]
        return root[..., None] * self.vectors.mT[:, None]

    def undecided(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """Where the evidence cannot tell σ from none, [M, O or 1]: it is down at the resolution, or
        a thousandth of it would do as well."""
        sure = replace(self, residual=self.residual - self.resolution)
        here, below = (sure.log_evidence(log_noise - d, log_std) for d in (0.0, math.log(1e3)))
        gain, floor = below - here, self.resolution / self.n[:, None]
        if log_noise.shape[1] == 1:
            gain, floor = gain.sum(1, keepdim=True), floor.mean(1, keepdim=True)
        return (log_noise <= 0.5 * (1.1 * floor).log()) | (gain > -1e-3)
