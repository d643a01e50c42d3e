"""The finite-sample quantile that makes a set of rows hold at a given level.

With n calibration scores and one more that is exchangeable with them, the new score is at most the
k-th smallest with probability at least level when

    k = ⌈(n + 1) level⌉,

and at most level + 1/(n + 1) when no two scores are equal (Vovk et al., 2005; Lei et al., 2018).
Given the calibration rows, the coverage of continuous scores is Beta(k, n + 1 - k) distributed.
Ties are exact: a score equal to the threshold is inside.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from doxa.errors import DataError


def check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise DataError(f"level must lie between 0 and 1, got {level}")


def rank(n: int, level: float) -> int:
    """⌈(n + 1) level⌉ with the level read as the fraction that was meant: 0.9 is 9/10."""
    return math.ceil((n + 1) * _exact(level))


def rows_needed(level: float) -> int:
    """The least n with rank(n, level) <= n: 1/(1 - level) - 1, rounded up."""
    exact = _exact(level)
    return math.ceil(exact / (1 - exact))


def threshold(
    scores: Tensor, level: float, *, allow_infinite: bool = False, of: str = ""
) -> Tensor:
    """The rank(n, level)-th smallest of scores [n, ...] along the first axis: [...].

    Fewer than `rows_needed` scores raise, or give infinity where that is allowed; `of` says in
    the error what they are the scores of.
    """
    if bool(torch.isnan(scores).any()):
        raise DataError(f"a calibration score{of} is not a number: predictions contain NaN")
    n = scores.shape[0]
    k = rank(n, level)
    if k <= n:
        return scores.sort(0)[0][k - 1]
    if not allow_infinite:
        raise DataError(
            f"{n} calibration rows{of} cannot guarantee level {level:g}: at least "
            f"{rows_needed(level)} are needed; with allow_infinite=True everything is inside"
        )
    return scores.new_full(scores.shape[1:], torch.inf)


def thresholds_by(
    scores: Tensor,
    index: Tensor,
    names: list[str],
    level: float,
    *,
    allow_infinite: bool = False,
) -> Tensor:
    """[G, ...]: one threshold for each group of scores [n, ...], by its index [n]."""
    each = [
        threshold(scores[index == g], level, allow_infinite=allow_infinite, of=f" of {name}")
        for g, name in enumerate(names)
    ]
    return torch.stack(each)


def _exact(level: float) -> Fraction:
    return Fraction(level).limit_denominator(10**9)
