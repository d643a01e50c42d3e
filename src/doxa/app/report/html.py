"""HTML of a report: Jinja2 templates with autoescape, and a check of the whole page.

The sections of a page are made from the components below. Each component is a macro of
`templates/components.html`. All text that is passed to a component is escaped, also text of doxa
itself. Invisible characters and characters that reorder their neighbours (controls, bidirectional
overrides, zero-width spaces, lone surrogates) are replaced by U+XXXX. Only the results of
components are used as markup. `render_page` assembles the page. It raises an error if the page
contains anything that could run code or load a resource. So a page with such an error in a template
is never written.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import doxa
from doxa.app.report.text import short
from doxa.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

    from doxa.app.report.charts import Chart

Content = Any  # markup, text, a number, None, or a sequence of them

LONGEST_NAME: Final = 40  # largest number of characters of a name in running text
FULL_NAMES: Final = 200_000  # largest number of characters in the list of full names of a page
MOST_VALUES: Final = 60  # largest number of rows in the table of a chart
PNG: Final = "data:image/png;base64,"
SIGNS = {"good": "✓", "slight": "○", "warning": "!", "bad": "✕", "none": "–"}

# C0 and C1 controls, format characters that reorder or hide, surrogates, non-characters.
_UNREADABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


def readable(value: object, keep: str = "") -> str:
    """The text with invisible characters replaced, except for those in `keep`."""

    def written_out(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else f"⟨U+{ord(character):04X}⟩"

    return _UNREADABLE.sub(written_out, str(value))


def cut(name: object, longest: int = LONGEST_NAME) -> str:
    """A name for SVG text and attributes, readable and of at most `longest` characters."""
    text = str(name)
    return readable(text if len(text) <= longest else text[: longest - 1].rstrip() + "…") or (
        "(empty)"
    )


def join(*pieces: Content) -> Markup:
    """Concatenate pieces of content. Text is escaped."""
    from markupsafe import Markup

    return Markup("").join(_output(piece) for piece in pieces)


def _output(value: Content) -> Any:
    """The form in which a template writes a value. Text is escaped afterwards."""
    if value is None or value is False:
        return ""
    if hasattr(value, "__html__"):
        return value
    if isinstance(value, (str, int, float)):
        return readable(value)
    if isinstance(value, Iterable):
        return join(*value)
    raise DataError(f"a page cannot show {type(value).__name__} as it is; give text")


def _lines(text: str) -> Markup:
    """Text of a <pre> or <code>, which keeps its line breaks."""
    from markupsafe import escape

    return escape(readable(text, keep="\n"))


@cache
def environment() -> jinja2.Environment:
    """The template environment. Every expression is made readable, then escaped."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra("HTML pages need jinja2: pip install 'doxa[report]'") from error
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("doxa.app.report", "templates"),
        autoescape=True,
        finalize=_output,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["lines"] = _lines
    return found


@cache
def _components() -> Any:
    return environment().get_template("components.html").module


def _make(component: str, *values: Any) -> Markup:
    return getattr(_components(), component)(*values)


def paragraph(*content: Content, look: str = "") -> Markup:
    return _make("paragraph", content, look)


def heading(content: Content) -> Markup:
    return _make("heading", content)


def strong(content: Content) -> Markup:
    return _make("strong", content)


def quiet(content: Content) -> Markup:
    return _make("quiet", content)


def code(text: str) -> Markup:
    return _make("code", text)


def link(key: str, content: Content) -> Markup:
    """A link to the element of this page whose id is `key`."""
    return _make("link", key, content)


def mark(look: str, content: Content) -> Markup:
    """A status label: a sign, a word and a colour that have the same meaning."""
    look = look if look in SIGNS else "none"
    return _make("mark", look, SIGNS[look], content)


def items(contents: Sequence[Content]) -> Markup | None:
    """A list. None if it has no items."""
    return _make("items", contents) if contents else None


def pair(charts: Sequence[Content]) -> Markup | None:
    """Two or more figures side by side."""
    shown = [chart for chart in charts if chart is not None]
    return _make("box", "pair", shown) if shown else None


def cards(*contents: Content) -> Markup:
    return _make("box", "facts", contents)


def card(title: str, pairs: Iterable[tuple[str, Content]]) -> Markup:
    """A titled list of terms and their values."""
    return _make("card", title, terms(pairs))


def boxed(title: str, *contents: Content) -> Markup:
    return _make("card", title, contents)


def terms(pairs: Iterable[tuple[str, Content]]) -> Markup:
    """A list of terms and their values. Terms without a value are omitted."""
    known = [(term, _cell(what)) for term, what in pairs if what is not None and what != ""]
    return _make("terms", known)


