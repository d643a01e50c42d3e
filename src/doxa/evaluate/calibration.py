"""Do events of probability q happen in a share q of the cases? Calibration of class probabilities.

The expected calibration error (Naeini et al., 2015; Guo et al., 2017) over bins k of L labels,
with confidence z (the likeliest class's probability) and hit h (it came true):

    ECE = sum_k n_k/L |mean_k h - mean_k z| = (1/L) sum_k |sum_(l in k) (h_l - z_l)|

Empty bins count nothing. Its usual variants, `kind`:

- "top-label": the above, bins of equal width.
- "adaptive": the above, bins of equal mass (Nguyen and O'Connor, 2015); ties are never split.
- "class-wise": of every class's probability, averaged over the classes (Kull et al., 2019).
- "adaptive-class-wise": the same with bins of equal mass (Nixon et al., 2019).
- "debiased": the root of the squared error less what chance alone would leave in each bin,
  sum_k n_k/L [(o_k - z_k)^2 - o_k (1 - o_k) / (n_k - 1)], cut at 0 (Bröcker, 2012; Kumar, Liang
  and Ma, 2019). A root mean square: compare it with no other kind. A bin of one label keeps
  its gap.
- "kde": no bins, see `kernel_ece`.

All but the debiased one are biased upwards in small sets: a perfectly calibrated predictive has an
ECE above 0. `ece_interval` says how much of it is chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from doxa.errors import DataError
from doxa.evaluate.binning import bin_of, bin_sums, edges, mass_bin_of
from doxa.evaluate.kernel import kernel_ece
from doxa.evaluate.paired import Labelled, labelled
from doxa.predictive import Predictive

Kind = Literal["top-label", "adaptive", "class-wise", "adaptive-class-wise", "debiased", "kde"]


def ece(p: Predictive, y: Any, kind: Kind = "top-label", bins: int = 15) -> float:
    """The expected calibration error; 0 is calibrated, lower is better."""
    return ece_of(labelled(p, y), kind, bins)


def ece_of(table: Labelled, kind: Kind = "top-label", bins: int = 15) -> float:
    """See `ece`, of labels that are at hand already."""
    if kind not in get_args(Kind):
        raise DataError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}")
    if kind == "kde":
        return kernel_ece(table.confidence, table.hit)
    if kind == "debiased":
        z, h = table.confidence, table.hit
        count, z_sum, h_sum = bin_sums(bin_of(table.comparable(z), bins), bins, z, h)
        some = count.clamp_min(1.0)
        share = h_sum / some
        chance = share * (1.0 - share) / (count - 1.0).clamp_min(1.0)
        squares = count * ((share - z_sum / some).square() - chance)
        return float((squares.sum() / len(z)).clamp_min(0.0).sqrt())
    cell, gap = cells(table, kind, bins)
    _, sums = bin_sums(cell, bins * gap.shape[1], gap)
    return float(sums.abs().sum() / gap.numel())


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: one bar a bin, NaN where a bin is empty."""

    confidence: Tensor
    """[B]: the mean predicted probability."""
    accuracy: Tensor
    """[B]: the share that came true."""
    count: Tensor
    """[B]: labels in the bin."""
    edges: Tensor
    """[B + 1]"""


def reliability(
    p: Predictive, y: Any, bins: int = 15, *, of_class: int | None = None
) -> Reliability:
    """Over bins of equal width, of the likeliest class; or of the event that `of_class` comes
    true. For numbers see `quantile_reliability`."""
    table = labelled(p, y)
    z, h = table.confidence, table.hit
    if of_class is not None:
        if not 0 <= of_class < table.probs.shape[1]:
            raise DataError(f"of_class must be 0 to {table.probs.shape[1] - 1}, got {of_class}")
        z, h = table.probs[:, of_class], (table.label == of_class).double()
    count, z_sum, h_sum = bin_sums(bin_of(table.comparable(z), bins), bins, z, h)
    return Reliability(z_sum / count, h_sum / count, count.long(), edges(bins, z.device))


def cells(table: Labelled, kind: str, bins: int) -> tuple[Tensor, Tensor]:
    """(the bin of each label and event, what came true minus its probability), both [L, K]."""
    z = _events(table, kind)
    sort = mass_bin_of if kind.startswith("adaptive") else bin_of
    cell = sort(table.comparable(z), bins)
    cell = cell + bins * torch.arange(z.shape[1], device=z.device)
    return cell, gaps(table, kind, table.label)


def gaps(table: Labelled, kind: str, label: Tensor) -> Tensor:
    """What came true minus its probability, of labels [..., L]: [..., L, K]."""
    z = _events(table, kind)
    if kind in ("top-label", "adaptive"):
        return (label == table.top).double().unsqueeze(-1) - z
    return one_hot(label, z.shape[1]).double() - z


def _events(table: Labelled, kind: str) -> Tensor:
    """The probabilities that are judged, [L, K]: of the likeliest class, or of every class."""
    top = kind in ("top-label", "adaptive")
    return table.confidence.unsqueeze(1) if top else table.probs
