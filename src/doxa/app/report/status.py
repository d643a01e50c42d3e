"""The overall status: the findings of the diagnostics and on the scored rows, the worst first.

The head of the report, its section on diagnostics and the command line all use this status, so that
they agree.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from doxa.app.report import html
from doxa.app.report.calibration import (
    confidence_gap,
    coverage_gap,
    describe_confidence,
    epistemic_share,
    share_band,
)
from doxa.app.report.evaluation import LEVEL, Evaluation
from doxa.app.report.html import Content
from doxa.app.report.scores import about_rows, baseline, value_of
from doxa.app.report.subject import TEST, Rows, Subject
from doxa.app.report.text import capitalized, count, describe, listed, percent, points, short
from doxa.diagnose import Diagnosis, Finding, diagnose
from doxa.diagnose.advice import MORE_ROWS, NAMES, Advice, any_of, recalibrate
from doxa.diagnose.calibration import evaluated_coverage
from doxa.diagnose.data import binomial, binomial_upper
from doxa.diagnose.finding import NOT_CHECKED, bad, good, skipped, slight, warning
from doxa.driver.validation import evaluate_rows
from doxa.errors import DoxaError
from doxa.evaluate.table import score

MOST_ROWS = 20_000  # largest number of rows for the diagnostics, to limit their time
LEAST_ROWS = 20  # with fewer rows, nothing can be concluded
LARGE_GAP = 0.05  # a large gap between nominal and observed share, in addition to chance
HARDLY = 0.1  # a class is hardly recognised if a smaller share of its rows is classified correctly
MOST_CLASSES = 3  # largest number of classes that one finding names
BAD_STATUS = ("diverged", "not-converged", "worse-than-constant", "prior-collapse")
SHOWN_ELSEWHERE = {  # entries of `posterior.diagnostics` that other sections show
    "engine", "mode", "engine_reason", "seconds", "steps", "rows", "kernel", "stopping",
}  # fmt: skip


@dataclass(frozen=True)
class OverallStatus:
    """All findings, and the reason why the diagnostics were not run, if so."""

    diagnosis: Diagnosis
    reason: str = ""

    def find(self, check: str) -> Finding | None:
        """The finding of a check. None if it was not done."""
        found = (f for f in self.diagnosis if f.check == check and f.status != NOT_CHECKED)
        return next(found, None)


def assess(subject: Subject, diagnose: bool = True) -> OverallStatus:
    """Run the diagnostics, and add the checks that they do not include.

    Parameters
    ----------
    subject : Subject
        The subject of the report, with its evaluations.
    diagnose : bool
        Whether to run the diagnostics.

    Returns
    -------
    OverallStatus
        The findings. If the diagnostics fail, there is no error, and `reason` says why.
    """
    evaluations = subject.evaluations
    level = evaluations[0].level if evaluations else LEVEL
    _evaluate(subject)
    found, reason = _diagnose(subject, level) if diagnose else ([], "they were switched off")
    seen = {finding.check for finding in found if finding.status != NOT_CHECKED}
    if not found:
        found = [replace(_status(subject), check="status")]
    for evaluation in evaluations:
        for name, check in CHECKS.items():
            name += evaluation.head
            finding = None if name in seen else check(subject, evaluation)
            if finding is not None:
                found = [f for f in found if f.check != name]
                found.append(replace(finding, check=name))
    kept = None if evaluations else _remembered_coverage(subject)
    if kept is not None:
        found = [f for f in found if f.check != "coverage"]
        found.append(replace(kept, check="coverage"))
    new_rows = subject.test is not None or kept is not None
    return OverallStatus(Diagnosis(found, new_rows), reason)


def _evaluate(subject: Subject) -> None:
    """Evaluate the status of the fit on new rows, as `doxa fit --test` does."""
    test, train = subject.test, subject.train
    if test is None or not subject.evaluations:
        return
    with contextlib.suppress(DoxaError):  # the sections say what cannot be evaluated
        name = "test rows" if test.source == TEST else f"rows of {test.source}"
        seen = None if train is None else train.y
        evaluate_rows(subject.posterior, test.x, test.y, name, seen, certify=False)


def _diagnose(subject: Subject, level: float) -> tuple[list[Finding], str]:
    if subject.train is None:
        return [], "they need the rows the posterior was fitted to (--train, or train= in Python)"
    test = None if subject.test is None else _pair(subject.test)
    try:
        found = diagnose(subject.posterior, _pair(subject.train), test, level=level)
    except DoxaError as error:
        return [], str(error)
    return [_with_class_names(subject, finding) for finding in found.findings], ""


def _with_class_names(subject: Subject, finding: Finding) -> Finding:
    """Replace class numbers in a finding of the diagnostics by class names."""
    names = subject.classes
    if names is None or len(subject.evaluations) > 1:
        return finding

    def named(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"class {names[number]!r}" if number < len(names) else match[0]

    return replace(finding, words=re.sub(r"\bclass (\d+)\b", named, finding.words))


def _pair(rows: Rows) -> tuple[Any, Any]:
    """(x, y) of at most `MOST_ROWS` evenly spaced rows."""
    step = math.ceil(rows.count / MOST_ROWS)
    y = tuple(t[::step] for t in rows.y) if isinstance(rows.y, tuple) else rows.y[::step]
    return rows.take(slice(None, None, step)), y


def _status(subject: Subject) -> Finding:
    """The status of the fit, if the diagnostics were not run."""
    status = subject.posterior.status
    if status != "ok":
        grade = bad if status in BAD_STATUS else warning
        reason = status.reason or "no reason was given"
        return grade(f"the fit ended as {str(status)!r}: {reason}", "")
    ended = "the fit ended normally"
    return good(ended) if subject.evaluations else skipped(f"{ended}; there are no rows to check")


def _remembered_coverage(subject: Subject) -> Finding | None:
    """The coverage on the rows that the fit held out, if the report has no rows."""
    kept = subject.posterior.metadata.get("held_out_scores")
    share = None if kept is None else kept["scores"].get("coverage")
    if kept is None or share is None or kept["rows"] < LEAST_ROWS:
        return None
    n, level = kept["rows"], kept["level"]
    held = (
        f"when it was fitted, {percent(share)} of {count(n, 'row')} of {kept['file']} that were "
        f"held out lay in their {percent(level)} interval"
    )
    p = binomial(round(share * n), n, level)
    return evaluated_coverage(share, level, p, held, _recalibrated(subject))


def _recalibrated(subject: Subject) -> Advice:
    return any_of(recalibrate(subject.posterior), "an ensemble", MORE_ROWS)


def _coverage(subject: Subject, found: Evaluation) -> Finding | None:
    """The finding on the share of targets inside the intervals of the scores."""
    share = found.scores.get("coverage")
    if found.kind == "classes" or share is None or not math.isfinite(share):
        return None
    n = found.truth.size
    held = f"{percent(share)} of {count(n, 'target')} lie in their {percent(found.level)} interval"
    if n < LEAST_ROWS:
        return skipped(f"{held}: too few to tell", MORE_ROWS)
    if share > found.level and (found.kind == "counts" or subject.test is None):
        return good(held, share)  # true by construction, or because the rows were trained on
    p = binomial(round(share * n), n, found.level)
    return evaluated_coverage(share, found.level, p, held, _recalibrated(subject))


def _calibration(subject: Subject, found: Evaluation) -> Finding | None:
    """The finding on intervals of all levels, or on the confidence in the most probable class."""
    if found.kind == "classes":
        return _confidence(subject, found)
    gap = coverage_gap(found)
    if gap is None or found.conformal or found.kind == "counts" or found.truth.size < LEAST_ROWS:
        return None
    at_level = _coverage(subject, found)
    if at_level is not None and at_level.alarms:
        return None  # the same finding
    wide = gap.value > 0
    side = "above" if wide else "below"
    text = f"on average over all levels the coverage is {points(gap.value)} {side} the level"
    if not gap.beyond:
        return good(f"{text}, within chance", gap.value)
    if wide and subject.test is None:
        return good(f"{text}, as is common on training rows", gap.value)
    text = f"intervals are too {'wide' if wide else 'narrow'}: {text}, beyond chance"
    grade = warning if abs(gap.value) > LARGE_GAP else slight
    return grade(text, _recalibrated(subject), gap.value)


def _confidence(subject: Subject, found: Evaluation) -> Finding | None:
    gap, n = confidence_gap(found), found.truth.size
    if gap is None or "accuracy" not in found.scores:
        return None
    side = "above" if gap.value > 0 else "below"
    text = f"the mean confidence is {points(gap.value)} {side} the accuracy"
    if n < LEAST_ROWS:
        return skipped(f"{text} at {count(n, 'row')}: too few to tell", MORE_ROWS)
    if not gap.beyond:
        return good(f"{text}, within chance", gap.value)
    if gap.value < 0 and subject.test is None:
        return good(f"{text}, as is common on training rows", gap.value)
    alarming = abs(gap.value) > LARGE_GAP + gap.chance * 3.29 / 1.96  # a level of 0.001
    grade = warning if alarming else slight
    return grade(f"{text}, beyond chance", _recalibrated(subject), gap.value)


def _error(subject: Subject, found: Evaluation) -> Finding | None:
    """The finding on the error, compared with a prediction that ignores the inputs."""
    constant = baseline(found)
    if constant is None or found.truth.size < LEAST_ROWS:
        return None
    name, what, ground = constant
    value, show = found.scores.get(name), partial(value_of, score(name))
    if value is None:
        return None
    advice = any_of("more steps", MORE_ROWS)
    if name == "rmse":
        text = f"its error is {show(value)} (RMSE); {what} would give {show(ground)}"
        return good(text, value) if value < ground else warning(text, advice, value)
    text = f"{show(value)} of rows are right; {what} would give {show(ground)}"
    if value < ground - share_band(ground, found.truth.size):
        return warning(text, advice, value)
    return (
        good(text, value)
        if value > ground
        else slight(f"no better than a constant: {text}", advice, value)
    )


def _classes(subject: Subject, found: Evaluation) -> Finding | None:
    """The finding on classes whose rows are rarely classified correctly, even if the accuracy is
    high.

    Suppose that the rows of a class were classified correctly as often as all rows. A class is
    reported if so few correct rows would then be unlikely (1 % for all classes together)."""
    counts = found.confusion()
    if counts is None or len(counts) < 2:
        return None
    total, right = counts.sum(axis=1), np.diag(counts)
    overall = float(right.sum() / total.sum())
    names, rare = subject.class_names(len(counts)), 0.01 / len(counts)
    missed = [
        f"class {names[c]!r} is recognised in {right[c]} of its {total[c]:,} rows"
        for c in np.argsort(-total, kind="stable")
        if total[c] and right[c] <= HARDLY * total[c]
        and binomial_upper(int(total[c] - right[c]), int(total[c]), 1 - overall) < rare
    ]  # fmt: skip
    worst = float(np.min(right[total > 0] / total[total > 0]))
    if not missed:
        return good("every class with enough rows is recognised in some of them", worst)
    more = f" and {len(missed) - MOST_CLASSES} more classes" if len(missed) > MOST_CLASSES else ""
    advice = any_of(
        "choose the class by the costs of mistakes instead of taking the likeliest one (the "
        "probabilities may still be right)",
        "more rows of such classes",
    )
    return warning(f"{listed(missed[:MOST_CLASSES])}{more}", advice, worst)


CHECKS = {
    "coverage": _coverage, "calibration": _calibration, "error": _error, "classes": _classes,
}  # fmt: skip


def overall_mark(status: OverallStatus) -> Content:
    """The status as a label. It is never "good" if only training rows were scored."""
    found = status.diagnosis
    look = found.status if found.new_rows or found.status != "good" else "none"
    return html.mark(look, found.headline)


def lead(subject: Subject) -> Content:
    """One paragraph on the quality of predictions and of their uncertainty."""
    status = subject.status
    assert status is not None
    found, ended = status.diagnosis, status.find("status")
    parts: list[Content] = []
    if found.summary != f"{found.headline}.":
        parts.append(f"{found.summary} ")
    if ended is not None and ended.alarms:
        parts.append(f"{capitalized(ended.words)}. ")
    if subject.evaluations:
        first = subject.evaluations[0]
        head = f" ({first.label})" if first.label else ""
        describe_head = _describe_classes if first.kind == "classes" else _describe_numbers
        parts += ["On ", about_rows(subject, first), head, " ", describe_head(first, status)]
        share = epistemic_share(first)
        if share is not None:
            parts.append(f" {percent(share, 0)} of the uncertainty is epistemic.")
    else:
        parts.append(
            "No rows were given to evaluate its predictions and their uncertainty: pass held-out "
            "rows with --test."
        )
    return [*parts, " More in the ", html.link("diagnostics", "diagnostics"), "."]


def _describe_numbers(found: Evaluation, status: OverallStatus) -> str:
    rmse, constant = found.scores.get("rmse"), baseline(found)
    parts = []
    if rmse is not None:
        text = f"its error is {short(rmse)} (RMSE)"
        if constant is not None:
            text += f", against {short(constant[2])} for always predicting the mean"
            if rmse >= constant[2]:
                text += ", so it is no better than a constant"
        parts.append(text)
    share = found.scores.get("coverage")
    if share is not None:
        level = f"{'conformal ' * found.conformal}{percent(found.level)}"
        held = f"its {level} intervals contain {percent(share)} of the targets"
        parts.append(f"{held}, {_describe_coverage(share, found, status)}")
    return "; ".join(parts) + "." if parts else "it gives no scores."


def _describe_coverage(share: float, found: Evaluation, status: OverallStatus) -> str:
    """A sentence on the coverage of the intervals, and on the coverage at all levels."""
    finding = status.find("coverage" + found.head)
    if finding is None:
        return "too few rows to tell"
    little = "a little " if finding.status == "slight" else ""
    side = "underconfident" if share > found.level else "overconfident"
    if finding.status != "good":
        more = "more" if share > found.level else "less"
        return f"{little}{more} than their level: it is {little}{side}"
    gap = None if found.conformal else coverage_gap(found)
    if gap is not None and gap.beyond and found.kind == "numbers":
        where = f"{points(gap.value)} {'above' if gap.value > 0 else 'below'} the level"
        return f"but on average over all levels the coverage is {where}, beyond chance"
    return "as expected, within chance"


def _describe_classes(found: Evaluation, status: OverallStatus) -> str:
    accuracy, constant, gap = found.scores.get("accuracy"), baseline(found), confidence_gap(found)
    if accuracy is None or gap is None:
        return "it gives no scores."
    text = f"it predicts the right class for {percent(accuracy)} of the rows"
    if constant is not None:
        text += f" (always the commonest class: {percent(constant[2])})"
    finding, missed = (status.find(name + found.head) for name in ("calibration", "classes"))
    if finding is None:
        text += "; too few rows to assess its confidence."
    elif gap.beyond:
        side = "above" if gap.value > 0 else "below"
        text += f"; its mean confidence is {points(gap.value)} {side} that."
    elif finding.status == "good":
        text += ", about as often as its mean confidence says."
    else:
        text += f". {describe_confidence(gap)} But {finding.words}."
    if missed is not None and missed.alarms:
        text += f" {capitalized(missed.words)}."
    return text


def diagnostics_section(subject: Subject) -> Content:
    """The section with all findings, suggestions, and the diagnostics of the method."""
    status = subject.status
    assert status is not None
    found = status.diagnosis
    parts: list[Content] = [html.paragraph(found.summary)]
    if status.reason:
        parts.append(html.paragraph(f"The diagnostics were not run: {status.reason}."))
    parts.append(html.findings([
        (html.mark(f.status, f.status), str(f.check).replace("_", " "), f.words, f.advice)
        for f in found.ranked
    ]))  # fmt: skip
    if found.code:
        title = "What to try, in Python"
        code = html.code_block(title, "\n\n".join(found.code), tall=True)
        parts += [html.heading(title), html.paragraph(f"Here {NAMES}.", look="quiet"), code]
    own = [
        (name.replace("_", " "), describe(value))
        for name, value in subject.posterior.diagnostics.items()
        if name not in SHOWN_ELSEWHERE
    ]
    if own:
        parts.append(html.boxed("Diagnostics of the method", html.terms(own)))
    return parts
