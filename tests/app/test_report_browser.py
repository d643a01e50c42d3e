"""The report in a real browser: nothing runs, nothing is fetched, everything can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import Browser, find
from contrast import CONTRAST
from hostile_names import HOSTILE

import doxa
from doxa.app import report
from doxa.app.comparison import Reference, compare_arrays
from doxa.app.comparison import page as comparison

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

PHONE = (375, 812)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A regression, a classification with hostile names, and pictures."""
    folder = tmp_path_factory.mktemp("pages")
    source = torch.Generator().manual_seed(0)
    x = torch.randn(150, len(HOSTILE), generator=source)
    y = x[:, :1] + 0.3 * torch.randn(150, 1, generator=source)
    label = torch.bucketize(x[:, 0] + x[:, 1], torch.tensor([-1.0, 0.0, 1.0]))
    picture = torch.rand(40, 1, 8, 8, generator=source)
    bright = (picture.mean((1, 2, 3)) > 0.5).long()
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    width = len(HOSTILE)
    numbers = doxa.fit(doxa.nets.mlp(width, 1, (16,)), (x, y), "deep-ensemble", steps=200)
    classes = doxa.fit(doxa.nets.mlp(width, 4, (16,)), (x, label), "mc-dropout", steps=200,
                       likelihood="categorical", standardize=True)  # fmt: skip
    images = doxa.fit(flat, (picture, bright), "deep-ensemble", likelihood="categorical", steps=50)
    hostile = {"names": HOSTILE, "target": HOSTILE[1], "title": HOSTILE[0]}
    return {
        "numbers": report.write(numbers, folder / "a.html", (x, y), (x, y)),
        "hostile": report.write(classes, folder / "b.html", (x, label), (x, label),
                                classes=HOSTILE[1:5], **hostile),
        "images": report.write(images, folder / "c.html", (picture, bright)),
        "comparison": _comparison(x, y, folder / "d.html"),
    }  # fmt: skip


def _comparison(x: torch.Tensor, y: torch.Tensor, path: Path) -> Path:
    found = compare_arrays(
        x, y, {HOSTILE[0]: "linear", HOSTILE[1]: "map", HOSTILE[2]: "laplace"}, splits=2, steps=50,
        net=doxa.nets.mlp(x.shape[1], 1, (4,)), likelihood="gaussian",
        reference=Reference(draws=20, burn_in=20, leapfrog=5, chains=2),
    )  # fmt: skip
    comparison.write(found, path, f"{HOSTILE[0]} of {HOSTILE[3]}", list(HOSTILE))
    return path


KINDS = ("numbers", "hostile", "images", "comparison")


def trouble(browser: Browser) -> list[object]:
    """Errors, warnings, policy violations, dialogs, and requests for anything but the file."""
    found: list[object] = [e["entry"] for e in browser.seen("Log.entryAdded")]
    found += browser.seen("Runtime.consoleAPICalled") + browser.seen("Runtime.exceptionThrown")
    found += browser.seen("Audits.issueAdded") + browser.seen("Page.javascriptDialogOpening")
    urls = [e["request"]["url"] for e in browser.seen("Network.requestWillBeSent")]
    found += [url for url in urls[1:] if not url.startswith("data:image/png")]
    return found


def test_the_checks_see_what_they_should(browser: Browser, tmp_path: Path) -> None:
    """A page with everything that a report must not have."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!DOCTYPE html><meta http-equiv=Content-Security-Policy content=\"style-src 'none'\">"
        "<style>p{color:red}</style><p>grey<img src='http://127.0.0.1:9/x.png'>"
        "<div style='width:2000px;color:#999'>wide</div><script>console.error('hello')</script>",
        encoding="utf-8",
    )
    browser.open(bad, *PHONE)
    said = str(trouble(browser))
    assert "127.0.0.1:9" in said
    assert "Content Security Policy" in said
    assert "hello" in said
    bad.write_text("<body bgcolor=white><p><font color='#999999'>grey</font></p>", encoding="utf-8")
    browser.open(bad)
    assert browser.evaluate(CONTRAST)[0][0] == pytest.approx(2.85, abs=0.01)  # WCAG's #999 on #fff
    assert browser.evaluate("document.querySelectorAll('script').length") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs_and_nothing_is_fetched(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind])
    assert trouble(browser) == []
    assert browser.evaluate("document.scripts.length") == 0
    handlers = "[...document.querySelectorAll('*')].filter(e => [...e.attributes]"
    handlers += ".some(a => a.name.startsWith('on') || a.name === 'style')).length"
    assert browser.evaluate(handlers) == 0
    outside = "document.querySelectorAll('iframe, object, embed, link, base, form').length"
    assert browser.evaluate(outside) == 0
    assert browser.evaluate("getComputedStyle(document.body).marginTop") == "0px"  # style applies


# Pairs of texts of one chart whose boxes share more than a pixel or two each way.
OVERPRINTED = """
(() => { const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim())
      .map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 1.5 && down > 4) found.push([svg.querySelector("title").textContent, a, b]); }));
  } return found; })()