def code_block(label: str, text: str, tall: bool = False) -> Markup:
    return _make("code_block", label, text, tall)


def disclosure(summary: str, *contents: Content) -> Markup:
    return _make("disclosure", summary, contents)


def tiles(label: str, entries: Sequence[tuple[str, str, str]]) -> Markup | None:
    """Large numbers, each given as (number, label, note)."""
    return _make("tiles", label, entries) if entries else None


def findings(entries: Sequence[tuple[Content, str, str, str]]) -> Markup:
    """Findings, each given as (mark, check, text, advice)."""
    return _make("findings", entries)


def gallery(entries: Sequence[tuple[Sequence[Picture], Sequence[Content]]]) -> Markup:
    """Pictures with lines of text below them."""
    drawn = [([picture.values() for picture in pictures], lines) for pictures, lines in entries]
    return _make("gallery", drawn)


@dataclass(frozen=True)
class Picture:
    """Pixels [H, W] or [H, W, 3] in 0 … 1, with a description for screen readers."""

    pixels: Any
    label: str

    def values(self) -> tuple[str, str, int, int]:
        from doxa.app.figures import encode

        height, width = self.pixels.shape[:2]
        return base64.b64encode(encode(self.pixels)).decode("ascii"), self.label, width, height


@dataclass(frozen=True)
class Wrapped:
    """A cell of a table that holds running text, which may wrap."""

    content: Content


def table(
    caption: str,
    columns: Sequence[Content],
    rows: Iterable[Sequence[Content]],
    *,
    tall: bool = False,
    right: Sequence[int] = (),
    quiet: bool = False,
) -> Markup:
    """A table. The first column has the headings of the rows. Numbers are right-aligned.

    Parameters
    ----------
    caption : str
        The caption.
    columns : sequence of Content
        The headings of the columns.
    rows : iterable of sequence of Content
        The cells of each row.
    tall : bool
        Show the whole table, without a limit on its height.
    right : sequence of int
        The columns that are right-aligned because they have numbers.
    quiet : bool
        Show the caption to screen readers only, because it repeats a heading.
    """
    rows = [list(row) for row in rows]
    first = rows[0] if rows else []
    numeric = [k > 0 and (k in right or _is_number(cell)) for k, cell in enumerate(first)]
    numeric += [False] * (len(columns) - len(numeric))

    def look(k: int, cell: Content) -> str:
        return "words" if isinstance(cell, Wrapped) else "right" * (k in right or _is_number(cell))

    body = [[(_cell(cell), look(k, cell)) for k, cell in enumerate(row)] for row in rows]
    return _make("table", caption, list(zip(columns, numeric, strict=True)), body, tall, quiet)


def _values(title: str, series: Sequence[tuple[str, Iterable[float]]]) -> Markup:
    """The values of a chart as a table, with at most `MOST_VALUES` evenly spaced rows."""
    caption = f"Values of the chart: {title}"
    rows = list(zip(*(list(values) for _, values in series), strict=True))
    if len(rows) > MOST_VALUES:
        step = (len(rows) - 1) / (MOST_VALUES - 1)
        caption = f"{caption} ({MOST_VALUES} of {len(rows):,} rows, evenly taken)"
        rows = [rows[round(k * step)] for k in range(MOST_VALUES)]
    return table(caption, [name for name, _ in series], [list(map(float, row)) for row in rows])


def _cell(cell: Content) -> Content:
    if isinstance(cell, Wrapped):
        return cell.content
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}".replace("-", "−")
    return short(cell) if isinstance(cell, float) else cell


def _is_number(cell: Content) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def drawing(chart: Chart) -> Markup:
    """A chart as inline SVG, with its title and description for screen readers."""
    width, height, shapes = chart.draw()
    size = f"{width:g}", f"{height:g}"
    return _make("svg", chart.key, chart.title, chart.description, *size, shapes)


def figure(
    chart: Chart,
    caption: Content,
    values: Markup | Sequence[tuple[str, Iterable[float]]],
    wide: bool = False,
) -> Markup:
    """A figure: a chart, a text about it, and its values in a collapsed element. `values` is a
    table, or its columns as pairs (name, numbers)."""
    if not hasattr(values, "__html__"):
        values = _values(chart.title, values)
    return _make("figure", chart.title, caption, drawing(chart), values, wide)


