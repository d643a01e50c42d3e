"""The sections on calibration and uncertainty.

They compare predicted probabilities with observed frequencies, show the aleatoric and epistemic
parts of the uncertainty, and compare the errors of certain and uncertain predictions. The head of
the report, its charts and its status all use `coverage_gap` and `confidence_gap`, so that they
agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from doxa.app.report import html
from doxa.app.report.charts import Axis, Bars, Line, Mark, Plot, Points, Ribbon, Segments
from doxa.app.report.evaluation import LEVELS, Evaluation
from doxa.app.report.html import Content
from doxa.app.report.subject import Array, Subject
from doxa.app.report.text import count, percent, points, short

FEW = 20  # with fewer rows, a histogram shows only chance
_SMALLEST_GAP = 0.01  # smallest gap between confidence and accuracy that the text describes


class Gap(NamedTuple):
    """The mean deviation from calibration, compared with chance.

    Parameters
    ----------
    value : float
        The deviation. It is positive if intervals contain too many targets, or if confidence is
        above accuracy.
    chance : float
        The half width of the band that contains the deviation of a calibrated posterior in 95 % of
        cases.
    beyond : bool
        Whether the deviation is outside this band.
    """

    value: float
    chance: float
    beyond: bool


def coverage_curve(found: Evaluation) -> Array | None:
    """The share of targets inside the central interval of each level, [levels]."""
    if found.covered is not None:
        covered = found.covered
    elif found.pit is not None and found.pit.size:
        away = np.abs(found.pit - 0.5)
        covered = np.array([np.mean(away <= 0.5 * level + 1e-12) for level in LEVELS])
    else:
        return None
    return covered if np.isfinite(covered).all() else None


def coverage_gap(found: Evaluation) -> Gap | None:
    """The mean of coverage minus level, over the levels."""
    covered = coverage_curve(found)
    if covered is None or not found.truth.size:
        return None
    # The curve is an empirical distribution function. In 95 % of cases the whole curve is at most
    # this far from the diagonal (Dvoretzky, Kiefer & Wolfowitz, 1956, with Massart's constant).
    chance = math.sqrt(math.log(2 / 0.05) / (2 * found.truth.size))
    away = covered - np.array(LEVELS)
    return Gap(float(away.mean()), chance, bool((np.abs(away) > chance).any()))


def confidence_gap(found: Evaluation) -> Gap | None:
    """The mean confidence in the most probable class, minus the accuracy."""
    if found.probs is None or not found.truth.size or not np.isfinite(found.probs).all():
        return None
    top = found.probs.max(axis=1)
    right = found.probs.argmax(axis=1) == found.truth
    value = float(top.mean() - right.mean())
    # If confidence c is right, the number of correctly classified rows has variance Σ c (1 − c).
    chance = 1.96 * math.sqrt(float((top * (1.0 - top)).clip(0.0).sum())) / top.size
    return Gap(value, chance, abs(value) > max(chance, _SMALLEST_GAP))


def describe_coverage(found: Evaluation, gap: Gap) -> str:
    if not gap.beyond:
        return "All deviations are within chance."
    where = f"{points(gap.value)} {'above' if gap.value > 0 else 'below'} the level"
    return f"On average over the levels the coverage is {where}, beyond chance."


def describe_confidence(gap: Gap) -> str:
    if gap.beyond:
        side = "over" if gap.value > 0 else "under"
        return f"Overall it is {side}confident, by {points(gap.value)}."
    return "Overall it is neither over- nor underconfident, within chance."


def share_band(share: float, n: int) -> float:
    """1.96 standard errors of a share of n independent cases: the 95 % band of chance."""
    return 1.96 * math.sqrt(max(share * (1.0 - share), 0.0) / max(n, 1))


def calibration_section(subject: Subject) -> Content:
    parts: list[Content] = []
    for k, found in enumerate(subject.evaluations):
        parts.append(html.heading(found.label) if found.label else None)
        charts = _of_classes(found, k) if found.kind == "classes" else _of_numbers(found, k)
        if found.truth.size < FEW:
            rows = count(found.truth.size, "row")
            parts.append(html.paragraph(f"With only {rows}, most of what is shown here is chance."))
        why = next(iter(found.missing.values()), "the predictions are not finite")
        parts.append(html.pair(charts) or html.paragraph(f"Not available: {why}."))
    return parts


def reliability_of(found: Evaluation, bins: int = 15) -> tuple[Array, Array, Array]:
    """(confidence, accuracy, count) of the bins of the ECE that are not empty."""
    from doxa import Predictive
    from doxa.evaluate import reliability

    assert found.probs is not None
    p = Predictive.from_probs(torch.as_tensor(found.probs))
    curve = reliability(p, torch.as_tensor(found.truth).long(), bins)
    confidence, accuracy, number = (
        t.detach().cpu().double().numpy() for t in (curve.confidence, curve.accuracy, curve.count)
    )
    some = number > 0
    return confidence[some], accuracy[some], number[some]


def _of_classes(found: Evaluation, k: int) -> list[Content]:
    gap = confidence_gap(found)
    if gap is None:
        return []
    confidence, accuracy, number = reliability_of(found)
    chance = [share_band(c, int(n)) for c, n in zip(confidence, number, strict=True)]
    error = float(np.sum(number * np.abs(confidence - accuracy)) / number.sum())
    lean = describe_confidence(gap)
    low, high = np.clip(confidence - chance, 0, 1), np.clip(confidence + chance, 0, 1)
    ends = np.minimum(confidence, accuracy), np.maximum(confidence, accuracy)
    start = max(0.0, float(min(0.5, np.floor(10 * ends[0].min()) / 10)))
    diagonal = np.array([start, 1.0])
    plot = Plot(
        f"reliability-{k}",
        "Reliability",
        f"Accuracy against confidence in {len(number)} bins; the diagonal is calibrated. {lean}",
        Axis("confidence", start, 1.0),
        Axis("accuracy", start, 1.0),
        [
            Line(diagonal, diagonal, "rule", "calibrated"),
            Segments(confidence, low, high, "one", "95 % band"),
            Segments(confidence, *ends, "gap", "gap"),
            Points(confidence, accuracy, "one", "observed", 4.5),
        ],
    )
    bins = zip(confidence.tolist(), accuracy.tolist(), number.astype(int).tolist(), strict=True)
    values = html.table("Reliability by bin", ["confidence", "accuracy", "rows"], bins)
    caption = f"How often the likeliest class was the true one, by its probability. {lean}"
    mean = f"The mean gap is the ECE, {percent(error)}."
    return [html.figure(plot, f"{caption} {mean}", values), _confidences(found, k)]


def _confidences(found: Evaluation, k: int) -> Content:
    assert found.probs is not None
    top = found.probs.max(axis=1)
    right = found.probs.argmax(axis=1) == found.truth
    edges = np.linspace(1.0 / found.probs.shape[1], 1.0, 16)
    good, wrong = (
        np.histogram(np.clip(top[mask], edges[0], 1), edges)[0].astype(float)
        for mask in (right, ~right)
    )
    plot = Plot(
        f"confidence-{k}",
        "Confidence, right and wrong",
        f"{int(good.sum()):,} right and {int(wrong.sum()):,} wrong predictions by confidence.",
        Axis("confidence", float(edges[0]), 1.0),
        Axis("rows", 0.0),
        [Bars(edges, good, "one", "right"), Bars(edges, wrong, "two", "wrong", good)],
    )
    values = [("from", edges[:-1]), ("right", good), ("wrong", wrong)]
    mistakes = f"{count(int(wrong.sum()), 'prediction')} of {len(top):,} wrong"
    caption = f"Wrong predictions should have a low confidence. {mistakes}."
    return html.figure(plot, caption, values)


def _of_numbers(found: Evaluation, k: int) -> list[Content]:
    charts = []
    if coverage_curve(found) is not None:
        charts.append(_coverage(found, k))
    if found.pit is not None and found.pit.size and np.isfinite(found.pit).all():
        charts.append(_pit(found, k))
    return charts


def _coverage(found: Evaluation, k: int) -> Content:
    covered, gap, levels = coverage_curve(found), coverage_gap(found), np.array(LEVELS)
    assert covered is not None and gap is not None
    lean = describe_coverage(found, gap)
    if found.kind == "counts":
        lean += " Intervals of counts contain a little more than their level by construction."
    at_level = found.scores.get("coverage")
    extra: list[Mark] = []
    if found.conformal and at_level is not None:
        lean = (
            f"The conformal {percent(found.level)} intervals contain {percent(at_level)}; the "
            "curve is that of the predictive without the conformal correction."
        )
        place = np.array([found.level]), np.array([at_level])
        extra.append(Points(*place, "two", "conformal", 4.5))
    x, ends = np.linspace(0.0, 1.0, 101), np.array([0.0, 1.0])
    band = np.clip(x - gap.chance, 0, 1), np.clip(x + gap.chance, 0, 1)
    plot = Plot(
        f"coverage-{k}",
        "Coverage",
        f"Share of targets inside the central interval against its level. {lean}",
        Axis("nominal level", 0.0, 1.0),
        Axis("observed", 0.0, 1.0),
        [
            Ribbon(x, *band, "rule", "95 % band of chance"),
            Line(ends, ends, "rule", "calibrated"),
            Line(levels, covered, "one", "observed"),
            Points(levels, covered, "one", None, 3.0),
            *extra,
        ],
    )
    values = [("nominal level", levels), ("observed", covered)]
    return html.figure(
        plot, f"The share of targets inside central intervals, against their level. {lean}", values
    )


def _pit(found: Evaluation, k: int) -> Content:
    assert found.pit is not None
    bins = 20 if found.pit.size >= 200 else 10
    edges = np.linspace(0.0, 1.0, bins + 1)
    density = np.histogram(np.clip(found.pit, 0, 1), edges)[0] * bins / found.pit.size
    chance = bins * share_band(1.0 / bins, found.pit.size)
    outer = (density[0] + density[-1]) / 2
    ends = np.array([0.0, 1.0])
    band = np.full(2, max(0.0, 1 - chance)), np.full(2, 1 + chance)
    plot = Plot(
        f"pit-{k}",
        "PIT histogram",
        f"The predicted probability of a smaller value than each target, in {bins} bins; 1 is "
        f"calibrated. The mean of the two outermost bins is {outer:.2f}.",
        Axis("predicted probability of a smaller value", 0.0, 1.0),
        Axis("density", 0.0),
        [
            Ribbon(ends, *band, "rule", "95 % band of a bin"),
            Bars(edges, density, "one", "observed"),
            Line(ends, np.ones(2), "rule", "calibrated"),
        ],
    )
    caption = (
        "Flat: calibrated. Shape of a U: predictions are too narrow. A hump: too wide. A slope: "
        "biased."
    )
    return html.figure(plot, caption, [("from", edges[:-1]), ("density", density)])


def uncertainty_section(subject: Subject) -> Content:
    parts: list[Content] = []
    for k, found in enumerate(subject.evaluations):
        parts.append(html.heading(found.label) if found.label else None)
        parts.append(html.paragraph(_describe_split(found, epistemic_share(found))))
        parts.append(html.pair([_split(found, k), _risk(found, k)]))
    return parts


def _parts(found: Evaluation) -> tuple[Array, Array] | None:
    """(aleatoric, epistemic) uncertainty of each element. For numbers, they are variances. For
    classes, they are the expected entropy and the mutual information."""
    if found.kind == "classes":
        if found.entropy is None or found.information is None:
            return None
        return np.maximum(found.entropy - found.information, 0.0), found.information
    if found.aleatoric is None or found.epistemic is None:
        return None
    return found.aleatoric, found.epistemic


def epistemic_share(found: Evaluation) -> float | None:
    """The share of the total uncertainty that is epistemic."""
    split = _parts(found)
    if split is None:
        return None
    with np.errstate(all="ignore"):
        aleatoric, epistemic = (float(np.nansum(part)) for part in split)
    total = aleatoric + epistemic
    return epistemic / total if total > 0 and math.isfinite(total) else None


def _describe_split(found: Evaluation, share: float | None) -> str:
    if share is None:
        why = found.missing.get("epistemic") or found.missing.get("information")
        return f"The split is not available{f': {why}' if why else ''}."
    what = "entropy" if found.kind == "classes" else "variance"
    text = (
        f"{percent(share)} of the predictive {what} is epistemic (more data of this kind would "
        f"reduce it) and {percent(1 - share)} aleatoric (more data would not reduce it)."
    )
    if found.draws == 1 and share < 1e-9:
        text += " The method keeps a single function, which has no epistemic uncertainty."
    return text


def _split(found: Evaluation, k: int) -> Content:
    """A histogram of the epistemic share over rows."""
    split = _parts(found)
    if split is None:
        return None
    total = split[0] + split[1]
    known = np.isfinite(total) & (total > 0)
    if not known.any():
        return None
    share = np.clip(split[1][known] / total[known], 0.0, 1.0)
    edges = np.linspace(0.0, 1.0, 21)
    rows = np.histogram(share, edges)[0].astype(float)
    middle = percent(float(np.median(share)))
    plot = Plot(
        f"split-{k}",
        "Epistemic share of the uncertainty",
        f"Histogram over {share.size:,} predictions; half of them lie below {middle}.",
        Axis("epistemic share", 0.0, 1.0),
        Axis("predictions", 0.0),
        [Bars(edges, rows, "one")],
    )
    caption = (
        f"The epistemic share of each prediction. The median is {middle}. Predictions far to the "
        "right are at inputs unlike the training data."
    )
    return html.figure(plot, caption, [("from", edges[:-1]), ("predictions", rows)])


def _risk(found: Evaluation, k: int) -> Content:
    """The risk among the most certain predictions, by their share."""
    from doxa.evaluate.scores import risk_coverage_of

    measure = loss = None
    classes = found.kind == "classes"
    if classes and found.probs is not None and found.probs.size:
        measure = 1.0 - found.probs.max(axis=1)
        loss = (found.probs.argmax(axis=1) != found.truth).astype(float)
    elif found.mean is not None and found.std is not None:
        measure, loss = found.std, (found.mean - found.truth) ** 2
    if measure is None or loss is None or measure.size < 5:
        return None
    if not (np.isfinite(measure).all() and np.isfinite(loss).all()):
        return None
    curve = risk_coverage_of(torch.as_tensor(measure), torch.as_tensor(loss))
    kept, risk = curve.coverage.numpy(), curve.risk.numpy()
    share = np.arange(1, loss.size + 1) / loss.size
    best = np.sort(loss).cumsum() / np.arange(1, loss.size + 1)
    if not classes:
        risk, best = np.sqrt(risk), np.sqrt(best)
    started = kept >= max(0.05, 5.0 / loss.size)  # below this, a few rows decide the curve
    if started.sum() < 2:
        return None
    all_rows, half = float(risk[-1]), float(risk[np.searchsorted(kept, 0.5 - 1e-12)])
    show = percent if classes else short
    summary = f"The more certain half has {show(half)}, all rows have {show(all_rows)}."
    risk_name = "share wrong" if classes else "RMSE of those kept"
    plot = Plot(
        f"risk-{k}",
        "Risk and coverage",
        f"{risk_name} against the share of predictions kept, the most certain first. {summary}",
        Axis("share of predictions kept", 0.0, 1.0),
        Axis(risk_name, 0.0),
        [
            Line(np.array([0.0, 1.0]), np.full(2, all_rows), "rule", "all rows"),
            Line(share, best, "three", "best possible order"),
            Line(kept[started], risk[started], "one", "most certain first"),
        ],
    )
    values = [("kept", kept[started]), (risk_name, risk[started])]
    lead = "Error that remains when the least certain predictions are refused. "
    return html.figure(plot, lead + summary, values)
