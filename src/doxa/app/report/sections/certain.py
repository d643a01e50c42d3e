"""The most and the least certain rows, with their own columns, or as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils._pytree import tree_flatten

from doxa.app.report.answers import Answer
from doxa.app.report.charts.picture import as_picture, data_png
from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import cut
from doxa.app.report.page import Section
from doxa.app.report.sections.predictions import class_names
from doxa.app.report.subject import Array, Rows, Subject
from doxa.app.report.tabular import table
from doxa.app.report.words import percent

SHOWN = 8
MOST_COLUMNS = 8


def certain(subject: Subject, answers: Sequence[Answer]) -> Section | None:
    rows = subject.rows
    answer = answers[0]
    measure = answer.uncertainty
    if rows is None or measure is None or not answer.truth.size:
        return None
    by_row = answer.by_row(measure)
    order = np.argsort(by_row, kind="stable")  # NaN last: least certain
    picked = min(SHOWN, answer.rows // 2)
    if picked == 0:
        groups = [("The only row", order)]
    else:
        groups = [("Least certain", order[::-1][:picked]), ("Most certain", order[:picked])]
    what = "the entropy of their prediction" if answer.kind == "classes" else (
        "the standard deviation of their prediction"
    )  # fmt: skip
    head = f" (of {answer.label})" if answer.label else ""
    parts: list[Content] = [tag("p", None, f"Rows are ranked by {what}{head}.")]
    pictures = _picture(subject, rows, answer, 0) is not None
    if pictures and _is_map(answer):
        order_said = "From above: the input, the prediction, the epistemic uncertainty of each "
        parts.append(tag("p", None, order_said + "pixel (light is high, what was ignored black)."))
    for title, chosen in groups:
        parts.append(tag("h3", None, title))
        if pictures:
            parts.append(_gallery(subject, rows, answer, chosen, by_row))
        else:
            parts.append(_table(subject, rows, answer, chosen, by_row, title))
    return Section("rows", "Most and least certain rows", parts)


def _table(
    subject: Subject, rows: Rows, answer: Answer, chosen: Array, by_row: Array, title: str
) -> Html:
    names = subject.names
    columns = [names.show(name, 24) for name in rows.columns[:MOST_COLUMNS]]
    lines: list[list[Content]] = []
    for i in chosen:
        given = int(answer.index[i])
        cells = [_value(subject, cell) for cell in list(rows.cells(given))[:MOST_COLUMNS]]
        lines.append([names.show(rows.label(given), 24), *_said(subject, answer, int(i)), *cells])
    left = len(rows.columns) - len(columns)
    note = f" ({left} more columns are not shown)" if left > 0 else ""
    spread = "entropy" if answer.kind == "classes" else "std"
    heads: list[Content] = ["row", "true", "predicted"]
    heads += ["probability"] if answer.kind == "classes" else ["interval"]
    return table(
        f"{title}{note}", [*heads, spread, *columns], lines, True, right=(3,), quiet=not note
    )


def _said(subject: Subject, answer: Answer, row: int) -> list[Content]:
    """True, predicted, probability or interval, uncertainty of one row."""
    at = np.flatnonzero(answer.row == row)
    assert answer.uncertainty is not None
    spread = float(np.mean(answer.uncertainty[at])) if at.size else float("nan")
    if at.size != 1:
        several = f"{at.size} values"
        return [several, several, "", spread]
    k = int(at[0])
    if answer.kind == "classes":
        assert answer.probs is not None
        names = class_names(subject, answer)
        guess, truth = int(answer.probs[k].argmax()), int(answer.truth[k])
        sign = "✓ " if guess == truth else "✕ "
        return [
            subject.names.show(names[truth], 24),
            [sign, subject.names.show(names[guess], 24)],
            percent(float(answer.probs[k, guess])),
            spread,
        ]
    assert answer.mean is not None
    between = ""
    if answer.low is not None and answer.high is not None:
        between = f"{short(float(answer.low[k]))} … {short(float(answer.high[k]))}"
    return [float(answer.truth[k]), float(answer.mean[k]), between, spread]


def _value(subject: Subject, cell: object) -> Content:
    if isinstance(cell, (bool, np.bool_)):
        return str(bool(cell))
    if isinstance(cell, (int, np.integer)):
        return int(cell)
    if isinstance(cell, (float, np.floating)):
        return float(cell)
    return subject.names.show(cell, 24)


def _gallery(subject: Subject, rows: Rows, answer: Answer, chosen: Array, by_row: Array) -> Html:
    items = []
    for i in chosen:
        given = int(answer.index[i])
        picture = _picture(subject, rows, answer, given)
        if picture is None:
            continue
        truth, guess, detail, spread = _said(subject, answer, int(i))
        label = cut(rows.label(given), 24)
        images = [_image(picture, f"input of {label}")]
        images += _maps(answer, int(i), label)
        words: list[Content] = [tag("strong", None, subject.names.show(rows.label(given), 24))]
        if not _is_map(answer):
            words += [tag("br"), "true ", _text(truth), tag("br"), "predicted ", _text(guess)]
            words += [" ", _text(detail)]
        words += [
            tag("br"),
            f"{'entropy' if answer.kind == 'classes' else 'std'} {short(float(spread))}",
        ]
        items.append(tag("li", None, images, words))
    return tag("ul", {"class": "gallery"}, items)


def _maps(answer: Answer, row: int, label: str) -> list[Html]:
    """For targets that are images: the predicted map and where it is uncertain."""
    if not _is_map(answer):
        return []
    at = np.flatnonzero(answer.row == row)
    measure = answer.information if answer.kind == "classes" else answer.epistemic
    guess = answer.mean
    if answer.kind == "classes" and answer.probs is not None:
        guess = answer.probs.argmax(axis=1).astype(float)
    maps = []
    for values, what in ((guess, "prediction"), (measure, "epistemic uncertainty")):
        if values is None:
            continue
        whole = np.full(int(np.prod(answer.site)), np.nan)  # ignored pixels stay black
        whole[answer.place[at]] = values[at]
        picture = as_picture(whole.reshape(answer.site))
        if picture is not None:
            maps.append(_image(picture, f"{what} of {label}, light is high"))
    return maps


def _is_map(answer: Answer) -> bool:
    return len(answer.site) >= 2 and answer.site[-1] > 1


def _image(picture: Array, alt: str) -> Html:
    height, width = picture.shape[:2]
    return tag("img", {"src": data_png(picture), "alt": alt, "width": width, "height": height})


def _picture(subject: Subject, rows: Rows, answer: Answer, row: int) -> Array | None:
    leaves = tree_flatten(rows.x)[0]
    if len(leaves) != 1:
        return None
    values = leaves[0][row].detach().cpu().double().numpy()
    if subject.image is not None:
        values = values.reshape(subject.image)
    return as_picture(values)


def _text(value: Content) -> Content:
    return short(value) if isinstance(value, float) else value
