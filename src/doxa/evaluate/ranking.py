"""How well a score separates two sets: AUROC, average precision, false positives at 95 %.

Scores are larger for what is stranger. With inside scores s_i and outside scores t_j,

    AUROC = P(t > s) + ½ P(t = s)                                  (Mann & Whitney, 1947)
    AUPR  = Σ_k (R_k − R_{k−1}) P_k over the distinct thresholds   (average precision)
    FPR95 = share of the outside at or below the smallest t that keeps 95 % of the inside

Ties are counted exactly: every number is a ratio of whole counts, whatever the order of the rows.
The definitions of the last are those of Hendrycks & Gimpel (2017) and Liang et al. (2018): the
inside is what should pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, MethodError, ShapeError


def auroc(inside: Any, outside: Any) -> float:
    """The chance that an outside row scores above an inside row; a tie counts one half.

    Parameters
    ----------
    inside, outside: scores [N] and [M], larger = stranger; lists, arrays or tensors.

    Returns
    -------
    1 where every outside row is the stranger one, 0.5 where the score says nothing.

    Examples
    --------
    >>> auroc([0.1, 0.2], [0.2, 0.9])
    0.875
    """
    inside, outside = _both(inside, outside)
    ranked = inside.sort().values
    below = torch.searchsorted(ranked, outside, right=False).sum()
    up_to = torch.searchsorted(ranked, outside, right=True).sum()
    return int(below + up_to) / (2 * len(inside) * len(outside))


def aupr(inside: Any, outside: Any, positive: str = "out") -> float:
    """Average precision, with the outside ("out") or the inside ("in") as what is looked for.

    Its value for a score that says nothing is the share of positives, not one half.
    """
    inside, outside = _both(inside, outside)
    if positive not in ("out", "in"):
        raise MethodError(f"positive must be 'out' or 'in', not {positive!r}")
    hits, misses = (outside, inside) if positive == "out" else (-inside, -outside)
    scores, order = torch.cat([hits, misses]).sort(descending=True)
    found = (order < len(hits)).cumsum(0)
    last = torch.ones_like(order, dtype=torch.bool)  # the last row of each run of equal scores
    last[:-1] = scores[1:] != scores[:-1]
    found, seen = found[last].double(), (last.nonzero().flatten() + 1).double()
    gained = torch.diff(found, prepend=found.new_zeros(1))
    return float((gained * found / seen).sum() / len(hits))


def fpr95(inside: Any, outside: Any, level: float = 0.95) -> float:
    """The share of the outside that passes a threshold which lets `level` of the inside pass."""
    inside, outside = _both(inside, outside)
    if not 0.0 < level <= 1.0:
        raise MethodError(f"level must lie in (0, 1], not {level}")
    kept = math.ceil(level * len(inside) - 1e-9)  # 0.95 × 20 is 19 rows, whatever the rounding
    threshold = inside.sort().values[max(kept, 1) - 1]
    return int((outside <= threshold).sum()) / len(outside)


def ood_metrics(inside_scores: Any, outside_scores: Any) -> dict[str, float]:
    """auroc, aupr_out, aupr_in and fpr95 of one score."""
    return {
        "auroc": auroc(inside_scores, outside_scores),
        "aupr_out": aupr(inside_scores, outside_scores, "out"),
        "aupr_in": aupr(inside_scores, outside_scores, "in"),
        "fpr95": fpr95(inside_scores, outside_scores),
    }


def _both(inside: Any, outside: Any) -> tuple[Tensor, Tensor]:
    first = _scores(inside, "inside")
    return first, _scores(outside, "outside").to(first.device)


def _scores(values: Any, name: str) -> Tensor:
    scores = torch.as_tensor(values)
    if scores.ndim != 1:
        raise ShapeError(f"{name} must be one score a row, [N], got shape {list(scores.shape)}")
    if len(scores) == 0:
        raise DataError(f"{name} is empty: a ranking needs at least one row on each side")
    scores = scores.detach().double()
    missing = torch.isnan(scores)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise DataError(f"{name}: the score of row {row} is NaN; look at the predictions there")
    return scores
