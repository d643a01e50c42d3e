"""The room "Label" in a real browser: keys, undo, rows that a shell answers meanwhile, and the
choice of the next rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from browser import Browser, find  # noqa: E402
from contrast import CONTRAST  # noqa: E402
from shell import doxa  # noqa: E402

from doxa.decide.active.labels import LabelState, load  # noqa: E402
from studio import NAMED, Server, check_quiet, press  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

READY = "window.doxaStudio && doxaStudio.found && !doxaStudio.busy && !doxaStudio.waiting.length"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A session of forty rows with a text, six of them labelled, and four open."""
    x = np.random.default_rng(0).normal(size=40).round(3)
    kind = np.where(x > 0, "cat", "dog").astype(object)
    frame = pd.DataFrame({"a": x, "note": [f"{MARKUP} {i}" for i in range(40)], "kind": kind})
    frame.loc[6:, "kind"] = None
    frame.to_csv(tmp_path / "pool.csv", index=False)
    where = tmp_path / "session"
    doxa(
        "active", "start", tmp_path / "pool.csv", "--target", "kind", "--drop", "note", "--out",
        where, "--method", "map", "--by", "max_entropy", "--steps", 2, "--hidden", 4, "--count", 4,
    )  # fmt: skip
    doxa("active", "next", where)
    return where


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    server = Server("--label", str(folder))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def book_of(folder: Path) -> LabelState:
    found = load(folder)
    assert found is not None
    return found[0][0]


def text_of(browser: Browser, name: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{name}').textContent"))


def ready(browser: Browser) -> None:
    browser.settle(0.1)
    browser.wait(READY, 60)


def test_a_person_labels_by_keys_while_a_shell_does(server: Server, folder: Path) -> None:
    with Browser() as browser:
        browser.visit(server.address)
        browser.wait(READY, 120)
        asked = book_of(folder).asked
        assert text_of(browser, "query-title") == f"line {asked[0] + 2}"
        assert MARKUP in text_of(browser, "shown")
        assert browser.evaluate("document.querySelectorAll('#shown img').length") == 0
        assert "Its score by max entropy is" in text_of(browser, "why")
        press(browser, "2", 50, "2")  # the second class
        ready(browser)
        assert book_of(folder).answers[asked[0]] == "dog"
        assert text_of(browser, "query-title") == f"line {asked[1] + 2}"
        press(browser, "u", 85, "u")
        ready(browser)
        assert asked[0] not in book_of(folder).answers
        assert text_of(browser, "query-title") == f"line {asked[0] + 2}"
        # a shell answers the row that the page shows: the page says so, and changes nothing
        doxa("active", "label", folder, "--partial", "--answer", f"{asked[0] + 2}=cat")
        press(browser, "2", 50, "2")
        ready(browser)
        assert book_of(folder).answers[asked[0]] == "cat"
        assert "has an answer already" in text_of(browser, "message")
        press(browser, "n", 78, "n")
        for _ in range(3):
            press(browser, "1", 49, "1")
            ready(browser)
        assert book_of(folder).asked == []
        assert text_of(browser, "query-title") == "No row is open"
        browser.evaluate("document.querySelector('#answers button').click()")
        browser.settle(0.2)
        browser.wait(f"{READY} && doxaStudio.found.open === 4", 120)
        assert len(book_of(folder).asked) == 4
        assert len(book_of(folder).rounds) == 2
        assert browser.evaluate("document.getElementById('undo').disabled")  # a fit has used them
        assert browser.evaluate("document.querySelectorAll('#counts b').length") == 2
        check_quiet(browser, server.origin)


def test_the_page_has_names_contrast_and_fits_a_phone(server: Server) -> None:
    with Browser() as browser:
        browser.visit(server.address)
        browser.wait(READY, 120)
        assert "token" not in browser.evaluate("location.href")
        address = browser.evaluate("location.href")
        for width, dark in ((1280, False), (390, True)):
            browser.visit(address, width, 844, dark)
            browser.wait(READY, 60)
            assert browser.evaluate(NAMED) == []
            assert [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5] == []
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        check_quiet(browser, server.origin)
