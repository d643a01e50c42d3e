"""Isotonic regression: the best increasing curve from predicted to observed probability.

    min_g Σ_n (y_n - g(p_n))²,   g increasing

Zadrozny and Elkan (2002); solved exactly by pooling adjacent violators (Ayer et al., 1955), with
equal predictions pooled first. The solution also minimises the log loss among increasing curves, of
which the identity is one: with two classes the log-likelihood of the calibration rows never gets
worse. Between the rows' predictions the curve is linear, outside them constant.

A curve may reach 0 or 1, which costs infinitely much on a later row that contradicts it; `floor`
keeps probabilities of each curve within [floor, 1 - floor], at the price of that guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa import store
from doxa.errors import MethodError
from doxa.evaluate.recalibrate.one_vs_rest import OneVsRest, curves_of
from doxa.evaluate.recalibrate.rows import Labelled


@store.register("recalibrate.isotonic")
@dataclass(frozen=True, eq=False)
class Isotonic(OneVsRest):
    """The corners (predicted, observed) of each curve."""

    curves: tuple[tuple[Tensor, Tensor], ...]

    def curve(self, c: int, probs: Tensor) -> Tensor:
        x, y = (t.to(probs) for t in self.curves[c])
        if len(x) == 1:
            return y.expand(probs.shape).clone()
        inside = probs.clamp(float(x[0]), float(x[-1])).contiguous()
        right = torch.searchsorted(x, inside).clamp(1, len(x) - 1)
        x0, x1, y0, y1 = x[right - 1], x[right], y[right - 1], y[right]
        share = (inside - x0) / (x1 - x0)
        return torch.where(y0 == y1, y0, (1.0 - share) * y0 + share * y1)


def fit_isotonic(rows: Labelled, *, floor: float = 0.0) -> Isotonic:
    if not 0.0 <= floor < 0.5:
        raise MethodError(f"floor must lie in [0, 0.5), not {floor!r}")
    rows.check_classes("isotonic")
    corners = [pool_adjacent_violators(*own) for own in curves_of(rows.log_probs, rows.y)]
    return Isotonic(tuple((x, y.clamp(floor, 1.0 - floor)) for x, y in corners))


def pool_adjacent_violators(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The corners (increasing x, value) of the least-squares increasing function of x [n]."""
    places, index, counts = x.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros_like(places).scatter_add_(0, index, y)
    blocks: list[tuple[float, int, int]] = []  # sum, weight, how many places
    for total, weight in zip(sums.tolist(), counts.tolist(), strict=True):
        block = (total, weight, 1)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    sizes = torch.tensor([size for _, _, size in blocks], device=x.device)
    means = [total / weight for total, weight, _ in blocks]
    values = torch.tensor(means, dtype=x.dtype, device=x.device)
    last = sizes.cumsum(0) - 1
    first = last - sizes + 1
    corners = torch.stack([first, last], 1).flatten().unique_consecutive()
    return places[corners], values.repeat_interleave(sizes)[corners]
