"""The sections that show predictions: predictions against targets, the most and the least certain
rows, and function draws along one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from doxa.app.report import html
from doxa.app.report.charts import (
    Axis,
    Grid,
    Line,
    Mark,
    Plot,
    Points,
    Ribbon,
    Segments,
    as_picture,
)
from doxa.app.report.evaluation import Evaluation, array, kind_of
from doxa.app.report.html import Content, Picture, cut
from doxa.app.report.subject import Array, Input, Rows, Subject
from doxa.app.report.text import count, percent, short
from doxa.errors import DoxaError
from doxa.posterior import TransformedPosterior

MOST_POINTS = 300
MOST_INTERVALS = 60
MOST_CLASSES = 10  # largest number of classes in a confusion matrix
MOST_LISTED = 15  # largest number of classes in the table of classes
EXTREME_ROWS = 8
MOST_COLUMNS = 8
DRAWS = 12
MOST_SLICES = 4
MOST_TRIED = 40
GRID = 81  # number of points along a slice
LOOKS = ("one", "two", "three", "four")


def predictions_section(subject: Subject) -> Content:
    parts: list[Content] = []
    for k, found in enumerate(subject.evaluations):
        draw = _confusion if found.kind == "classes" else _numbers
        charts = draw(subject, found, k)
        if charts:
            parts += [html.heading(found.label) if found.label else None, html.pair(charts)]
    return parts or None


def _numbers(subject: Subject, found: Evaluation, k: int) -> list[Content]:
    if found.mean is None:
        return []
    known = np.flatnonzero(np.isfinite(found.mean) & np.isfinite(found.truth))
    if not known.size:
        return []
    target = cut(subject.target, 30)
    charts = [_scatter(found, _some(known, MOST_POINTS), known.size, target, k)]
    if found.low is not None and found.high is not None:
        charts.append(_intervals(found, _some(known, MOST_INTERVALS), known.size, target, k))
    return charts


def _scatter(found: Evaluation, at: Array, total: int, target: str, k: int) -> Content:
    assert found.mean is not None
    mean, truth = found.mean[at], found.truth[at]
    ends = np.array([min(mean.min(), truth.min()), max(mean.max(), truth.max())])
    summary = ""
    if found.truth.size > 2 and np.std(found.truth) > 0 and np.std(found.mean) > 0:
        summary = f"Correlation {np.corrcoef(found.mean, found.truth)[0, 1]:.3f}."
    plot = Plot(
        f"scatter-{k}",
        "Predicted against true",
        f"{len(at)} predictions; on the diagonal they are right. {summary}",
        Axis(f"true {target}"),
        Axis("predicted mean"),
        [Line(ends, ends, "rule", "right"), Points(truth, mean, "one", "prediction")],
    )
    values = [("true", truth), ("predicted mean", mean)]
    return html.figure(plot, f"{_subsample(len(at), total)} {summary}", values)


def _intervals(found: Evaluation, at: Array, total: int, target: str, k: int) -> Content:
    assert found.low is not None and found.high is not None and found.mean is not None
    order = at[np.argsort(found.mean[at], kind="stable")]
    place = np.arange(1.0, len(order) + 1)
    low, high, truth = found.low[order], found.high[order], found.truth[order]
    inside = (low <= truth) & (truth <= high)
    summary = f"{count(int((~inside).sum()), 'target')} of {len(order)} outside."
    plot = Plot(
        f"intervals-{k}",
        f"{percent(found.level)} intervals and targets",
        f"{len(order)} rows in the order of their predicted mean. {summary}",
        Axis("rows, by predicted mean", at=[]),
        Axis(target),
        [
            Segments(place, low, high, "one", "interval"),
            Points(place[inside], truth[inside], "one", "target inside", 2.6),
            Points(place[~inside], truth[~inside], "two", "target outside", 3.6),
        ],
    )
    values = [("place", place), ("low", low), ("high", high), ("true", truth)]
    return html.figure(plot, f"{_subsample(len(order), total)} {summary}", values)


def _confusion(subject: Subject, found: Evaluation, k: int) -> list[Content]:
    counts = found.confusion()
    if counts is None:
        return []
    names = subject.class_names(len(counts))
    by_class = _class_table(subject, names, counts)
    if len(counts) > MOST_CLASSES:
        return [by_class]
    shown = [subject.names.show(name) for name in names]
    rows = [[name, *map(int, row)] for name, row in zip(shown, counts, strict=True)]
    values = html.table("True classes by row, predicted by column", ["true", *shown], rows)
    right = f"{int(np.trace(counts)):,} of {found.truth.size:,}"
    grid = Grid(
        f"confusion-{k}",
        "Confusion matrix",
        f"{right} predictions are on the diagonal, where they are right.",
        names,
        names,
        counts,
        "true",
        "predicted",
    )
    return [
        html.figure(grid, "Rows are true classes, shaded by share of the row.", values),
        by_class,
    ]


def _class_table(subject: Subject, names: Sequence[str], counts: Array) -> Content:
    """How often each class is recognised, with the most frequent class first."""
    rows: list[list[Content]] = []
    for c in np.argsort(-counts.sum(axis=1), kind="stable")[:MOST_LISTED]:
        total, right = int(counts[c].sum()), int(counts[c, c])
        if not total:
            continue
        wrong = counts[c].copy()
        wrong[c] = 0
        taken: Content = "–"
        if wrong.sum():
            taken = [subject.names.show(names[int(wrong.argmax())], 24), f" ({int(wrong.max()):,})"]
        rows.append([subject.names.show(names[c], 24), total, percent(right / total), taken])
    columns = ["class", "cases", "recognised", "most often taken for"]
    title = "Classes, the commonest first"
    return html.boxed(
        "Class by class", html.table(title, columns, rows, tall=True, right=(2,), quiet=True)
    )


def _some(index: Array, most: int) -> Array:
    """At most `most` evenly spaced entries of `index`, chosen without random numbers."""
    if index.size <= most:
        return index
    return index[np.linspace(0, index.size - 1, most).round().astype(int)]


def _subsample(shown: int, total: int) -> str:
    if shown == total:
        return f"All {count(total, 'prediction')}." if total > 1 else "One prediction."
    return f"{shown} of {total:,} predictions, evenly spaced over the rows."


def extreme_rows_section(subject: Subject) -> Content:
    """The most and the least certain rows, shown with their columns or as pictures."""
    rows, found = subject.rows, subject.evaluations[0]
    measure = found.uncertainty
    if rows is None or measure is None or not found.truth.size:
        return None
    order = np.argsort(found.by_row(measure), kind="stable")  # NaN last: least certain
    picked = min(EXTREME_ROWS, found.rows // 2)
    groups = [("Least certain", order[::-1][:picked]), ("Most certain", order[:picked])]
    if picked == 0:
        groups = [("The only row", order)]
    what = "entropy" if found.kind == "classes" else "standard deviation"
    head = f" (of {found.label})" if found.label else ""
    parts: list[Content] = [
        html.paragraph(f"Rows are ranked by the {what} of their prediction{head}.")
    ]
    pictures = _picture(subject, rows, 0) is not None
    if pictures and _is_map(found):
        parts.append(html.paragraph(
            "From top to bottom: the input, the prediction, and the epistemic uncertainty of each "
            "pixel (light is high; ignored pixels are black)."
        ))  # fmt: skip
    for title, chosen in groups:
        show = _gallery if pictures else _row_table
        parts += [html.heading(title), show(subject, rows, found, chosen, title)]
    return parts


def _row_table(
    subject: Subject, rows: Rows, found: Evaluation, chosen: Array, title: str
) -> Content:
    names = subject.names
    columns = [names.show(name, 24) for name in rows.columns[:MOST_COLUMNS]]
    lines: list[list[Content]] = []
    for i in chosen:
        given = int(found.index[i])
        cells = [_value(subject, cell) for cell in list(rows.cells(given))[:MOST_COLUMNS]]
        label = names.show(rows.label(given), 24)
        lines.append([label, *_predicted(subject, found, int(i)), *cells])
    hidden = len(rows.columns) - len(columns)
    note = f" ({hidden} more columns are not shown)" if hidden > 0 else ""
    classes = found.kind == "classes"
    heads = ["row", "true", "predicted", "probability" if classes else "interval"]
    heads += ["entropy" if classes else "std"]
    return html.table(
        f"{title}{note}", [*heads, *columns], lines, tall=True, right=(3,), quiet=not note
    )


def _predicted(subject: Subject, found: Evaluation, row: int) -> list[Content]:
    """The cells of one row: the target, the prediction, its probability or interval, and the
    uncertainty."""
    at = np.flatnonzero(found.row == row)
    assert found.uncertainty is not None
    spread = float(np.mean(found.uncertainty[at])) if at.size else float("nan")
    if at.size != 1:
        several = f"{at.size} values"
        return [several, several, "", spread]
    k = int(at[0])
    if found.kind == "classes":
        assert found.probs is not None
        names = subject.class_names(found.probs.shape[1])
        guess, truth = int(found.probs[k].argmax()), int(found.truth[k])
        return [
            subject.names.show(names[truth], 24),
            ["✓ " if guess == truth else "✕ ", subject.names.show(names[guess], 24)],
            percent(float(found.probs[k, guess])),
            spread,
        ]
    assert found.mean is not None
    between = ""
    if found.low is not None and found.high is not None:
        between = f"{short(float(found.low[k]))} … {short(float(found.high[k]))}"
    return [float(found.truth[k]), float(found.mean[k]), between, spread]


def _value(subject: Subject, cell: object) -> Content:
    if isinstance(cell, (bool, np.bool_)):
        return str(bool(cell))
    if isinstance(cell, (int, np.integer)):
        return int(cell)
    if isinstance(cell, (float, np.floating)):
        return float(cell)
    return subject.names.show(cell, 24)


def _gallery(subject: Subject, rows: Rows, found: Evaluation, chosen: Array, title: str) -> Content:
    entries: list[tuple[list[Picture], list[Content]]] = []
    for i in chosen:
        given = int(found.index[i])
        picture = _picture(subject, rows, given)
        if picture is None:
            continue
        truth, guess, detail, spread = _predicted(subject, found, int(i))
        label = cut(rows.label(given), 24)
        pictures = [Picture(picture, f"input of {label}"), *_maps(found, int(i), label)]
        lines: list[Content] = [html.strong(subject.names.show(rows.label(given), 24))]
        if not _is_map(found):
            lines += [["true ", _text(truth)], ["predicted ", _text(guess), " ", detail]]
        lines.append(f"{'entropy' if found.kind == 'classes' else 'std'} {short(spread)}")
        entries.append((pictures, lines))
    return html.gallery(entries)


def _maps(found: Evaluation, row: int, label: str) -> list[Picture]:
    """For targets that are images: the predicted image, and its uncertainty as an image."""
    if not _is_map(found):
        return []
    at = np.flatnonzero(found.row == row)
    measure, guess = found.epistemic, found.mean
    if found.kind == "classes":
        measure = found.information
        guess = None if found.probs is None else found.probs.argmax(axis=1).astype(float)
    maps = []
    for values, what in ((guess, "prediction"), (measure, "epistemic uncertainty")):
        if values is None:
            continue
        whole = np.full(int(np.prod(found.site)), np.nan)  # ignored pixels stay black
        whole[found.place[at]] = values[at]
        picture = as_picture(whole.reshape(found.site))
        if picture is not None:
            maps.append(Picture(picture, f"{what} of {label}, light is high"))
    return maps


def _is_map(found: Evaluation) -> bool:
    return len(found.site) >= 2 and found.site[-1] > 1


def _picture(subject: Subject, rows: Rows, row: int) -> Array | None:
    leaves = tree_flatten(rows.x)[0]
    if len(leaves) != 1:
        return None
    values = array(leaves[0][row])
    return as_picture(values if subject.image is None else values.reshape(subject.image))


def _text(value: Content) -> Content:
    return short(value) if isinstance(value, float) else value


@dataclass(frozen=True)
class Slice:
    """Inputs x [G, D] in which one column varies, and the values [G] of this column."""

    column: Input
    grid: Array
    x: Array
    alone: bool  # whether the column is the only input


def functions_section(subject: Subject) -> Content:
    """Function draws from the posterior along one input at a time."""
    lines = _slices(subject)
    if not lines:
        return None
    try:
        ranked = sorted(lines[:MOST_TRIED], key=lambda line: -_effect(subject, line))
        charts = [_function_chart(subject, line, k) for k, line in enumerate(ranked[:MOST_SLICES])]
    except DoxaError as error:
        return html.paragraph(f"Not available: {error}.")
    shown = [chart for chart in charts if chart is not None]
    if not shown:
        return None
    if lines[0].alone:
        about = "Functions drawn from the posterior, also a little outside the range of the data."
    else:
        about = (
            "One column varies from its 1st to its 99th percentile; the others are fixed at their "
            "median (categories at the commonest one)."
        )
        if subject.rows is None:
            about = (
                "One column varies by two standard deviations around its training mean; the "
                "others are fixed at theirs."
            )
        if len(lines) > len(shown):
            about += (
                f" Of {len(lines)} columns, the {len(shown)} with the largest effect are shown."
            )
    return [
        html.paragraph(f"{about} Where draws differ, the data do not determine the function."),
        html.pair(shown),
    ]


def _slices(subject: Subject) -> list[Slice]:
    """One slice per numeric column that is not a flag. The other columns are fixed at the median of
    the rows, or at the training mean if there are no rows. Empty if x is not a table of numbers."""
    ranges = _ranges(subject)
    if ranges is None:
        return []
    middle, low, high = ranges
    lines = []
    for column in subject.inputs:
        at = column.at[0]
        if column.categories is not None or column.flag:
            continue
        if not (np.isfinite([low[at], high[at]]).all() and high[at] > low[at]):
            continue
        grid = np.linspace(low[at], high[at], GRID)
        x = np.repeat(middle[None], GRID, axis=0)
        x[:, at] = grid
        lines.append(Slice(column, grid, x, len(middle) == 1))
    return lines


def _ranges(subject: Subject) -> tuple[Array, Array, Array] | None:
    """(middle, low, high) of every column of x, [D] each."""
    rows = subject.train or subject.test
    x = None if rows is None else rows.table
    width = sum(len(column.at) for column in subject.inputs)
    if not width:
        return None
    if x is not None and x.shape[1] == width:
        middle, share = np.median(x, axis=0), x.mean(axis=0)
        low, high = np.quantile(x, [0.01, 0.99], axis=0)
        if width == 1:
            low, high = x.min(axis=0), x.max(axis=0)
    else:
        scales = subject.posterior.scales
        if not all(isinstance(value, torch.Tensor) for value in (scales.x_loc, scales.x_scale)):
            return None
        share, scale = array(scales.x_loc).reshape(-1), array(scales.x_scale).reshape(-1)
        if share.size != width:
            return None
        middle, low, high = share.copy(), share - 2 * scale, share + 2 * scale
    margin = 0.2 * (high - low) if width == 1 else 0.0 * high
    for column in subject.inputs:
        if column.categories is not None:  # fixed at the most frequent category
            places = list(column.at)
            middle[places] = 0.0
            middle[places[int(np.argmax(share[places]))]] = 1.0
    return middle, low - margin, high + margin


def function_draws(posterior: Any, x: Array, n: int = DRAWS) -> Array | None:
    """Function draws at inputs x, [S, G, …]. None if the posterior has only one function. For a
    recalibrated or conformal posterior, they are the draws of its base."""
    inputs = torch.as_tensor(x)
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior.base
    try:
        return array(posterior.functions(inputs, n))
    except DoxaError:
        pass
    try:
        samples = array(posterior.predict(inputs).samples)
    except DoxaError:
        return None
    return samples[:n] if len(samples) > 1 else None


def _effect(subject: Subject, line: Slice) -> float:
    """The size of the change of the mean along a slice."""
    mean = array(subject.posterior.predict(torch.as_tensor(line.x)).heads[0].mean)
    change = float(np.ptp(mean.reshape(len(mean), -1), axis=0).max())
    return change if np.isfinite(change) else 0.0


def _function_chart(subject: Subject, line: Slice, k: int) -> Content:
    p = subject.posterior.predict(torch.as_tensor(line.x)).heads[0]
    name, mean = cut(line.column.name, 40), array(p.mean)
    draws = function_draws(subject.posterior, line.x)
    if kind_of(p.likelihood) == "classes":
        binary = p.likelihood.binary
        if mean.ndim > 2 or (mean.ndim == 2 and binary and mean.shape[1] > 1):
            return None
        probs = mean.reshape(-1, 1) if binary else mean
        marks, label = _class_marks(subject, line, probs, draws, binary)
        y = Axis(label, 0.0, 1.0)
        curves = [(m.label or "", m.y) for m in marks if m.look in LOOKS]
    else:
        flat = mean.reshape(len(mean), -1)[:, 0]
        marks = _number_marks(p, line, flat, draws)
        y = Axis(cut(subject.target, 30))
        curves = [("mean", flat)]
    drawn: list[Mark] = list(marks)
    if kind_of(p.likelihood) != "classes":
        drawn = [*_interval(p, line), *drawn]
        if line.alone and subject.rows is not None:
            drawn.append(_data(subject.train or subject.rows, line))
    many = f", with {len(draws)} function draws." if draws is not None else "."
    axes = Axis(name), y
    about = f"{y.label} against {name}{many}"
    plot = Plot(f"function-{k}", f"Along {name}", about, *axes, drawn)
    caption = "The method keeps a single function." if draws is None else ""
    return html.figure(plot, caption, [(name, line.grid), *curves], line.alone)


def _interval(p: Any, line: Slice) -> list[Mark]:
    try:
        low, high = (array(b).reshape(len(line.grid), -1)[:, 0] for b in p.interval(0.95))
    except DoxaError:
        return []
    return [Ribbon(line.grid, low, high, "one", "95 % interval")]


def _draw_lines(line: Slice, draws: Array, label: str = "draws") -> list[Line]:
    """Draws [S, G] as thin lines with one common label."""
    return [Line(line.grid, d, "thin", label if s == 0 else None) for s, d in enumerate(draws)]


def _number_marks(p: Any, line: Slice, mean: Array, draws: Array | None) -> list[Line]:
    marks = []
    if draws is not None:
        flat = draws.reshape(*draws.shape[:2], -1)[:, :, 0]
        marks = _draw_lines(line, np.exp(flat) if kind_of(p.likelihood) == "counts" else flat)
    return [*marks, Line(line.grid, mean, "one", "mean")]


def _class_marks(
    subject: Subject, line: Slice, probs: Array, draws: Array | None, binary: bool
) -> tuple[list[Line], str]:
    names = subject.class_names(max(2, probs.shape[1]))
    marks: list[Line] = []
    if binary:
        if draws is not None:
            logits = np.clip(draws.reshape(*draws.shape[:2], -1)[:, :, 0], -500, 500)
            marks = _draw_lines(line, 1.0 / (1.0 + np.exp(-logits)))
        return [*marks, Line(line.grid, probs[:, 0], "one", "mean")], f"P({cut(names[-1], 20)})"
    spread = np.ptp(probs, axis=0) + probs.max(axis=0)
    chosen = sorted(np.argsort(-spread, kind="stable")[: len(LOOKS)].tolist())
    if draws is not None and draws.ndim == 3:
        shifted = np.exp(draws - draws.max(axis=2, keepdims=True))
        each = shifted / shifted.sum(axis=2, keepdims=True)
        marks = _draw_lines(line, each[:, :, chosen[0]], f"draws of {cut(names[chosen[0]], 14)}")
    for look, c in zip(LOOKS, chosen, strict=False):
        marks.append(Line(line.grid, probs[:, c], look, cut(names[c], 14)))
    return marks, "probability"


def _data(rows: Rows, line: Slice) -> Points:
    x = rows.table
    assert x is not None
    y = rows.y[0] if isinstance(rows.y, tuple) else rows.y
    values = array(y).reshape(len(x), -1)[:, 0]
    at = _some(np.arange(len(x)), MOST_POINTS)
    return Points(x[at, line.column.at[0]], values[at], "dim", "data", 2.4)
