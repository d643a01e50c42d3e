"""Conformal prediction: intervals and sets with a guaranteed coverage, for any model.

`conformal` is the entry point. The guarantee comes from a finite-sample quantile: with n
calibration scores and one more that is exchangeable with them, the new score is at most the k-th
smallest with probability at least level when

    k = ⌈(n + 1) level⌉,

and at most level + 1/(n + 1) when no two scores are equal (Vovk et al., 2005; Lei et al., 2018).
Given the calibration rows, the coverage of continuous scores is Beta(k, n + 1 - k) distributed.
Ties are exact: a score equal to the threshold is inside.

Mondrian conformal prediction (Vovk et al., 2005) has coverage within every group: rows are divided
into groups, and each group has a threshold of its own. Groups are the classes of the labels, or
come from the inputs, by a column of x or a function of x.

**Intervals from held-out rows**: split and quantile (CQR).

    split    s = |y - m(x)|                          [m - t, m + t]
    scaled   s = |y - m(x)| / σ(x)                   [m - t σ, m + t σ]
    cqr      s = max(l(x) - y, y - u(x))             [l - t, u + t]

with t the ⌈(n + 1) level⌉-th smallest score, m and σ the predictive mean and standard deviation,
l and u its quantiles at (1 ∓ level) / 2. Split: Papadopoulos et al. (2002), Lei et al. (2018).
CQR: Romano, Patterson and Candès (2019); where t is negative and the bounds would cross, both are
their midpoint. With several outputs each has its own t, and the level holds for each by itself.

**Sets of classes from held-out rows.**

    LAC    s(x, y) = -log p(y | x)                                             all c with s <= t
    APS    s(x, y) = Σ_{c before y} p(c | x) + u p(y | x),   u ~ U(0, 1)       all c with s <= t

where classes come by falling probability (among equals the lower number first), and t is the
⌈(n + 1) level⌉-th smallest score of the calibration rows; by class, of those of that class. LAC
(Sadinle, Lei and Wasserman, 2019) has the smallest sets on average; the set of a difficult row may
be empty. APS (Romano, Sesia and Candès, 2020) adapts to the difficulty of a row. Randomised, it is
exact (u is a function of the row: see `row_uniforms`). With u = 1 (`randomized=False`) its sets are
deterministic, larger, and never empty: they contain the likeliest class.

**Jackknife+**: intervals without calibration rows, from fits that each hold some rows out.

    r_i = |y_i - m_{-i}(x_i)|
    low(x)  = the ⌊(n + 1) α⌋-th smallest of m_{-i}(x) - r_i
    high(x) = the ⌈(n + 1) (1 - α)⌉-th smallest of m_{-i}(x) + r_i

with m_{-i} the mean prediction of the runs that held row i out, α = 1 - level. Barber, Candès,
Ramdas and Tibshirani (2021): coverage is at least 1 - 2α with one row held out at a time, and
1 - 2α - √(2/n) with K folds (CV+), 1 - α in practice. With bootstrapped rows it is the
jackknife+-after-bootstrap of Kim, Xu and Barber (2020).

**Rows that belong to groups** (several rows of one person) are not exchangeable with the row of a
new group, but groups are. Each of the K groups has the same weight:

    1 / ((K + 1) n_k)   for a score of a group of n_k rows
    1 / (K + 1)         for the new row

and t is the smallest score for which the weights of the scores s ≤ t add up to at least `level`
(Dunn, Wasserman and Ramdas, 2023; Lee, Barber and Willett, 2023). The level holds for one new row
of a new group, on average over groups. With one row per group this is the rank k above. For
jackknife+, m_{-i} is the mean of the runs that held out the whole group of row i.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from doxa import checks, store
from doxa.data import as_tensor, as_tensors, rows_of
from doxa.data.dependence import read_groups
from doxa.driver.runs import Sweep
from doxa.errors import DataError, MethodError, ShapeError, did_you_mean
from doxa.evaluate.recalibrate import check_one_head, check_unseen, labelled, pair
from doxa.likelihoods import Heads, Likelihood
from doxa.noise import generator
from doxa.posterior import MixturePosterior, Posterior, PredictiveTransform, TransformedPosterior
from doxa.predictive import Predictive
from doxa.predictive.blend import Blend
from doxa.predictive.calibrated import ConformalInterval, ConformalSet, log_probs
from doxa.predictive.form import Form

log = logging.getLogger("doxa")


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
    scores: Tensor, level: float, *, allow_infinite: bool = False, of: str = "",
    group: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The rank(n, level)-th smallest of scores [n, ...] along the first axis: [...].

    Fewer than `rows_needed` scores raise, or give infinity where that is allowed; `of` describes in
    the error what they are the scores of. `group` [n] is the group of each score: every group then
    has the same weight, and as many groups are needed.
    """
    if bool(torch.isnan(scores).any()):
        raise DataError(f"a calibration score{of} is not a number: predictions contain NaN")
    if group is not None:
        return _threshold_by_group(scores, level, allow_infinite, group)
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


