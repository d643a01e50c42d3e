"""The head of the report: what it is, how it stands, and one paragraph that says why."""

from __future__ import annotations

from collections.abc import Sequence

from doxa.app.report.answers import Answer
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.sections.calibration import reliability_of
from doxa.app.report.sections.fitted import method_name
from doxa.app.report.sections.health import Examination
from doxa.app.report.sections.scores import about_rows, baseline, meaning, shown
from doxa.app.report.sections.uncertainty import shares
from doxa.app.report.subject import Subject
from doxa.app.report.words import chance_of_share, count, listed, mark, percent, points

STANDING = {
    "ok": ("good", "The fit finished without trouble"),
    "diverged": ("bad", "The fit diverged"),
    "not-converged": ("warning", "The fit has not converged"),
    "stopped": ("warning", "The fit was stopped early"),
    "overconfident": ("warning", "The fit is too sure of itself"),
    "worse-than-constant": ("bad", "The fit predicts worse than a constant"),
    "worse-than-map": ("warning", "The posterior predicts worse than its own maximum"),
    "degenerate": ("warning", "The data cannot tell the noise from none"),
}
TILES = {
    "numbers": ("rmse", "coverage", "crps", "log_likelihood"),
    "counts": ("rmse", "coverage", "crps", "log_likelihood"),
    "classes": ("accuracy", "ece", "brier", "log_likelihood"),
}


def top(subject: Subject, answers: Sequence[Answer], examination: Examination) -> Content:
    posterior = subject.posterior
    verdict, words = STANDING.get(str(posterior.status), ("warning", f"Status: {posterior.status}"))
    reason = posterior.status.reason
    pills: list[Content] = [mark(verdict, words)]
    pills += _doctor(examination)
    return [
        tag("p", {"class": "over"}, "doxa report"),
        tag("h1", None, title(subject)),
        tag("div", {"class": "standing"}, pills),
        tag("p", {"class": "lead"}, words, f": {reason}" if reason else "", ". ",
            _paragraph(subject, answers, examination)),
        _tiles(subject, answers),
    ]  # fmt: skip


def title(subject: Subject) -> Content:
    if subject.title:
        return subject.names.show(subject.title, 120)
    return [f"{method_name(subject.posterior)} for ", subject.names.show(subject.target)]


def _doctor(examination: Examination) -> list[Content]:
    if not examination.findings:
        return []
    bad, warnings = examination.count("bad"), examination.count("warning")
    if bad:
        return [mark("bad", count(bad, "bad finding"))]
    if warnings:
        return [mark("warning", count(warnings, "warning"))]
    return [mark("good", count(examination.count("good"), "check") + " passed")]


def _paragraph(
    subject: Subject, answers: Sequence[Answer], examination: Examination
) -> list[Content]:
    if not answers:
        return ["No rows were given to score it on: pass held-out rows with --test to see whether "
                "its predictions, and their uncertainty, hold."]  # fmt: skip
    answer = answers[0]
    head = f" ({answer.label})" if answer.label else ""
    parts: list[Content] = ["On ", about_rows(subject, answer), head, " "]
    parts.append(_classes(answer) if answer.kind == "classes" else _numbers(answer))
    share = shares(answer)
    if share is not None:
        parts.append(f" {percent(share, 0)} of the uncertainty is epistemic.")
    return [*parts, *_complaints(examination)]


def _complaints(examination: Examination) -> list[Content]:
    """What is wrong, by name, with the way to it."""
    wrong = [f for v in ("bad", "warning") for f in examination.findings if f.verdict == v]
    if not wrong:
        return []
    named = listed([str(f.check).replace("_", " ") for f in wrong[:4]])
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    link = tag("a", {"href": "#diagnostics"}, "diagnostics")
    return [" The ", link, f" raise an alarm: {named}{more}."]


def _numbers(answer: Answer) -> str:
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
        said.append(f"{held}, {_judged(at, answer)}")
    return "; ".join(said) + "." if said else "it gives no scores."


def _judged(at: float, answer: Answer) -> str:
    chance = max(chance_of_share(answer.level, answer.truth.size), 0.01)
    if answer.truth.size < 10:
        return "too few to judge by"
    if abs(at - answer.level) <= chance:
        return "as they should"
    if at > answer.level:
        return "more than promised: it is too cautious"
    little = "a little " if answer.level - at < 0.03 else ""
    return f"{little}less than promised: it is {little}too sure of itself"


def _classes(answer: Answer) -> str:
    accuracy, ground = answer.scores.get("accuracy"), baseline(answer)
    if accuracy is None:
        return "it gives no scores."
    text = f"it names the right class in {percent(accuracy)} of cases"
    if ground is not None:
        text += f" (the commonest class alone: {percent(ground[1])})"
    confidence, right, number = reliability_of(answer)
    over = float((number * (confidence - right)).sum() / number.sum())
    noise = chance_of_share(accuracy, answer.truth.size)
    if abs(over) <= max(noise, 0.01):
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
