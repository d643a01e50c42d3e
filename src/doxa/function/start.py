"""Where hyper-parameters start: values that suit the size of the data, whatever its units.

Lengthscales are the median distance between rows, each column by its own spread; variances share
the mean square of y. The evidence has many tops along a period: the best of some is taken, by the
evidence of a few rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.function.composed import Composed
from doxa.function.evidence import Problem
from doxa.function.kernels import KernelFunction

FEW = 256  # rows that are looked at
_PERIODS = 13  # from the range of x down to a 64th of it


def kernel_start(
    kernel: Composed, x: Tensor, y: Tensor, lengthscale: float | None, variance: float | None
) -> Tensor:
    """Logarithms for rows x [n, D] and targets y [n, O]: [H]; what is given is taken as it is."""
    spread = x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    values, layout = {}, kernel.layout
    for entry in layout.entries:
        own, columns = entry.name.rpartition(".")[2], entry.shape[1]
        size = spread if columns > 1 else torch.ones_like(spread[:1])
        if own == "lengthscale":
            found = size * _distance(x / size) if lengthscale is None else lengthscale
        elif own == "period":
            found = size * 4.0 if columns > 1 else spread.mean() * 4.0
        elif own == "offset":
            found = _or_one(x.square().sum(1).mean())
        else:  # a variance, set below; alpha
            found = 1.0
        values[entry.name] = torch.as_tensor(found, dtype=x.dtype).expand(1, columns).log()
    flat = layout.flatten(values)
    terms = [s.start for name, s in layout.slices.items() if name.endswith(".variance")]
    power = _or_one(y.square().mean()) / len(terms)
    for term in terms:
        alone = flat.clone()
        alone[terms] = -torch.inf
        alone[term] = 0.0
        size = _or_one(kernel(alone, x, x, True).mean())  # of a term without its variance
        flat[term] = (power / size if variance is None else x.new_tensor(variance)).log()
    return flat


def best_period(kernel: Composed, problem: Problem, theta: Tensor) -> Tensor:
    """θ [H] with its periods divided by the number under which the evidence is largest."""
    periods = [s for name, s in kernel.layout.slices.items() if name.endswith(".period")]
    if not periods:
        return theta
    tried = theta.repeat(_PERIODS, 1)
    less = torch.linspace(0.0, torch.tensor(64.0).log(), _PERIODS, dtype=theta.dtype)
    for own in periods:
        tried[:, own] -= less[:, None]
    value = problem.value(tried, problem.solve(tried)).nan_to_num(-torch.inf)
    return tried[value.argmax()]


def check_positive(kernel: KernelFunction, x: Tensor) -> None:
    """A kernel that somebody brought is one: symmetric, with no negative eigenvalue."""
    found = kernel(kernel.start(), x, x).detach()
    size = float(found.diagonal().abs().max())
    if not bool(torch.isfinite(found).all()):
        raise MethodError("the kernel gives values that are not finite at the training rows")
    if float((found - found.mT).abs().max()) > 1e-8 * size:
        raise MethodError("the kernel is no covariance: k(a, b) differs from k(b, a)")
    least = float(torch.linalg.eigvalsh(found)[0])
    if least < -1e-6 * size:
        raise MethodError(
            f"the kernel is not positive definite: the covariance of {len(x)} training rows has "
            f"an eigenvalue of {least:.3g}, and a variance cannot be negative; sums and products "
            "of kernels are kernels, differences are not"
        )


def _or_one(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, torch.ones_like(value))


def _distance(x: Tensor) -> Tensor:
    """The median distance between rows, 1 where they coincide."""
    away = torch.pdist(x)
    return _or_one(away.median()) if len(away) else torch.ones((), dtype=x.dtype)