def _threshold_by_group(
    scores: Tensor, level: float, allow_infinite: bool, group: Tensor
) -> Tensor:
    """The smallest score for which the weights of the scores up to it add up to the level."""
    _, code, counts = group.unique(return_inverse=True, return_counts=True)
    if rank(len(counts), level) > len(counts):
        if allow_infinite:
            return scores.new_full(scores.shape[1:], torch.inf)
        raise DataError(
            f"calibration rows of {len(counts)} groups cannot guarantee level {level:g} for new "
            f"groups: at least {rows_needed(level)} groups are needed; with allow_infinite=True "
            "everything is inside"
        )
    ordered, order = scores.sort(0)
    each = (1.0 / counts.double())[code].to(scores.device)
    needed = float(_exact(level) * (len(counts) + 1))
    reached = each[order].cumsum(0) >= needed - 1e-9 * len(counts)  # sums of fractions are rounded
    return ordered.gather(0, reached.to(torch.int8).argmax(0, keepdim=True))[0]


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


class ByGroup(PredictiveTransform):
    """A transform with a threshold for each group of rows: subclasses are frozen dataclasses that
    define what a predictive becomes `_with` thresholds, one row of them per group, or per row."""

    thresholds: Tensor
    groups: Groups | None
    level: float

    @property
    def guaranteed_level(self) -> float:
        return self.level

    def __call__(self, p: Predictive) -> Predictive:
        if self.groups is not None:
            raise MethodError("thresholds differ by group: predict with the posterior, which has x")
        return self._with(p, self.thresholds)

    def at(self, p: Predictive, x: Any) -> Predictive:
        if self.groups is None:
            return self(p)
        index = self.groups.index(x, self.thresholds.device)
        return self._with(p, self.thresholds[index])

    @abstractmethod
    def _with(self, p: Predictive, t: Tensor) -> Predictive: ...


@store.register("conformal.groups")
@dataclass(frozen=True)
class Groups:
    """Which group a row belongs to: `by` is a column of x, or a function from x to N labels;
    `labels` are those of the calibration rows, in order.

    Saving needs a column, or a function that is a registered frozen dataclass.
    """

    by: int | Callable[[Any], Any]
    labels: tuple[Hashable, ...]

    @classmethod
    def of(cls, by: Any, x: Any) -> Groups:
        if not callable(by) and (isinstance(by, bool) or not isinstance(by, int)):
            raise MethodError(f"groups are a column of x or a function of x, not {by!r}")
        found = set(_labels(by, x))
        try:
            ordered = sorted(found)
        except TypeError:  # labels of several types
            ordered = sorted(found, key=repr)
        return cls(by, tuple(ordered))

    @property
    def names(self) -> list[str]:
        return [f"group {label!r}" for label in self.labels]

    def index(self, x: Any, device: torch.device) -> Tensor:
        """[N]: the number of each row's group."""
        number = {label: g for g, label in enumerate(self.labels)}
        rows = []
        for i, label in enumerate(_labels(self.by, x)):
            if label not in number:
                raise DataError(
                    f"row {i} is of group {label!r}, of which there was no calibration row; known: "
                    f"{', '.join(map(repr, self.labels[:12]))}"
                )
            rows.append(number[label])
        return torch.tensor(rows, device=device)


