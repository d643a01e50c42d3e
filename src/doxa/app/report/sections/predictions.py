"""Predictions against the truth: intervals for numbers, a confusion matrix for classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from doxa.app.report.answers import Answer
from doxa.app.report.charts import Axis, Grid, Line, Plot, Points, Segments, figure
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import cut
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import table, values_table
from doxa.app.report.words import count, percent

MOST_POINTS = 300
MOST_INTERVALS = 60
MOST_CLASSES = 10


def predictions(subject: Subject, answers: Sequence[Answer]) -> Section | None:
    parts: list[Content] = []
    for k, answer in enumerate(answers):
        charts = _confusion(subject, answer, k) if answer.kind == "classes" else _numbers(
            subject, answer, k
        )  # fmt: skip
        if charts:
            parts.append(tag("h3", None, answer.label) if answer.label else None)
            parts.append(tag("div", {"class": "pair"}, charts))
    return Section("predictions", "Predictions and truth", parts) if parts else None


def class_names(subject: Subject, answer: Answer) -> list[str]:
    assert answer.probs is not None
    number = answer.probs.shape[1]
    if subject.classes and len(subject.classes) == number and not answer.label:
        return list(subject.classes)
    return [f"class {k}" for k in range(number)]


def _numbers(subject: Subject, answer: Answer, k: int) -> list[Html]:
    if answer.mean is None:
        return []
    known = np.flatnonzero(np.isfinite(answer.mean) & np.isfinite(answer.truth))
    if not known.size:
        return []
    chosen = _some(known, MOST_POINTS)
    target = cut(subject.target, 30)
    charts = [_scatter(answer, chosen, known.size, target, k)]
    if answer.low is not None and answer.high is not None:
        charts.append(_intervals(answer, _some(known, MOST_INTERVALS), known.size, target, k))
    return charts


def _scatter(answer: Answer, at: np.ndarray, total: int, target: str, k: int) -> Html:
    assert answer.mean is not None
    mean, truth = answer.mean[at], answer.truth[at]
    ends = np.array([min(mean.min(), truth.min()), max(mean.max(), truth.max())])
    whole_mean, whole_truth = answer.mean, answer.truth
    correlation = None
    if whole_truth.size > 2 and np.std(whole_truth) > 0 and np.std(whole_mean) > 0:
        correlation = float(np.corrcoef(whole_mean, whole_truth)[0, 1])
    said = f"Correlation {correlation:.3f}." if correlation is not None else ""
    plot = Plot(
        f"scatter-{k}",
        "Predicted against true",
        f"{len(at)} predictions; on the diagonal they are right. {said}",
        Axis(f"true {target}"),
        Axis("predicted mean"),
        [Line(ends, ends, "rule", "right"), Points(truth, mean, "one", "prediction")],
    )
    values = values_table("Predicted and true", ["true", "predicted mean"], [truth, mean])
    return figure(plot, f"{_subsample(len(at), total)} {said}", values)


def _intervals(answer: Answer, at: np.ndarray, total: int, target: str, k: int) -> Html:
    assert answer.low is not None and answer.high is not None and answer.mean is not None
    order = at[np.argsort(answer.mean[at], kind="stable")]
    place = np.arange(1.0, len(order) + 1)
    low, high, truth = answer.low[order], answer.high[order], answer.truth[order]
    inside = (low <= truth) & (truth <= high)
    level = percent(answer.level)
    out = int((~inside).sum())
    said = f"{count(out, 'truth')} of {len(order)} outside."
    plot = Plot(
        f"intervals-{k}",
        f"{level} intervals and truths",
        f"{len(order)} rows in the order of their predicted mean. {said}",
        Axis("rows, by predicted mean", at=[]),
        Axis(target),
        [
            Segments(place, low, high, "one", "interval"),
            Points(place[inside], truth[inside], "one", "truth inside", 2.6),
            Points(place[~inside], truth[~inside], "two", "truth outside", 3.6),
        ],
    )
    values = values_table(
        "Intervals and truths", ["place", "low", "high", "true"], [place, low, high, truth]
    )
    return figure(plot, f"{_subsample(len(order), total)} {said}", values)


def _confusion(subject: Subject, answer: Answer, k: int) -> list[Html]:
    if answer.probs is None or not answer.truth.size:
        return []
    number = answer.probs.shape[1]
    names = class_names(subject, answer)
    predicted = answer.probs.argmax(axis=1)
    truth = answer.truth.astype(int)
    counts = np.bincount(truth * number + predicted, minlength=number**2).reshape(number, number)
    most = _mistakes(subject, names, counts)
    if number > MOST_CLASSES:
        return [most]
    rows: list[list[Content]] = [
        [subject.names.show(names[r]), *(int(c) for c in counts[r])] for r in range(number)
    ]
    values = table(
        "True classes by row, predicted by column",
        ["true", *(subject.names.show(name) for name in names)],
        rows,
    )
    right = int(np.trace(counts))
    grid = Grid(
        f"confusion-{k}",
        "Confusion matrix",
        f"{right:,} of {truth.size:,} predictions are on the diagonal, where they are right.",
        names,
        names,
        counts,
        "true",
        "predicted",
    )
    return [figure(grid, "Rows are true classes, shaded by share of the row.", values), most]


def _mistakes(subject: Subject, names: Sequence[str], counts: np.ndarray) -> Html:
    """How each class fares: the commonest first."""
    rows: list[list[Content]] = []
    for c in np.argsort(-counts.sum(axis=1), kind="stable")[:15]:
        total, right = int(counts[c].sum()), int(counts[c, c])
        if not total:
            continue
        wrong = counts[c].copy()
        wrong[c] = 0
        taken: Content = "–"
        if wrong.sum():
            taken = [subject.names.show(names[int(wrong.argmax())], 24), f" ({int(wrong.max()):,})"]
        rows.append([subject.names.show(names[c], 24), total, percent(right / total), taken])
    title = "Classes, the commonest first"
    columns = ["class", "cases", "recognised", "most often taken for"]
    return tag("div", {"class": "card"}, tag("h3", None, "Class by class"),
               table(title, columns, rows, tall=True, right=(2,), quiet=True))  # fmt: skip


def _some(index: np.ndarray, most: int) -> np.ndarray:
    """Evenly spread over the rows, always the same ones."""
    if index.size <= most:
        return index
    return index[np.linspace(0, index.size - 1, most).round().astype(int)]


def _subsample(shown: int, total: int) -> str:
    if shown == total:
        return f"All {count(total, 'prediction')}." if total > 1 else "The one prediction."
    return f"{shown} of {total:,} predictions, evenly taken over the rows."