"""
# Tables that go on past their box, and how their box shows it.
CUT = """
[...document.querySelectorAll(".scroll")]
  .filter(b => b.checkVisibility() && b.scrollWidth > b.clientWidth + 1)
  .map(b => [b.getAttribute("aria-label"), getComputedStyle(b).backgroundAttachment,
             getComputedStyle(b).backgroundImage.split("linear-gradient").length - 1])
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(390, 844), (1280, 900)])
def test_no_label_is_printed_over_another(
    browser: Browser, pages: dict[str, Path], kind: str, size: tuple[int, int]
) -> None:
    browser.open(pages[kind], *size)
    assert browser.evaluate(OVERPRINTED) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_goes_on_has_a_shadow_and_prints_whole(
    browser: Browser, pages: dict[str, Path], kind: str
) -> None:
    browser.open(pages[kind], 390, 844)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    cut = browser.evaluate(CUT)
    assert kind == "images" or cut
    for _, attachment, shadows in cut:
        assert attachment.split(", ")[:8] == ["local"] * 4 + ["scroll"] * 4
        assert shadows == 8
    browser.call("Emulation.setEmulatedMedia", {"media": "print"})
    paper = {"width": 720, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", paper)
    assert browser.evaluate(CUT) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [PHONE, (320, 640), (1280, 900)])
def test_the_page_never_scrolls_sideways(
    browser: Browser, pages: dict[str, Path], kind: str, size: tuple[int, int]
) -> None:
    browser.open(pages[kind], *size)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("innerWidth") == size[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast(
    browser: Browser, pages: dict[str, Path], kind: str, dark: bool
) -> None:
    browser.open(pages[kind], dark=dark)
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    level = np.mean([int(v) for v in background.removeprefix("rgb(").removesuffix(")").split(",")])
    assert bool(level < 60) is dark
    found = browser.evaluate(CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_what_scrolls_can_be_reached_by_the_keyboard(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["hostile"], *PHONE)
    for event in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", {"type": event, "key": "Tab", "code": "Tab",
                                                "windowsVirtualKeyCode": 9})  # fmt: skip
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0")
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    stuck = """[...document.querySelectorAll("*")].filter(e => e.tabIndex < 0 &&
      /auto|scroll/.test(getComputedStyle(e).overflowX + getComputedStyle(e).overflowY) &&
      (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1))
      .map(e => e.outerHTML.slice(0, 80))"""
    assert browser.evaluate(stuck) == []
    reached = "document.querySelectorAll('.scroll[tabindex=\"0\"]').length"
    assert browser.evaluate(reached) > 5


def test_hostile_names_are_read_in_their_place(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE[0]
    text = browser.evaluate("document.body.textContent")
    for name in (HOSTILE[1], HOSTILE[2], HOSTILE[3], HOSTILE[8], "⟨U+202E⟩gnp.exe"):
        assert name in text
    isolated = "[...document.querySelectorAll('bdi')].every(b => getComputedStyle(b).unicodeBidi"
    assert browser.evaluate(f"{isolated} === 'isolate')")
    longest = "Math.max(...[...document.querySelectorAll('td, th')].map(e => e.innerText.length))"
    assert browser.evaluate(longest) < 400


def test_on_paper_it_is_black_on_white_and_whole(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["numbers"], dark=True)
    browser.call("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert len(browser.call("Page.printToPDF")["data"]) > 10_000
