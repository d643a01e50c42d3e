"""Calibration: do promised probabilities come true? Reliability, PIT, coverage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from doxa.app.report.answers import Answer
from doxa.app.report.block import LEVELS
from doxa.app.report.charts import Axis, Bars, Line, Plot, Points, Ribbon, Segments, figure
from doxa.app.report.charts.marks import Array, Mark
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import table, values_table
from doxa.app.report.words import chance_of_share, count, percent, points

FEW = 20  # rows: below that a histogram says nothing


def calibration(subject: Subject, answers: Sequence[Answer]) -> Section:
    parts: list[Content] = []
    for k, answer in enumerate(answers):
        parts.append(tag("h3", None, answer.label) if answer.label else None)
        charts = _classes(answer, k) if answer.kind == "classes" else _numbers(answer, k)
        if answer.truth.size < FEW:
            rows = count(answer.truth.size, "truth")
            parts.append(tag("p", None, f"With {rows} chance decides most of what is seen here."))
        parts.append(tag("div", {"class": "pair"}, charts) if charts else _none(answer))
    return Section("calibration", "Calibration", parts)


def coverage_of(answer: Answer) -> Array | None:
    """[levels]: shares of truths inside the central intervals."""
    if answer.covered is not None:
        return answer.covered
    if answer.pit is None:
        return None
    away = np.abs(answer.pit - 0.5)
    return np.array([np.mean(away <= 0.5 * level + 1e-12) for level in LEVELS])


def reliability_of(answer: Answer, bins: int = 15) -> tuple[Array, Array, Array]:
    """(confidence, accuracy, count) of the bins that are not empty: those of the ECE."""
    from doxa import Predictive
    from doxa.evaluate import reliability

    assert answer.probs is not None
    p = Predictive.from_probs(torch.as_tensor(answer.probs))
    found = reliability(p, torch.as_tensor(answer.truth).long(), bins)
    confidence, accuracy, number = (
        t.detach().cpu().double().numpy() for t in (found.confidence, found.accuracy, found.count)
    )
    some = number > 0
    return confidence[some], accuracy[some], number[some]


def _classes(answer: Answer, k: int) -> list[Html]:
    assert answer.probs is not None
    if not answer.truth.size or not np.isfinite(answer.probs).all():
        return []
    confidence, accuracy, number = reliability_of(answer)
    chance = [chance_of_share(c, int(n)) for c, n in zip(confidence, number, strict=True)]
    gap = float(np.sum(number * np.abs(confidence - accuracy)) / number.sum())
    over = float(np.sum(number * (confidence - accuracy)) / number.sum())
    hit = float((number * accuracy).sum() / number.sum())
    lean = "On the whole neither over- nor underconfident, within chance."
    if abs(over) > max(chance_of_share(hit, int(number.sum())), 0.01):
        lean = f"On the whole {'over' if over > 0 else 'under'}confident, by {points(over)}."
    low, high = np.clip(confidence - chance, 0, 1), np.clip(confidence + chance, 0, 1)
    least = float(min(0.5, np.floor(10 * min(confidence.min(), accuracy.min())) / 10))
    start = max(0.0, least)
    plot = Plot(
        f"reliability-{k}",
        "Reliability",
        f"Accuracy against confidence in {len(number)} bins; the diagonal is calibrated. {lean}",
        Axis("confidence", start, 1.0),
        Axis("accuracy", start, 1.0),
        [
            Line(np.array([start, 1.0]), np.array([start, 1.0]), "rule", "calibrated"),
            Segments(confidence, low, high, "one", "within chance"),
            Segments(confidence, np.minimum(confidence, accuracy),
                     np.maximum(confidence, accuracy), "gap", "gap"),
            Points(confidence, accuracy, "one", "observed", 4.5),
        ],
    )  # fmt: skip
    rows = [
        [float(c), float(a), int(n)] for c, a, n in zip(confidence, accuracy, number, strict=True)
    ]
    values = table("Reliability by bin", ["confidence", "accuracy", "rows"], rows)
    words = f"How often the likeliest class came true, by the probability given to it. {lean}"
    mean = f"The mean gap is the ECE, {percent(gap)}."
    return [figure(plot, f"{words} {mean}", values), _confidences(answer, k)]


def _confidences(answer: Answer, k: int) -> Html:
    assert answer.probs is not None
    top = answer.probs.max(axis=1)
    right = answer.probs.argmax(axis=1) == answer.truth
    edges = np.linspace(1.0 / answer.probs.shape[1], 1.0, 16)
    good = np.histogram(np.clip(top[right], edges[0], 1), edges)[0].astype(float)
    wrong = np.histogram(np.clip(top[~right], edges[0], 1), edges)[0].astype(float)
    plot = Plot(
        f"confidence-{k}",
        "Confidence, right and wrong",
        f"{int(good.sum()):,} right and {int(wrong.sum()):,} wrong predictions by confidence.",
        Axis("confidence", float(edges[0]), 1.0),
        Axis("rows", 0.0),
        [Bars(edges, good, "one", "right"), Bars(edges, wrong, "two", "wrong", good)],
    )
    values = values_table(
        "Rows by confidence", ["from", "right", "wrong"], [edges[:-1], good, wrong]
    )
    said = f"{count(int(wrong.sum()), 'prediction')} of {len(top):,} wrong"
    return figure(plot, f"Mistakes should be made with low confidence. {said}.", values)


def _numbers(answer: Answer, k: int) -> list[Html]:
    charts = []
    covered = coverage_of(answer)
    if covered is not None and np.isfinite(covered).all():
        charts.append(_coverage(answer, covered, k))
    if answer.pit is not None and answer.pit.size and np.isfinite(answer.pit).all():
        charts.append(_pit(answer, k))
    return charts


def _coverage(answer: Answer, covered: Array, k: int) -> Html:
    levels = np.array(LEVELS)
    # The curve is a distribution function: all of it stays this close to the diagonal in 95 % of
    # cases (Dvoretzky, Kiefer & Wolfowitz, 1956, with Massart's constant).
    chance = np.sqrt(np.log(2 / 0.05) / (2 * answer.truth.size))
    gap = float(np.mean(covered - levels))
    lean = "Within chance at every level."
    if (np.abs(covered - levels) > chance).any():
        lean = f"Beyond chance: on the whole intervals hold {points(gap)} "
        lean += f"{'less' if gap < 0 else 'more'} than they promise."
    if answer.kind == "counts":
        lean += " Intervals of counts hold a little more by construction."
    own = answer.scores.get("coverage")
    extra: list[Mark] = []
    if answer.conformal and own is not None:
        lean = f"The conformal {percent(answer.level)} intervals hold {percent(own)}; the curve is "
        lean += "that of the predictive under them."
        at = np.array([answer.level]), np.array([own])
        extra.append(Points(*at, "two", "conformal", 4.5))
    plot = Plot(
        f"coverage-{k}",
        "Coverage",
        f"Share of truths inside the central interval against its level. {lean}",
        Axis("promised", 0.0, 1.0),
        Axis("observed", 0.0, 1.0),
        [
            Ribbon(*_band(chance), "rule", "within chance"),
            Line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), "rule", "calibrated"),
            Line(levels, covered, "one", "observed"),
            Points(levels, covered, "one", None, 3.0),
            *extra,
        ],
    )  # fmt: skip
    values = values_table("Coverage by level", ["promised", "observed"], [levels, covered])
    return figure(plot, f"How many truths central intervals hold. {lean}", values)


def _band(chance: float) -> tuple[Array, Array, Array]:
    """The diagonal and what lies within `chance` of it, cut to the square."""
    x = np.linspace(0.0, 1.0, 101)
    return x, np.clip(x - chance, 0, 1), np.clip(x + chance, 0, 1)


def _pit(answer: Answer, k: int) -> Html:
    assert answer.pit is not None
    bins = 20 if answer.pit.size >= 200 else 10
    edges = np.linspace(0.0, 1.0, bins + 1)
    counts = np.histogram(np.clip(answer.pit, 0, 1), edges)[0]
    density = counts * bins / answer.pit.size
    chance = bins * chance_of_share(1.0 / bins, answer.pit.size)
    outer = (density[0] + density[-1]) / 2
    lean = "A flat histogram is calibrated; a U is too narrow, a hump too wide, a slope biased."
    plot = Plot(
        f"pit-{k}",
        "PIT histogram",
        f"Where truths fall in their predictive distribution, {bins} bins; 1 is calibrated. The "
        f"outermost bins stand at {outer:.2f} on average.",
        Axis("predicted probability of a smaller value", 0.0, 1.0),
        Axis("density", 0.0),
        [
            Ribbon(np.array([0.0, 1.0]), np.full(2, max(0.0, 1 - chance)), np.full(2, 1 + chance),
                   "rule", "within chance"),
            Bars(edges, density, "one", "observed"),
            Line(np.array([0.0, 1.0]), np.ones(2), "rule", "calibrated"),
        ],
    )  # fmt: skip
    values = values_table("PIT histogram", ["from", "density"], [edges[:-1], density])
    return figure(plot, lean, values)


def _none(answer: Answer) -> Html:
    why = next(iter(answer.missing.values()), "the predictions are not finite")
    return tag("p", None, f"Not available: {why}.")
