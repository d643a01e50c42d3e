"""HTML that is safe by construction: the one path from text to the page.

`tag` is the only way to make an element. A `str` given to it is text and is escaped, whoever wrote
it; only what `tag` made is taken as markup. Elements and attributes that could run code or fetch
something are refused here, so that a report cannot hold them by accident.

Text is also made harmless to read: control characters, lone surrogates, and the characters that
reorder or hide what surrounds them (bidirectional overrides, marks, zero-width spaces) are written
out as U+XXXX.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from doxa.errors import DataError

Content = Any  # Html, str, a number, None, or an iterable of them

VOID: Final = frozenset({"meta", "img", "br", "hr"})
ELEMENTS: Final = VOID | frozenset(
    {
        "html", "head", "title", "body", "header", "main", "footer", "nav", "section", "article",
        "h1", "h2", "h3", "h4", "p", "a", "ul", "ol", "li", "dl", "dt", "dd", "div", "span", "bdi",
        "strong", "em", "code", "pre", "table", "caption", "thead", "tbody", "tr", "th", "td",
        "figure", "figcaption", "details", "summary", "svg", "desc", "g", "path", "line", "rect",
        "circle", "text", "tspan", "image", "abbr", "sup", "sub",
    }
)  # fmt: skip
ATTRIBUTES: Final = frozenset(
    {
        "id", "class", "lang", "dir", "charset", "name", "content", "http-equiv", "href", "src",
        "alt", "title", "scope", "role", "tabindex", "open", "width", "height", "colspan",
        "viewBox", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "rx", "d", "transform",
        "text-anchor", "dominant-baseline", "preserveAspectRatio", "focusable", "opacity",
        "aria-label", "aria-labelledby", "aria-describedby", "aria-hidden", "fill-opacity",
    }
)  # fmt: skip
PNG: Final = "data:image/png;base64,"

# C0 and C1 controls, format characters that reorder or hide, surrogates, non-characters.
_UNREADABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


@final
class Html:
    """Markup that `tag`, `join` or `raw_style` made. Not a str: it cannot be built by adding."""

    __slots__ = ("_source",)

    def __init__(self, source: str, _key: object = None) -> None:
        if _key is not _MINE:
            raise TypeError("markup is made by tag(), never from a string")
        self._source = source

    def __str__(self) -> str:
        return self._source


_MINE = object()


def readable(value: object, keep: str = "") -> str:
    """Text in which every character can be seen; those in `keep` are left as they are."""

    def written_out(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else f"⟨U+{ord(character):04X}⟩"

    return _UNREADABLE.sub(written_out, str(value))


def tag(name: str, attributes: Mapping[str, object] | None = None, *content: Content) -> Html:
    """<name …>content</name>; an attribute that is None or False is left out, True is bare."""
    if name not in ELEMENTS:
        raise DataError(f"a report has no <{name}> element")
    shown = "".join(_attribute(name, key, value) for key, value in (attributes or {}).items())
    if name in VOID:
        return Html(f"<{name}{shown}>", _MINE)
    keep = "\n" if name in ("pre", "code") else ""
    return Html(f"<{name}{shown}>{_content(content, keep)}</{name}>", _MINE)


def join(*content: Content) -> Html:
    """Several pieces one after the other, text escaped."""
    return Html(_content(content), _MINE)


def raw_style(css: str) -> Html:
    """The one <style> block: our own file, which may not hold data or end the element."""
    if any(word in css.lower() for word in ("<", "url(", "@import")):
        raise DataError("the style sheet must not hold markup or fetch anything")
    return Html(f"<style>{css}</style>", _MINE)


def document(head: Html, body: Html, lang: str = "en") -> str:
    """The whole file."""
    return f"<!DOCTYPE html>\n{tag('html', {'lang': lang}, head, body)}\n"


def _content(pieces: Iterable[Content], keep: str = "") -> str:
    parts = []
    for piece in pieces:
        if piece is None or piece is False:
            continue
        if isinstance(piece, Html):
            parts.append(str(piece))
        elif isinstance(piece, (str, int, float)):
            parts.append(html.escape(readable(piece, keep), quote=True))
        elif isinstance(piece, Iterable):
            parts.append(_content(piece, keep))
        else:
            raise DataError(f"a report cannot show {type(piece).__name__} as it is; say it in text")
    return "".join(parts)


def _attribute(element: str, key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    if key not in ATTRIBUTES:
        raise DataError(f"a report has no attribute {key!r}")
    if value is True:
        return f" {key}"
    text = readable(value)
    inside = text.startswith("#") if element != "image" else text.startswith(PNG)
    if (key == "href" and not inside) or (key == "src" and not text.startswith(PNG)):
        raise DataError(f"a report fetches nothing: {key} of <{element}> leads out of the file")
    return f' {key}="{html.escape(text, quote=True)}"'
