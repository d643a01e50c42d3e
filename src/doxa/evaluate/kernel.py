"""Calibration error without bins: a kernel regression of hits on confidence.

The estimator of Popordanoska, Sayer and Blaschko (2022) in its top-label form: a leave-one-out
Nadaraya-Watson estimate with the beta kernel (Chen, 1999), which knows that confidences end at
0 and 1,

    ECE = (1/L) sum_j | sum_(i != j) k(z_j; z_i) h_i / sum_(i != j) k(z_j; z_i)  -  z_j |
    k(z; z_i) = Beta(z; z_i/b + 1, (1 - z_i)/b + 1)

with bandwidth b. As they do, b is the one of a few candidates under which the confidences are
likeliest when each is left out in turn. The cost is quadratic in L.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from doxa.errors import DataError

BANDWIDTHS = tuple(10.0 ** (-4.0 + 0.5 * k) for k in range(7))  # 1e-4 ... 0.1
_EDGE = 1e-6  # the kernel's logarithm is infinite at 0 and 1
_PILOT = 2000  # evenly spaced order statistics that choose the bandwidth
_BLOCK = 1 << 22


def kernel_ece(confidence: Tensor, hit: Tensor, bandwidth: float | None = None) -> float:
    """The kernel calibration error of confidences [L] and hits [L] (0 or 1)."""
    if len(confidence) < 2:
        raise DataError("the kernel calibration error leaves one label out: it needs two or more")
    if bandwidth is not None and not 0.0 < bandwidth < math.inf:
        raise DataError(f"bandwidth must be positive and finite, got {bandwidth}")
    z = confidence.double().clamp(_EDGE, 1.0 - _EDGE)
    b = best_bandwidth(z) if bandwidth is None else bandwidth
    came = torch.where(hit > 0.5, 0.0, -torch.inf).double()
    total = 0.0
    for at, kernel in _log_kernels(z, b):
        every = torch.logsumexp(kernel, 1)
        share = torch.exp(torch.logsumexp(kernel + came, 1) - every)
        total += float((share - confidence[at].double()).abs().sum())
    return total / len(z)


def best_bandwidth(z: Tensor) -> float:
    """The candidate with the largest leave-one-out log-likelihood of z, in (0, 1)."""
    if len(z) > _PILOT:
        places = torch.linspace(0, len(z) - 1, _PILOT, dtype=torch.float64).round().long()
        z = z.sort().values[places.to(z.device)]
    scores = [
        sum(float(torch.logsumexp(kernel, 1).sum()) for _, kernel in _log_kernels(z, b))
        for b in BANDWIDTHS
    ]
    return BANDWIDTHS[scores.index(max(scores))]


def _log_kernels(z: Tensor, b: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of (rows j, log k(z_j; z_i) [J, L] with minus infinity where i = j)."""
    first, second = z / b, (1.0 - z) / b
    norm = math.lgamma(1.0 / b + 2.0) - torch.lgamma(first + 1.0) - torch.lgamma(second + 1.0)
    up, down = z.log(), torch.log1p(-z)
    for at in torch.arange(len(z), device=z.device).split(max(1, _BLOCK // len(z))):
        kernel = norm + torch.outer(up[at], first) + torch.outer(down[at], second)
        kernel[torch.arange(len(at), device=z.device), at] = -torch.inf
        yield at, kernel
