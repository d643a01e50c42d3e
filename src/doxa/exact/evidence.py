"""σ² and the prior variance s² of a linear model by evidence or by maximum likelihood.

With ΦᵀΦ = V diag(λ) Vᵀ, c = VᵀΦᵀy and RSS the residual of least squares, for each output

    log p(y | σ, s) = −½ [n log 2πσ² + Σ_j log(1 + s²λ_j/σ²)
                          + (RSS + Σ_j (c_j²/λ_j) / (1 + s²λ_j/σ²)) / σ²]

which is log N(y; 0, σ²I + s²ΦΦᵀ) at the cost of a few sums. One unknown at a time is found on a
grid and refined by golden section and Newton steps, for all members (and outputs) at once: the
function may have two maxima, so that a gradient from one start is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_GRID = 160
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Spectrum:
    """What the evidence needs of the data: everything in float64.

    values: λ [M, F]. fitted: c²/λ [M, F, O]. residual: RSS [M, O]. square: yᵀy [M, O]. n: [M].
    """

    values: Tensor
    fitted: Tensor
    residual: Tensor
    square: Tensor
    n: Tensor

    @classmethod
    def of(cls, gram: Tensor, cross: Tensor, square: Tensor, n: Tensor) -> Spectrum:
        """From ΦᵀΦ [M, F, F], Φᵀy [M, F, O], yᵀy [M, O] and the number of rows [M]."""
        values, vectors = torch.linalg.eigh(gram)
        eps = torch.finfo(values.dtype).eps * values.shape[-1]
        zero = values <= eps * values.amax(-1, keepdim=True)
        values = values.masked_fill(zero, 0.0)
        inverse = torch.where(zero, 0.0, 1.0 / values.masked_fill(zero, 1.0))
        fitted = (vectors.mT @ cross).square() * inverse[..., None]
        residual = torch.maximum(square - fitted.sum(1), 1e-15 * square)
        return cls(values, fitted, residual, square, n)

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


def by_evidence(
    data: Spectrum, log_noise: Tensor | None, log_std: Tensor | None, per_output: bool
) -> tuple[Tensor, Tensor]:
    """log σ [M, 1 or O] and log s [M] at the maximum of the evidence; what is given stays."""
    if log_noise is not None and log_std is not None:
        return log_noise, log_std
    if log_noise is not None:
        return log_noise, _fit_std(data, log_noise)
    if log_std is not None:
        return _fit_noise(data, log_std, per_output), log_std
    log_noise, log_std = _fit_both(data)
    if not per_output:
        return log_noise, log_std
    for _ in range(25):  # coordinate by coordinate: the noises depend on each other through s only
        log_noise = _fit_noise(data, log_std, per_output)
        log_std = _fit_std(data, log_noise)
    return log_noise, log_std


def by_likelihood(data: Spectrum, per_output: bool) -> Tensor:
    """log σ of maximum likelihood, σ² = RSS/n: [M, 1 or O]."""
    each = data.residual / data.n[:, None]
    floor = 1e-14 * data.square / data.n[:, None] + 1e-300
    each = torch.maximum(each, floor)
    return 0.5 * (each if per_output else each.mean(1, keepdim=True)).log()


def _scales(data: Spectrum) -> tuple[Tensor, Tensor]:
    """(the largest λ, the smallest one above 0), [M]; 1 where all are 0."""
    most = data.values.amax(-1)
    most = torch.where(most > 0, most, torch.ones_like(most))
    least = data.values.masked_fill(data.values <= 0, math.inf).amin(-1)
    return most, torch.where(least.isfinite(), least, most)


def _fit_both(data: Spectrum) -> tuple[Tensor, Tensor]:
    """Over ρ = s²/σ², with σ² at its maximum for each ρ: misfit / (n O)."""
    count = data.n * data.square.shape[1]
    floor = 1e-14 * data.square.sum(1) / count + 1e-300

    def variance(log_rho: Tensor) -> Tensor:
        total = data.misfit(log_rho.exp()[:, None]).sum(1)
        return torch.maximum(total / count, floor)

    def value(log_rho: Tensor) -> Tensor:
        complexity = data.complexity(log_rho.exp()[:, None]).sum(1) * data.square.shape[1]
        return -0.5 * (count * variance(log_rho).log() + complexity)

    most, least = _scales(data)
    log_rho = maximise(value, (1e-6 / most).log(), (1e8 / least).log())
    log_noise = 0.5 * variance(log_rho).log()
    return log_noise[:, None], log_noise + 0.5 * log_rho


def _fit_std(data: Spectrum, log_noise: Tensor) -> Tensor:
    most, least = _scales(data)
    low = log_noise.amin(1) - 0.5 * (most.log() + math.log(1e6))
    high = log_noise.amax(1) - 0.5 * (least.log() - math.log(1e8))
    return maximise(lambda log_std: data.log_evidence(log_noise, log_std).sum(1), low, high)


def _fit_noise(data: Spectrum, log_std: Tensor, per_output: bool) -> Tensor:
    size = data.square / data.n[:, None] + 1e-300
    size = size if per_output else size.mean(1, keepdim=True)

    def value(log_noise: Tensor) -> Tensor:
        each = data.log_evidence(log_noise, log_std)
        return each if per_output else each.sum(1, keepdim=True)

    return maximise(value, 0.5 * (1e-14 * size).log(), 0.5 * (1e1 * size).log())


def maximise(value: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The elementwise maximum of a function of tensors on [low, high], everywhere at once."""
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
    for _ in range(3):  # golden section knows half the digits; Newton's steps give the rest
        with torch.enable_grad():
            x = at.detach().requires_grad_()
            (first,) = torch.autograd.grad(value(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        step = torch.where(second < 0, -first.detach() / second, torch.zeros_like(at))
        at = torch.where(step.abs() < 1e-3, at + step, at)
    return torch.minimum(torch.maximum(at, low), high)
