"""Scores on the rows at hand, each with what it means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from doxa.app.report.answers import Answer
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import Words, table
from doxa.app.report.words import count, percent

MEANING = {
    "log_likelihood": ("log likelihood", "higher", "mean log density of the truth, in nats a row"),
    "rmse": ("RMSE", "lower", "root mean squared error of the mean"),
    "mae": ("MAE", "lower", "mean absolute error of the mean"),
    "crps": ("CRPS", "lower", "distance from the whole predictive distribution to the truth"),
    "coverage": ("coverage", "", "share of truths inside the interval"),
    "width": ("width", "lower", "mean width of that interval, in units of the target"),
    "pinball": ("pinball loss", "lower", "mean loss of the predicted quantiles"),
    "accuracy": ("accuracy", "higher", "share of rows whose likeliest class is the true one"),
    "brier": ("Brier score", "lower", "squared distance of the probabilities from the truth"),
    "set_coverage": ("set coverage", "", "share of truths inside the conformal set"),
    "set_size": ("set size", "lower", "mean number of classes in that set"),
    "ece": ("ECE", "lower", "mean gap between confidence and accuracy"),
}
SHARES = ("coverage", "accuracy", "ece", "set_coverage")
LEVELLED = ("coverage", "width", "set_coverage", "set_size")


def scores(subject: Subject, answers: Sequence[Answer]) -> Section:
    parts: list[Content] = [_about(subject, answers[0])]
    for answer in answers:
        parts.append(tag("h3", None, answer.label) if answer.label else None)
        parts.append(_table(answer))
    return Section("scores", "Scores", parts)


def shown(name: str, value: float) -> str:
    return percent(value) if name in SHARES else short(value)


def meaning(name: str, answer: Answer) -> tuple[str, str, str]:
    """(title, what is better, words)."""
    title, better, words = MEANING.get(name, (name.replace("_", " "), "", ""))
    if name in LEVELLED:
        title = f"{percent(answer.level)} {title}"
        better = better or f"near {percent(answer.level)}"
    return title, better, words


def baseline(answer: Answer) -> tuple[str, float] | None:
    """The score of an answer that ignores the inputs, from the same rows."""
    if answer.kind == "classes":
        if not answer.truth.size:
            return None
        _, counts = np.unique(answer.truth, return_counts=True)
        return "always the commonest class", float(counts.max() / counts.sum())
    if answer.truth.size < 2:
        return None
    return "always the mean", float(np.std(answer.truth))


def about_rows(subject: Subject, answer: Answer) -> Content:
    """Which rows are scored, in words."""
    rows = subject.rows
    assert rows is not None
    part = ""
    if answer.rows < answer.of:
        part = f"a random {answer.rows:,} of "
    return [part, f"{count(answer.of, 'row')} (", subject.names.show(rows.what), f", {rows.told})"]


def _about(subject: Subject, answer: Answer) -> Html:
    rows = subject.rows
    assert rows is not None
    warning = None
    if subject.test is None:
        warning = (
            " Scores on training rows are optimistic: pass held-out rows with --test for honest "
            "ones."
        )
    said = [*subject.remarks, *rows.notes]
    notes = [tag("li", None, subject.names.show(note, 300)) for note in said]
    text = tag("p", None, "Measured on ", about_rows(subject, answer), ".", warning)
    return tag("div", None, text, tag("ul", None, notes) if notes else None)


def _table(answer: Answer) -> Html:
    if not answer.scores:
        why = answer.missing.get("scores", "the predictive gives no scores")
        return tag("p", None, f"Not available: {why}.")
    ground = baseline(answer)
    rows: list[list[Content]] = []
    for name, value in answer.scores.items():
        title, better, words = meaning(name, answer)
        note: Content = words
        if ground and name in ("rmse", "accuracy"):
            note = f"{words}; {ground[0]} would give {shown(name, ground[1])}"
        rows.append([title, tag("strong", None, shown(name, value)), better, Words(note)])
    return table(
        "Scores",
        ["score", "value", "better", "what it is"],
        rows,
        tall=True,
        right=(1,),
        quiet=True,
    )
