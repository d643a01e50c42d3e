"""The door from text to HTML: nothing that is not ours gets through it."""

from __future__ import annotations

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_names import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

import doxa.app.report
from doxa.app.report import html
from doxa.app.report.html import Names, Section, cut, join, readable
from doxa.errors import DataError

FOLDER = Path(doxa.app.report.__file__).parent


class Tags(HTMLParser):
    """The elements, attributes and text that a browser would see."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
@given(st.text())
def test_any_text_is_only_text_in_content_and_in_attributes(text: str) -> None:
    picture = html.gallery([([html.Picture(np.zeros((4, 4)), text)], [text, html.strong(text)])])
    seen = Tags(str(picture))
    assert seen.tags == ["ul", "li", "img", "br", "strong"]
    assert [name for name, _ in seen.attributes] == ["class", "src", "alt", "width", "height"]
    assert dict(seen.attributes)["alt"] == readable(text)
    assert seen.text.strip() == (2 * readable(text)).strip()
    code = Tags(str(html.code(text)))
    assert code.tags == ["code"] and code.text == readable(text, keep="\n")


@given(st.text())
def test_readable_text_has_no_character_that_hides_or_reorders(text: str) -> None:
    import unicodedata

    shown = readable(text)
    reordering = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN"}
    for character in shown:
        assert unicodedata.category(character) not in ("Cc", "Cs")
        if character not in "\u200c\u200d":  # the joiners that scripts and emoji need
            assert unicodedata.bidirectional(character) not in reordering or (
                unicodedata.category(character) not in ("Cf",)
            )
    shown.encode("utf-8")
    if text.isascii() and text.isprintable():
        assert shown == text


def test_a_string_is_text_and_an_object_is_refused() -> None:
    assert str(join("<b>")) == "&lt;b&gt;"
    assert str(join(["<b>", [html.strong("<i>"), None, 3]])) == (
        "&lt;b&gt;<strong>&lt;i&gt;</strong>3"
    )
    with pytest.raises(DataError, match="give text"):
        join(object())


def rendered(**parts: Any) -> str:
    given = {"title": "t", "over": "o", "heading": "h", "marks": "m", "lead": "l", "sections": []}
    return html.render_page(**{**given, "names": Names(), **parts})


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", ["title", "over", "heading", "marks", "lead", "tiles"])
def test_hostile_text_is_text_in_every_place_of_the_page(place: str, text: str) -> None:
    plain, hostile = Tags(rendered()), Tags(rendered(**{place: text}))
    assert hostile.tags == plain.tags
    assert [name for name, _ in hostile.attributes] == [name for name, _ in plain.attributes]
    assert readable(text) in hostile.text


RUNS_OR_FETCHES = [
    "<script></script>",
    "<style></style>",
    "<iframe></iframe>",
    "<svg><foreignObject></foreignObject></svg>",
    '<p onclick="alert(1)"></p>',
    '<p style="color: red"></p>',
    '<a href="https://example.org"></a>',
    '<a href="javascript:alert(1)"></a>',
    '<img src="x">',
    '<img src="data:image/svg+xml,<svg onload=alert(1)>">',
    '<svg><image href="//example.org/x.png"/></svg>',
    '<p x="1" onclick="alert(1)"></p>',
    "<p/onclick=alert(1)>",
]


@pytest.mark.parametrize("source", RUNS_OR_FETCHES)
def test_what_could_run_or_fetch_is_refused(source: str) -> None:
    """Also where a template is wrong and lets it through as markup."""
    page = rendered(sections=[Section("key", "title", "text")])
    html.check_page(page)
    for place in ("text</section>", "</main>", "</body>"):
        assert place.removeprefix("text") in page
    with pytest.raises(DataError):
        html.check_page(page.replace("</main>", f"{source}</main>"))
    with pytest.raises(DataError):
        rendered(lead=Markup(source))


@pytest.mark.parametrize("css", ["a{}</style>", "a{background:URL(x)}", "@import 'x';"])
def test_a_style_sheet_that_ends_itself_or_fetches_is_refused(css: str) -> None:
    with pytest.raises(DataError):
        html.check_style(css)


def test_templates_escape_everything_and_lead_nowhere() -> None:
    """Autoescape is on and nobody turns it off; what a value can stand in is quoted; a link begins
    with "#" and a picture with "data:" before any value."""
    assert html.environment().autoescape is True
    for name in html.environment().list_templates(filter_func=lambda n: n.endswith(".html")):
        source = re.sub(
            r"\{#.*?#\}", "", (FOLDER / "templates" / name).read_text("utf-8"), flags=re.S
        )
        assert not re.search(r"\|\s*safe|autoescape|<script|\bon\w+\s*=|style=|javascript:", source)
        for tag in re.findall(r"<[a-zA-Z][^>]*>", source):
            outside = re.sub(r'"[^"]*"', "", tag)
            assert "{{" not in outside.replace("{{ shape.at|xmlattr }}", ""), tag
        assert all(re.match('"#', rest) for rest in re.findall(r"href=(..)", source))
        assert all(rest.startswith('"data:image/png;base64,')
                   for rest in re.findall(r"src=(.{25})", source))  # fmt: skip


def test_only_the_door_makes_markup() -> None:
    """No other file takes a string for markup, or writes elements itself."""
    for file in FOLDER.rglob("*.py"):
        if file.name == "html.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called.rpartition(".")[2] not in ("Markup", "_make", "_components"), file
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert "markupsafe" not in ast.unparse(node), file
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search("<[a-zA-Z/!]", node.value), f"{file}: {node.value!r}"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_isolated_and_a_long_one_is_given_in_full_once(name: str) -> None:
    names = Names()
    shown, again = Tags(str(names.show(name))), Tags(str(names.show(name)))
    assert shown.tags[0] == "bdi"
    assert again.text == shown.text
    whole = names.list_in_full()
    if len(name) <= 40:
        assert shown.text == readable(name)
        assert whole is None
        return
    assert shown.tags == ["bdi", "a"]
    assert shown.text.endswith("…")
    assert len(shown.text) <= 40
    assert whole is not None
    listed = Tags(str(whole))
    assert name in listed.text
    assert listed.tags.count("li") == 1
    target = dict(shown.attributes)["href"]
    assert target is not None
    assert ("id", target[1:]) in listed.attributes


def test_the_list_of_long_names_is_bounded_and_says_so() -> None:
    names = Names()
    for k in range(100):
        names.show(f"{k} " + "x" * 10_000)
    text = str(names.list_in_full())
    assert len(text) < 250_000
    assert "characters more" in text


def test_an_empty_or_blank_name_is_still_something_to_see() -> None:
    assert "(empty)" in str(Names().show(""))
    assert "(blank)" in str(Names().show("   "))
    assert cut("") == "(empty)"
