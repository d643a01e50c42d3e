"""The one path from text to markup: nothing that is not ours gets through it."""

from __future__ import annotations

import ast
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_names import HOSTILE
from hypothesis import given
from hypothesis import strategies as st

import doxa.app.report
from doxa.app.report.markup import Html, join, raw_style, readable, tag
from doxa.app.report.names import Names, cut
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
    seen = Tags(str(tag("p", {"title": text}, text, tag("bdi", None, text))))
    assert seen.tags == ["p", "bdi"]
    assert [name for name, _ in seen.attributes] == ["title"]
    assert seen.attributes[0][1] == readable(text)
    assert seen.text == 2 * readable(text)


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


def test_markup_cannot_be_made_from_a_string() -> None:
    with pytest.raises(TypeError, match="never from a string"):
        Html("<b>bold</b>")
    assert str(join("<b>")) == "&lt;b&gt;"
    assert not isinstance(tag("p"), str)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("script", {}),
        ("style", {}),
        ("iframe", {}),
        ("foreignObject", {}),
        ("p", {"onclick": "alert(1)"}),
        ("p", {"style": "color: red"}),
        ("a", {"href": "https://example.org"}),
        ("a", {"href": "javascript:alert(1)"}),
        ("img", {"src": "x"}),
        ("img", {"src": "data:image/svg+xml,<svg onload=alert(1)>"}),
        ("image", {"href": "//example.org/x.png"}),
        ("p", {'x="1" onclick': "alert(1)"}),
    ],
)
def test_what_could_run_or_fetch_is_refused(name: str, attributes: dict[str, object]) -> None:
    with pytest.raises(DataError):
        tag(name, attributes)


@pytest.mark.parametrize("css", ["a{}</style>", "a{background:URL(x)}", "@import 'x';"])
def test_a_style_sheet_that_ends_itself_or_fetches_is_refused(css: str) -> None:
    with pytest.raises(DataError):
        raw_style(css)


def test_only_the_markup_module_knows_the_key() -> None:
    """No other file builds Html directly, reaches for its key, or joins markup as strings."""
    for file in FOLDER.rglob("*.py"):
        if file.name == "markup.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called != "Html", file
            assert not (isinstance(node, ast.Name) and node.id == "_MINE"), file
            assert not (isinstance(node, ast.Attribute) and node.attr == "_source"), file
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
