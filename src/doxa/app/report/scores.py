"""The scores of a report, of `doxa compare` and of `doxa fit`: one table says everything of each.

A new score is a row of `SCORES`. One that `doxa.evaluate.metrics` gives needs no more; another one
names the function that computes it from an `Evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from doxa.app.report import html
from doxa.app.report.evaluation import Evaluation
from doxa.app.report.html import Content, Wrapped
from doxa.app.report.subject import Subject
from doxa.app.report.text import count, percent, short

LEVEL = 0.95  # of intervals, unless a posterior has its own


@dataclass(frozen=True)
class Score:
    """One score and how it is shown.

    Attributes
    ----------
    name : str
        Its key in `doxa.evaluate.metrics`, or a new one.
    label, explanation : str
        What it is called, and what it is.
    better : str
        "higher", "lower", or "near" where it should be near a value.
    share : bool
        It lies between 0 and 1 and is shown in percent.
    at_level : bool
        It is of an interval or set, whose level belongs to its label.
    right : float or None
        What a calibrated method has; the comparison draws such scores beside it.
    compute : callable or None
        Its value for an `Evaluation`, None where it has none; None for what `metrics` gives.
    tile : bool
        It is among the large numbers at the head of a report.
    compared : bool
        It is a column of `doxa compare`.
    printed : bool
        `doxa fit` and `doxa predict` print it.
    """

    name: str
    label: str
    better: str
    explanation: str
    share: bool = False
    at_level: bool = False
    right: float | None = None
    compute: Callable[[Evaluation], float | None] | None = None
    tile: bool = False
    compared: bool = False
    printed: bool = False

    def title(self, level: float = LEVEL) -> str:
        return f"{percent(level)} {self.label}" if self.at_level else self.label

    def aim(self, level: float = LEVEL) -> str:
        """What is better: "higher", "lower" or "near 95 %"."""
        return f"near {percent(level)}" if self.better == "near" else self.better

    def show(self, value: float) -> str:
        return percent(value) if self.share else short(value)


def _balanced_accuracy(found: Evaluation) -> float | None:
    """The mean over the classes that occur of the share of their rows that is recognised."""
    counts = found.confusion()
    if counts is None:
        return None
    total = counts.sum(axis=1)
    return float(np.mean(np.diag(counts)[total > 0] / total[total > 0]))


def _set_coverage(found: Evaluation) -> float | None:
    if found.sets is None or not found.truth.size:
        return None
    return float(found.sets[np.arange(found.truth.size), found.truth.astype(int)].mean())


def _set_size(found: Evaluation) -> float | None:
    if found.sets is None or not found.truth.size:
        return None
    return float(found.sets.sum(axis=1).mean())


SCORES = (
    Score("rmse", "RMSE", "lower", "root mean squared error of the mean", tile=True, compared=True,
          printed=True),
    Score("mae", "MAE", "lower", "mean absolute error of the mean"),
    Score("accuracy", "accuracy", "higher", "share of rows whose likeliest class is the true one",
          share=True, tile=True, compared=True, printed=True),
    Score("balanced_accuracy", "balanced accuracy", "higher",
          "share of rows that are recognised, as the mean over classes: rare classes count as much "
          "as common ones", share=True, compute=_balanced_accuracy),
    Score("coverage", "coverage", "near", "share of targets inside the interval", share=True,
          at_level=True, right=LEVEL, tile=True, compared=True, printed=True),
    Score("width", "width", "lower", "mean width of that interval, in units of the target",
          at_level=True, printed=True),
    Score("crps", "CRPS", "lower", "distance from the whole predictive distribution to the target",
          tile=True, compared=True),
    Score("pinball", "pinball loss", "lower", "mean loss of the predicted quantiles"),
    Score("ece", "ECE", "lower", "mean gap between confidence and accuracy", share=True, right=0.0,
          tile=True, compared=True, printed=True),
    Score("brier", "Brier score", "lower", "squared distance of the probabilities from the target",
          tile=True, compared=True, printed=True),
    Score("set_coverage", "set coverage", "near", "share of targets inside the conformal set",
          share=True, at_level=True, compute=_set_coverage, printed=True),
    Score("set_size", "set size", "lower", "mean number of classes in that set", at_level=True,
          compute=_set_size, printed=True),
    Score("log_likelihood", "log likelihood", "higher",
          "mean log density of the target, in nats per row", tile=True, compared=True,
          printed=True),
)  # fmt: skip


def score(name: str) -> Score:
    """A score by its name; one that is not in the table is shown under its name."""
    known = (each for each in SCORES if each.name == name)
    return next(known, Score(name, name.replace("_", " "), "", ""))


def own_scores(found: Evaluation) -> dict[str, float]:
    """The scores of the table that are computed from an evaluation."""
    values = {each.name: each.compute(found) for each in SCORES if each.compute is not None}
    return {name: value for name, value in values.items() if value is not None}


def baseline(found: Evaluation) -> tuple[str, str, float] | None:
    """(score, constant, value) of a prediction that ignores the inputs, from the same rows."""
    if found.kind == "classes":
        if not found.truth.size:
            return None
        _, counts = np.unique(found.truth, return_counts=True)
        return "accuracy", "always the commonest class", float(counts.max() / counts.sum())
    if found.truth.size < 2:
        return None
    return "rmse", "always the mean", float(np.std(found.truth))


def scores_section(subject: Subject) -> Content:
    rows = subject.rows
    assert rows is not None
    note = None
    if subject.test is None:
        note = (
            " Scores on training rows are optimistic: pass held-out rows with --test to see how "
            "it does on new ones."
        )
    remarks = [subject.names.show(each, 300) for each in (*subject.remarks, *rows.notes)]
    about = about_rows(subject, subject.evaluations[0])
    parts: list[Content] = [html.paragraph("Measured on ", about, ".", note), html.items(remarks)]
    for found in subject.evaluations:
        parts += [html.heading(found.label) if found.label else None, _table(found)]
    return parts


def about_rows(subject: Subject, found: Evaluation) -> Content:
    """Which rows are scored."""
    rows = subject.rows
    assert rows is not None
    part = f"a random {found.rows:,} of " if found.rows < found.total else ""
    source = subject.names.show(rows.source)
    return [part, f"{count(found.total, 'row')} (", source, f", {rows.provenance})"]


def _table(found: Evaluation) -> Content:
    if not found.scores:
        why = found.missing.get("scores", "the predictive gives no scores")
        return html.paragraph(f"Not available: {why}.")
    constant = baseline(found)
    order = [each.name for each in SCORES if each.name in found.scores]
    order += [name for name in found.scores if name not in order]
    rows: list[list[Content]] = []
    for name in order:
        each = score(name)
        note = each.explanation
        if constant and name == constant[0]:
            note += f"; {constant[1]} would give {each.show(constant[2])}"
        value = html.strong(each.show(found.scores[name]))
        rows.append([each.title(found.level), value, each.aim(found.level), Wrapped(note)])
    columns = ["score", "value", "better", "what it is"]
    return html.table("Scores", columns, rows, tall=True, right=(1,), quiet=True)


def score_tiles(subject: Subject) -> Content:
    """The main scores of the first head, large."""
    if not subject.evaluations:
        return None
    found = subject.evaluations[0]
    entries = []
    for each in SCORES:
        if each.tile and each.name in found.scores:
            aim = each.aim(found.level)
            note = f"{aim} is {'right' if each.better == 'near' else 'better'}"
            entries.append((each.show(found.scores[each.name]), each.title(found.level), note))
    return html.tiles("Main scores", entries)
