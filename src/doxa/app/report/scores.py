"""The section on scores, and the large numbers at the top of a report."""

from __future__ import annotations

import numpy as np

from doxa.app.report import html
from doxa.app.report.evaluation import Evaluation
from doxa.app.report.html import Content, Wrapped
from doxa.app.report.subject import Array, Subject
from doxa.app.report.text import count, percent, short
from doxa.evaluate import RareClass, rare_class, table, threshold
from doxa.evaluate.table import LEVEL, Score, score
from doxa.predictive import Predictive


def title_of(of: Score, level: float = LEVEL) -> str:
    return f"{percent(level)} {of.label}" if of.at_level else of.label


def aim_of(of: Score, level: float = LEVEL) -> str:
    """Which values of a score are good: "higher", "lower", "near 95 %" or "near 0"."""
    if of.better != "near":
        return of.better
    return f"near {percent(level)}" if of.right is None or of.at_level else f"near {of.right:g}"


def value_of(of: Score, value: float) -> str:
    return percent(value) if of.share else short(value)


def own_scores(found: Evaluation) -> dict[str, float]:
    """The scores of the table that are computed from an evaluation."""
    values = {each.name: each.compute(found) for each in table.SCORES if each.compute is not None}
    return {name: value for name, value in values.items() if value is not None}


def baseline(found: Evaluation) -> tuple[str, str, float] | None:
    """(score, constant, value): the score of a constant prediction, which ignores the inputs, on
    the same rows."""
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
    """A text that says which rows are scored."""
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
    order = [each.name for each in table.SCORES if each.name in found.scores]
    order += [name for name in found.scores if name not in order]
    rows: list[list[Content]] = []
    for name in order:
        each = score(name)
        note = each.explanation
        if constant and name == constant[0]:
            note += f"; {constant[1]} would give {value_of(each, constant[2])}"
        value = html.strong(value_of(each, found.scores[name]))
        rows.append([title_of(each, found.level), value, aim_of(each, found.level), Wrapped(note)])
    columns = ["score", "value", "better", "what it is"]
    return html.table("Scores", columns, rows, tall=True, right=(1,), quiet=True)


_RARE = 0.4  # a class is rare if its share is below 0.4 divided by the number of classes


def rare_class_section(subject: Subject) -> Content:
    """For each head whose rarest class is rare: the scores of this class, its reliability, and a
    threshold for it."""
    parts: list[Content] = []
    for found in subject.evaluations:
        if found.kind != "classes" or found.probs is None or len(np.unique(found.truth)) < 2:
            continue
        p, y = Predictive.from_probs(found.probs), found.truth.astype(int)
        rare = rare_class(p, y)
        number = found.probs.shape[1]
        if rare.share < _RARE / number:
            name = subject.names.show(subject.class_names(number)[rare.label])
            parts += [html.heading(found.label) if found.label else None, *_rare(p, y, rare, name)]
    return parts or None


def _rare(p: Predictive, y: Array, rare: RareClass, name: Content) -> list[Content]:
    cost = (1.0 - rare.share) / rare.share
    at = threshold(p, y, 1.0, cost, positive=rare.label)
    reliable = "as many as expected, within chance"
    if abs(rare.z) > _DEVIATIONS:
        reliable = f"its probabilities are too {'small' if rare.z > 0 else 'large'} on average"
    rows: list[list[Content]] = [
        ["share of the rows", percent(rare.share), Wrapped(f"{rare.observed:,.0f} rows")],
        ["AUROC", short(rare.roc_auc), Wrapped("0.5 without information")],
        ["average precision", short(rare.average_precision),
         Wrapped(f"{short(rare.share)} without information")],
        ["recall", percent(rare.recall), Wrapped("share of its rows for which it is likeliest")],
        ["expected rows", f"{rare.expected:.1f} ± {rare.error:.1f}",
         Wrapped(f"the sum of its probabilities; observed are {rare.observed:,.0f}: {reliable}")],
    ]  # fmt: skip
    table = at.confusion
    decisions: list[list[Content]] = [
        [label, f"{table[row, 1]:,.0f}", f"{table[row, 0]:,.0f}"]
        for row, label in ((1, name), (0, "another class"))
    ]
    return [
        html.paragraph(
            "The class ", name, f" is rare: {percent(rare.share)} of the rows. A prediction that "
            f"never names it is right in {percent(1.0 - rare.share)} of them, so accuracy says "
            "little."
        ),
        html.table("The rare class", ["score", "value", "what it is"], rows, right=(1,)),
        html.paragraph(
            f"If a missed row of it costs {short(cost)} times as much as a false alarm (as much as "
            f"its share is smaller), rows with a probability of at least {percent(at.probability)} "
            f"should be called: {percent(at.recall)} of its rows are then found, and "
            f"{percent(at.precision)} of the calls are right. Another ratio r of the costs gives "
            "the threshold 1/(1 + r): doxa.evaluate.threshold."
        ),
        html.table(
            f"Decisions at the threshold {percent(at.probability)}",
            ["true class", "called", "not called"], decisions, right=(1, 2),
        ),
    ]  # fmt: skip


_DEVIATIONS = 3.0  # number of standard deviations of the number of rows


def score_tiles(subject: Subject) -> Content:
    """The main scores of the first head, as large numbers."""
    if not subject.evaluations:
        return None
    found = subject.evaluations[0]
    entries = []
    for each in table.SCORES:
        if each.tile and each.name in found.scores:
            better = aim_of(each, found.level)
            note = f"{better} is {'right' if each.better == 'near' else 'better'}"
            value = value_of(each, found.scores[each.name])
            entries.append((value, title_of(each, found.level), note))
    return html.tiles("Main scores", entries)
