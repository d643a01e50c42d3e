"""One verdict: what the doctor found and what the page measured itself, the worst first.

Head, diagnostics and command line all say the same, because all of them read it here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from doxa.app.report.answers import LEVEL, Answer
from doxa.app.report.charts.scales import short
from doxa.app.report.sections.calibration import reliability_of
from doxa.app.report.sections.scores import baseline
from doxa.app.report.subject import Rows, Subject
from doxa.app.report.words import chance_of_share, count, percent, points
from doxa.diagnose import Diagnosis, Finding, doctor
from doxa.diagnose.advice import MORE_ROWS, Advice, any_of, recalibrate
from doxa.diagnose.calibration import judged_coverage
from doxa.diagnose.data import binomial
from doxa.diagnose.finding import NOT_CHECKED, bad, good, skipped, slight, warning
from doxa.errors import DoxaError

MOST_ROWS = 20_000  # for the doctor, who then stays quick
LEAST_ROWS = 20  # below which chance decides
_TOO_SURE = 0.05  # how far confidence may be from accuracy, beside what chance allows
_BAD = ("diverged", "not-converged", "worse-than-constant", "learned-nothing")


@dataclass(frozen=True)
class Verdict:
    """All findings, and why the doctor was not asked where it was not."""

    diagnosis: Diagnosis
    reason: str = ""

    def find(self, check: str) -> Finding | None:
        """A finding of this name that was looked at."""
        found = (f for f in self.diagnosis if f.check == check and f.verdict != NOT_CHECKED)
        return next(found, None)


def judge(subject: Subject, answers: Sequence[Answer], diagnose: bool = True) -> Verdict:
    """Ask the doctor, and add what it has not looked at; its failure is told, not raised."""
    level = answers[0].level if answers else LEVEL
    findings, reason = _doctor(subject, level) if diagnose else ([], "it was not wanted")
    seen = {finding.check for finding in findings if finding.verdict != NOT_CHECKED}
    if not findings:
        findings = [replace(_status(subject, bool(answers)), check="status")]
    for k, answer in enumerate(answers):
        head = f" (head {k})" if answer.label else ""
        for name, check in _CHECKS.items():
            if name + head not in seen and (found := check(subject, answer)) is not None:
                findings = [f for f in findings if f.check != name + head]
                findings.append(replace(found, check=name + head))
    kept = None if answers else _remembered(subject)
    if kept is not None:
        findings = [f for f in findings if f.check != "coverage"]
        findings.append(replace(kept, check="coverage"))
    return Verdict(Diagnosis(findings, subject.test is not None or kept is not None), reason)


def _doctor(subject: Subject, level: float) -> tuple[list[Finding], str]:
    if subject.train is None:
        return [], "it needs the rows the posterior was fitted to (--train, or train= in Python)"
    test = None if subject.test is None else _pair(subject.test)
    try:
        found = doctor(subject.posterior, _pair(subject.train), test, level=level)
    except DoxaError as error:
        return [], str(error)
    return list(found.findings), ""


def _pair(rows: Rows) -> tuple[Any, Any]:
    """(x, y), at most so many rows that the doctor stays quick."""
    if rows.count <= MOST_ROWS:
        return rows.x, rows.y
    step = math.ceil(rows.count / MOST_ROWS)
    y = tuple(t[::step] for t in rows.y) if isinstance(rows.y, tuple) else rows.y[::step]
    return rows.take(slice(None, None, step)), y


def _status(subject: Subject, scored: bool) -> Finding:
    """What the driver said, where the doctor has not weighed it."""
    said = subject.posterior.status
    if said != "ok":
        grade = bad if said in _BAD else warning
        return grade(f"the fit ended as {str(said)!r}: {said.reason or 'no reason was given'}", "")
    ended = "the fit ended as it should"
    return good(ended) if scored else skipped(f"{ended}; there are no rows to judge it by")


def _remembered(subject: Subject) -> Finding | None:
    """How intervals did on the rows that the fit set aside, where none are given now."""
    kept = subject.posterior.metadata.get("held_out_scores")
    share = None if kept is None else kept["scores"].get("coverage")
    if kept is None or share is None or kept["rows"] < LEAST_ROWS:
        return None
    n, level = kept["rows"], kept["level"]
    held = (
        f"when it was fitted, {percent(share)} of {count(n, 'row')} of {kept['file']} that were "
        f"set aside lay in their {percent(level)} interval"
    )
    p = binomial(round(share * n), n, level)
    return judged_coverage(share, level, p, held, _recalibrated(subject))


def _coverage(subject: Subject, answer: Answer) -> Finding | None:
    """The intervals of the card, by the doctor's rule."""
    share = answer.scores.get("coverage")
    if answer.kind == "classes" or share is None or not math.isfinite(share):
        return None
    n = answer.truth.size
    held = f"{percent(share)} of {count(n, 'truth')} lie in their {percent(answer.level)} interval"
    if n < LEAST_ROWS:
        return skipped(f"{held}: too few to judge by", MORE_ROWS)
    if share > answer.level and (answer.kind == "counts" or subject.test is None):
        return good(held, share)  # by construction, or because they were trained on
    p = binomial(round(share * n), n, answer.level)
    return judged_coverage(share, answer.level, p, held, _recalibrated(subject))


def _calibration(subject: Subject, answer: Answer) -> Finding | None:
    """How sure it is of its likeliest class, and how often that is right."""
    if answer.kind != "classes" or "accuracy" not in answer.scores or not answer.truth.size:
        return None
    over, n = surer(answer), answer.truth.size
    told = f"it is {points(over)} {'more' if over > 0 else 'less'} confident than right"
    if n < LEAST_ROWS:
        return skipped(f"{told} at {count(n, 'row')}: too few to judge by", MORE_ROWS)
    chance = chance_of_share(answer.scores["accuracy"], n) * 3.29 / 1.96  # level 0.001
    if abs(over) <= max(chance, 0.01) or (over < 0 and subject.test is None):
        return good(told, over)
    grade = warning if abs(over) > _TOO_SURE + chance else slight
    return grade(told, _recalibrated(subject), over)


def surer(answer: Answer) -> float:
    """Mean confidence minus accuracy."""
    confidence, right, number = reliability_of(answer)
    return float((number * (confidence - right)).sum() / number.sum())


def _error(subject: Subject, answer: Answer) -> Finding | None:
    """Against an answer that ignores the inputs."""
    ground = baseline(answer)
    name = "accuracy" if answer.kind == "classes" else "rmse"
    value = answer.scores.get(name)
    if ground is None or value is None or answer.truth.size < LEAST_ROWS:
        return None
    if name == "rmse":
        told = f"its error is {short(value)} (RMSE); {ground[0]} would give {short(ground[1])}"
        worse = not value < ground[1]
    else:
        told = f"{percent(value)} of cases are right; {ground[0]} would give {percent(ground[1])}"
        worse = value < ground[1] - chance_of_share(ground[1], answer.truth.size)
    return warning(told, any_of("more steps", MORE_ROWS), value) if worse else good(told, value)


def _recalibrated(subject: Subject) -> Advice:
    return any_of(recalibrate(subject.posterior), "an ensemble", MORE_ROWS)


_CHECKS = {"coverage": _coverage, "calibration": _calibration, "error": _error}
