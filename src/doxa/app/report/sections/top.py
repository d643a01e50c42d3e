"""The head of the report: what it is, how it stands, and one paragraph that says why."""

from __future__ import annotations

from collections.abc import Sequence

from doxa.app.report.answers import Answer
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.sections.fitted import method_name
from doxa.app.report.sections.scores import about_rows, baseline, meaning, shown
from doxa.app.report.sections.uncertainty import shares
from doxa.app.report.subject import Subject
from doxa.app.report.verdict import Verdict, surer
from doxa.app.report.words import mark, percent, points

TILES = {
    "numbers": ("rmse", "coverage", "crps", "log_likelihood"),
    "counts": ("rmse", "coverage", "crps", "log_likelihood"),
    "classes": ("accuracy", "ece", "brier", "log_likelihood"),
}


def top(subject: Subject, answers: Sequence[Answer], verdict: Verdict) -> Content:
    found = verdict.diagnosis
    look = found.verdict if found.new_rows or found.verdict != "good" else "none"
    status = verdict.find("status")
    ended = f"{status.words[0].upper()}{status.words[1:]}. " if status and status.alarms else ""
    link = tag("a", {"href": "#diagnostics"}, "diagnostics")
    return [
        tag("p", {"class": "over"}, "doxa report"),
        tag("h1", None, title(subject)),
        tag("div", {"class": "standing"}, mark(look, found.headline)),
        tag("p", {"class": "lead"}, None if found.summary == f"{found.headline}." else (
            f"{found.summary} "), ended, _paragraph(subject, answers, verdict), " More in the ",
            link, "."),
        _tiles(subject, answers),
    ]  # fmt: skip


def title(subject: Subject) -> Content:
    if subject.title:
        return subject.names.show(subject.title, 120)
    return [f"{method_name(subject.posterior)} for ", subject.names.show(subject.target)]


def _paragraph(subject: Subject, answers: Sequence[Answer], verdict: Verdict) -> list[Content]:
    if not answers:
        return ["No rows were given to score it on: pass held-out rows with --test to see whether "
                "its predictions, and their uncertainty, hold."]  # fmt: skip
    answer = answers[0]
    head = f" ({answer.label})" if answer.label else ""
    parts: list[Content] = ["On ", about_rows(subject, answer), head, " "]
    said = _classes if answer.kind == "classes" else _numbers
    parts.append(said(answer, verdict))
    share = shares(answer)
    if share is not None:
        parts.append(f" {percent(share, 0)} of the uncertainty is epistemic.")
    return parts


def _numbers(answer: Answer, verdict: Verdict) -> str:
    rmse, ground = answer.scores.get("rmse"), baseline(answer)
    said = []
    if rmse is not None:
        text = f"its error is {short(rmse)} (RMSE)"
        if ground is not None:
            text += f", against {short(ground[1])} for always predicting the mean"
            if rmse >= ground[1]:
                text += ", so that it has learned nothing that helps here"
        said.append(text)
    at = answer.scores.get("coverage")
    if at is not None:
        level = f"{'conformal ' * answer.conformal}{percent(answer.level)}"
        held = f"its {level} intervals hold {percent(at)} of the truths"
        said.append(f"{held}, {_judged(at, answer, verdict)}")
    return "; ".join(said) + "." if said else "it gives no scores."


def _judged(at: float, answer: Answer, verdict: Verdict) -> str:
    """In the words of the finding about them, so that the page says one thing."""
    found = verdict.find("coverage" + " (head 0)" * bool(answer.label))
    if found is None:
        return "too few to judge by"
    little = "a little " if found.verdict == "slight" else ""
    if found.verdict == "good":
        return "as they should, within chance"
    if at > answer.level:
        return f"{little}more than promised: it is {little}too cautious"
    return f"{little}less than promised: it is {little}too sure of itself"


def _classes(answer: Answer, verdict: Verdict) -> str:
    accuracy, ground = answer.scores.get("accuracy"), baseline(answer)
    if accuracy is None:
        return "it gives no scores."
    text = f"it names the right class in {percent(accuracy)} of cases"
    if ground is not None:
        text += f" (the commonest class alone: {percent(ground[1])})"
    over = surer(answer)
    found = verdict.find("calibration" + " (head 0)" * bool(answer.label))
    if found is None:
        return f"{text}; too few to judge its confidence by."
    if found.verdict == "good":
        return f"{text}, about as often as it says."
    lean = "more" if over > 0 else "less"
    return f"{text}, and is {lean} confident than right by {points(over)} on average."


def _tiles(subject: Subject, answers: Sequence[Answer]) -> Html | None:
    if not answers or not answers[0].scores:
        return None
    answer = answers[0]
    items = []
    for name in TILES[answer.kind]:
        if name not in answer.scores:
            continue
        label, better, _ = meaning(name, answer)
        note = f"{better} is better" if better in ("higher", "lower") else f"{better} is right"
        items.append(
            tag(
                "li",
                None,
                tag("span", {"class": "number"}, shown(name, answer.scores[name])),
                tag("span", {"class": "what"}, label),
                tag("span", {"class": "quiet"}, note),
            )
        )
    return tag("ul", {"class": "tiles", "aria-label": "Main scores"}, items) if items else None
