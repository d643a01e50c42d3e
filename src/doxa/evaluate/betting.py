"""Tests by betting: evidence that grows with every row, and may be looked at after every row.

An e-process of a null hypothesis is a sequence of numbers M_t ≥ 0, known at time t, whose mean is
at most 1 at every stopping time if the hypothesis holds. By Ville's inequality it ever reaches 1/α
with probability α at most, however long it runs and however often it is looked at.

**A mean** (`mean_bets`). X_t in [0, 1], and E[X_t | past] ≤ b. A bet with λ in [0, 1/b] multiplies
the evidence by

    e_t(λ) = 1 + λ (X_t − b)

which is not negative and has a mean of at most 1. With λ = (q − b)/(b (1 − b)) and binary X it is
the likelihood ratio of the probabilities q and b. The evidence is averaged over a grid of q, so
that it adapts to the X that are seen (Waudby-Smith & Ramdas, 2024; the mixture of Krichevsky &
Trofimov, 1981, on a grid).

**Exchangeability** (`conformal_p`, `shape_bets`; Vovk, Nouretdinov & Gammerman, 2003). The rank of
a value among itself and all values before it, with ties broken at random, gives p-values

    p_t = (#{i < t: a_i < a_t} + U_t (1 + #{i < t: a_i = a_t})) / t

that are independent and uniform if all values are exchangeable. Every value joins those that later
ones are compared with. Bets are 1 + λ g(p) with the Legendre polynomials g = 2p − 1 (values shift)
and g = 6p² − 6p + 1 (values spread or shrink), whose mean is 0 under the uniform distribution.
Again they are averaged over a grid of λ.

**Start times** (`evidence`). A change after many quiet rows would have to make up for the bets that
were lost before. So the evidence is also averaged over the time s at which betting starts,

    M_t = Σ_{s ≤ t} w_s Π_{i = s..t} e_i + Σ_{s > t} w_s,   w_s = 1/log(s + e − 1) − 1/log(s + e)

with Σ w = 1. The sum follows S_t = e_t (S_{t−1} + w_t): one number for each λ, whatever t is. Many
rows at once are computed with cumulative sums of logarithms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_MEANS = torch.logspace(math.log10(0.005), math.log10(0.9), 12, dtype=torch.float64)
_SHIFTS = (-0.9, -0.5, -0.2, 0.2, 0.5, 0.9)  # λ of 2p − 1, which lies in [−1, 1]
_SPREADS = (-0.9, -0.5, -0.2, 0.3, 0.8, 1.6)  # λ of 6p² − 6p + 1, which lies in [−0.5, 1]
BETS = len(_SHIFTS) + len(_SPREADS)
_BLOCK = 256  # values that are ranked at a time
_E = math.e


def mean_bets(x: Tensor, bound: float) -> Tensor:
    """log e_t of numbers x [..., T] in [0, 1] whose mean should be `bound` at most:
    [..., G, T]."""
    q = bound + (1.0 - bound) * _MEANS
    rate = (q - bound) / (bound * (1.0 - bound))
    return torch.log1p(rate[:, None] * (x.double().unsqueeze(-2) - bound))


def shape_bets(p: Tensor) -> Tensor:
    """log e_t of p-values p [..., T] that should be uniform: [..., BETS, T]."""
    p = p.double().unsqueeze(-2)
    shifts, spreads = (torch.tensor(each, dtype=p.dtype)[:, None] for each in (_SHIFTS, _SPREADS))
    both = (shifts * (2 * p - 1), spreads * (6 * p * p - 6 * p + 1))
    return torch.cat(both, -2).log1p()


class Evidence(NamedTuple):
    """log M after each row, [..., T]; and log S of each bet after the last one, [..., G], with the
    number of rows until then, to go on with."""

    log_m: Tensor
    log_s: Tensor
    rows: int


def evidence(log_e: Tensor, log_s: Tensor | None = None, rows: int = 0) -> Evidence:
    """The evidence of bets log_e [..., G, T], averaged over bets and start times. `log_s` and
    `rows` are those of the rows before."""
    *_, bets, count = log_e.shape
    t = torch.arange(rows + 1, rows + count + 1, dtype=torch.float64)
    before, after = (t + (_E - 1)).log(), (t + _E).log()
    log_w = (torch.log1p(1 / (t + (_E - 1))) / (before * after)).log()  # of starts at t
    total = log_e.cumsum(-1)
    started = torch.logcumsumexp(log_w - (total - log_e), -1)
    if log_s is not None:
        started = torch.logaddexp(log_s.unsqueeze(-1), started)
    s = total + started  # [..., G, T]
    log_m = torch.logaddexp(s.logsumexp(-2) - math.log(bets), -after.log())
    return Evidence(log_m, s[..., -1], rows + count)


def conformal_p(values: Tensor, earlier: Tensor, ties: Tensor) -> Tensor:
    """p-values [T, K] of values [T, K], each column among `earlier` [R, K] and the values before
    it. `ties` [T, K] are uniform numbers."""
    found = []
    base = earlier.T.contiguous().sort(1).values  # [K, R]
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        more = values[:start].T.contiguous().sort(1).values  # [K, start]
        at = block.T.contiguous()
        below, until = (  # [B, K]
            (
                torch.searchsorted(base, at, right=right)
                + torch.searchsorted(more, at, right=right)
            ).T.double()
            for right in (False, True)
        )
        past = torch.ones(len(block), len(block), dtype=torch.bool).tril(-1)[:, :, None]
        below += ((block.unsqueeze(0) < block.unsqueeze(1)) & past).sum(1)
        until += ((block.unsqueeze(0) <= block.unsqueeze(1)) & past).sum(1)
        n = torch.arange(len(block), dtype=torch.float64)[:, None] + len(earlier) + start + 1
        dice = ties[start : start + _BLOCK].double()
        found.append((below + dice * (until - below + 1)) / n)
    return torch.cat(found)
