"""How surprising is a number? Exact and Monte Carlo tests, all at one level.

Every test of the doctor runs at `ALPHA` (two-sided where both sides are bad), and an alarm needs
an effect of a stated size besides. A posterior that is right raises a false alarm in any one test
with probability at most ALPHA; `TESTS` of them look at a head, so that the rate of the family is at
most TESTS × ALPHA (Bonferroni, 1936), less what the effect sizes take away.

A Monte Carlo test (Barnard, 1963) compares a statistic with the same statistic of R replicas drawn
under the hypothesis: p = (1 + #{T_r ≥ T}) / (R + 1) is exact for any R.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALPHA = 1e-3
TESTS = 9
REPLICAS = 1999


def monte_carlo(observed: Tensor, replicas: Tensor) -> float:
    """P of a replica at least as large as the observed value."""
    return (1 + int((replicas >= observed).sum())) / (1 + replicas.numel())


def two_sided(observed: Tensor, replicas: Tensor) -> float:
    """Twice the smaller of the two one-sided probabilities, at most 1."""
    sides = monte_carlo(observed, replicas), monte_carlo(-observed, -replicas)
    return min(1.0, 2 * min(sides))


def binomial(successes: int, trials: int, probability: float) -> float:
    """The exact two-sided test: the mass of all counts no likelier than the observed one."""
    log_mass = _log_binomial(trials, probability)
    as_unlikely = log_mass <= log_mass[successes] + 1e-7  # ties up to rounding
    return min(1.0, float(log_mass[as_unlikely].exp().sum()))


def binomial_upper(successes: int, trials: int, probability: float) -> float:
    """P(K ≥ successes), exactly."""
    return min(1.0, float(_log_binomial(trials, probability)[successes:].exp().sum()))


def _log_binomial(trials: int, probability: float) -> Tensor:
    """log P(K = k) for k = 0 … n."""
    k = torch.arange(trials + 1, dtype=torch.float64)
    n, p = k[-1], torch.tensor(probability, dtype=torch.float64)
    choose = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return choose + torch.xlogy(k, p) + torch.special.xlog1py(n - k, -p)


def normal_upper(z: float) -> float:
    """P(Z ≥ z) of a standard normal."""
    return float(0.5 * torch.erfc(torch.tensor(z, dtype=torch.float64) / 2**0.5))


def normal_quantile(level: float) -> float:
    """z with P(Z ≤ z) = level."""
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def mean_above_zero(values: Tensor) -> float:
    """P of so large a mean if the true mean were zero: one-sided, by the central limit theorem.
    A single value proves nothing."""
    if len(values) < 2:
        return 1.0
    spread = float(values.double().std()) / len(values) ** 0.5
    mean = float(values.double().mean())
    if spread == 0:
        return 0.0 if mean > 0 else 1.0
    return normal_upper(mean / spread)


def kolmogorov(u: Tensor) -> Tensor:
    """The largest distance of the empirical distribution of u [..., N] in (0, 1) from uniform."""
    ordered = u.sort(-1).values
    n = u.shape[-1]
    steps = torch.arange(1, n + 1, dtype=u.dtype, device=u.device) / n
    above, below = (steps - ordered).amax(-1), (ordered - steps + 1 / n).amax(-1)
    return torch.maximum(above, below)
