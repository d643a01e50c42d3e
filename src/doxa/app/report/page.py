"""The file around the sections: policy, style, landmarks, contents."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from doxa.app.report.markup import Content, Html, document, raw_style, readable, tag


@dataclass(frozen=True)
class Section:
    """One part of the report; `key` is its anchor."""

    key: str
    title: str
    content: Content


@cache
def style() -> str:
    return files("doxa.app.report").joinpath("style.css").read_text(encoding="utf-8").strip()


def policy() -> str:
    """Nothing may run or be fetched; the one style block is known by its hash."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def page(title: str, top: Content, sections: Sequence[Section], foot: Content) -> str:
    """The whole document as text."""
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy()}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "referrer", "content": "no-referrer"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        tag("title", None, readable(title)),
        raw_style(style()),
    )
    links = [tag("li", None, tag("a", {"href": f"#{s.key}"}, s.title)) for s in sections]
    body = tag(
        "body",
        None,
        tag("a", {"class": "skip", "href": "#content"}, "Skip to the content"),
        tag(
            "div",
            {"class": "frame"},
            tag("header", None, top),
            tag("nav", {"aria-label": "Contents"}, tag("ul", None, links)),
            tag("main", {"id": "content", "tabindex": -1}, [_section(s) for s in sections]),
            tag("footer", None, foot),
        ),
    )
    return document(head, body)


def _section(section: Section) -> Html:
    heading = f"{section.key}-heading"
    return tag(
        "section",
        {"id": section.key, "aria-labelledby": heading},
        tag("h2", {"id": heading}, section.title),
        section.content,
    )
