"""A chart with two axes, and the figure around it: caption, description, table of its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from doxa.app.report.charts.marks import Mark
from doxa.app.report.charts.scales import Scale, extent, tick_labels, ticks
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import cut

WIDTH, HEIGHT = 440, 290  # as many units as pixels on a desktop, so that text keeps its size
LETTER = 7.5  # of a label, in a wide font: a digit of DejaVu Sans is 0.636 em


@dataclass(frozen=True)
class Axis:
    """What runs along one side; low and high where the data should not decide. Names that speak for
    themselves need no label."""

    label: str
    low: float | None = None
    high: float | None = None
    at: Sequence[float] | None = None
    names: Sequence[str] | None = None

    def range(self, parts: Sequence[object], room: float) -> tuple[float, float]:
        low, high = extent(parts)  # type: ignore[arg-type]
        margin = room * (high - low)
        low = low - margin if self.low is None else self.low
        high = high + margin if self.high is None else self.high
        return (low, high) if high > low else (low, low + 1.0)


@dataclass
class Plot:
    """Marks on two axes.

    Parameters
    ----------
    key: unique in the report; the SVG's ids begin with it.
    title: what it shows. description: what a reader who cannot see it should know.
    """

    key: str
    title: str
    description: str
    x: Axis
    y: Axis
    marks: list[Mark] = field(default_factory=list)
    height: int = HEIGHT

    def add(self, *marks: Mark) -> Plot:
        self.marks.extend(marks)
        return self

    def svg(self) -> Html:
        x_low, x_high = self.x.range([m.xs() for m in self.marks], 0.02)
        y_low, y_high = self.y.range([m.ys() for m in self.marks], 0.05)
        x_at = list(self.x.at) if self.x.at is not None else ticks(x_low, x_high, 5)
        y_at = list(self.y.at) if self.y.at is not None else ticks(y_low, y_high, 6)
        x_words = list(self.x.names or tick_labels(x_at))
        y_words = list(self.y.names or tick_labels(y_at))
        labelled = [m for m in self.marks if m.label]
        rows = _legend_rows([m.label or "" for m in labelled])
        left = (32 if self.y.label else 14) + LETTER * max((len(w) for w in y_words), default=1)
        right = WIDTH - 14 - 0.35 * LETTER * (len(x_words[-1]) if x_words else 1)
        top, bottom = 12 + 20 * len(rows), self.height - 48
        across, up = Scale(x_low, x_high, left, right), Scale(y_low, y_high, bottom, top)
        parts: list[Content] = [
            tag("title", {"id": f"{self.key}-title"}, self.title),
            tag("desc", {"id": f"{self.key}-desc"}, self.description),
        ]
        for value, word in zip(y_at, y_words, strict=True):
            y = f"{up(value):.1f}"
            parts.append(tag("line", {"class": "grid", "x1": left, "x2": right, "y1": y, "y2": y}))
            place: dict[str, object] = {
                "x": f"{left - 8:.1f}",
                "y": y,
                "dominant-baseline": "central",
            }
            parts.append(tag("text", {"class": "tick", "text-anchor": "end", **place}, word))
        for value, word in zip(x_at, x_words, strict=True):
            place = {"x": f"{across(value):.1f}", "y": bottom + 18, "text-anchor": "middle"}
            parts.append(tag("text", {"class": "tick", **place}, word))
        axis = {"x1": left, "x2": right, "y1": bottom, "y2": bottom}
        parts.append(tag("line", {"class": "axis", **axis}))
        parts.extend(piece for mark in self.marks for piece in mark.draw(across, up))
        parts.append(
            tag(
                "text",
                {"class": "label", "x": f"{(left + right) / 2:.1f}", "y": self.height - 8,
                 "text-anchor": "middle"},
                cut(self.x.label, 52),
            )
        )  # fmt: skip
        middle = f"{(top + bottom) / 2:.1f}"
        turned = {"transform": f"translate(13 {middle}) rotate(-90)", "text-anchor": "middle"}
        if self.y.label:
            parts.append(tag("text", {"class": "label", **turned}, cut(self.y.label, 34)))
        parts.extend(_legend(labelled, rows, left))
        return svg(self.key, parts, WIDTH, self.height)


def svg(key: str, parts: Sequence[Content], width: float, height: float) -> Html:
    """The element itself; its first two parts are the title and the description."""
    return tag(
        "svg",
        {
            "viewBox": f"0 0 {width:g} {height:g}",
            "role": "img",
            "aria-labelledby": f"{key}-title {key}-desc",
            "focusable": "false",
        },
        list(parts),
    )


class Chart(Protocol):
    """Anything with a title that draws itself."""

    title: str

    def svg(self) -> Html: ...


def figure(chart: Chart, caption: Content, table: Html | None, wide: bool = False) -> Html:
    """A chart, what to see in it, and its values behind a disclosure."""
    drawn = chart.svg()
    title = tag("strong", None, chart.title)
    values = None
    if table is not None:
        values = tag(
            "details",
            {"class": "data"},
            tag(
                "summary",
                None,
                "Values as a table",
                tag("span", {"class": "unseen"}, f": {chart.title}"),
            ),
            table,
        )
    return tag(
        "figure",
        {"class": "wide" if wide else None},
        tag("figcaption", None, title, " ", tag("span", {"class": "quiet"}, caption)),
        drawn,
        values,
    )


def _legend_rows(labels: Sequence[str]) -> list[list[int]]:
    """Entries by line: as many as fit the width."""
    rows: list[list[int]] = []
    used = 0.0
    for k, label in enumerate(labels):
        need = 40 + LETTER * len(label)
        if not rows or used + need > WIDTH - 50:
            rows.append([])
            used = 0.0
        rows[-1].append(k)
        used += need
    return rows


def _legend(marks: Sequence[Mark], rows: Sequence[Sequence[int]], left: float) -> list[Html]:
    parts = []
    for line, row in enumerate(rows):
        x, y = left, 10.0 + 20 * line
        for k in row:
            mark = marks[k]
            parts.append(mark.key(x, y))
            place = {"x": f"{x + 28:.1f}", "y": y, "dominant-baseline": "central"}
            parts.append(tag("text", {"class": "tick", **place}, mark.label))
            x += 40 + LETTER * len(mark.label or "")
    return parts