class Names:
    """Names of columns, classes, rows and files on one page. They come from the data, and may be
    any text.

    In running text, each name is put into <bdi>, so that a name written from right to left does not
    reorder its neighbours. Attributes and SVG have no <bdi>, so `cut` is used there. A long name is
    shortened, with a link to a list of full names at the end of the page.
    """

    def __init__(self) -> None:
        self._long: dict[str, int] = {}

    def show(self, name: object, longest: int = LONGEST_NAME) -> Markup:
        """A name in running text or in a table."""
        text = str(name)
        if text.strip() == "":
            return _make("no_name", "(empty)" if text == "" else "(blank)")
        if len(text) <= longest:
            return _make("name", text, None, "")
        number = self._long.setdefault(text, len(self._long) + 1)
        shown = cut(text, longest)
        label = f"{shown} (cut; all {len(text):,} characters at the end of the report)"
        return _make("name", shown, number, label)

    def listed(self, names: Sequence[object], most: int = 8) -> Content:
        """Several names, and the number of those that are not shown."""
        shown = [[", " if k else None, self.show(name)] for k, name in enumerate(names[:most])]
        return [*shown, f" and {len(names) - most} more" if len(names) > most else None]

    def list_in_full(self) -> Markup | None:
        """The full forms of the shortened names, up to `FULL_NAMES` characters. None if no name was
        shortened."""
        left, entries = FULL_NAMES, []
        for text, number in self._long.items():
            whole = text[:left]
            left -= len(whole)
            rest = len(text) - len(whole)
            note = f" … and {rest:,} characters more" if rest else ""
            entries.append((number, f"{len(text):,}", whole, note))
        return _make("long_names", entries) if entries else None


@dataclass(frozen=True)
class Section:
    """One section of a page. `key` is its anchor."""

    key: str
    title: str
    content: Content


def render_page(
    *,
    title: str,
    over: str,
    heading: Content,
    marks: Content,
    lead: Content,
    sections: Sequence[Section],
    names: Names,
    tiles: Content = None,
) -> str:
    """The whole document as text, checked by `check_page`."""
    whole = names.list_in_full()
    if whole is not None:
        sections = [*sections, Section("names", "Long names in full", whole)]
    text = environment().get_template("page.html").render(
        title=title, over=over, heading=heading, marks=marks, lead=lead, tiles=tiles,
        sections=sections, policy=policy(), style=style_sheet(), version=doxa.__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )  # fmt: skip
    check_page(text)
    return text + "\n"


@cache
def style_sheet() -> Markup:
    """The style sheet. It is a file of this package, and contains no data of the user."""
    from markupsafe import Markup

    sheet = files("doxa.app.report").joinpath("templates", "style.css").read_text(encoding="utf-8")
    return Markup(check_style(sheet.strip()))


def check_style(css: str) -> str:
    """Raise an error if the style sheet could end its element or load a resource."""
    if any(word in css.lower() for word in ("<", "url(", "@import")):
        raise DataError("the style sheet must not hold markup or fetch anything")
    return css


def policy() -> str:
    """The content security policy. It forbids code and resources, and allows one style block by its
    hash."""
    digest = base64.b64encode(hashlib.sha256(style_sheet().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


ELEMENTS: Final = frozenset({
    "html", "head", "title", "style", "meta", "body", "header", "main", "footer", "nav", "section",
    "h1", "h2", "h3", "p", "a", "ul", "ol", "li", "dl", "dt", "dd", "div", "span", "bdi", "strong",
    "em", "code", "pre", "br", "img", "table", "caption", "thead", "tbody", "tr", "th", "td",
    "figure", "figcaption", "details", "summary", "svg", "desc", "path", "line", "rect", "circle",
    "text",
})  # fmt: skip
ATTRIBUTES: Final = frozenset({
    "id", "class", "lang", "charset", "name", "content", "http-equiv", "href", "src", "alt",
    "scope", "role", "tabindex", "width", "height", "viewbox", "x", "y", "x1", "y1", "x2", "y2",
    "cx", "cy", "r", "rx", "d", "transform", "text-anchor", "dominant-baseline", "focusable",
    "fill-opacity", "aria-label", "aria-labelledby",
})  # fmt: skip


class _Check(HTMLParser):
    """Raises an error at the first element or attribute that a page must not have."""

    styles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            raise DataError(f"a page has no <{tag}> element")
        self.styles += tag == "style"
        if self.styles > 1:
            raise DataError("a page has one <style> element")
        for key, value in attrs:
            if key not in ATTRIBUTES:
                raise DataError(f"a page has no attribute {key!r}")
            start = {"href": "#", "src": PNG}.get(key)
            if start is not None and not (value or "").startswith(start):
                raise DataError(f"a page fetches nothing: {key} of <{tag}> leads out of the file")


def check_page(text: str) -> None:
    """Raise an error if the markup could run code or load a resource."""
    checker = _Check(convert_charrefs=True)
    checker.feed(text)
    checker.close()