def _labels(by: int | Callable[[Any], Any], x: Any) -> list[Any]:
    if callable(by):
        labels = by(x)
        return list(labels.tolist() if hasattr(labels, "tolist") else labels)
    table = as_tensor(x, "x")
    if table.ndim != 2 or not -table.shape[1] <= by < table.shape[1]:
        raise ShapeError(f"x of shape {list(table.shape)} has no column {by} to group by")
    return table[:, by].tolist()


@store.register("conformal.interval")
@dataclass(frozen=True, eq=False)
class Interval(ByGroup):
    """`thresholds` [G, *event], one for each group (one group where there are none)."""

    level: float
    score: str  # "absolute", "scaled" or "quantile"
    thresholds: Tensor
    groups: Groups | None = None

    def _with(self, p: Predictive, t: Tensor) -> Predictive:
        form = p.form

        def bounds() -> tuple[Tensor, Tensor]:
            low, high, unit = centre(form, self.score, self.level)
            return spread_out(low, high, t.to(low) * unit, form.mean.dtype)

        return p.of_form(ConformalInterval(form, self.level, bounds))


def fit_interval(
    p: Predictive, x: Any, y: Any, level: float, score: str, by: Any, allow_infinite: bool,
    group: Tensor | None = None,
) -> Interval:  # fmt: skip
    scores = interval_scores(p, y, score, level)
    if by is None:
        t = threshold(scores, level, allow_infinite=allow_infinite, group=group).unsqueeze(0)
        return Interval(level, score, t)
    groups = Groups.of(by, x)
    index = groups.index(x, scores.device)
    t = thresholds_by(scores, index, groups.names, level, allow_infinite=allow_infinite)
    return Interval(level, score, t, groups)


def interval_scores(p: Predictive, y: Any, score: str, level: float) -> Tensor:
    """[N, *event] in float64."""
    target = p.form.targets(y).double()
    low, high, unit = centre(p.form, score, level)
    if not bool((unit > 0).all()):
        raise DataError(
            "a predicted standard deviation is 0 or not a number; use kind='split' unscaled"
        )
    return torch.maximum(low - target, target - high) / unit


