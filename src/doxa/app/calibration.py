"""Recalibration and conformal prediction of a posterior on held-out rows, for the command line.

`doxa fit --calibrate --conformal 0.9` and `doxa calibrate` offer the same two corrections:
recalibrated predictions (`evaluate.recalibrate`), and intervals or sets with a guaranteed coverage
(`evaluate.conformal`). If both are given, each gets one half of the rows: on the rows that fitted
the recalibration, conformal scores would be too small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from doxa.driver.validation import evaluate_rows
from doxa.errors import DataError, MethodError, did_you_mean
from doxa.evaluate import conformal, coverage, recalibrate
from doxa.evaluate.conformal import CLASSES as SETS
from doxa.evaluate.conformal import NUMBERS as INTERVALS
from doxa.evaluate.conformal import rows_needed
from doxa.evaluate.recalibrate import CLASSES, NUMBERS, Temperature
from doxa.likelihoods import LIKELIHOODS
from doxa.tables.columns import CLASSIFIERS
from doxa.tables.reading import Array

FEWEST = 20  # the smallest number of rows for a recalibration
KINDS = ("auto", *CLASSES, *NUMBERS)
CONFORMAL = (*INTERVALS, *SETS)


@dataclass(frozen=True)
class Calibration:
    """The options: a recalibration, a guaranteed level, or both. Falsy if there is neither."""

    kind: str | None = None  # of `KINDS`
    level: float | None = None
    guarantee: str | None = None  # of `CONFORMAL`; None: the default for the target

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            hint = did_you_mean(self.kind, KINDS)
            raise MethodError(f"no recalibration named {self.kind!r}{hint}")
        if self.level is not None and not 0.0 < self.level < 1.0:
            raise MethodError(f"--conformal must be between 0 and 1, not {self.level:g}")
        if self.guarantee is not None and self.level is None:
            raise MethodError("--conformal-kind needs --conformal, the level: --conformal 0.9")
        if self.guarantee is not None and self.guarantee not in CONFORMAL:
            hint = did_you_mean(self.guarantee, CONFORMAL)
            raise MethodError(f"no conformal kind {self.guarantee!r}{hint}")

    def __bool__(self) -> bool:
        return self.kind is not None or self.level is not None

    def of(self, likelihood: str) -> Calibration:
        """With "auto" resolved; an error, before any fit, if it does not suit the target."""
        classes = likelihood in CLASSIFIERS
        if self.kind is not None and LIKELIHOODS[likelihood].counts:
            raise MethodError(
                f"there is no recalibration for counts (likelihood {likelihood}); --conformal 0.9 "
                "gives intervals with guaranteed coverage"
            )
        kind = ("temperature" if classes else "quantile") if self.kind == "auto" else self.kind
        what = "classes" if classes else "numbers"
        for chosen, possible in (
            (kind, CLASSES if classes else NUMBERS),
            (self.guarantee, SETS if classes else INTERVALS),
        ):
            if chosen is not None and chosen not in possible:
                raise MethodError(
                    f"{chosen!r} is not for {what}, and the likelihood is {likelihood}; there are: "
                    f"{', '.join(possible)}"
                )
        return Calibration(kind, self.level, self.guarantee)

    @property
    def rows_needed(self) -> int:
        fit = FEWEST if self.kind is not None else 0
        hold = rows_needed(self.level) if self.level is not None else 0
        return fit + hold if not (fit and hold) else 2 * max(fit, hold)

    def check_time(self, time: str | None) -> None:
        """An error if a level is wanted for rows in order of time."""
        if self.level is not None and time is not None:
            raise MethodError(
                f"--conformal holds for new rows that are like the calibration rows, and --time "
                f"{time} says that new rows are later: remove one of them"
            )

    def check_rows(self, rows: int, remedy: str) -> None:
        """An error if there are too few rows to calibrate on; `remedy`: how to get more."""
        if rows < self.rows_needed:
            raise DataError(
                f"{rows} rows are too few to calibrate on: {self.words} needs "
                f"{self.rows_needed} at least; {remedy}"
            )

    @property
    def words(self) -> str:
        asked = [] if self.kind is None else [f"{self.kind} recalibration"]
        asked += [] if self.level is None else [f"a conformal level of {self.level:g}"]
        return " and ".join(asked)


def calibrated(
    posterior: Any, x: Array, y: Array, asked: Calibration, seed: int, groups: Array | None = None
) -> tuple[Any, list[str]]:
    """The recalibrated, then conformal posterior, and messages for the user. `groups` has the group
    of each row, if rows belong together.

    If the posterior was over- or underconfident, or worse than a constant, its status is evaluated
    again: with a correction that is made from one half of the rows, on the other half."""
    before = posterior.status
    corrected, messages = _corrected(posterior, x, y, asked, seed, groups)
    wrong = ("worse-than-constant", "overconfident", "underconfident")
    if before in wrong and len(x) >= 2 * asked.rows_needed:
        half, other = _halves(len(x), groups, np.random.default_rng([seed, 11]))
        own = None if groups is None else groups[half]
        trial, _ = _corrected(posterior, x[half], y[half], asked, seed, own)
        name = "calibration rows that are held out"
        status = evaluate_rows(trial, x[other], y[other], name)
        corrected.record = replace(corrected.record, status=status)
        messages.append(f"status: {before} before the correction, {status} after it")
    return corrected, messages


def _halves(rows: int, groups: Array | None, random: np.random.Generator) -> tuple[Array, Array]:
    """Two random halves of the rows, as numbers. A group has all its rows in one of them."""
    order = random.permutation(rows)
    if groups is None:
        first, second = np.array_split(order, 2)
        return first, second
    half = np.array_split(random.permutation(np.unique(groups)), 2)[0]
    inside = np.isin(groups[order], half)
    return order[inside], order[~inside]


def _corrected(
    posterior: Any, x: Array, y: Array, asked: Calibration, seed: int, groups: Array | None
) -> tuple[Any, list[str]]:
    both = asked.kind is not None and asked.level is not None
    random = np.random.default_rng([seed, 7])
    first, second = _halves(len(x), groups, random) if both else (random.permutation(len(x)),) * 2
    messages = []
    if asked.kind is not None:
        before = posterior
        posterior = recalibrate(posterior, (x[first], y[first]), asked.kind)
        messages.append(_recalibration(before, posterior, x[first], y[first], asked.kind))
    if asked.level is not None:
        posterior = conformal(
            posterior, (x[second], y[second]), asked.level, asked.guarantee, seed=seed,
            groups=None if groups is None else groups[second],
        )  # fmt: skip
        what = "sets of classes" if posterior.base_likelihood.classifies else "intervals"
        messages.append(
            f"conformal on {'other ' if both else ''}{len(second)} rows: {what} that contain the "
            f"target with probability {asked.level:g}, if new "
            f"{'rows' if groups is None else 'groups'} are like these"
        )
    return posterior, messages


def _recalibration(before: Any, after: Any, x: Array, y: Array, kind: str) -> str:
    """The result as a message."""
    message = f"recalibrated by {kind} on {len(x)} rows"
    if isinstance(after.transform, Temperature):
        t = float(after.transform.temperature)
        if f"{t:.2f}" == "1.00":
            return f"{message}: temperature 1.00, it was calibrated as it was"
        was = "overconfident" if t > 1 else "underconfident"
        return f"{message}: temperature {t:.2f}, it was {was}"
    if before.base_likelihood.classifies:
        return message
    held = coverage(before.predict(x), y, 0.95)
    return f"{message}: the 95 % intervals contained {float(held):.0%} of the targets before"
