"""Sorting probabilities into bins, of equal width or of equal mass.

Equal width: bin k of B holds k/B < p <= (k+1)/B, and 0 belongs to the first, as in Guo et al.
(2017) and scikit-learn. Equal mass: without ties the label of rank i (from 0) of L goes to bin
floor(B (i + 1/2) / L); equal probabilities are never split, a group of them goes where the middle
of its ranks says. Bins may then be fewer or unequal, and the result does not depend on the order
of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.evaluate.paired import check_count


def edges(bins: int, device: torch.device) -> Tensor:
    """[B + 1] from 0 to 1."""
    return torch.arange(bins + 1, dtype=torch.float64, device=device) / bins


def bin_of(probs: Tensor, bins: int) -> Tensor:
    """The equal-width bin of each probability, int64, in its shape."""
    check_count("bins", bins)
    inner = edges(bins, probs.device)[1:-1]
    return torch.bucketize(probs.double().contiguous(), inner)


def mass_bin_of(probs: Tensor, bins: int) -> Tensor:
    """The equal-mass bin of each probability of [L], or of each column of [L, C]."""
    check_count("bins", bins)
    if probs.ndim == 2:
        return torch.stack([mass_bin_of(column, bins) for column in probs.unbind(1)], 1)
    _, group, count = torch.unique(probs, return_inverse=True, return_counts=True)
    last = count.cumsum(0)  # ranks of a group: last - count ... last - 1
    twice_middle = 2 * last - count
    return (bins * twice_middle // (2 * len(probs)))[group]


def bin_sums(cell: Tensor, cells: int, *values: Tensor) -> tuple[Tensor, ...]:
    """Labels in each cell, and the sum of each of the values there: [cells] float64."""
    flat = cell.reshape(-1)
    count = torch.bincount(flat, minlength=cells).double()
    sums = [
        torch.bincount(flat, weights=each.double().reshape(-1), minlength=cells) for each in values
    ]
    return count, *sums
