"""The noise variance σ² and the prior variance s² of a linear model, by evidence or by maximum
likelihood.

The data enter through sums over rows (`Statistics`) and their eigendecomposition (`Spectrum`). With
ΦᵀΦ = V diag(λ) Vᵀ, the least-squares weights ŵ, b = Vᵀŵ, the residual sum of squares RSS of ŵ, and
ρ = s²/σ², the log evidence of each output is

    log p(y | σ, s) = −½ [n log 2πσ² + Σ_j log(1 + ρλ_j) + (RSS + Σ_j λ_j b_j² / (1 + ρλ_j)) / σ²]

This is log N(y; 0, σ²I + s²ΦΦᵀ) at the cost of a few sums, and it is accurate for any ratio ρ. The
same holds for the mean and covariance of the posterior, V diag(ρλ/(1 + ρλ)) b and
V diag(s²/(1 + ρλ)) Vᵀ.

**Precision.** The sums are of e = y − Φw₀, where Φw₀ is a function near the data. With w₀ = 0, RSS
would be a difference of numbers as large as yᵀy, and would lose all digits below the last digit of
yᵀy. These are all of its digits if σ is below 1e-8 of y.

**Search.** One unknown at a time is found on a grid, and refined by golden section and Newton
steps, for all members (and outputs) at once. The evidence may have two maxima, so a gradient method
from one start would not be enough. The ends of the grid follow from the data: no maximum can lie
beyond them. So no ratio of signal to noise is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Sums over rows in float64, with e = y − Φw₀.

    Parameters
    ----------
    gram : Tensor of shape [K, F, F]
        ΦᵀΦ.
    cross : Tensor of shape [K, F, O]
        Φᵀe.
    square : Tensor of shape [K, O]
        eᵀe per output.
    n : Tensor of shape [K]
        The number of rows, or the sum of their weights.
    origin : Tensor of shape [K, F, O]
        w₀.
    """

    gram: Tensor
    cross: Tensor
    square: Tensor
    n: Tensor
    origin: Tensor

    def plus(self, phi: Tensor, y: Tensor) -> Statistics:
        """The sums with further rows added: φ [N, F] or [K, N, F], and y [N, O]."""
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
    """The sums of `Statistics` in the basis of the eigenvectors of ΦᵀΦ.

    Parameters
    ----------
    values : Tensor of shape [M, F]
        The eigenvalues λ.
    vectors : Tensor of shape [M, F, F]
        The eigenvectors V.
    best : Tensor of shape [M, F, O]
        b, the least-squares weights in this basis.
    residual : Tensor of shape [M, O]
        RSS. It is at least `resolution`.
    n : Tensor of shape [M]
        The number of rows.
    resolution : Tensor of shape [M, O]
        The RSS that an exact fit would have because of rounding.
    """

    values: Tensor
    vectors: Tensor
    best: Tensor
    residual: Tensor
    n: Tensor
    resolution: Tensor

    @classmethod
    def of(cls, data: Statistics, dtype: torch.dtype) -> Spectrum:
        """Compute the spectrum of sums over rows that were given in the type `dtype`.

        `resolution` has two parts. If data with y = Φŵ are rounded with a relative error ε, the
        residual of a row is at most ε (|y| + Σ_f |φ_f ŵ_f|). And RSS is the difference of two
        numbers, with the rounding error of the larger one.
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
        """λb², the part of yᵀy that each eigenvector explains, [M, F, O]."""
        return self.values[..., None] * self.best.square()

    @property
    def square(self) -> Tensor:
        """yᵀy per output, [M, O]."""
        return self.residual + self.fitted.sum(1)

    def misfit(self, rho: Tensor) -> Tensor:
        """yᵀ (I + ρΦΦᵀ)⁻¹ y, [M, O], for ρ = s²/σ² [M, O or 1]."""
        shrink = 1.0 + rho.unsqueeze(1) * self.values[..., None]  # [M, F, ·]
        return self.residual + (self.fitted / shrink).sum(1)

    def complexity(self, rho: Tensor) -> Tensor:
        """log |I + ρΦΦᵀ|, [M, O or 1], for ρ = s²/σ² [M, O or 1]."""
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
        """Whether the evidence cannot distinguish σ from zero, [M, O or 1]. This is so if σ is at
        the resolution, or if σ/1000 has the same evidence."""
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
    """Maximise the evidence over σ and s.

    Parameters
    ----------
    data : Spectrum
        The data.
    log_noise, log_std : Tensor or None
        Given values of log σ and log s, which stay fixed.
    per_output : bool
        Whether each output has its own σ.

    Returns
    -------
    tuple of Tensor
        log σ [M, 1 or O] and log s [M].
    """
    if log_noise is not None and log_std is not None:
        return log_noise, log_std
    if log_noise is not None:
        return log_noise, _fit_std(data, log_noise)
    if log_std is not None:
        return _fit_noise(data, log_std, per_output), log_std
    log_noise, log_std = _fit_both(data)
    if not per_output:
        return log_noise, log_std
    for _ in range(25):  # coordinate ascent: the noise levels depend on each other only through s
        before, log_noise = log_std, _fit_noise(data, log_std, per_output)
        log_std = _fit_std(data, log_noise)
        if bool(((log_std - before).abs() < 1e-10).all()):
            break
    return log_noise, log_std


def by_likelihood(data: Spectrum, per_output: bool) -> Tensor:
    """log σ by maximum likelihood, σ² = RSS/n, as a tensor [M, 1 or O]."""
    each = data.residual / data.n[:, None]
    return 0.5 * (each if per_output else each.mean(1, keepdim=True)).log()


def _scales(data: Spectrum) -> tuple[Tensor, Tensor]:
    """The largest λ and the smallest positive λ of each member, [M]. Both are 1 if all λ are 0."""
    most = data.values.amax(-1)
    most = torch.where(most > 0, most, torch.ones_like(most))
    least = data.values.masked_fill(data.values <= 0, math.inf).amin(-1)
    return most, torch.where(least.isfinite(), least, most)


def _fit_both(data: Spectrum) -> tuple[Tensor, Tensor]:
    """The maximum over ρ = s²/σ². For each ρ, the best σ² is misfit / (n O).

    With u = ρλ_j, the derivative with respect to log ρ is

        ½ Σ_jo [(nO λ_j b_jo² / misfit) u/(1 + u)² − u/(1 + u)],

    so no maximum lies beyond 1 + u = nO Σ λb² / RSS for the smallest λ.
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

    With u = s²λ_j/σ_o², the derivative with respect to log s² is

        ½ Σ_jo [(λ_j b_jo²/σ_o²) u/(1 + u)² − u/(1 + u)],

    so no maximum lies beyond s²λ = λb² for the smallest λ.
    """
    most, least = _scales(data)
    low = log_noise.amin(1) - 0.5 * (most.log() + math.log(1e6))
    above = data.fitted.amax((1, 2)) + (2 * log_noise).exp().amax(1)
    high = 0.5 * (10 * above / least).log()
    return maximise(lambda log_std: data.log_evidence(log_noise, log_std).sum(1), low, high)


def _fit_noise(data: Spectrum, log_std: Tensor, per_output: bool) -> Tensor:
    """The maximum over σ at a given s.

    At the maximum, σ² = |y − Φμ|² / (n − γ) with γ ≥ 0, which is at least RSS/n. For σ² above yᵀy,
    every term of the derivative is negative.
    """
    size = torch.stack([data.residual / data.n[:, None], data.square])  # [2, M, O]
    low, high = 0.5 * (size if per_output else size.mean(2, keepdim=True)).log()

    def value(log_noise: Tensor) -> Tensor:
        each = data.log_evidence(log_noise, log_std)
        return each if per_output else each.sum(1, keepdim=True)

    return maximise(value, low, high)


def maximise(value: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The argument on [low, high] that maximises a function, for each element of tensors.

    Parameters
    ----------
    value : callable
        The function, from a tensor to a tensor of values, element by element.
    low, high : Tensor
        The ends of the interval of each element.

    Returns
    -------
    Tensor
        The arguments.
    """
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
    for _ in range(3):  # golden section finds half of the digits, and Newton steps the others
        with torch.enable_grad():
            x = at.detach().requires_grad_()
            (first,) = torch.autograd.grad(value(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        step = torch.where(second < 0, -first.detach() / second, torch.zeros_like(at))
        at = torch.where(step.abs() < 1e-3, at + step, at)
    return torch.minimum(torch.maximum(at, low), high)
