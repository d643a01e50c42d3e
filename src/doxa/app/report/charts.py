"""Charts as inline SVG: scales, marks, plots with two axes, and grids of counts.

A chart has a key, a title and a description. Its method `draw` returns shapes, which `html.drawing`
writes as SVG. The style of a mark is a class of the style sheet ("one", "two", …), which sets a
colour and a dash pattern. So light, dark and print styles are defined in one place, and series can
be distinguished without colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from doxa.app.report.html import cut
from doxa.app.report.text import short

Array = np.ndarray[Any, np.dtype[Any]]

LARGEST = 1e300  # differences of larger numbers may overflow
MOST_POINTS = 240  # largest number of points on one line; more could not be distinguished
WIDTH, HEIGHT = 440, 290  # one unit is one pixel on a desktop, so that text keeps its size
LETTER = 7.5  # width of a letter of a label in a wide font (a digit of DejaVu Sans is 0.636 em)


@dataclass(frozen=True)
class Shape:
    """One SVG element. Its kind is "path", "line", "rect", "circle" or "text"."""

    kind: str
    look: str
    at: dict[str, object]
    text: str = ""


class Chart(Protocol):
    """A chart. `key` is unique in the page, and the ids of its elements begin with it."""

    key: str
    title: str
    description: str

    def draw(self) -> tuple[float, float, list[Shape]]:
        """The chart as (width, height, shapes)."""
        ...


def finite(values: Iterable[float]) -> Array:
    """The finite values, which can be drawn."""
    given = np.asarray(values if isinstance(values, np.ndarray) else list(values), float).ravel()
    return given[np.isfinite(given) & (np.abs(given) < LARGEST)]


def extent(parts: Sequence[Iterable[float]]) -> tuple[float, float]:
    """The range of all finite values, or (0, 1) if there are none. Its width is never zero."""
    known = [values for values in map(finite, parts) if values.size]
    if not known:
        return 0.0, 1.0
    low = float(min(values.min() for values in known))
    high = float(max(values.max() for values in known))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.5 * max(abs(low), abs(high)) or 0.5
        return low - margin, high + margin
    return low, high


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About `about` round values inside [low, high]. Their distance is 1, 2 or 5 times a power of
    ten."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough), 10.0 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of values, with as many digits as are needed to distinguish them."""
    if not values:
        return []
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    largest = max(map(abs, values))
    if largest >= 1e6 or (largest and largest < 1e-3):
        first, last = (math.floor(math.log10(size) + 1e-9) for size in (largest, step))
        return [short(v, max(3, 1 + first - last)) for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:,.{digits}f}".replace("-", "−") for v in (v + 0.0 for v in values)]


