"""The room of samplers in a real browser, driven as a person drives it: the clock, live changes,
clicks and keys, the address, names and contrast."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from browser import Browser, find
from contrast import CONTRAST

from studio import NAMED, Server, check_quiet, press

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

READY = (
    "window.doxaStudio && doxaStudio.panels.length > 0 && doxaStudio.picture !== null"
    " && doxaStudio.panels.every(p => p.failed || p.ended || "
    "p.frames.length > Math.floor(doxaStudio.time))"
)
FRAMES = "doxaStudio.panels.map(p => JSON.stringify(p.frames.slice(0, COUNT).map(f => f.at)))"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Browser]:
    """A browser that has entered by the page of this room: the token is exchanged there, too."""
    with Browser() as browser:
        browser.visit(server.address.replace("/?", "/samplers?"))
        browser.wait(READY, 120)
        assert browser.evaluate("location.pathname + location.search") == "/samplers"
        yield browser


def visit(browser: Browser, server: Server, fragment: str = "", **options: Any) -> None:
    browser.visit(f"{server.origin}/samplers{fragment}", **options)
    browser.wait(READY, 120)


def use(browser: Browser, *samplers: str, at: int = 0, **state: Any) -> None:
    panels = [{"sampler": name} if isinstance(name, str) else name for name in samplers]
    state = {"panels": panels, "at": at, "chains": 2, "spread": 1} | state
    browser.evaluate(
        f"doxaStudio.take(doxaStudio.checked({{target: 'banana', ...{json.dumps(state)}}}))"
    )
    browser.wait(READY, 120)


def points(browser: Browser, count: int) -> list[Any]:
    """Where the chains of each panel were after each of the first steps."""
    browser.wait(f"doxaStudio.panels.every(p => p.frames.length >= {count})", 120)
    return [json.loads(one) for one in browser.evaluate(FRAMES.replace("COUNT", str(count)))]


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).textContent"))


def python(browser: Browser, i: int = 0) -> dict[str, Any]:
    """Run the Python that a panel shows."""
    browser.evaluate(f"doxaStudio.panels[{i}].pythonButton.click()")
    browser.wait("document.getElementById('python').open", 60)
    code = text(browser, "#python-text")
    browser.evaluate("document.getElementById('python').close()")
    script: dict[str, Any] = {}
    exec(compile(code, "shown", "exec"), script)
    return script


def test_the_clock(browser: Browser, server: Server) -> None:
    """Play, pause, step, back, the start; by buttons and by keys."""
    visit(browser, server)
    use(browser, "hmc", "metropolis", speed=25)
    assert text(browser, "#step") == "Step 0"
    browser.evaluate("document.getElementById('play').click()")
    browser.wait("doxaStudio.time > 5", 60)
    browser.evaluate("document.getElementById('play').click()")
    at = browser.evaluate("doxaStudio.time")
    assert at == int(at) > 4
    browser.settle(0.3)
    assert browser.evaluate("doxaStudio.time") == at
    for button, by in (("on", 1), ("back", -1), ("back", -1)):
        at += by
        browser.evaluate(f"document.getElementById({button!r}).click()")
        assert browser.evaluate("doxaStudio.time") == at
    assert text(browser, "#step") == f"Step {int(at)}"
    assert text(browser, "#said").startswith(f"Step {int(at)}: HMC")
    browser.evaluate("doxaStudio.panels[0].canvas.focus()")
    press(browser, ".")
    press(browser, ".")
    press(browser, ",")
    assert browser.evaluate("doxaStudio.time") == at + 1
    press(browser, " ", 32)
    browser.wait("doxaStudio.playing")
    press(browser, " ", 32)
    browser.wait("!doxaStudio.playing")
    browser.evaluate("document.getElementById('rewind').click()")
    assert browser.evaluate("doxaStudio.time") == 0
    assert browser.evaluate("document.getElementById('back').disabled") is True
    check_quiet(browser, server.origin)


def test_numbers_in_the_page_are_those_of_the_shown_python(
    browser: Browser, server: Server
) -> None:
    visit(browser, server)
    use(browser, "nuts", {"sampler": "sgld", "changes": [[7, "step_size", 0.05]]}, at=20)
    for i, shown in enumerate(points(browser, 20)):
        script = python(browser, i)
        assert shown == script["points"].tolist()
        mean = browser.evaluate(f"doxaStudio.panels[{i}].summaries[0].mean")
        assert mean == script["table"]["mean"].tolist()
        cell = text(browser, f"article:nth-child({i + 1}) tbody td")
        assert cell.startswith(f"{mean[0]:.3g}".replace("-", "−"))
    check_quiet(browser, server.origin)


def test_a_click_starts_the_chains_or_moves_them(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "metropolis", "nuts", at=12)
    place = (
        "(() => { const s = doxaStudio.panels[0].scene, b = s.canvas.getBoundingClientRect();"
        " const q = s.pixel([1, 0.5], s.frame); return [b.left + q[0], b.top + q[1]]; })()"
    )

    def click(modifiers: int = 0) -> None:
        x, y = browser.evaluate(place)
        for kind in ("mousePressed", "mouseReleased"):
            browser.call("Input.dispatchMouseEvent", {
                "type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1,
                "modifiers": modifiers,
            })  # fmt: skip

    browser.evaluate("scrollTo(0, 0)")
    click(modifiers=8)  # Shift
    changes = browser.evaluate("doxaStudio.panels.map(p => p.changes)")
    assert [(at, name) for ((at, name, _),) in changes] == [(12, "restart")] * 2
    assert changes[0][0][2] == pytest.approx([1, 0.5], abs=0.05)
    assert browser.evaluate("doxaStudio.time") == 12
    assert "12: moved to" in text(browser, ".changes ol")
    moved = points(browser, 13)
    assert moved[1][12] != moved[1][11]
    assert "no single distribution" not in text(browser, ".facts")
    browser.evaluate("document.getElementById('on').click()")
    assert "no single distribution" in text(browser, ".facts")
    click()
    assert browser.evaluate("doxaStudio.time") == 0
    browser.wait(READY, 60)
    assert browser.evaluate("doxaStudio.start") == changes[0][0][2]
    browser.evaluate("doxaStudio.panels[0].canvas.focus()")
    press(browser, "ArrowRight", 39)
    press(browser, "ArrowDown", 40)
    press(browser, "Enter", 13, "\r")
    browser.wait(READY, 60)
    wide, high = 10 / 60, 9 / 60
    expected = [changes[0][0][2][0] + wide, changes[0][0][2][1] - high]
    assert browser.evaluate("doxaStudio.start") == pytest.approx(expected, abs=2e-3)
    check_quiet(browser, server.origin)


def fragment_with(browser: Browser, changes: list[int]) -> str:
    """The fragment of the address, once it has so many changes in each panel."""
    end = time.monotonic() + 60
    while True:
        fragment = str(browser.evaluate("location.hash"))
        packed = fragment.partition(".")[2]
        state = json.loads(zlib.decompress(base64.urlsafe_b64decode(packed + "=="), -15))
        if [len(panel.get("changes", [])) for panel in state["panels"]] == changes:
            return fragment
        assert time.monotonic() < end, state
        browser.settle(0.1)


def test_a_live_change_replays_from_a_link(browser: Browser, server: Server) -> None:
    """Sliders change the next steps only; the address repeats the numbers in another page."""
    visit(browser, server)
    use(browser, "hmc", {"sampler": "sghmc"}, at=10, target="network")
    before = points(browser, 20)
    for panel, name, value in ((0, "step_size", 0.02), (0, "mass", 3), (1, "batch_size", 40),
                               (1, "temperature", 0.5)):  # fmt: skip
        browser.evaluate(
            f"(() => {{ const {{ box }} = doxaStudio.panels[{panel}].sliders.get({name!r});"
            f" box.value = {value}; box.dispatchEvent(new Event('change')); }})()"
        )
    after = points(browser, 20)
    for one, other in zip(before, after, strict=True):
        assert one[:10] == other[:10]
        assert one[10] != other[10]
    fragment = fragment_with(browser, [2, 2])
    for _ in range(2):  # another tab, and a reload
        visit(browser, server, fragment)
        assert browser.evaluate("doxaStudio.time") == 10
        assert points(browser, 20) == after
    assert browser.evaluate("doxaStudio.panels[1].changes.length") == 2
    assert len(fragment) < 600
    browser.evaluate("doxaStudio.panels[0].changesBox.querySelector('button').click()")
    assert points(browser, 20)[0] == before[0]
    browser.wait(f"location.hash !== {fragment!r}")
    browser.evaluate("history.back()")
    browser.wait(f"location.hash === {fragment!r} && doxaStudio.panels[0].changes.length === 2")
    assert points(browser, 20) == after
    check_quiet(browser, server.origin)


def test_every_control_of_the_bar(browser: Browser, server: Server) -> None:
    """Targets, a typed density and its errors, chains, spread, seed, layers, zoom, panels."""
    visit(browser, server)
    use(browser, "metropolis")
    for name in browser.evaluate("Object.keys(doxaStudio.facts.targets)"):
        browser.evaluate(f"document.querySelector('#targets [value={name}]').click()")
        browser.wait(READY, 60)
        assert browser.evaluate("doxaStudio.target") == name
        assert browser.evaluate("doxaStudio.panels[0].failed") is False
    put = (
        "(() => {{ const box = document.getElementById({!r}); box.value = {!r};"
        " box.dispatchEvent(new Event('change')); }})()"
    )
    assert browser.evaluate("document.getElementById('formula-form').hidden") is False
    browser.evaluate(put.format("formula", "x^2"))
    browser.wait("!document.getElementById('message').hidden")
    assert "x**2" in text(browser, "#message")
    browser.wait("doxaStudio.panels[0].failed")
    assert "x**2" in text(browser, "article [role=alert]")
    browser.evaluate(put.format("formula", "-x**4 - y**4"))
    browser.wait(READY, 60)
    assert browser.evaluate("document.getElementById('message').hidden") is True
    assert browser.evaluate("doxaStudio.panels[0].failed") is False
    browser.evaluate(put.format("chains", "4"))
    browser.wait(READY, 60)
    assert [len(one[0]) for one in points(browser, 1)] == [4]
    first = points(browser, 3)
    for name, value in (("seed", "5"), ("spread", "0.5")):
        browser.evaluate(put.format(name, value))
        browser.wait(READY, 60)
        assert points(browser, 3) != first
        first = points(browser, 3)
    for name in ("density", "draws", "trace", "marginals"):
        browser.evaluate(f"document.querySelector('#layers [name={name}]').click()")
        assert browser.evaluate(f"doxaStudio.layers.{name}") is False
    view = browser.evaluate("doxaStudio.view")
    browser.evaluate("document.getElementById('zoom-in').click()")
    assert browser.evaluate("doxaStudio.view")[0] == pytest.approx(0.7 * view[0])
    browser.evaluate("document.getElementById('zoom-reset').click()")
    assert browser.evaluate("doxaStudio.view") == view
    for count in (2, 3, 4):
        browser.evaluate("document.getElementById('add').click()")
        assert browser.evaluate("doxaStudio.panels.length") == count
    assert browser.evaluate("document.getElementById('add').hidden") is True
    browser.evaluate("document.querySelector('article .head button').click()")
    assert browser.evaluate("doxaStudio.panels.length") == 3
    browser.wait(READY, 60)
    check_quiet(browser, server.origin)


def test_every_sampler_and_its_settings(browser: Browser, server: Server) -> None:
    """Each is chosen in a panel, runs, and shows its equation; a setting begins a new run."""
    visit(browser, server)
    use(browser, "hmc")
    for name in browser.evaluate("doxaStudio.facts.samplers.map(s => s.name)"):
        browser.evaluate(
            f"(() => {{ const s = document.querySelector('article select'); s.value = {name!r};"
            " s.dispatchEvent(new Event('change')); })()"
        )
        browser.wait(READY, 60)
        browser.evaluate("doxaStudio.goTo(3)")
        assert browser.evaluate("doxaStudio.panels[0].sampler") == name
        assert browser.evaluate("doxaStudio.panels[0].failed") is False
        assert len(text(browser, ".equation")) > 10
        browser.evaluate("doxaStudio.goTo(0)")
    use(browser, "hmc", at=5)
    before = points(browser, 5)
    browser.evaluate(
        "(() => { const panel = doxaStudio.panels[0]; panel.settingsButton.click(); const box = "
        "[...panel.formElement.querySelectorAll('label')].find(l => l.textContent === 'leapfrog')"
        ".querySelector('input'); box.value = 3; box.dispatchEvent(new Event('change')); })()"
    )
    assert points(browser, 5) != before
    assert "leapfrog=3" in python_text(browser)
    check_quiet(browser, server.origin)


def python_text(browser: Browser) -> str:
    browser.evaluate("doxaStudio.panels[0].pythonButton.click()")
    browser.wait("document.getElementById('python').open", 60)
    browser.evaluate("document.getElementById('python').close()")
    return text(browser, "#python-text")


def test_a_step_is_drawn_part_by_part(browser: Browser, server: Server) -> None:
    """While it plays slowly, the picture changes between two steps; not so where motion is not
    wanted. Every kind of record is drawn."""
    visit(browser, server)
    picture = "doxaStudio.panels[0].canvas.toDataURL()"
    for name in ("hmc", "nuts", "mala", "sgld", "svgd", "metropolis"):
        use(browser, name, at=3, speed=0.5)
        seen = []
        for part in (0.1, 0.5, 0.9):
            browser.evaluate(f"doxaStudio.time = 3 + {part}; doxaStudio.draw()")
            seen.append(browser.evaluate(picture))
        assert len(set(seen)) == 3, name
    browser.call("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-reduced-motion", "value": "reduce"}]
    })  # fmt: skip
    still = []
    for part in (0.1, 0.9):
        browser.evaluate(f"doxaStudio.time = 3 + {part}; doxaStudio.draw()")
        still.append(browser.evaluate(picture))
    assert still[0] == still[1]
    browser.call("Emulation.setEmulatedMedia", {"features": []})
    browser.evaluate("doxaStudio.time = 3")
    check_quiet(browser, server.origin)


WRONG = [
    "1",
    "{}",
    "[]",
    "{target: 'moon', panels: [{sampler: 'hmc'}]}",
    "{target: 'banana'}",
    "{target: 'banana', panels: []}",
    "{target: 'banana', panels: [{sampler: 'gibbs'}]}",
    "{target: 'typed', panels: [{sampler: 'hmc'}]}",
    "{target: '__proto__', panels: [1]}",
    "{target: 'banana', panels: Array(5).fill({sampler: 'hmc'})}",
    "{target: 'banana', chains: 9, panels: [{sampler: 'hmc'}]}",
    "{target: 'banana', start: [0, 'a'], panels: [{sampler: 'hmc'}]}",
    "{target: 'banana', view: [1, 0, 0, 1], panels: [{sampler: 'hmc'}]}",
    "{target: 'banana', at: -1, panels: [{sampler: 'hmc'}]}",
    "{target: 'banana', panels: [{sampler: 'hmc', changes: [[0, 'mass', 1]]}]}",
    "{target: 'banana', panels: [{sampler: 'hmc', changes: [[5, 'mass', 1], [4, 'mass', 1]]}]}",
    "{target: 'banana', panels: [{sampler: 'hmc', changes: [[5, 'restart', 1]]}]}",
    "{target: 'banana', panels: [{sampler: 'hmc', initial: {mass: 'x'}}]}",
]


def test_a_state_of_wrong_values_is_malformed(browser: Browser, server: Server) -> None:
    visit(browser, server)
    for state in WRONG:
        kind = browser.evaluate(
            f"(() => {{ try {{ doxaStudio.checked({state}); return 'taken'; }}"
            " catch (e) { return e.kind; } })()"
        )
        assert kind == "malformed", state
    for fragment, words in (("#nonsense", "no state"), ("#2.AAAA", "newer")):
        visit(browser, server, fragment)
        assert words in text(browser, "#message")
    check_quiet(browser, server.origin)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 375])
def test_names_contrast_and_width(dark: bool, width: int, browser: Browser, server: Server) -> None:
    visit(browser, server, width=width, height=812, dark=dark)
    changed = {"sampler": "sgld", "changes": [[5, "step_size", 0.01]]}
    use(browser, "hmc", changed, "svgd", at=20)
    browser.wait("doxaStudio.panels.every(p => p.summaries.length)", 60)
    browser.evaluate("doxaStudio.panels.forEach(p => p.settingsButton.click())")
    browser.settle(0.3)
    assert browser.evaluate(NAMED) == []
    assert [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    check_quiet(browser, server.origin)
