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
from doxa.method import Method, Run

FEW = 256  # rows that are looked at
_SHORTER, _QUIETER = (1.0, 2.0, 4.0, 8.0), (1.0, 3.0)  # divisors of lengthscales and noise
_PERIODS = 128  # of frequencies half a cycle apart over the range of x: periods to a 64th of it


class Sizes(NamedTuple):
    """Of each member's data: the spread of each column of x [..., D], the mean squares of its rows'
    lengths and of y, the standard deviation of y (1 where it has none), all [..., 1]."""

    spread: Tensor
    length: Tensor
    power: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None) -> Sizes:
        """Of rows x [..., n, D] and targets y [..., n, O]."""
        w = torch.ones_like(x[..., 0]) if weight is None else weight
        w = (w / w.sum(-1, keepdim=True)).unsqueeze(-1)
        spread, deviation = (
            (w * (t - (w * t).sum(-2, keepdim=True)).square()).sum(-2) for t in (x, y)
        )
        length = (w * x.square()).sum((-2, -1)).unsqueeze(-1)
        power = (w * y.square()).sum(-2).mean(-1, keepdim=True)
        return cls(spread.sqrt(), length, power, _or_one(deviation.mean(-1, keepdim=True).sqrt()))


def kernel_start(
    kernel: Composed,
    x: Tensor,
    sizes: Sizes,
    lengthscale: Tensor | None,
    variance: Tensor | None,
    counts: Tensor | None = None,
) -> Tensor:
    """Logarithms for a few rows x [..., n, D] of data of such sizes: [..., H]; what is given, [] or
    [..., 1], is taken. counts: which of the rows are there, [..., n]."""
    own = sizes.spread
    some = own > 1e-12 * own.amax(-1, keepdim=True)
    spread = torch.where(some, own, torch.ones_like(own))
    varied = _or_one(some.double().sum(-1, keepdim=True))
    whole = _or_one(own.square().sum(-1, keepdim=True)).sqrt()
    values, layout, lead = {}, kernel.layout, x.shape[:-2]
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
        value = torch.as_tensor(found, dtype=x.dtype, device=x.device).expand(*lead, columns).log()
        values[entry.name] = value.unsqueeze(-2)
    flat = layout.flatten(values)
    terms = [s.start for name, s in layout.slices.items() if name.endswith(".variance")]
    power = _or_one(sizes.power).squeeze(-1) / len(terms)
    there = torch.ones_like(x[..., 0]) if counts is None else counts.to(x)
    for term in terms:
        alone = flat.clone()
        alone[..., terms] = -torch.inf
        alone[..., term] = 0.0
        if kernel.text == "linear":
            mean = sizes.length.squeeze(-1)
        else:
            mean = (there * kernel(alone, x, x, True)).sum(-1) / there.sum(-1)
        size = _or_one(mean)  # of a term without its variance
        first = power / size
        if variance is not None:
            first = variance.to(x).expand(*lead, 1).squeeze(-1)
        flat[..., term] = first.log()
    return flat


def first_value(run: Run, method: Method, field: str) -> Tensor | None:
    """A first value of each member, [M, 1] in float64, where it is given."""
    if field in run.hyper:
        return run.hyper[field].double().unsqueeze(1)
    value = getattr(method, field)
    if value is None:
        return None
    return torch.full((run.size, 1), value, dtype=torch.float64, device=run.device)


def best_start(kernel: Composed, problem: Problem, theta: Tensor, scales: bool) -> Tensor:
    """θ [M, H] with the periods, then the lengthscales (where `scales`) and the noise, divided by
    the numbers under which the evidence of each member's problem is largest."""
    layout, size = kernel.layout, kernel.layout.size
    ends = [(name.rpartition(".")[2], s) for name, s in layout.slices.items()]
    periods, lengths = ([s for end, s in ends if end == w] for w in ("period", "lengthscale"))
    if periods:
        tried = theta.repeat(_PERIODS, 1, 1)
        less = torch.arange(1, _PERIODS + 1, dtype=theta.dtype, device=theta.device).log()
        for own in periods:
            tried[..., own] -= less[:, None, None]
        theta = _best(problem, tried)
    less = torch.cartesian_prod(
        *(torch.tensor(each).double().log() for each in (_SHORTER, _QUIETER))
    ).to(theta.device)
    tried = theta.repeat(len(less), 1, 1)
    for own in lengths if scales else ():
        tried[..., own] -= less[:, None, :1]
    tried[..., size:] -= less[:, None, 1:]
    return _best(problem, tried)


def _best(problem: Problem, tried: Tensor) -> Tensor:
    """Of θ [T, M, H] the best for each member, [M, H]: all members at once, one of T at a time."""
    each = [problem.value(theta, problem.solve(theta)) for theta in tried]
    best = torch.stack(each).nan_to_num(-torch.inf).argmax(0)
    return tried[best, torch.arange(tried.shape[1], device=tried.device)]


def check_positive(kernel: KernelFunction, x: Tensor) -> None:
    """A kernel that somebody brought is one: symmetric, with no negative eigenvalue, at the rows of
    each member, [M, n, D]."""
    found = kernel(kernel.start().to(x).expand(len(x), -1), x, x).detach()
    size = float(found.diagonal(0, -2, -1).abs().max())
    if not bool(torch.isfinite(found).all()):
        raise MethodError("the kernel gives values that are not finite at the training rows")
    if float((found - found.mT).abs().max()) > 1e-8 * size:
        raise MethodError("the kernel is no covariance: k(a, b) differs from k(b, a)")
    least = float(torch.linalg.eigvalsh(found).min())
    if least < -1e-6 * size:
        raise MethodError(
            f"the kernel is not positive definite: the covariance of {x.shape[1]} training rows "
            f"has an eigenvalue of {least:.3g}, and a variance cannot be negative; sums and "
            "products of kernels are kernels, differences are not"
        )


def _or_one(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, torch.ones_like(value))
