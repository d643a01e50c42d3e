"""Names that come from the data: isolated, cut where they are long, and given in full once.

A column, class, row or file may be called anything. In running text a name stands in bdi, so
that one written from right to left cannot reorder its neighbours; in attributes and in SVG, where
there is no bdi, its reordering characters have been written out (`markup.readable`). A long name
is cut with "…" and links to the list at the end of the report that holds the whole of it.
"""

from __future__ import annotations

from typing import Final

from doxa.app.report.markup import Html, join, readable, tag

SHOWN: Final = 40
FULL_BUDGET: Final = 200_000  # characters of full names in one report


class Names:
    """The names of one report; remembers those that it had to cut."""

    def __init__(self) -> None:
        self._long: dict[str, int] = {}

    def show(self, name: object, most: int = SHOWN) -> Html:
        """A name in running text or a table."""
        text = str(name)
        if text.strip() == "":
            return tag("em", {"class": "quiet"}, "(empty)" if text == "" else "(blank)")
        if len(text) <= most:
            return tag("bdi", {"class": "name"}, text)
        number = self._long.setdefault(text, len(self._long) + 1)
        link = tag(
            "a", {"href": f"#name-{number}", "aria-label": _aria(text, most)}, cut(text, most)
        )
        return tag("bdi", {"class": "name"}, link)

    def list_in_full(self) -> Html | None:
        """Every name that was cut, up to a budget; None if none was."""
        if not self._long:
            return None
        left, items = FULL_BUDGET, []
        for text, number in self._long.items():
            whole = text[:left]
            left -= len(whole)
            rest = len(text) - len(whole)
            note = f" … and {rest:,} characters more" if rest else ""
            box = tag("bdi", {"class": "name"}, whole)
            count = tag("p", {"class": "quiet"}, f"{len(text):,} characters")
            shown = tag(
                "div",
                {"class": "long", "tabindex": 0, "role": "region", "aria-label": f"name {number}"},
                box,
                note,
            )
            items.append(tag("li", {"id": f"name-{number}"}, count, shown))
        return tag("ol", {"class": "names"}, items)


def cut(name: object, most: int = SHOWN) -> str:
    """For SVG text and attributes: at most `most` characters and an ellipsis, all readable."""
    text = str(name)
    short = text if len(text) <= most else text[: most - 1].rstrip() + "…"
    return readable(short) or "(empty)"


def sentence(*parts: str | Html) -> Html:
    return tag("p", None, join(*parts))


def _aria(text: str, most: int) -> str:
    return f"{cut(text, most)} (cut; all {len(text):,} characters at the end of the report)"
