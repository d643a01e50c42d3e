"""Pictures of predictions: calibration, intervals, parts of uncertainty, scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from doxa import evaluate
from doxa.errors import DataError, MethodError, ShapeError, Unavailable
from doxa.plot.style import (
    ALEATORIC,
    DASHES,
    EPISTEMIC,
    GRID,
    INK,
    MEAN,
    MOST_ROWS,
    SERIES,
    Array,
    axes,
    flat,
    legend,
)  # fmt: skip
from doxa.posterior import Posterior
from doxa.predictive import Predictive


def _predicted(p: Any) -> Predictive:
    if isinstance(p, Posterior):
        raise DataError("this picture is of predictions: pass posterior.predict(x)")
    if not isinstance(p, Predictive):
        raise DataError(f"this picture is of a doxa.Predictive, not of {type(p).__name__}")
    return p


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def reliability(p: Predictive, y: Any, *, bins: int = 10, ax: Any = None) -> Any:
    """What was predicted against what came true: calibrated predictions lie on the diagonal.

    Parameters
    ----------
    p : Predictive
        Predictions of classes, or of numbers.
    y : array_like
        The observed targets of the same rows.
    bins : int, default 10
        Bins of the probability, for classes.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        For classes the accuracy in bins of the confidence, with the size of the bins as the size of
        the marks. For numbers the share of targets at or below each predicted quantile.

    Examples
    --------
    >>> doxa.plot.reliability(posterior.predict(x_test), y_test)
    """
    p = _predicted(p)
    if p.likelihood.classifies:
        found = evaluate.reliability(p, y, bins)
        said, true, count = map(flat, (found.confidence, found.accuracy, found.count))
        error = evaluate.ece(p, y, bins=bins)
        ax = axes(ax, f"reliability (ECE {error:.3f})", "confidence", "accuracy")
        here = count > 0
        sizes = 20 + 180 * count[here] / count.sum()
        spread = np.sqrt(true[here] * (1 - true[here]) / count[here])
        ax.errorbar(said[here], true[here], 1.96 * spread, fmt="none", color=ALEATORIC, zorder=2)
        ax.scatter(said[here], true[here], sizes, color=SERIES[0], zorder=3, label="rows in a bin")
    else:
        numbers = evaluate.quantile_reliability(p, y, np.linspace(0.05, 0.95, 19).tolist())
        title = f"reliability (mean distance {numbers.error:.3f})"
        ax = axes(ax, title, "predicted quantile", "share of targets below it")
        ax.plot(flat(numbers.level), flat(numbers.observed), ".-", color=SERIES[0], zorder=3,
                label="predictions")  # fmt: skip
    ax.plot([0, 1], [0, 1], color=INK, lw=1.0, ls=DASHES[1], label="calibrated", zorder=1)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    legend(ax, loc="upper left")
    return ax


def pit(p: Predictive, y: Any, *, bins: int = 10, ax: Any = None) -> Any:
    """The histogram of the probability integral transform F(y): flat if calibrated.

    A ∪ is of overconfident, a ∩ of underconfident, and a slope of biased predictions.

    Parameters
    ----------
    p : Predictive
        Predictions of numbers.
    y : array_like
        The observed targets of the same rows.
    bins : int, default 10
        Number of bars.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        The bars, and the band in which 95 % of the bars of calibrated predictions are.
    """
    found = evaluate.pit_histogram(_predicted(p), y, bins)
    total = float(found.count.sum())
    title = f"PIT (p-value of uniform: {found.ks_pvalue:.2g})"
    ax = axes(ax, title, "F(y)", "density")
    half = 1.96 * math.sqrt((1 - 1 / bins) * bins / total)
    ax.axhspan(max(0.0, 1 - half), 1 + half, color=GRID, lw=0, zorder=0,
               label="95 % if calibrated")  # fmt: skip
    ax.bar(flat(found.edges)[:-1], flat(found.density), 1 / bins, align="edge",
           color=SERIES[0], edgecolor="white", alpha=0.85, label="predictions",
           zorder=2)  # fmt: skip
    ax.axhline(1.0, color=INK, lw=1.0, ls=DASHES[1], zorder=3)
    ax.set_xlim(0, 1)
    legend(ax)
    return ax


def intervals(
    p: Predictive, y: Any = None, *, level: float = 0.9, most: int = MOST_ROWS, ax: Any = None
) -> Any:
    """The central interval of each row, in order of the mean, and the targets.

    Parameters
    ----------
    p : Predictive
        Predictions of numbers.
    y : array_like, optional
        The observed targets; those outside their interval are marked.
    level : float, default 0.9
        The probability of the intervals.
    most : int, default 200
        The most rows that are drawn, evenly spaced in the order. Coverage counts all rows.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        With the coverage in the title if `y` is given.
    """
    p = _predicted(p)
    if p.likelihood.classifies:
        raise MethodError("classes have no intervals: doxa.plot.decomposition shows them")
    mean, (low, high) = flat(p.mean), map(flat, p.interval(level))
    order = np.argsort(mean, kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)]
    title = f"{_share(level)} intervals"
    target = None
    if y is not None:
        target = flat(y)
        if target.shape != mean.shape:
            raise ShapeError(f"y has {len(target)} values, and there are {len(mean)} predictions")
        held = float(np.mean((low <= target) & (target <= high)))
        title += f", which hold {_share(held)} of the targets"
    ax = axes(ax, title, "rows, by predicted mean", "y", (6.4, 3.9))
    at = np.arange(len(shown))
    ax.vlines(at, low[shown], high[shown], color=EPISTEMIC, lw=1.2, alpha=0.6,
              label=f"{_share(level)} interval", zorder=2)  # fmt: skip
    ax.plot(at, mean[shown], color=MEAN, lw=1.4, label="mean", zorder=3)
    if target is not None:
        seen = target[shown]
        out = (seen < low[shown]) | (seen > high[shown])
        ax.plot(at[~out], seen[~out], ".", color=INK, ms=4, label="y", zorder=4)
        ax.plot(at[out], seen[out], "x", color=SERIES[1], ms=5, label="y outside", zorder=5)
    legend(ax)
    return ax


def decomposition(p: Predictive, *, most: int = MOST_ROWS, ax: Any = None) -> Any:
    """The uncertainty of each row in two parts: noise in the data, and what more data could remove.

    Parameters
    ----------
    p : Predictive
        Numbers: the variances. Classes: the entropy, whose second part is the mutual information.
    most : int, default 200
        The most rows that are drawn, evenly spaced in the order.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        Stacked areas, with rows in order of the sum.
    """
    p = _predicted(p)
    if p.likelihood.classifies:
        if not p.splits:
            raise Unavailable("these probabilities come from one function: there is one part only")
        second, total = flat(p.mutual_information), flat(p.entropy)
        first, unit = np.maximum(total - second, 0.0), "entropy (nats)"
        names = ("aleatoric: of the classes", "epistemic: mutual information")
    else:
        first, second, unit = flat(p.aleatoric), np.maximum(flat(p.epistemic), 0.0), "variance"
        names = ("aleatoric: noise", "epistemic: of the function")
    order = np.argsort(first + second, kind="stable")
    shown = order[np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)]
    whole = float((first + second).sum())
    share = float(second.sum()) / whole if whole > 0 else 0.0
    ax = axes(ax, f"uncertainty, {_share(share)} of it epistemic", "rows, by uncertainty", unit)
    ax.stackplot(np.arange(len(shown)), first[shown], second[shown], labels=names,
                 colors=(ALEATORIC, EPISTEMIC))  # fmt: skip
    ax.set_ylim(0, None)
    legend(ax, loc="upper left")
    return ax


def ood(
    inside: Any, outside: Any, *, score: str | None = None, bins: int = 30, ax: Any = None
) -> Any:
    """Scores of inputs like those of the fit, and of out-of-distribution inputs.

    Parameters
    ----------
    inside, outside : Predictive, Mapping or array_like
        Predictions, whose entropy (classes) or variance (numbers) is the score; the scores of
        `doxa.evaluate.ood_scores`; or scores themselves, larger for out-of-distribution inputs.
    score : str, optional
        Which of the scores of a mapping. Default: the first that both have.
    bins : int, default 30
        Number of bars.
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        Two histograms; the title has the area under the ROC curve.
    """
    name, a = _scores(inside, score)
    name, b = _scores(outside, name if score is None and isinstance(inside, Mapping) else score)
    area = evaluate.auroc(torch.as_tensor(a), torch.as_tensor(b))
    ax = axes(ax, f"out-of-distribution inputs (AUROC {area:.3f})", name, "density")
    low, high = min(a.min(), b.min()), max(a.max(), b.max())
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    for values, label, colour, fill in (
        (a, "like the fit", SERIES[0], 0.55), (b, "out of distribution", SERIES[1], 0.4)
    ):  # fmt: skip
        ax.hist(values, edges, density=True, color=colour, alpha=fill, label=label)
        ax.axvline(float(np.median(values)), color=colour, lw=1.2, ls=DASHES[1])
    legend(ax)
    return ax


def _scores(given: Any, score: str | None) -> tuple[str, Array]:
    """The name and the values of a score."""
    if isinstance(given, Predictive):
        if given.likelihood.classifies:
            return "entropy (nats)", flat(given.entropy)
        return "variance", flat(given.variance)
    if isinstance(given, Mapping):
        name = next(iter(given)) if score is None else score
        if name not in given:
            raise DataError(f"there is no score {name!r}; there are {', '.join(given)}")
        return name, flat(given[name])
    return score or "score", flat(given)


def closeness(
    distances: Mapping[str, Any], *, metric: str = "total_variation", ax: Any = None
) -> Any:
    """The distance of several predictions to a reference, such as HMC.

    Parameters
    ----------
    distances : Mapping
        {name: what `doxa.evaluate.closeness(p, reference)` gave}, or numbers.
    metric : str, default "total_variation"
        "total_variation", "wasserstein2" or "agreement".
    ax : Axes, optional
        The axes to draw on.

    Returns
    -------
    Axes
        One bar for each name, the closest at the top.

    Examples
    --------
    >>> distances = {name: doxa.evaluate.closeness(p, reference) for name, p in found.items()}
    >>> doxa.plot.closeness(distances)
    """
    values: dict[str, float] = {}
    for name, each in distances.items():
        number = each if isinstance(each, int | float) else getattr(each, metric, None)
        if number is None:
            raise DataError(f"{name!r} has no {metric}: it is for classes, or the name is wrong")
        values[name] = float(number)
    if not values:
        raise DataError("there is nothing to compare: the mapping is empty")
    order = sorted(values, key=values.__getitem__, reverse=metric == "agreement")
    ax = axes(ax, "distance to the reference", metric.replace("_", " "), "",
               (5.6, 1.2 + 0.38 * len(values)))  # fmt: skip
    ax.barh(order, [values[name] for name in order], color=SERIES[0], alpha=0.8)
    ax.invert_yaxis()
    ax.set_xlim(0, None)
    return ax
