"""The room "Your run" in a real browser: status, charts, rows, sliders, uploads, files and the
address, by mouse and keyboard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from browser import Browser, find  # noqa: E402
from contrast import CONTRAST  # noqa: E402
from shell import doxa  # noqa: E402

from doxa.app.fitting import load_run  # noqa: E402
from studio import NAMED, Server, check_quiet, press  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

READY = "window.doxaStudio && doxaStudio.about && doxaStudio.busy.size === 0"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({
        "area": draw.normal(90, 25, 160).round(2), "city": draw.choice(["Bonn", MARKUP], 160),
    })  # fmt: skip
    rows["price"] = (2 * rows.area + draw.normal(0, 10, 160)).round(3)
    rows.head(100).to_csv(root / "rows.csv", index=False)
    rows.tail(60).to_csv(root / "new.csv", index=False)
    rows.tail(30).to_csv(root / "upload.csv", index=False)
    for name, more in (("first", ()), ("second", ("--drop", "area"))):
        doxa(
            "fit", root / "rows.csv", "--target", "price", "--method", "linear", *more,
            "--allow-status", "--out", root / name,
        )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    tables = ("--table", str(folder / "new.csv"), "--table", str(folder / "rows.csv"))
    server = Server(str(folder / "first"), str(folder / "second"), *tables)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    with Browser() as browser:
        browser.visit(server.address)
        browser.wait(READY, 120)
        assert browser.evaluate("location.pathname + location.search") == "/run"
        yield browser


def visit(browser: Browser, server: Server, fragment: str = "", **options: Any) -> None:
    browser.visit(f"{server.origin}/run{fragment}", **options)
    browser.wait(READY, 120)


def text_of(browser: Browser, name: str) -> str:
    return str(browser.evaluate(f"document.getElementById('{name}').textContent"))


def choose(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const box = document.getElementById('{name}'); box.value = '{value}';"
        " box.dispatchEvent(new Event('change')); })()"
    )
    browser.settle(0.1)
    browser.wait(READY, 60)


def test_the_numbers_of_the_page_are_those_of_the_library(
    browser: Browser, server: Server, folder: Path
) -> None:
    visit(browser, server)
    posterior, schema = load_run(folder / "first")
    p = posterior.predict(schema.features(pd.read_csv(folder / "new.csv"))[0])
    found = browser.evaluate("doxaStudio.found.rows")
    assert found["count"] == 60
    for row in found["rows"]:
        assert row["predicted"]["mean"] == float(p.mean[row["row"]])
    assert "--" not in text_of(browser, "headline")
    assert browser.evaluate("document.querySelectorAll('#calibration svg').length") == 2
    assert MARKUP in text_of(browser, "rows-table")
    assert browser.evaluate("document.querySelectorAll('#rows-table img').length") == 0
    check_quiet(browser, server.origin)


def test_a_slider_by_keyboard_leaves_the_fit_and_says_so(browser: Browser, server: Server) -> None:
    visit(browser, server)
    assert "fit" in text_of(browser, "where")
    browser.evaluate("document.querySelector('#cells input[type=range]').focus()")
    press(browser, "End", 35)
    browser.wait("document.querySelector('#cells .slider').classList.contains('out')")
    browser.wait(READY)
    assert "area" in text_of(browser, "where")
    mean = browser.evaluate("doxaStudio.found.what_if.predicted.mean")
    press(browser, "ArrowLeft", 37)
    browser.wait(f"doxaStudio.found.what_if.predicted.mean !== {mean}")
    browser.evaluate("document.querySelector('#rows-table button').click()")
    browser.settle(0.1)
    browser.wait(READY)
    first = browser.evaluate("doxaStudio.found.rows.rows[0].predicted.mean")
    assert browser.evaluate("doxaStudio.found.what_if.predicted.mean") == first
    check_quiet(browser, server.origin)


def test_sorting_comparing_and_files(browser: Browser, server: Server) -> None:
    visit(browser, server)
    browser.evaluate("[...document.querySelectorAll('#by button')].at(-1).click()")
    browser.settle(0.1)
    browser.wait(READY)
    rows = browser.evaluate("doxaStudio.found.rows.rows.map(r => r.predicted.std)")
    assert rows == sorted(rows, reverse=True)
    browser.evaluate("document.getElementById('rows-on').click()")
    browser.settle(0.1)
    browser.wait(READY)
    assert browser.evaluate("doxaStudio.found.rows.start") == 50
    choose(browser, "column", "city")
    assert browser.evaluate("doxaStudio.found.dependence.column") == "city"
    choose(browser, "other", "1")
    assert browser.evaluate("doxaStudio.found.compare.difference") < 0
    assert "first is less surprised" in text_of(browser, "compare-words")
    browser.evaluate("document.getElementById('export').click()")
    browser.wait("doxaStudio.exported")
    lines = browser.evaluate("doxaStudio.exported.text").splitlines()
    assert len(lines) == 61
    files = """import('/pages/chart.js').then(async (m) => {
      const svg = document.querySelector('svg.chart'), b = await m.png(svg);
      window.files = [m.standing(svg), b.type, b.size];
    })"""
    browser.evaluate(files)
    svg, kind, size = browser.wait("window.files")
    assert kind == "image/png"
    assert size > 5000
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg
    assert 'stroke="rgb(' in svg  # it stands without the style sheet
    check_quiet(browser, server.origin)


def test_an_upload_by_the_page_and_the_address(
    browser: Browser, server: Server, folder: Path
) -> None:
    visit(browser, server)
    content = (folder / "upload.csv").read_text()
    browser.evaluate(
        f"doxaStudio.upload(new File([{json.dumps(content)}], {json.dumps(MARKUP + '.csv')}))"
    )
    browser.wait("typeof doxaStudio.table === 'string'")
    browser.settle(0.1)
    browser.wait(READY)
    assert browser.evaluate("doxaStudio.table") == hashlib.sha256(content.encode()).hexdigest()
    assert browser.evaluate("doxaStudio.about.rows.count") == 30
    assert browser.evaluate("doxaStudio.about.rows.source") == "table.csv"
    address = browser.wait("location.hash.length > 1 && location.hash")
    assert "token" not in browser.evaluate("location.href")
    before = browser.evaluate("doxaStudio.found.rows")
    browser.evaluate("location.reload()")
    browser.settle(0.5)
    browser.wait(READY, 60)
    assert browser.evaluate("doxaStudio.found.rows") == before
    browser.evaluate("doxaStudio.upload(new File(['x'], 'run.exe'))")
    browser.wait("!document.getElementById('message').hidden")
    assert "a table is a .csv" in text_of(browser, "message")
    browser.evaluate("sessionStorage.clear()")
    visit(browser, server, address)
    assert "a table that is not here" in text_of(browser, "message")
    for fragment in ("#1.zzzz", "#1", "#nonsense"):
        visit(browser, server, fragment)
        assert "no state that this page can read" in text_of(browser, "message")


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_names_contrast_and_width(dark: bool, width: int, browser: Browser, server: Server) -> None:
    visit(browser, server, width=width, dark=dark)
    choose(browser, "other", "1")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    low = [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5]
    assert low == []
    assert browser.evaluate(NAMED) == []
    check_quiet(browser, server.origin)
