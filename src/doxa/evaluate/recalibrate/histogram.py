"""Histogram binning: a probability becomes the share of the class among rows like it.

    q = #{n : p_n in the bin, y_n = c} / #{n : p_n in the bin}

Zadrozny and Elkan (2001). Bins are [a, b), the last one closed; of equal width, or holding equally
many calibration rows (`equal_mass`). An empty bin knows nothing: probabilities in it stay as they
are. Shares of 0 and 1 occur in small bins and cost infinitely much where they are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa import checks, store
from doxa.evaluate.recalibrate.one_vs_rest import OneVsRest, curves_of
from doxa.evaluate.recalibrate.rows import Labelled


@store.register("recalibrate.histogram")
@dataclass(frozen=True, eq=False)
class Histogram(OneVsRest):
    """Inner edges and shares of each curve; NaN where a bin was empty."""

    edges: Tensor  # [curves, bins - 1]
    shares: Tensor  # [curves, bins]

    def curve(self, c: int, probs: Tensor) -> Tensor:
        share = self.shares.to(probs)[c][_bin(probs, self.edges.to(probs)[c])]
        return torch.where(torch.isnan(share), probs, share)


def fit_histogram(rows: Labelled, *, bins: int = 15, equal_mass: bool = False) -> Histogram:
    checks.whole("bins", bins)
    rows.check_classes("histogram")
    edges, shares = [], []
    inner = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64)[1:-1].to(rows.log_probs.device)
    for probs, hit in curves_of(rows.log_probs, rows.y):
        own = _quantiles(probs, inner) if equal_mass else inner
        place = _bin(probs, own)
        count = torch.bincount(place, minlength=bins)
        total = torch.zeros_like(count, dtype=hit.dtype).scatter_add_(0, place, hit)
        edges.append(own)
        shares.append(total / count)  # 0 / 0 is NaN: an empty bin
    return Histogram(torch.stack(edges), torch.stack(shares))


def _bin(probs: Tensor, inner: Tensor) -> Tensor:
    return torch.bucketize(probs.contiguous(), inner.contiguous(), right=True)


def _quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """Values such that the bins between them hold equally many, to within one."""
    ordered = values.sort()[0]
    return ordered[(levels * len(ordered)).round().long().clamp_max(len(ordered) - 1)]
