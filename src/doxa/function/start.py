"""Where hyper-parameters start: values that suit the size of the data, whatever its units.

Lengthscales are the root mean square distance between rows, each column by its own spread;
variances share the mean square of y. A row of weight 2 counts as two. The evidence has several
tops, and many along a period: of some starts the best is taken, by the evidence of a few rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import MethodError
from doxa.function.composed import Composed
from doxa.function.evidence import Problem
from doxa.function.kernels import KernelFunction

FEW = 256  # rows that are looked at
_SHORTER, _QUIETER = (1.0, 2.0, 4.0, 8.0), (1.0, 3.0)  # divisors of lengthscales and noise
_PERIODS = 128  # of frequencies half a cycle apart over the range of x: periods to a 64th of it


class Sizes(NamedTuple):
    """Of the data: the spread of each column of x [D], the mean squares of its rows' lengths and
    of y, the standard deviation of y (1 where it has none)."""

    spread: Tensor
    length: Tensor
    power: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None) -> Sizes:
        """Of rows x [n, D] and targets y [n, O]."""
        w = torch.ones_like(x[:, 0]) if weight is None else weight
        w = (w / w.sum())[:, None]
        spread, deviation = ((w * (t - (w * t).sum(0)).square()).sum(0) for t in (x, y))
        length = (w * x.square()).sum()
        power = (w * y.square()).sum(0).mean()
        return cls(spread.sqrt(), length, power, _or_one(deviation.mean().sqrt()))


def kernel_start(
    kernel: Composed, x: Tensor, sizes: Sizes, lengthscale: float | None, variance: float | None
) -> Tensor:
    """Logarithms for a few rows x [n, D] of data of such sizes: [H]; what is given is taken."""
    own = sizes.spread
    spread = torch.where(own > 1e-12 * own.amax(), own, torch.ones_like(own))
    varied = _or_one((own > 1e-12 * own.amax()).double().sum())
    whole = _or_one(own.square().sum()).sqrt()
    values, layout = {}, kernel.layout
    for entry in layout.entries:
        name, columns = entry.name.rpartition(".")[2], entry.shape[1]
        found: Tensor | float
        if name == "lengthscale" and entry.name.startswith("periodic"):
            found = 1.0 if lengthscale is None else lengthscale  # of a sine: it has no units
        elif name == "lengthscale":
            found = math.sqrt(2) * (spread * varied.sqrt() if columns > 1 else whole)
            found = found if lengthscale is None else lengthscale
        elif name == "period":
            found = 8.0 * (spread if columns > 1 else whole)
        else:  # alpha; a variance, set below; an offset
            found = _or_one(sizes.length) if name == "offset" else 1.0
        values[entry.name] = torch.as_tensor(found, dtype=x.dtype).expand(1, columns).log()
    flat = layout.flatten(values)
    terms = [s.start for name, s in layout.slices.items() if name.endswith(".variance")]
    power = _or_one(sizes.power) / len(terms)
    for term in terms:
        alone = flat.clone()
        alone[terms] = -torch.inf
        alone[term] = 0.0
        mean = sizes.length if kernel.text == "linear" else kernel(alone, x, x, True).mean()
        size = _or_one(mean)  # of a term without its variance
        flat[term] = (power / size if variance is None else x.new_tensor(variance)).log()
    return flat


def best_start(kernel: Composed, problem: Problem, theta: Tensor, scales: bool) -> Tensor:
    """θ [H] with the periods, then the lengthscales (where `scales`) and the noise, divided by the
    numbers under which the evidence of the problem is largest."""
    layout, size = kernel.layout, kernel.layout.size
    ends = [(name.rpartition(".")[2], s) for name, s in layout.slices.items()]
    periods, lengths = ([s for end, s in ends if end == w] for w in ("period", "lengthscale"))
    if periods:
        tried = theta.repeat(_PERIODS, 1)
        for own in periods:
            tried[:, own] -= torch.arange(1, _PERIODS + 1, dtype=theta.dtype)[:, None].log()
        theta = _best(problem, tried)
    less = torch.cartesian_prod(
        *(torch.tensor(each).double().log() for each in (_SHORTER, _QUIETER))
    )
    tried = theta.repeat(len(less), 1)
    for own in lengths if scales else ():
        tried[:, own] -= less[:, :1]
    tried[:, size:] -= less[:, 1:]
    return _best(problem, tried)


def _best(problem: Problem, tried: Tensor) -> Tensor:
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
