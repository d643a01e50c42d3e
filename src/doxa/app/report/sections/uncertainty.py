"""Where uncertainty comes from, and whether it knows which predictions are bad."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from doxa.app.report.answers import Answer
from doxa.app.report.charts import Axis, Bars, Line, Plot, figure, short
from doxa.app.report.charts.marks import Array
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.page import Section
from doxa.app.report.subject import Subject
from doxa.app.report.tabular import values_table
from doxa.app.report.words import percent


def uncertainty(subject: Subject, answers: Sequence[Answer]) -> Section:
    parts: list[Content] = []
    for k, answer in enumerate(answers):
        parts.append(tag("h3", None, answer.label) if answer.label else None)
        split = shares(answer)
        parts.append(tag("p", None, _said(answer, split)))
        charts = [_split(answer, k), _risk(answer, k)]
        shown = [chart for chart in charts if chart is not None]
        parts.append(tag("div", {"class": "pair"}, shown) if shown else None)
    return Section("uncertainty", "Uncertainty", parts)


def parts_of(answer: Answer) -> tuple[Array, Array] | None:
    """(aleatoric, epistemic) of each element: variances of numbers; entropies of classes, where
    the epistemic part is the mutual information."""
    if answer.kind == "classes":
        whole, knowable = answer.entropy, answer.information
        if whole is None or knowable is None:
            return None
        return np.maximum(whole - knowable, 0.0), knowable
    if answer.aleatoric is None or answer.epistemic is None:
        return None
    return answer.aleatoric, answer.epistemic


def shares(answer: Answer) -> float | None:
    """How much of all uncertainty is epistemic."""
    split = parts_of(answer)
    if split is None:
        return None
    with np.errstate(all="ignore"):
        noise, doubt = float(np.nansum(split[0])), float(np.nansum(split[1]))
    return doubt / (noise + doubt) if noise + doubt > 0 and np.isfinite(noise + doubt) else None


def _said(answer: Answer, share: float | None) -> str:
    if share is None:
        why = answer.missing.get("epistemic") or answer.missing.get("information")
        return f"The split is not available{f': {why}' if why else ''}."
    what = "entropy" if answer.kind == "classes" else "variance"
    text = (
        f"{percent(share)} of the predictive {what} is epistemic (more data of this kind would "
        f"reduce it) and {percent(1 - share)} aleatoric (noise that would stay)."
    )
    if answer.draws == 1 and share < 1e-9:
        text += " The method keeps one function, so that it has no epistemic part to show."
    return text


def _split(answer: Answer, k: int) -> Html | None:
    """Histogram over rows of the epistemic share."""
    split = parts_of(answer)
    if split is None:
        return None
    noise, doubt = split
    total = noise + doubt
    good = np.isfinite(total) & (total > 0)
    if not good.any():
        return None
    share = np.clip(doubt[good] / total[good], 0.0, 1.0)
    edges = np.linspace(0.0, 1.0, 21)
    rows = np.histogram(share, edges)[0].astype(float)
    middle = float(np.median(share))
    plot = Plot(
        f"split-{k}",
        "Epistemic share of the uncertainty",
        f"Histogram over {share.size:,} predictions; half of them lie below {percent(middle)}.",
        Axis("epistemic share", 0.0, 1.0),
        Axis("predictions", 0.0),
        [Bars(edges, rows, "one")],
    )
    values = values_table(
        "Predictions by epistemic share", ["from", "predictions"], [edges[:-1], rows]
    )
    words = f"Each prediction's own split. The median is {percent(middle)}; what lies far to the "
    return figure(plot, f"{words}right is unlike the training data.", values)


def _risk(answer: Answer, k: int) -> Html | None:
    """Risk among the most certain predictions."""
    from doxa.evaluate.scores import risk_coverage_of

    measure = loss = None
    if answer.kind == "classes" and answer.probs is not None and answer.probs.size:
        measure = 1.0 - answer.probs.max(axis=1)
        loss = (answer.probs.argmax(axis=1) != answer.truth).astype(float)
        risk_name = "share wrong"
    elif answer.mean is not None and answer.std is not None:
        measure, loss = answer.std, (answer.mean - answer.truth) ** 2
        risk_name = "RMSE of those kept"
    if measure is None or loss is None or measure.size < 5:
        return None
    if not (np.isfinite(measure).all() and np.isfinite(loss).all()):
        return None
    curve = risk_coverage_of(torch.as_tensor(measure), torch.as_tensor(loss))
    kept, risk = curve.coverage.numpy(), curve.risk.numpy()
    best = np.sort(loss).cumsum() / np.arange(1, loss.size + 1)
    share = np.arange(1, loss.size + 1) / loss.size
    if answer.kind != "classes":
        risk, best = np.sqrt(risk), np.sqrt(best)
    started = kept >= max(0.05, 5.0 / loss.size)  # a few rows decide the rest
    if started.sum() < 2:
        return None
    all_rows = float(risk[-1])
    half = float(risk[np.searchsorted(kept, 0.5 - 1e-12)])
    show = percent if answer.kind == "classes" else short
    words = f"Keeping the surer half gives {show(half)}, all rows {show(all_rows)}."
    plot = Plot(
        f"risk-{k}",
        "Risk and coverage",
        f"{risk_name} against the share of predictions kept, the most certain first. {words}",
        Axis("share of predictions kept", 0.0, 1.0),
        Axis(risk_name, 0.0),
        [
            Line(np.array([0.0, 1.0]), np.full(2, all_rows), "rule", "all rows"),
            Line(share, best, "three", "best possible order"),
            Line(kept[started], risk[started], "one", "surest first"),
        ],
    )
    values = values_table("Risk by share kept", ["kept", risk_name], [kept[started], risk[started]])
    lead = "Error that remains when the least certain predictions are refused. "
    return figure(plot, lead + words, values)
