"""Tables that scroll in their own box, and pairs of a term and what it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from doxa.app.report.charts.scales import short
from doxa.app.report.markup import Content, Html, tag

MOST_VALUES = 60  # rows of the table behind a chart


@dataclass(frozen=True)
class Words:
    """A cell of running text, which may wrap."""

    content: Content


def table(
    caption: str,
    columns: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    tall: bool = False,
    right: Sequence[int] = (),
    quiet: bool = False,
) -> Html:
    """A table whose numbers stand to the right and whose first column heads its rows.

    tall: not cut to a height. right: columns of text that are numbers. quiet: the caption, which
    a heading has just said, is for screen readers only.
    """
    rows = [list(row) for row in rows]
    first = rows[0] if rows else []
    numeric = [k > 0 and (k in right or _is_number(cell)) for k, cell in enumerate(first)]
    numeric += [False] * (len(columns) - len(numeric))
    body = [
        tag(
            "tr",
            None,
            [
                tag("th", {"scope": "row"}, _cell(cell)) if k == 0 else _data(cell, k in right)
                for k, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    heads = [
        tag("th", {"scope": "col", "class": "right" if right else None}, column)
        for column, right in zip(columns, numeric, strict=True)
    ]
    head = tag("tr", None, heads)
    return tag(
        "div",
        {"class": "scroll tall" if tall else "scroll", "role": "region", "tabindex": 0,
         "aria-label": caption},
        tag("table", None, tag("caption", {"class": "unseen" if quiet else None}, caption),
            tag("thead", None, head), tag("tbody", None, body)),
    )  # fmt: skip


def values_table(caption: str, columns: Sequence[str], series: Sequence[Iterable[float]]) -> Html:
    """What a chart shows, as numbers: at most `MOST_VALUES` rows, evenly taken."""
    rows = list(zip(*(list(values) for values in series), strict=True))
    if len(rows) > MOST_VALUES:
        step = (len(rows) - 1) / (MOST_VALUES - 1)
        caption = f"{caption} ({MOST_VALUES} of {len(rows):,} rows, evenly taken)"
        rows = [rows[round(k * step)] for k in range(MOST_VALUES)]
    return table(caption, columns, [[float(v) for v in row] for row in rows])


def terms(pairs: Iterable[tuple[str, Content]]) -> Html:
    """A list of terms; those with nothing to say are left out."""
    known = [(term, what) for term, what in pairs if what is not None and what != ""]
    return tag("dl", None, [(tag("dt", None, t), tag("dd", None, _cell(w))) for t, w in known])


def card(title: str, pairs: Iterable[tuple[str, Content]]) -> Html:
    return tag("div", {"class": "card"}, tag("h3", None, title), terms(pairs))


def _cell(cell: Content) -> Content:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}".replace("-", "−")
    return short(cell) if isinstance(cell, float) else cell


def _data(cell: Content, right: bool) -> Html:
    if isinstance(cell, Words):
        return tag("td", {"class": "words"}, cell.content)
    return tag("td", {"class": "right"} if right or _is_number(cell) else None, _cell(cell))


def _is_number(cell: Content) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)
