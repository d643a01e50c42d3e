"""The head of the report: what it is, how it stands, and one paragraph that says why."""

from __future__ import annotations

from collections.abc import Sequence

from doxa.app.report.answers import LEVELS, Answer
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.sections.calibration import coverage_of, reliability_of
from doxa.app.report.sections.fitted import method_name
from doxa.app.report.sections.health import Examination
from doxa.app.report.sections.scores import MEANING, about_rows, baseline, shown
from doxa.app.report.sections.uncertainty import shares
from doxa.app.report.subject import Subject
from doxa.app.report.words import chance_of_share, count, listed, mark, percent

STANDING = {
    "ok": ("good", "The fit finished without trouble"),
    "diverged": ("bad", "The fit diverged"),
    "not-converged": ("warning", "The fit has not converged"),
    "stopped": ("warning", "The fit was stopped early"),
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
            _paragraph(subject, answers)),
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


def _paragraph(subject: Subject, answers: Sequence[Answer]) -> list[Content]:
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
    return parts


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
    covered = coverage_of(answer)
    if covered is not None:
        at = float(covered[LEVELS.index(0.95)])
        said.append(f"its 95 % intervals hold {percent(at)} of the truths, {_judged(at, answer)}")
    return "; ".join(said) + "." if said else "it gives no scores."


def _judged(at: float, answer: Answer) -> str:
    if abs(at - 0.95) <= max(chance_of_share(0.95, answer.truth.size), 0.01):
        return "as they should"
    if at > 0.95:
        return "more than promised: it is too cautious"
    return "less than promised: it is too sure of itself"


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
    return f"{text}, and is {lean} confident than right by {percent(abs(over))} on average."


def _tiles(subject: Subject, answers: Sequence[Answer]) -> Html | None:
    if not answers or not answers[0].scores:
        return None
    answer = answers[0]
    items = []
    for name in TILES[answer.kind]:
        if name not in answer.scores:
            continue
        label, better, _ = MEANING[name]
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


def summary(examination: Examination) -> str:
    """The names of what is wrong, for the terminal."""
    wrong = [str(f.check) for f in examination.findings if f.verdict in ("bad", "warning")]
    return f"the doctor complains about {listed(wrong)}" if wrong else ""
