"""Diagnostics: the doctor's findings, and what the method measured about itself."""

from __future__ import annotations

from typing import Any

from doxa.app.report.describe import describe
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import terms
from doxa.app.report.verdict import Verdict
from doxa.app.report.words import mark
from doxa.diagnose.advice import NAMES

TOLD_ELSEWHERE = {
    "engine",
    "mode",
    "engine_reason",
    "seconds",
    "steps",
    "rows",
    "kernel",
    "stopping",
}


def health(subject: Subject, verdict: Verdict) -> Section:
    found = verdict.diagnosis
    parts: list[Content] = [tag("p", None, found.summary)]
    if verdict.reason:
        parts.append(tag("p", None, f"The doctor was not asked: {verdict.reason}."))
    parts.append(tag("ul", {"class": "findings"}, [_finding(f) for f in found.ranked]))
    if found.code:
        parts.append(tag("h3", None, "What to try, in Python"))
        parts.append(tag("p", {"class": "quiet"}, f"Here {NAMES}."))
        box = {
            "class": "tall",
            "tabindex": 0,
            "role": "region",
            "aria-label": "What to try, in Python",
        }
        parts.append(tag("pre", box, tag("code", None, "\n\n".join(found.code))))
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


def _finding(finding: Any) -> Html:
    check = str(finding.check).replace("_", " ")
    advice = tag("p", {"class": "quiet"}, f"Try: {finding.advice}") if finding.advice else None
    words = tag(
        "div", None, tag("p", None, tag("strong", None, check), ": ", finding.words), advice
    )
    return tag("li", None, tag("div", None, mark(finding.verdict, finding.verdict)), words)
