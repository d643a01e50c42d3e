"""What the posterior believes the function to be: draws along one input at a time."""

from __future__ import annotations

import numpy as np
import torch

from doxa.app.report.block import array, heads, kind_of
from doxa.app.report.charts import Axis, Line, Plot, Points, Ribbon, figure
from doxa.app.report.charts.marks import Mark
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import cut
from doxa.app.report.page import Section
from doxa.app.report.slices import Slice, slices
from doxa.app.report.subject import Array, Rows, Subject
from doxa.app.report.tabular import values_table
from doxa.errors import DoxaError
from doxa.likelihoods import Bernoulli
from doxa.posterior import TransformedPosterior

DRAWS = 12
MOST_SLICES = 4
MOST_TRIED = 40
LOOKS = ("one", "two", "three", "four")


def functions(subject: Subject) -> Section | None:
    lines = slices(subject)
    if not lines:
        return None
    try:
        ranked = sorted(lines[:MOST_TRIED], key=lambda line: -_effect(subject, line))
        charts = [_chart(subject, line, k) for k, line in enumerate(ranked[:MOST_SLICES])]
    except DoxaError as error:
        return Section("functions", "Functions", tag("p", None, f"Not available: {error}."))
    shown = [chart for chart in charts if chart is not None]
    if not shown:
        return None
    if lines[0].alone:
        words = "Functions drawn from the posterior, a little beyond the data on both sides."
    else:
        words = (
            "One column varies from its 1st to its 99th percentile, the others rest at their "
            "median (categories at the commonest one)."
        )
        if subject.rows is None:
            words = (
                "One column varies by two standard deviations around the training mean, at which "
                "the others rest."
            )
        if len(lines) > len(shown):
            words += f" Shown are the {len(shown)} columns that matter most, of {len(lines)}."
    words += " Where draws spread, the data leave the function open."
    return Section(
        "functions", "Functions", [tag("p", None, words), tag("div", {"class": "pair"}, shown)]
    )


def draws_of(posterior: object, x: Array, n: int = DRAWS) -> Array | None:
    """[S, G, …] function draws; None for a posterior that holds one function. Those of a
    recalibrated or conformal posterior are its base's."""
    inputs = torch.as_tensor(x)
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior.base
    try:
        return array(posterior.functions(inputs, n))  # type: ignore[attr-defined]
    except DoxaError:
        pass
    try:
        samples = array(posterior.predict(inputs).samples)  # type: ignore[attr-defined]
    except DoxaError:
        return None
    return samples[:n] if len(samples) > 1 else None


def _effect(subject: Subject, line: Slice) -> float:
    """How much the mean changes along the slice."""
    mean = array(heads(subject.posterior.predict(torch.as_tensor(line.x)))[0].mean)
    flat = mean.reshape(len(mean), -1)
    change = float(np.ptp(flat, axis=0).max())
    return change if np.isfinite(change) else 0.0


def _chart(subject: Subject, line: Slice, k: int) -> Html | None:
    p = heads(subject.posterior.predict(torch.as_tensor(line.x)))[0]
    name = cut(line.column.name, 40)
    mean = array(p.mean)
    draws = draws_of(subject.posterior, line.x)
    marks: list[Mark]
    columns, table = [name], [line.grid]
    if kind_of(p.likelihood) == "classes":
        if mean.ndim > 2 or (
            mean.ndim == 2 and isinstance(p.likelihood, Bernoulli) and mean.shape[1] > 1
        ):
            return None
        probs = np.stack([mean.reshape(-1)], 1) if isinstance(p.likelihood, Bernoulli) else mean
        marks, label = _class_marks(
            subject, line, probs, draws, isinstance(p.likelihood, Bernoulli)
        )
        columns += [m.label or "" for m in marks if isinstance(m, Line) and m.look in LOOKS]
        table += [m.y for m in marks if isinstance(m, Line) and m.look in LOOKS]
        y = Axis(label, 0.0, 1.0)
    else:
        flat = mean.reshape(len(mean), -1)
        marks = _number_marks(p, line, flat[:, 0], draws)
        columns += ["mean"]
        table += [flat[:, 0]]
        y = Axis(cut(subject.target, 30))
        if line.alone and subject.rows is not None:
            marks.append(_data(subject.train or subject.rows, line))
    plot = Plot(
        f"function-{k}",
        f"Along {name}",
        f"{y.label} against {name}"
        + (f", with {len(draws)} function draws." if draws is not None else "."),
        Axis(name),
        y,
        marks,
    )
    words: Content = "One function: the method keeps no spread." if draws is None else ""
    return figure(plot, words, values_table(f"Along {name}", columns, table), line.alone)


def _number_marks(p: object, line: Slice, mean: Array, draws: Array | None) -> list[Mark]:
    marks: list[Mark] = []
    try:
        low, high = (array(b).reshape(len(mean), -1)[:, 0] for b in p.interval(0.95))  # type: ignore[attr-defined]
        marks.append(Ribbon(line.grid, low, high, "one", "95 % interval"))
    except DoxaError:
        pass
    if draws is not None:
        flat = draws.reshape(draws.shape[0], draws.shape[1], -1)[:, :, 0]
        if kind_of(p.likelihood) == "counts":  # type: ignore[attr-defined]
            flat = np.exp(flat)
        for s, draw in enumerate(flat):
            marks.append(Line(line.grid, draw, "thin", "draws" if s == 0 else None))
    marks.append(Line(line.grid, mean, "one", "mean"))
    return marks


def _class_marks(
    subject: Subject, line: Slice, probs: Array, draws: Array | None, binary: bool
) -> tuple[list[Mark], str]:
    names = subject.classes or tuple(f"class {c}" for c in range(max(2, probs.shape[1])))
    marks: list[Mark] = []
    if binary:
        if draws is not None:
            flat = 1.0 / (
                1.0 + np.exp(-np.clip(draws.reshape(*draws.shape[:2], -1)[:, :, 0], -500, 500))
            )
            for s, draw in enumerate(flat):
                marks.append(Line(line.grid, draw, "thin", "draws" if s == 0 else None))
        marks.append(Line(line.grid, probs[:, 0], "one", "mean"))
        return marks, f"P({cut(names[-1], 20)})"
    spread = np.ptp(probs, axis=0) + probs.max(axis=0)
    chosen = sorted(np.argsort(-spread, kind="stable")[: len(LOOKS)].tolist())
    if draws is not None and draws.ndim == 3:
        shifted = np.exp(draws - draws.max(axis=2, keepdims=True))
        each = shifted / shifted.sum(axis=2, keepdims=True)
        first = chosen[0]
        for s, draw in enumerate(each[:, :, first]):
            label = f"draws of {cut(names[first], 14)}" if s == 0 else None
            marks.append(Line(line.grid, draw, "thin", label))
    for look, c in zip(LOOKS, chosen, strict=False):
        marks.append(Line(line.grid, probs[:, c], look, cut(names[c], 14)))
    return marks, "probability"


def _data(rows: Rows, line: Slice) -> Points:
    table = rows.table
    assert table is not None
    y = rows.y[0] if isinstance(rows.y, tuple) else rows.y
    values = array(y).reshape(len(table), -1)[:, 0]
    at = np.arange(len(table))
    if at.size > 300:
        at = np.linspace(0, at.size - 1, 300).round().astype(int)
    return Points(table[at, line.column.at[0]], values[at], "dim", "data", 2.4)