def centre(form: Form, score: str, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """What an interval starts from, (low, high), and the unit it grows by; float64."""
    if score == "quantile":
        low, high = (form.quantile(0.5 * (1.0 + s * level)).double() for s in (-1.0, 1.0))
        return low, high, torch.ones_like(low)
    mean = form.mean.double()
    return mean, mean, form.std.double() if score == "scaled" else torch.ones_like(mean)


def spread_out(low: Tensor, high: Tensor, by: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(low - by, high + by), rounded outwards: a calibration row on the edge stays inside."""
    size = torch.maximum(low.abs(), high.abs()) + by.abs()
    slack = 2.0 * torch.finfo(dtype).eps * torch.where(torch.isinf(size), 0.0, size)
    crossed, middle = low - by > high + by, 0.5 * (low + high)
    low, high = (torch.where(crossed, middle, t) for t in (low - by, high + by))
    return (low - slack).to(dtype), (high + slack).to(dtype)


def check_numbers(p: Predictive) -> None:
    """Finite means, so that an error can name the row."""
    mean = p.mean
    bad = ~torch.isfinite(mean).reshape(len(mean), math.prod(mean.shape[1:])).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")


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
        form = p.form

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
    group: Tensor | None = None,
) -> Sets:
    """`by` is None for one threshold, "class" for one per class, else a column or function; `group`
    is the group of each row, if rows belong together."""
    check_one_label(p.form)
    rows = labelled(p, y)
    each = class_scores(score, rows.log_probs, randomized, seed)
    scores = each.gather(1, rows.y.unsqueeze(1)).squeeze(1)
    classes, groups = each.shape[1], None
    if by is None:
        if group is not None and len(group) != len(scores):
            raise DataError("groups need every calibration row labelled: drop the ignored ones")
        t = threshold(scores, level, allow_infinite=allow_infinite, group=group)
        t = t.expand(1, classes)
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


_CHUNK_ELEMENTS = 1 << 22


@store.register("conformal.jackknife+")
@dataclass(frozen=True, eq=False)
class JackknifePlus(PredictiveTransform):
    """Rows that were held out by the same runs share a pattern."""

    level: float
    residuals: Tensor  # [n, *event]
    pattern: Tensor  # [n], the number of each row's pattern
    left_out: Tensor  # [patterns, R] of bool: the runs that did not see such rows
    allow_infinite: bool = False
    group: Tensor | None = None  # [n], the number of each row's group, if rows belong together

    @property
    def guaranteed_level(self) -> float:
        return self.level

    def __call__(self, p: Predictive) -> Predictive:
        form = p.form
        if not isinstance(form, Blend) or len(form.parts) != self.left_out.shape[1]:
            raise MethodError(f"jackknife+ needs the mixture of its {self.left_out.shape[1]} runs")

        def bounds() -> tuple[Tensor, Tensor]:
            each = torch.stack([part.mean.double() for part in form.parts])  # [R, N, *event]
            means = leave_out_means(each, self.left_out.to(each.device))
            rows = max(1, _CHUNK_ELEMENTS // max(1, self.residuals.numel()))
            blocks = [self._bounds(block) for block in means.split(rows, 1)]
            low, high = (torch.cat(side) for side in zip(*blocks, strict=True))
            return spread_out(low, high, torch.zeros_like(low), form.mean.dtype)

        return p.of_form(ConformalInterval(form, self.level, bounds))

    def _bounds(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """[patterns, N, *event] to (low, high) [N, *event]."""
        centre = means[self.pattern.to(means.device)]  # [n, N, *event]
        spread = self.residuals.to(means).unsqueeze(1)
        infinite = self.allow_infinite
        low = -threshold(spread - centre, self.level, allow_infinite=infinite, group=self.group)
        return low, threshold(
            centre + spread, self.level, allow_infinite=infinite, group=self.group
        )


def leave_out_means(each: Tensor, left_out: Tensor) -> Tensor:
    """Means over the runs [R, ...] of each pattern: [patterns, ...]."""
    weights = left_out.to(each.dtype)
    weights = weights / weights.sum(1, keepdim=True)
    return (weights @ each.reshape(len(each), -1)).reshape(len(weights), *each.shape[1:])


def fit_jackknife(
    sweep: Sweep, x: Any, y: Any, level: float, allow_infinite: bool, group: Tensor | None
) -> TransformedPosterior:
    base = MixturePosterior(list(sweep), [1.0] * len(sweep))
    form = base.predict(x).form
    if not isinstance(form, Blend):
        raise MethodError("jackknife+ is for posteriors with one head")
    target = form.targets(y).double()
    left_out, pattern = _patterns(sweep, len(target), group)
    each = torch.stack([part.mean.double() for part in form.parts])
    if not bool(torch.isfinite(each).all()):
        raise DataError("a run's predictions at its training rows are not finite")
    own = leave_out_means(each, left_out.to(each.device))
    rows = torch.arange(len(target), device=own.device)
    residuals = (target - own[pattern.to(own.device), rows]).abs()
    # enough rows, or an error now
    threshold(residuals, level, allow_infinite=allow_infinite, group=group)
    transform = JackknifePlus(level, residuals, pattern, left_out, allow_infinite, group)
    return TransformedPosterior(base, transform)


def _patterns(sweep: Sweep, n: int, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """(left_out [patterns, R], pattern [n]) from the rows that each run was fitted to. A run that
    was fitted to a row has seen all rows of its group."""
    unseen = torch.ones(n, len(sweep), dtype=torch.bool)
    for r, spec in enumerate(sweep.specs):
        if spec.rows is None:
            unseen[:, r] = False
            continue
        numbers = spec.rows.cpu()
        if len(numbers) and int(numbers.max()) >= n:
            raise DataError(
                f"run {r} was fitted to row {int(numbers.max())}, but there are {n} rows: give "
                "jackknife+ the data that the runs were fitted to"
            )
        seen = numbers if group is None else torch.isin(group, group[numbers])
        unseen[seen, r] = False
    always = (~unseen.any(1)).nonzero().flatten()
    if len(always):
        whose = "" if group is None else ", or other rows of their groups,"
        raise DataError(
            f"{len(always)} of {n} rows (the first is row {int(always[0])}){whose} were seen by "
            "every run, so that nothing predicts them from outside; fit with "
            "runs=Runs(rows=folds), where each row is held out at least once"
            f"{', with all rows of its group' if group is not None else ''}"
        )
    left_out, pattern = unseen.unique(dim=0, return_inverse=True)
    return left_out, pattern


__all__ = [
    "Groups", "Interval", "JackknifePlus", "Sets", "conformal", "rank", "rows_needed", "threshold",
]  # fmt: skip

NUMBERS = {"split": "absolute", "cqr": "quantile"}
CLASSES = {"lac": "lac", "aps": "aps"}
KINDS = (*NUMBERS, *CLASSES, "mondrian", "jackknife+")


def conformal(
    posterior: Posterior | Sweep,
    data: Any,
    level: float = 0.9,
    kind: str | None = None,
    *,
    score: str | None = None,
    groups: Any = None,
    scaled: bool = False,
    randomized: bool = True,
    seed: int = 0,
    allow_infinite: bool = False,
) -> TransformedPosterior:
    """Give a posterior intervals (numbers) or sets (classes) that contain y with probability at
    least `level`, if calibration rows and new rows are exchangeable.

    Parameters
    ----------
    posterior : Posterior or Sweep
        Any posterior. It may be transformed. For "jackknife+" the `Sweep` of
        `fit(..., runs=doxa.Runs(rows=folds))`.
    data : tuple (x, y)
        Held-out rows. Rows that were passed to `fit` are an error (`doxa.data.fitted_rows`
        documents how they are recognised), except if the fit read them from a stream. For
        "jackknife+" the rows that the sweep was fitted to.
    level : float, default 0.9
        Coverage.
    kind : str, optional
        For numbers "split" (the default) or "cqr"; for classes "lac" (the default) or "aps"; for
        both "mondrian", with coverage within every class or group; for sweeps "jackknife+".
    score : str, optional
        For "mondrian": which of the other kinds to apply per class or group.
    groups : array-like of shape [N], int or callable, optional
        An array: the group of each row of `data`, if rows belong together, as in `doxa.fit`. The
        level then holds for rows of new groups, and every group has the same weight. For
        "mondrian", which has coverage within each group: a column of x, or a function from x to N
        labels; without it, classes are divided by label.
    scaled : bool, default False
        Use "split" in units of the predictive standard deviation, so that intervals are wider where
        it is larger.
    randomized : bool, default True
        "aps" draws one number per row, which makes its level exact.
    seed : int, default 0
        Seed of these numbers.
    allow_infinite : bool, default False
        If there are too few rows, or groups, return an infinite interval, or a class that is in
        every set, instead of an error.

    Returns
    -------
    TransformedPosterior
        `predict(x).interval()` and `.prediction_set()` have this `level` only; everything else is
        that of the base posterior.

    Notes
    -----
    A posterior that was fitted with `time=` is refused: later rows are not exchangeable with the
    calibration rows. If it was fitted with `groups=`, a warning is logged if groups are not given.

    Examples
    --------
    >>> import torch
    >>> import doxa
    >>> from doxa.evaluate import conformal
    >>> x, person = torch.linspace(-1, 1, 120)[:, None], torch.arange(120) // 3
    >>> fitted = doxa.fit(None, (x[:60], x[:60] ** 2), "gp")
    >>> posterior = conformal(fitted, (x[60:], x[60:] ** 2), level=0.9, groups=person[60:])
    >>> posterior.transform.guaranteed_level
    0.9
    """
    check_level(level)
    x, y = pair(data)
    _check_dependence(list(posterior) if isinstance(posterior, Sweep) else [posterior], groups)
    group = None
    if _is_array(groups) and kind != "mondrian":
        group, groups = read_groups(groups, rows_of(as_tensors(x, "x"), "x")), None
    if isinstance(posterior, Sweep):
        return _of_sweep(posterior, x, y, level, kind, allow_infinite, group)
    likelihood = posterior.base_likelihood
    name, by = _choose(kind, score, groups, likelihood)
    if scaled and name != "split":
        raise MethodError(f"scaled is an option of 'split', not of {name!r}")
    checks.whole("seed", seed, 0)
    x = posterior.ordered(x)
    check_unseen(posterior, x, y, ", or use kind='jackknife+' with a Sweep over folds")
    p = posterior.predict(x)
    check_one_head(p)
    if name in CLASSES:
        sets = fit_sets(
            p, x, y, level, name, by, allow_infinite, randomized=randomized, seed=seed, group=group
        )
        return TransformedPosterior(posterior, sets)
    check_numbers(p)
    how = "scaled" if scaled else NUMBERS[name]
    interval = fit_interval(p, x, y, level, how, by, allow_infinite, group)
    return TransformedPosterior(posterior, interval)


def _is_array(groups: Any) -> bool:
    """Whether groups are given as one value per row."""
    return groups is not None and not callable(groups) and not isinstance(groups, int | str)


def _check_dependence(posteriors: list[Posterior], groups: Any) -> None:
    """Refuse fits to rows in order of time; warn if groups are missing."""
    for each in posteriors:
        held_out = each.diagnostics.get("held_out", {})
        if held_out.get("later_rows"):
            raise MethodError(
                "this posterior was fitted with time=, for later rows; conformal levels hold only "
                "if new rows are exchangeable with the calibration rows, which later rows need not "
                "be: fit without time= if they are"
            )
        if "groups" in held_out and groups is None:
            log.warning(
                "conformal: the fit had groups, but no groups of the calibration rows are given: "
                "rows count as independent, and the level may not hold for new groups"
            )
            return


def _choose(
    kind: str | None, score: str | None, groups: Any, likelihood: Likelihood
) -> tuple[str, Any]:
    """(split, cqr, lac or aps; what thresholds differ by)."""
    if isinstance(likelihood, Heads):
        raise MethodError(
            f"this posterior has {len(likelihood.likelihoods)} heads; only predictions of one "
            "head can be made conformal"
        )
    possible = CLASSES if likelihood.classifies else NUMBERS
    default = next(iter(possible))
    if kind == "jackknife+":
        raise MethodError(
            "'jackknife+' needs the runs that left rows out: give the Sweep that "
            "fit(..., runs=Runs(rows=folds)) returns"
        )
    if kind == "mondrian":
        if groups is None and not likelihood.classifies:
            raise MethodError(
                "'mondrian' on numbers needs groups=, a column of x or a function of x"
            )
        by = "class" if groups is None else groups
        return _known(score or default, possible, likelihood), by
    for option, value in (("groups", groups), ("score", score)):
        if value is not None:
            raise MethodError(f"{option} is an option of kind='mondrian', not of {kind!r}")
    return _known(kind or default, possible, likelihood), None


def _known(kind: str, possible: dict[str, str], likelihood: Likelihood) -> str:
    if kind not in KINDS:
        raise MethodError(f"no conformal kind {kind!r}{did_you_mean(str(kind), KINDS)}")
    if kind not in possible:
        raise MethodError(
            f"{kind!r} does not fit this posterior's {likelihood.name} likelihood; for it there "
            f"are: {', '.join((*possible, 'mondrian'))}"
        )
    return kind


def _of_sweep(
    sweep: Sweep, x: Any, y: Any, level: float, kind: str | None, allow_infinite: bool,
    group: Tensor | None,
) -> TransformedPosterior:  # fmt: skip
    if kind not in (None, "jackknife+"):
        raise MethodError(f"a Sweep is for kind='jackknife+', not {kind!r}; give one run, sweep[r]")
    likelihood = sweep[0].base_likelihood
    if likelihood.classifies or isinstance(likelihood, Heads):
        raise MethodError(
            f"'jackknife+' is for numbers; this likelihood is {likelihood.name}: hold rows out and "
            "use 'lac' or 'aps' on one run"
        )
    return fit_jackknife(sweep, x, y, level, allow_infinite, group)
