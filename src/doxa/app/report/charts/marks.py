"""What is drawn inside a chart. Each mark knows its values' ranges and how it looks.

The look is a class of the style sheet ("one", "two", …: a colour with its own dashes), so that
light, dark and print differ in one place and no series is told from another by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from doxa.app.report.charts.scales import LARGEST, Scale
from doxa.app.report.markup import Html, tag

Array = np.ndarray[Any, np.dtype[Any]]
MOST_POINTS = 240  # on one line: two a pixel's worth is more than can be seen


@dataclass(frozen=True)
class Line:
    """A curve; where y is not finite there is a gap."""

    x: Array
    y: Array
    look: str = "one"
    label: str | None = None

    def xs(self) -> Array:
        return self.x

    def ys(self) -> Array:
        return self.y

    def draw(self, across: Scale, up: Scale) -> Iterator[Html]:
        d = _path(self.x, self.y, across, up)
        if d:
            yield tag("path", {"class": f"line {self.look}", "d": d})

    def key(self, x: float, y: float) -> Html:
        return tag("path", {"class": f"line {self.look}", "d": f"M{x:.0f} {y:.0f}h22"})


@dataclass(frozen=True)
class _Between:
    """What reaches from one height to another."""

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

    def draw(self, across: Scale, up: Scale) -> Iterator[Html]:
        good = np.isfinite(self.low) & np.isfinite(self.high) & np.isfinite(self.x)
        x, low, high = (_thinned(v[good]) for v in (self.x, self.low, self.high))
        if x.size > 1:
            there = _path(x, high, across, up)
            back = _path(x[::-1], low[::-1], across, up).replace("M", "L", 1)
            yield tag("path", {"class": f"ribbon {self.look}", "d": f"{there}{back}Z"})

    def key(self, x: float, y: float) -> Html:
        return tag(
            "rect",
            {"class": f"ribbon {self.look}", "x": x, "y": y - 5, "width": 22, "height": 10},
        )


@dataclass(frozen=True)
class Points:
    """Marks at places: filled circles ("one"), or open ones ("two")."""

    x: Array
    y: Array
    look: str = "one"
    label: str | None = None
    radius: float = 2.6

    def xs(self) -> Array:
        return self.x

    def ys(self) -> Array:
        return self.y

    def draw(self, across: Scale, up: Scale) -> Iterator[Html]:
        for x, y in zip(self.x.tolist(), self.y.tolist(), strict=True):
            if _drawable(x) and _drawable(y):
                place = {"cx": f"{across(x):.1f}", "cy": f"{up(y):.1f}", "r": self.radius}
                yield tag("circle", {"class": f"point {self.look}", **place})

    def key(self, x: float, y: float) -> Html:
        return tag("circle", {"class": f"point {self.look}", "cx": x + 11, "cy": y, "r": 3.5})


@dataclass(frozen=True)
class Segments(_Between):
    """Upright intervals."""

    def draw(self, across: Scale, up: Scale) -> Iterator[Html]:
        steps = []
        rows = zip(self.x.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        for x, low, high in rows:
            if all(map(_drawable, (x, low, high))):
                steps.append(f"M{across(x):.1f} {up(low):.1f}V{up(high):.1f}")
        if steps:
            yield tag("path", {"class": f"segment {self.look}", "d": "".join(steps)})

    def key(self, x: float, y: float) -> Html:
        return tag("path", {"class": f"segment {self.look}", "d": f"M{x + 11:.0f} {y - 6:.0f}v12"})


@dataclass(frozen=True)
class Bars:
    """Upright bars between consecutive edges, from `base` to heights; stacked on `under`."""

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

    def draw(self, across: Scale, up: Scale) -> Iterator[Html]:
        for k, (height, base) in enumerate(zip(self.heights, self._base(), strict=True)):
            if not np.isfinite(height) or height <= 0:
                continue
            left, right = across(float(self.edges[k])), across(float(self.edges[k + 1]))
            top, bottom = up(float(base + height)), up(float(base))
            gap = min(1.0, 0.1 * (right - left))
            place = {
                "x": f"{left + gap:.1f}", "y": f"{top:.1f}",
                "width": f"{right - left - 2 * gap:.1f}", "height": f"{bottom - top:.1f}",
            }  # fmt: skip
            yield tag("rect", {"class": f"bar {self.look}", **place})

    def key(self, x: float, y: float) -> Html:
        return tag(
            "rect", {"class": f"bar {self.look}", "x": x, "y": y - 5, "width": 22, "height": 10}
        )


Mark = Line | Ribbon | Points | Segments | Bars


def _drawable(value: float) -> bool:
    return bool(np.isfinite(value)) and abs(value) < LARGEST


def _thinned(values: Array) -> Array:
    if values.size <= MOST_POINTS:
        return values
    return values[np.linspace(0, values.size - 1, MOST_POINTS).round().astype(int)]


def _path(x: Array, y: Array, across: Scale, up: Scale) -> str:
    steps, pen = [], "M"
    for a, b in zip(_thinned(x).tolist(), _thinned(y).tolist(), strict=True):
        if _drawable(a) and _drawable(b):
            steps.append(f"{pen}{across(a):.1f} {up(b):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(steps)
