"""A table of shares as shaded cells with their numbers in them: a confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from doxa.app.report.charts.marks import Array
from doxa.app.report.charts.plot import LETTER, WIDTH, svg
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import cut


@dataclass
class Grid:
    """Counts [rows, columns]; a cell is shaded by its share of its row."""

    key: str
    title: str
    description: str
    rows: Sequence[str]
    columns: Sequence[str]
    counts: Array
    row_label: str
    column_label: str

    def svg(self) -> Html:
        row_names = [cut(name, 14) for name in self.rows]
        left = 38 + LETTER * max(map(len, row_names))
        width = (WIDTH - 10 - left) / len(self.columns)
        height = min(44.0, max(26.0, width * 0.8))
        top = 48.0
        bottom = top + height * len(self.rows)
        parts: list[Content] = [
            tag("title", {"id": f"{self.key}-title"}, self.title),
            tag("desc", {"id": f"{self.key}-desc"}, self.description),
            _text("label", (left + WIDTH - 10) / 2, 14, self.column_label, "middle"),
            tag(
                "text",
                {"class": "label", "text-anchor": "middle",
                 "transform": f"translate(13 {(top + bottom) / 2:.1f}) rotate(-90)"},
                self.row_label,
            ),
        ]  # fmt: skip
        letters = max(2, int((width - 8) / (1.1 * LETTER)))
        for c, name in enumerate(self.columns):
            parts.append(_text("tick", left + width * (c + 0.5), 36, cut(name, letters), "middle"))
        for r, name in enumerate(row_names):
            y = top + height * r
            parts.append(_text("tick", left - 8, y + height / 2, name, "end"))
            total = float(self.counts[r].sum())
            for c in range(len(self.columns)):
                count = int(self.counts[r, c])
                share = count / total if total else 0.0
                place = {"x": f"{left + width * c + 1:.1f}", "y": f"{y + 1:.1f}"}
                size = {"width": f"{width - 2:.1f}", "height": f"{height - 2:.1f}", "rx": 3}
                look = "cell right" if r == c else "cell wrong"
                parts.append(tag("rect", {"class": "cell empty", **place, **size}))
                shade = {"fill-opacity": f"{0.06 + 0.34 * share:.2f}"} if count else None
                if shade:
                    parts.append(tag("rect", {"class": look, **place, **size, **shade}))
                middle = left + width * (c + 0.5)
                look = "number" if count else "number none"
                parts.append(_text(look, middle, y + height / 2, f"{count:,}", "middle"))
        return svg(self.key, parts, WIDTH, bottom + 8)


def _text(look: str, x: float, y: float, words: str, anchor: str) -> Html:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "dominant-baseline": "central"}
    return tag("text", {"class": look, "text-anchor": anchor, **place}, words)