@dataclass(frozen=True)
class Scale:
    """A linear map from [low, high] to pixels [start, end]. Values outside are clamped to just
    beyond the ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = min(max((value - self.low) / (self.high - self.low), -0.02), 1.02)
        return self.start + share * (self.end - self.start)


def _drawable(*values: float) -> bool:
    return all(math.isfinite(value) and abs(value) < LARGEST for value in values)


def _thinned(values: Array) -> Array:
    if values.size <= MOST_POINTS:
        return values
    return values[np.linspace(0, values.size - 1, MOST_POINTS).round().astype(int)]


def _path(x: Array, y: Array, across: Scale, up: Scale) -> str:
    """The path of a line through points, with a gap where a point cannot be drawn."""
    steps, pen = [], "M"
    for a, b in zip(_thinned(x).tolist(), _thinned(y).tolist(), strict=True):
        if _drawable(a, b):
            steps.append(f"{pen}{across(a):.1f} {up(b):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(steps)


def _box(look: str, x: float, y: float, width: float, height: float, **more: Any) -> Shape:
    place = {"x": x, "y": y, "width": width, "height": height}
    return Shape("rect", look, {name: f"{v:.1f}" for name, v in place.items()} | more)


class Mark(Protocol):
    """A series in a plot, with the ranges of its values and its symbol in the legend."""

    @property
    def label(self) -> str | None: ...

    def xs(self) -> Array: ...

    def ys(self) -> Array: ...

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]: ...

    def sign(self, x: float, y: float) -> Shape: ...


@dataclass(frozen=True)
class _At:
    """A mark at points (x, y)."""

    x: Array
    y: Array
    look: str = "one"
    label: str | None = None

    def xs(self) -> Array:
        return self.x

    def ys(self) -> Array:
        return self.y


@dataclass(frozen=True)
class Line(_At):
    """A curve, with gaps where y is not finite."""

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]:
        if d := _path(self.x, self.y, across, up):
            yield Shape("path", f"line {self.look}", {"d": d})

    def sign(self, x: float, y: float) -> Shape:
        return Shape("path", f"line {self.look}", {"d": f"M{x:.0f} {y:.0f}h22"})


@dataclass(frozen=True)
class Points(_At):
    """Circles: filled ("one") or open ("two")."""

    radius: float = 2.6

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]:
        for x, y in zip(self.x.tolist(), self.y.tolist(), strict=True):
            if _drawable(x, y):
                place = {"cx": f"{across(x):.1f}", "cy": f"{up(y):.1f}", "r": self.radius}
                yield Shape("circle", f"point {self.look}", place)

    def sign(self, x: float, y: float) -> Shape:
        return Shape("circle", f"point {self.look}", {"cx": x + 11, "cy": y, "r": 3.5})


@dataclass(frozen=True)
class _Between:
    """A mark between two heights."""

    x: Array
    low: Array
    high: Array
    look: str = "one"
    label: str | None = None

    def xs(self) -> Array:
        return self.x

    def ys(self) -> Array:
        return np.concatenate([self.low, self.high])


@dataclass(frozen=True)
class Ribbon(_Between):
    """The area between two curves."""

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]:
        known = np.isfinite(self.low) & np.isfinite(self.high) & np.isfinite(self.x)
        x, low, high = (_thinned(v[known]) for v in (self.x, self.low, self.high))
        if x.size > 1:
            there = _path(x, high, across, up)
            back = _path(x[::-1], low[::-1], across, up).replace("M", "L", 1)
            yield Shape("path", f"ribbon {self.look}", {"d": f"{there}{back}Z"})

    def sign(self, x: float, y: float) -> Shape:
        return _box(f"ribbon {self.look}", x, y - 5, 22, 10)


@dataclass(frozen=True)
class Segments(_Between):
    """Vertical intervals."""

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]:
        rows = zip(self.x.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        d = "".join(
            f"M{across(x):.1f} {up(low):.1f}V{up(high):.1f}"
            for x, low, high in rows
            if _drawable(x, low, high)
        )
        if d:
            yield Shape("path", f"segment {self.look}", {"d": d})

    def sign(self, x: float, y: float) -> Shape:
        return Shape("path", f"segment {self.look}", {"d": f"M{x + 11:.0f} {y - 6:.0f}v12"})


@dataclass(frozen=True)
class Bars:
    """Vertical bars between consecutive edges, stacked on `under`."""

    edges: Array
    heights: Array
    look: str = "one"
    label: str | None = None
    under: Array | None = None

    def xs(self) -> Array:
        return self.edges

    def ys(self) -> Array:
        return np.concatenate([[0.0], self.heights + self._base()])

    def _base(self) -> Array:
        return np.zeros_like(self.heights) if self.under is None else self.under

    def draw(self, across: Scale, up: Scale) -> Iterator[Shape]:
        for k, (height, base) in enumerate(zip(self.heights, self._base(), strict=True)):
            if not np.isfinite(height) or height <= 0:
                continue
            left, right = across(float(self.edges[k])), across(float(self.edges[k + 1]))
            top, bottom = up(float(base + height)), up(float(base))
            gap = min(1.0, 0.1 * (right - left))
            size = right - left - 2 * gap, bottom - top
            yield _box(f"bar {self.look}", left + gap, top, *size)

    def sign(self, x: float, y: float) -> Shape:
        return _box(f"bar {self.look}", x, y - 5, 22, 10)


@dataclass(frozen=True)
class Axis:
    """One axis. `low` and `high` are set if the limits should not depend on the data. The label is
    empty if the names at the ticks are sufficient."""

    label: str
    low: float | None = None
    high: float | None = None
    at: Sequence[float] | None = None
    names: Sequence[str] | None = None

    def range(self, parts: Sequence[Iterable[float]], room: float) -> tuple[float, float]:
        low, high = extent(parts)
        margin = room * (high - low)
        low = low - margin if self.low is None else self.low
        high = high + margin if self.high is None else self.high
        return (low, high) if high > low else (low, low + 1.0)

    def marks(self, low: float, high: float, about: int) -> tuple[list[float], list[str]]:
        """The positions and labels of the ticks."""
        at = ticks(low, high, about) if self.at is None else list(self.at)
        return at, list(self.names or tick_labels(at))


@dataclass
class Plot:
    """Marks on two axes, with a title and with a description for screen readers."""

    key: str
    title: str
    description: str
    x: Axis
    y: Axis
    marks: list[Mark] = field(default_factory=list)
    height: int = HEIGHT

    def draw(self) -> tuple[float, float, list[Shape]]:
        x_range = self.x.range([m.xs() for m in self.marks], 0.02)
        y_range = self.y.range([m.ys() for m in self.marks], 0.05)
        x_at, x_texts = self.x.marks(*x_range, 5)
        y_at, y_texts = self.y.marks(*y_range, 6)
        labelled = [m for m in self.marks if m.label]
        rows = _legend_rows([m.label or "" for m in labelled])
        left = (32 if self.y.label else 14) + LETTER * max((len(t) for t in y_texts), default=1)
        right = WIDTH - 14 - 0.35 * LETTER * (len(x_texts[-1]) if x_texts else 1)
        top, bottom = 12 + 20 * len(rows), self.height - 48
        across, up = Scale(*x_range, left, right), Scale(*y_range, bottom, top)
        shapes = []
        for value, text in zip(y_at, y_texts, strict=True):
            y = f"{up(value):.1f}"
            shapes.append(Shape("line", "grid", {"x1": left, "x2": right, "y1": y, "y2": y}))
            shapes.append(_text("tick", left - 8, up(value), text, "end", central=True))
        for value, text in zip(x_at, x_texts, strict=True):
            shapes.append(_text("tick", across(value), bottom + 18, text, "middle"))
        ends = {"x1": left, "x2": right, "y1": bottom, "y2": bottom}
        shapes.append(Shape("line", "axis", dict(ends)))
        shapes += [shape for mark in self.marks for shape in mark.draw(across, up)]
        x_label = cut(self.x.label, 52) if self.x.label else ""
        shapes.append(_text("label", (left + right) / 2, self.height - 8, x_label, "middle"))
        if self.y.label:
            shapes.append(_turned((top + bottom) / 2, cut(self.y.label, 34)))
        return WIDTH, self.height, shapes + _legend(labelled, rows, left)


def _text(
    look: str, x: float, y: float, text: str, anchor: str = "start", central: bool = False
) -> Shape:
    place: dict[str, object] = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
    if central:
        place["dominant-baseline"] = "central"
    return Shape("text", look, place, text)


def _turned(middle: float, text: str) -> Shape:
    """The rotated label of a vertical axis."""
    turn = f"translate(13 {middle:.1f}) rotate(-90)"
    return Shape("text", "label", {"text-anchor": "middle", "transform": turn}, text)


def _legend_rows(labels: Sequence[str]) -> list[list[int]]:
    """The entries of the legend, divided into lines that fit the width."""
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


def _legend(marks: Sequence[Mark], rows: Sequence[Sequence[int]], left: float) -> list[Shape]:
    shapes = []
    for line, row in enumerate(rows):
        x, y = left, 10.0 + 20 * line
        for k in row:
            label = marks[k].label or ""
            shapes += [marks[k].sign(x, y), _text("tick", x + 28, y, label, central=True)]
            x += 40 + LETTER * len(label)
    return shapes


@dataclass
class Grid:
    """A table of counts [rows, columns] as shaded cells with numbers, such as a confusion matrix.
    The shade of a cell is the share of its count in its row."""

    key: str
    title: str
    description: str
    rows: Sequence[str]
    columns: Sequence[str]
    counts: Array
    row_label: str
    column_label: str

    def draw(self) -> tuple[float, float, list[Shape]]:
        row_names = [cut(name, 14) for name in self.rows]
        left = 38 + LETTER * max(map(len, row_names))
        width = (WIDTH - 10 - left) / len(self.columns)
        height = min(44.0, max(26.0, width * 0.8))
        top = 48.0
        bottom = top + height * len(self.rows)
        label = _text("label", (left + WIDTH - 10) / 2, 14, self.column_label, "middle", True)
        shapes = [label, _turned((top + bottom) / 2, self.row_label)]
        letters = max(2, int((width - 8) / (1.1 * LETTER)))
        for c, name in enumerate(self.columns):
            x = left + width * (c + 0.5)
            shapes.append(_text("tick", x, 36, cut(name, letters), "middle", True))
        for r, name in enumerate(row_names):
            y = top + height * r
            shapes.append(_text("tick", left - 8, y + height / 2, name, "end", True))
            total = float(self.counts[r].sum())
            for c in range(len(self.columns)):
                count = int(self.counts[r, c])
                box = left + width * c + 1, y + 1, width - 2, height - 2
                shapes.append(_box("cell empty", *box, rx=3))
                if count:
                    shade: dict[str, Any] = {"fill-opacity": f"{0.06 + 0.34 * count / total:.2f}"}
                    look = "cell right" if r == c else "cell wrong"
                    shapes.append(_box(look, *box, rx=3, **shade))
                look = "number" if count else "number none"
                x = left + width * (c + 0.5)
                shapes.append(_text(look, x, y + height / 2, f"{count:,}", "middle", True))
        return WIDTH, bottom + 8, shapes


def as_picture(row: Array, most: int = 64) -> Array | None:
    """One row of x, of shape [1 or 3, H, W] or [H, W], as a picture. None if it is not a picture.
    Values are scaled to their own range, and each side is thinned to at most `most` pixels."""
    if row.ndim == 3 and row.shape[0] in (1, 3):
        row = row[0] if row.shape[0] == 1 else np.moveaxis(row, 0, 2)
    if row.ndim not in (2, 3) or (row.ndim == 3 and row.shape[2] != 3) or min(row.shape[:2]) < 4:
        return None
    step = max(1, -(-max(row.shape[:2]) // most))
    small = row[::step, ::step].astype(float)
    low, high = np.nanmin(small), np.nanmax(small)
    return (small - low) / (high - low) if high > low else np.zeros_like(small)
