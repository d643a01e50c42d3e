"""Intervals and sets that hold at a stated level, whatever the model is worth."""

from __future__ import annotations

from typing import Any

from doxa import checks
from doxa.driver.runs import Sweep
from doxa.errors import MethodError, did_you_mean
from doxa.evaluate.conformal.interval import Interval, check_numbers, fit_interval
from doxa.evaluate.conformal.jackknife import JackknifePlus, fit_jackknife
from doxa.evaluate.conformal.mondrian import Groups
from doxa.evaluate.conformal.sets import Sets, fit_sets
from doxa.evaluate.conformal.threshold import check_level, rank, rows_needed, threshold
from doxa.evaluate.recalibrate.rows import check_one_head, check_unseen, pair
from doxa.likelihoods import Heads, Likelihood
from doxa.posterior import Posterior, TransformedPosterior

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
    """The posterior with intervals (numbers) or sets (classes) that hold y with probability at
    least `level`, when calibration and new rows are exchangeable.

    Parameters
    ----------
    posterior: any posterior, a transformed one too; for "jackknife+" the `Sweep` of
        `fit(..., runs=doxa.Runs(rows=folds))`.
    data: (x, y) that the fit has not seen: rows that were passed to `fit` are an error
        (`doxa.data.fitted_rows` says how they are recognised), except where the fit read them from
        a stream. For "jackknife+" the rows that the sweep was fitted to.
    kind: numbers: "split" (the default), "cqr"; classes: "lac" (the default), "aps"; either:
        "mondrian", which holds within every class or group; sweeps: "jackknife+".
    score: for "mondrian", which of the other kinds to do by class or group.
    groups: for "mondrian", a column of x or a function from x to N labels; classes are divided by
        label when it is left out.
    scaled: "split" in units of the predictive standard deviation: wider where it is larger.
    randomized, seed: "aps" draws one number a row, which makes its level exact.
    allow_infinite: too few rows give an infinite interval, or a class that is always in, instead
        of an error.

    Returns
    -------
    A posterior. `predict(x).interval()` and `.prediction_set()` are at `level` and at no other;
    everything else is the base's.
    """
    check_level(level)
    x, y = pair(data)
    if isinstance(posterior, Sweep):
        return _of_sweep(posterior, x, y, level, kind, allow_infinite)
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
        sets = fit_sets(p, x, y, level, name, by, allow_infinite, randomized=randomized, seed=seed)
        return TransformedPosterior(posterior, sets)
    check_numbers(p)
    how = "scaled" if scaled else NUMBERS[name]
    return TransformedPosterior(posterior, fit_interval(p, x, y, level, how, by, allow_infinite))


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
    sweep: Sweep, x: Any, y: Any, level: float, kind: str | None, allow_infinite: bool
) -> TransformedPosterior:
    if kind not in (None, "jackknife+"):
        raise MethodError(f"a Sweep is for kind='jackknife+', not {kind!r}; give one run, sweep[r]")
    likelihood = sweep[0].base_likelihood
    if likelihood.classifies or isinstance(likelihood, Heads):
        raise MethodError(
            f"'jackknife+' is for numbers; this likelihood is {likelihood.name}: hold rows out and "
            "use 'lac' or 'aps' on one run"
        )
    return fit_jackknife(sweep, x, y, level, allow_infinite)
