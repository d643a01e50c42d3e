"""σ² and the prior variance s² of a linear model, by evidence or by maximum likelihood.

The statistics of the data are sums over rows, and their spectrum. With ΦᵀΦ = V diag(λ) Vᵀ, b = Vᵀŵ
of least squares, RSS its residual and ρ = s²/σ², for each output

    log p(y | σ, s) = −½ [n log 2πσ² + Σ_j log(1 + ρλ_j) + (RSS + Σ_j λ_j b_j² / (1 + ρλ_j)) / σ²]

This is log N(y; 0, σ²I + s²ΦΦᵀ) at the cost of a few sums, and it is accurate for any ratio ρ. The
same holds for the posterior's moments, V diag(ρλ/(1 + ρλ)) b and V diag(s²/(1 + ρλ)) Vᵀ.

The sums are taken about a function Φw₀ near the data. If they were taken about 0, RSS = yᵀy − …
would lose everything below the last digit of yᵀy, which is all of it if σ is below 1e-8 of y.

One unknown at a time is found on a grid, and refined by golden section and Newton steps, for all
members (and outputs) at once. The function may have two maxima, so a gradient from one start would
not be enough. The grid reaches as far as a maximum can lie. These limits follow from the data, so
no ratio of signal to noise is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
        """The sums with further rows φ [(K,) N, F] and y [N, O]."""
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
    """The same sums in the basis of the eigenvectors of ΦᵀΦ.

    values: λ [M, F]. vectors: V [M, F, F]. best: b [M, F, O]. residual: RSS [M, O]. n: [M].
    resolution: the RSS that an exact fit would have because of rounding [M, O]; RSS is at least
    that.
    """

    values: Tensor
    vectors: Tensor
    best: Tensor
    residual: Tensor
    n: Tensor
    resolution: Tensor

    @classmethod
    def of(cls, data: Statistics, dtype: torch.dtype) -> Spectrum:
        """The spectrum of sums over rows that were given in `dtype`.

        If y = Φŵ is rounded to a relative ε, a row misses it by at most ε (|y| + Σ_f |φ_f ŵ_f|);
        RSS is itself a difference of two numbers.
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
        """λb², the part of yᵀy that each direction explains, [M, F, O]."""
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
        """The log evidence of each output, [M, O], at log σ [M, O or 1] and log s [M]."""
        rho = (2 * (log_std[:, None] - log_noise)).exp()
        quadratic = self.misfit(rho) * (-2 * log_noise).exp()
        constant = self.n[:, None] * (math.log(2 * math.pi) + 2 * log_noise)
        return -0.5 * (constant + self.complexity(rho) + quadratic)

    def mean(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """The posterior mean of the weights: [M, F, O]."""
        gain = (2 * (log_std[:, None] - log_noise)).exp().unsqueeze(1) * self.values[..., None]
        return self.vectors @ (self.best * (gain / (1.0 + gain)))

    def precision_root(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """A with AᵀA = ΦᵀΦ/σ² + I/s², the posterior's precision: [M, O or 1, F, F]."""
        ratio = (2 * (log_std[:, None] - log_noise)).exp()[..., None] * self.values[:, None]
        root = (1.0 + ratio).sqrt() * (-log_std).exp()[:, None, None]  # [M, ·, F]
        return root[..., None] * self.vectors.mT[:, None]

    def undecided(self, log_noise: Tensor, log_std: Tensor) -> Tensor:
        """Whether the evidence cannot distinguish σ from zero, [M, O or 1]: σ is at the resolution,
        or a thousandth of it has the same evidence."""
        sure = replace(self, residual=self.residual - self.resolution)
        here, below = (sure.log_evidence(log_noise - d, log_std) for d in (0.0, math.log(1e3)))
        gain, floor = below - here, self.resolution / self.n[:, None]
        if log_noise.shape[1] == 1:
            gain, floor = gain.sum(1, keepdim=True), floor.mean(1, keepdim=True)
        return (log_noise <= 0.5 * (1.1 * floor).log()) | (gain > -1e-3)


_GRID = 240
_GOLDEN = (math.sqrt(5) - 1) / 2


def by_evidence(
    data: Spectrum, log_noise: Tensor | None, log_std: Tensor | None, per_output: bool
) -> tuple[Tensor, Tensor]:
    """log σ [M, 1 or O] and log s [M] at the maximum of the evidence; given values stay fixed."""
    if log_noise is not None and log_std is not None:
        return log_noise, log_std
    if log_noise is not None:
        return log_noise, _fit_std(data, log_noise)
    if log_std is not None:
        return _fit_noise(data, log_std, per_output), log_std
    log_noise, log_std = _fit_both(data)
    if not per_output:
        return log_noise, log_std
    for _ in range(25):  # by coordinates: noise levels depend on each other only by s
        before, log_noise = log_std, _fit_noise(data, log_std, per_output)
        log_std = _fit_std(data, log_noise)
        if bool(((log_std - before).abs() < 1e-10).all()):
            break
    return log_noise, log_std


def by_likelihood(data: Spectrum, per_output: bool) -> Tensor:
    """log σ by maximum likelihood, σ² = RSS/n: [M, 1 or O]."""
    each = data.residual / data.n[:, None]
    return 0.5 * (each if per_output else each.mean(1, keepdim=True)).log()


def _scales(data: Spectrum) -> tuple[Tensor, Tensor]:
    """The largest λ and the smallest λ above 0, [M]; 1 if all are 0."""
    most = data.values.amax(-1)
    most = torch.where(most > 0, most, torch.ones_like(most))
    least = data.values.masked_fill(data.values <= 0, math.inf).amin(-1)
    return most, torch.where(least.isfinite(), least, most)


def _fit_both(data: Spectrum) -> tuple[Tensor, Tensor]:
    """The maximum over ρ = s²/σ², with σ² at its maximum for each ρ, which is misfit / (n O).

    In log ρ the slope is ½ Σ_jo [(nO λ_j b_jo² / misfit) u/(1 + u)² − u/(1 + u)] with u = ρλ_j:
    no maximum lies beyond 1 + u = nO Σ λb² / RSS for the least λ.
    """
    count, outputs = data.n * data.square.shape[1], data.square.shape[1]

    def variance(log_rho: Tensor) -> Tensor:
        return data.misfit(log_rho.exp()[:, None]).sum(1) / count

    def value(log_rho: Tensor) -> Tensor:
        complexity = data.complexity(log_rho.exp()[:, None]).sum(1) * outputs
        return -0.5 * (count * variance(log_rho).log() + complexity)

    most, least = _scales(data)
    signal = data.fitted.sum((1, 2)) / data.residual.sum(1)
    log_rho = maximise(value, (1e-6 / most).log(), ((10 + 10 * count * signal) / least).log())
    log_noise = 0.5 * variance(log_rho).log()
    return log_noise[:, None], log_noise + 0.5 * log_rho


def _fit_std(data: Spectrum, log_noise: Tensor) -> Tensor:
    """The maximum over s at a given σ.

    The slope in log s² is ½ Σ_jo [(λ_j b_jo²/σ_o²) u/(1 + u)² − u/(1 + u)] with u = s²λ_j/σ_o²:
    no maximum lies beyond s²λ = λb² for the least λ.
    """
    most, least = _scales(data)
    low = log_noise.amin(1) - 0.5 * (most.log() + math.log(1e6))
    above = data.fitted.amax((1, 2)) + (2 * log_noise).exp().amax(1)
    high = 0.5 * (10 * above / least).log()
    return maximise(lambda log_std: data.log_evidence(log_noise, log_std).sum(1), low, high)


def _fit_noise(data: Spectrum, log_std: Tensor, per_output: bool) -> Tensor:
    """The maximum over σ at a given s.

    There σ² = |y − Φμ|² / (n − γ) with γ ≥ 0, which is at least RSS/n. Beyond yᵀy every term of the
    slope is negative.
    """
    size = torch.stack([data.residual / data.n[:, None], data.square])  # [2, M, O]
    low, high = 0.5 * (size if per_output else size.mean(2, keepdim=True)).log()

    def value(log_noise: Tensor) -> Tensor:
        each = data.log_evidence(log_noise, log_std)
        return each if per_output else each.sum(1, keepdim=True)

    return maximise(value, low, high)


def maximise(value: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The maximum of each element of a function of tensors on [low, high]."""
    points = [torch.lerp(low, high, i / (_GRID - 1)) for i in range(_GRID)]
    best = torch.stack([value(point) for point in points]).argmax(0)
    width = (high - low) / (_GRID - 1)
    middle = low + best * width
    a, b = torch.maximum(middle - width, low), torch.minimum(middle + width, high)
    for _ in range(50):
        c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
        right = value(c) < value(d)
        a, b = torch.where(right, c, a), torch.where(right, b, d)
    at = (a + b) / 2
    for _ in range(3):  # golden section has half of the digits; Newton steps find the rest
        with torch.enable_grad():
            x = at.detach().requires_grad_()
            (first,) = torch.autograd.grad(value(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        step = torch.where(second < 0, -first.detach() / second, torch.zeros_like(at))
        at = torch.where(step.abs() < 1e-3, at + step, at)
    return torch.minimum(torch.maximum(at, low), high)
