"""Conformal sets of classes from held-out rows.

    LAC    s(x, y) = -log p(y | x)                                             all c with s <= t
    APS    s(x, y) = Σ_{c before y} p(c | x) + u p(y | x),   u ~ U(0, 1)       all c with s <= t

where classes come by falling probability (among equals the lower number first), and t is the
⌈(n + 1) level⌉-th smallest score of the calibration rows; by class, of those of that class. LAC
(Sadinle, Lei and Wasserman, 2019) has the smallest sets on average, and may leave a hard row with
none. APS (Romano, Sesia and Candès, 2020) adapts to how hard a row is; randomised it is exact (u
belongs to the row: see `row_uniforms`), and with u = 1 (`randomized=False`) deterministic, larger,
and never empty: the likeliest class is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.errors import DataError, MethodError
from doxa.evaluate.conformal.mondrian import ByGroup, Groups
from doxa.evaluate.conformal.threshold import threshold, thresholds_by
from doxa.evaluate.recalibrate.rows import labelled
from doxa.noise import generator
from doxa.predictive import Predictive
from doxa.predictive.calibrated import log_probs
from doxa.predictive.conformal import ConformalSet
from doxa.predictive.form import Form

_TURNS = 4096.0  # of u, at least, where the margin grows by 1


@store.register("conformal.sets")
@dataclass(frozen=True, eq=False)
class Sets(ByGroup):
    """`thresholds` [G, C], for each group (one where there are none) and class. The u of a row
    depends on `seed` and its probabilities, and on no other row."""

    level: float
    score: str  # "lac" or "aps"
    thresholds: Tensor
    randomized: bool = True
    seed: int = 0
    groups: Groups | None = None

    def _with(self, p: Predictive, t: Tensor) -> Predictive:
        form = p._form

        def chosen() -> Tensor:
            table = log_probs(form)
            flat = table.flatten(1)
            if not bool(torch.isfinite(flat).all()):
                raise DataError("the predicted probabilities are not finite: there is no set")
            each = class_scores(self.score, flat, self.randomized, self.seed)
            inside = each <= t.to(each)
            if self.score == "aps" and not self.randomized:
                inside = inside.scatter(1, flat.argmax(1, keepdim=True), True)
            return inside.reshape(table.shape)

        return p.of_form(ConformalSet(form, self.level, chosen))


def fit_sets(
    p: Predictive,
    x: Any,
    y: Any,
    level: float,
    score: str,
    by: Any,
    allow_infinite: bool,
    *,
    randomized: bool,
    seed: int,
) -> Sets:
    """`by` is None for one threshold, "class" for one a class, else a column or function."""
    check_one_label(p._form)
    rows = labelled(p, y)
    each = class_scores(score, rows.log_probs, randomized, seed)
    scores = each.gather(1, rows.y.unsqueeze(1)).squeeze(1)
    classes, groups = each.shape[1], None
    if by is None:
        t = threshold(scores, level, allow_infinite=allow_infinite).expand(1, classes)
    elif isinstance(by, str):
        names = [f"class {c}" for c in range(classes)]
        t = thresholds_by(scores, rows.y, names, level, allow_infinite=allow_infinite)[None]
    else:
        groups = Groups.of(by, x)
        index = groups.index(x, scores.device)
        if len(index) != len(scores):
            raise DataError("groups need every calibration row labelled: drop the ignored ones")
        t = thresholds_by(scores, index, groups.names, level, allow_infinite=allow_infinite)
        t = t.unsqueeze(1).expand(-1, classes)
    return Sets(level, score, t.contiguous(), randomized, seed, groups)


def class_scores(score: str, log_table: Tensor, randomized: bool, seed: int) -> Tensor:
    """[N, C]: the score of every class, from log-probabilities [N, C]."""
    if score == "lac":
        return -log_table
    u = row_uniforms(log_table, seed) if randomized else log_table.new_ones(len(log_table), 1)
    return adaptive_scores(log_table.exp(), u)


def row_uniforms(log_table: Tensor, seed: int) -> Tensor:
    """u [N, 1] as a function of a row's own prediction, so that it is the same whoever is predicted
    with it: the fraction of a large multiple of the margin between the two likeliest classes.

    The score of (x, y) is then a function that was fixed before the data came, so that the level
    holds even where predictions are alike (the bound from above needs them to differ). It is
    continuous: rounding, which differs between one row and many, moves u by little.
    """
    first, second = log_table.double().topk(2, 1).values.unbind(1)
    draws = torch.rand(2, generator=generator(seed, "conformal", "aps"), dtype=torch.float64)
    slope, shift = _TURNS * (1.0 + float(draws[0])), float(draws[1])
    return (slope * (first - second) + shift).frac().unsqueeze(1).to(log_table.dtype)


def adaptive_scores(probs: Tensor, u: Tensor) -> Tensor:
    """The mass before each class, and u [N, 1] of its own: [N, C]."""
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    return torch.empty_like(probs).scatter(1, order, before + u * ordered)


def check_one_label(form: Form) -> None:
    if math.prod(form.marginal_entropy.shape[1:]) != 1:
        raise MethodError(
            "conformal sets are for one label a row; labels of one row (pixels) are not "
            "exchangeable with those of others, which the guarantee needs"
        )
