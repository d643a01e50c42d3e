"""Diagnostics: the doctor's findings, and what the method measured about itself."""

from __future__ import annotations

import math
from typing import Any

from doxa.app.report.describe import describe
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Rows, Subject
from doxa.app.report.tabular import terms
from doxa.app.report.words import mark
from doxa.errors import DoxaError

TOLD_ELSEWHERE = {"engine", "mode", "engine_reason", "seconds", "steps", "rows", "kernel"}
MOST_ROWS = 20_000


class Examination:
    """What the doctor found, or why it could not look."""

    def __init__(self, findings: list[Any], reason: str = "") -> None:
        self.findings = findings
        self.reason = reason

    def count(self, verdict: str) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)


def examine(subject: Subject) -> Examination:
    """Ask the doctor; a failure is told, not raised, so that the report still comes out."""
    if subject.train is None:
        return Examination(
            [], "it needs the rows the posterior was fitted to (--train, or train= in Python)"
        )
    try:
        from doxa.diagnose import doctor
    except ImportError as error:
        return Examination([], f"it cannot be loaded ({error})")
    try:
        data = _pair(subject.train)
        test = None if subject.test is None else _pair(subject.test)
        found = doctor(subject.posterior, data, test=test)
    except DoxaError as error:
        return Examination([], str(error))
    return Examination(list(found.findings))


def health(subject: Subject, examination: Examination) -> Section:
    parts: list[Content] = []
    if examination.findings:
        order = {"bad": 0, "warning": 1, "good": 2}
        ranked = sorted(examination.findings, key=lambda f: order.get(f.verdict, 3))
        parts.append(tag("ul", {"class": "findings"}, [_finding(f) for f in ranked]))
    else:
        parts.append(tag("p", None, f"The doctor was not asked: {examination.reason}."))
    own = {
        name: value
        for name, value in subject.posterior.diagnostics.items()
        if name not in TOLD_ELSEWHERE
    }
    if own:
        pairs = [(name.replace("_", " "), describe(value)) for name, value in own.items()]
        parts.append(tag("h3", None, "What the method measured"))
        parts.append(tag("div", {"class": "card"}, terms(pairs)))
    return Section("diagnostics", "Diagnostics", parts)


def _pair(rows: Rows) -> tuple[Any, Any]:
    """(x, y), at most so many rows that the doctor stays quick."""
    if rows.count <= MOST_ROWS:
        return rows.x, rows.y
    step = math.ceil(rows.count / MOST_ROWS)
    y = tuple(t[::step] for t in rows.y) if isinstance(rows.y, tuple) else rows.y[::step]
    return rows.take(slice(None, None, step)), y


def _finding(finding: Any) -> Html:
    check = str(finding.check).replace("_", " ")
    verdict = finding.verdict if finding.verdict in ("good", "warning", "bad") else "none"
    advice = tag("p", {"class": "quiet"}, f"Try: {finding.advice}") if finding.advice else None
    words = tag(
        "div", None, tag("p", None, tag("strong", None, check), ": ", finding.words), advice
    )
    return tag("li", None, tag("div", None, mark(verdict, finding.verdict)), words)
