"""The studio in a real browser, driven as a person drives it: points by mouse and keys, settings,
the address, other tabs; nothing is fetched from elsewhere, and everything has a name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from browser import Browser, find
from contrast import CONTRAST

from studio import NAMED, READY, Server, check_quiet, mouse, place, press, settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]


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
    """A browser that has exchanged the token."""
    with Browser() as browser:
        browser.visit(server.address)
        browser.wait(READY, 120)
        assert browser.evaluate("location.search") == ""
        history = browser.call("Page.getNavigationHistory")["entries"]
        assert [entry["url"] for entry in history if "token" in entry["url"]] == []
        yield browser


def visit(browser: Browser, server: Server, fragment: str = "", **options: Any) -> None:
    browser.visit(f"{server.origin}/{fragment}", **options)
    browser.wait(READY, 120)


def use(browser: Browser, *methods: str, points: str = "[]") -> None:
    panels = json.dumps([{"method": name} for name in methods])
    browser.evaluate(
        f"doxaStudio.take({{points: {points}, view: {{x0: -5, x1: 5, y0: -3, y1: 3}}, seed: 0,"
        f" hidden: [], panels: {panels}}})"
    )


def test_points_by_mouse_and_keys(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "gp", "linear")
    before = settled(browser)
    assert [panel["points"] for panel in before] == [0, 0]
    assert all(len(panel["prior"]) == 12 for panel in before)
    x, y = place(browser, 1.0, 1.0)
    mouse(browser, "mousePressed", x, y)
    mouse(browser, "mouseReleased", x, y)
    after = settled(browser)
    assert [panel["points"] for panel in after] == [1, 1]
    assert browser.evaluate("doxaStudio.points.length") == 1
    assert browser.evaluate("doxaStudio.points[0].map(v => Math.round(v * 10) / 10)") == [1.0, 1.0]
    mouse(browser, "mousePressed", x, y)
    for step in range(1, 20):
        mouse(browser, "mouseMoved", x + 3 * step, y + 2 * step)
    mouse(browser, "mouseReleased", x + 57, y + 38)
    settled(browser)
    assert browser.evaluate("doxaStudio.points.length") == 1
    moved = browser.evaluate("doxaStudio.points[0]")
    assert moved[0] > 1.2
    assert moved[1] < 0.9
    press(browser, "Delete", 46)
    assert settled(browser)[0]["points"] == 0
    press(browser, "Escape", 27)
    for _ in range(3):
        press(browser, "ArrowRight", 39)
    press(browser, "ArrowUp", 38)
    press(browser, "Enter", 13, "\r")
    assert settled(browser)[0]["points"] == 1
    assert browser.evaluate("doxaStudio.points[0]") == pytest.approx([0.3, 0.1], abs=1e-6)
    press(browser, "n", 78, "n")
    press(browser, "ArrowLeft", 37)
    settled(browser)
    assert browser.evaluate("doxaStudio.points[0]") == pytest.approx([0.2, 0.1], abs=1e-6)
    assert "Point 1 of 1" in browser.evaluate("document.getElementById('said').textContent")
    check_quiet(browser, server.origin)


def test_numbers_in_the_page_are_those_of_the_shown_python(
    browser: Browser, server: Server
) -> None:
    visit(browser, server)
    use(browser, "gp", "map", points="doxaStudio.facts.presets.few")
    for i, shown in enumerate(settled(browser)):
        browser.evaluate(f"doxaStudio.panels[{i}].pythonButton.click()")
        code = browser.evaluate("document.getElementById('python-text').textContent")
        browser.evaluate("document.getElementById('python').close()")
        script: dict[str, Any] = {}
        exec(compile(code, "shown", "exec"), script)
        for name in ("mean", "aleatoric", "epistemic"):
            assert shown[name] == script[name].reshape(-1).tolist()
        assert shown["draws"] == script["draws"].reshape(len(shown["draws"]), -1).tolist()
    check_quiet(browser, server.origin)


def test_a_trained_method_shows_a_labelled_picture_first(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "map", points="[]")
    settled(browser)
    browser.evaluate(
        "window.labels = []; new MutationObserver(() => { const c = "
        "document.querySelector('.facts .chip'); if (c) labels.push(c.textContent); })"
        ".observe(document.querySelector('.facts'), {childList: true})"
    )
    browser.evaluate("document.querySelector('#presets button').click()")
    assert settled(browser)[0]["preview"] is False
    labels = browser.evaluate("labels")
    assert any(label.startswith("On its way: step") and "of 1,000" in label for label in labels)
    assert labels[-1] == "ok"


def test_every_setting_of_a_method_is_used(browser: Browser, server: Server) -> None:
    """A change in the form changes the settings, the numbers and the Python."""
    visit(browser, server)
    use(browser, "gp", points="doxaStudio.facts.presets.few")
    before = settled(browser)[0]
    browser.evaluate(
        "(() => { const panel = doxaStudio.panels[0], box = [...panel.formElement."
        "querySelectorAll('label')].find(l => l.textContent.startsWith('lengthscale'))"
        ".querySelector('input'); panel.settingsButton.click(); box.value = '0.4'; "
        "box.dispatchEvent(new Event('change')); const learn = [...panel.formElement."
        "querySelectorAll('label')].find(l => l.textContent === 'learn kernel')"
        ".querySelector('input'); learn.click(); })()"
    )
    after = settled(browser)[0]
    assert after["mean"] != before["mean"]
    python = browser.evaluate("doxaStudio.panels[0].python")
    assert "doxa.GP(lengthscale=0.4, learn_kernel=False)" in python
    browser.evaluate(
        "(() => { const box = [...doxaStudio.panels[0].formElement.querySelectorAll('label')]"
        ".find(l => l.textContent.startsWith('kernel')).querySelector('input'); "
        "box.value = 'nothing'; box.dispatchEvent(new Event('change')); })()"
    )
    browser.wait("document.querySelector('.facts .chip.bad') !== null")
    assert "kernel must be" in browser.evaluate("document.querySelector('.facts').textContent")
    check_quiet(browser, server.origin)


def test_the_address_holds_the_state(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "gp", "nngp", points="[[-1, 0.5], [0.25, -1], [2, 1]]")
    browser.evaluate("document.getElementById('seed').value = 7")
    browser.evaluate("document.getElementById('seed').dispatchEvent(new Event('change'))")
    shown = settled(browser)
    fragment = browser.wait("location.hash.length > 20 && location.hash")
    assert len(fragment) < 400
    for _ in range(2):  # another tab, and a reload
        visit(browser, server, fragment)
        again = settled(browser)
        for one, other in zip(shown, again, strict=True):
            assert one["mean"] == other["mean"]
            assert one["draws"] == other["draws"]
        assert browser.evaluate("doxaStudio.seed") == 7
    browser.evaluate("document.getElementById('clear').click()")
    settled(browser)
    browser.evaluate("history.back()")
    browser.wait("doxaStudio.points.length === 3")
    assert settled(browser)[0]["mean"] == shown[0]["mean"]
    check_quiet(browser, server.origin)


@pytest.mark.parametrize(
    ("fragment", "words"),
    [("#nonsense", "no state"), ("#1.AAAA", "no state"), ("#1.", "no state"),
     ("#2.AAAA", "newer"), ("#999999.x", "newer"), ("#1." + "A" * 9000, "no state")],
)  # fmt: skip
def test_an_address_that_is_malformed_or_newer(
    fragment: str, words: str, browser: Browser, server: Server
) -> None:
    visit(browser, server, fragment)
    assert words in browser.evaluate("document.getElementById('message').textContent")
    assert browser.evaluate("document.getElementById('message').hidden") is False
    assert browser.evaluate("doxaStudio.points.length") > 0
    check_quiet(browser, server.origin)


def test_a_state_of_wrong_values_is_malformed(browser: Browser, server: Server) -> None:
    visit(browser, server)
    wrong = [
        "1", "{}", '{points: "x", panels: [{method: "gp"}]}', '{points: [], panels: []}',
        '{points: [[0, "a"]], panels: [{method: "gp"}]}', '{points: [], panels: [{method: "cnp"}]}',
        '{points: [], panels: Array(5).fill({method: "gp"})}',
        '{points: [], panels: [{method: "gp"}], seed: -1}',
        '{points: [], panels: [{method: "gp"}], view: {x0: 1, x1: 0, y0: 0, y1: 1}}',
    ]  # fmt: skip
    for state in wrong:
        kind = browser.evaluate(
            f"(() => {{ try {{ doxaStudio.checked({state}); return 'taken'; }}"
            " catch (e) { return e.kind; } })()"
        )
        assert kind == "malformed", state


def test_points_as_text_and_text_that_is_markup(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "linear")
    settled(browser)
    put = (
        "(() => {{ const box = document.getElementById('points'); box.value = {!r};"
        " box.dispatchEvent(new Event('change')); }})()"
    )
    browser.evaluate(put.format("1, 2\n3 -4\n\n5;6"))
    settled(browser)
    assert browser.evaluate("doxaStudio.points") == [[1, 2], [3, -4], [5, 6]]
    browser.evaluate(put.format("1, 2\n<img src=x onerror=alert(1)>"))
    assert browser.evaluate("document.getElementById('points-said').textContent") == (
        "Line 2 is not two numbers."
    )
    assert browser.evaluate("document.querySelectorAll('img').length") == 1
    check_quiet(browser, server.origin)


def test_panels_orders_and_draws_that_move(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "gp", points="doxaStudio.facts.presets.quadratic")
    settled(browser)
    for count in (2, 3, 4):
        browser.evaluate("document.getElementById('add').click()")
        browser.wait(f"doxaStudio.panels.length === {count}")
    assert browser.evaluate("document.getElementById('add').hidden") is True
    methods = browser.evaluate("doxaStudio.panels.map(p => p.method)")
    assert len(set(methods)) == 4
    browser.evaluate("document.getElementById('orders-show').click()")
    said = browser.wait("document.getElementById('orders-said').textContent", 60)
    assert said.startswith("Degree 2:")
    use(browser, "gp", "map", points="doxaStudio.facts.presets.few")
    settled(browser)
    browser.evaluate("document.getElementById('play').click()")
    browser.wait("doxaStudio.panels[0].paths && doxaStudio.panels.every(p => p.plane.curves)")
    first = browser.evaluate("JSON.stringify(doxaStudio.panels[0].plane.curves)")
    browser.wait(f"JSON.stringify(doxaStudio.panels[0].plane.curves) !== {first!r}")
    browser.evaluate("document.getElementById('play').click()")
    assert browser.evaluate("doxaStudio.panels[0].plane.curves") is None
    check_quiet(browser, server.origin)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 375])
def test_names_contrast_and_width(dark: bool, width: int, browser: Browser, server: Server) -> None:
    visit(browser, server, width=width, height=812, dark=dark)
    browser.evaluate("doxaStudio.panels.forEach(p => p.settingsButton.click())")
    browser.settle(0.3)
    assert browser.evaluate(NAMED) == []
    low = [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5]
    assert low == []
    wide = browser.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    check_quiet(browser, server.origin)


def test_another_browser_and_another_site_come_no_further(browser: Browser, server: Server) -> None:
    """Of the running server, with its own headers: the rules are tested in test_doors."""
    import urllib.error
    import urllib.request

    def status(path: str, **headers: str) -> int:
        request = urllib.request.Request(server.origin + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert "server" not in {name.lower() for name in answer.headers}
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/pages/functions.js") == 401
    assert status("/", Host="evil.example") == 421
    assert status("/pages/strings.js", **{"Sec-Fetch-Site": "cross-site"}) == 403
    assert status("/pages/../server.py") in (401, 403, 404)
    with Browser() as other:
        other.visit(server.address)
        other.wait("document.getElementById('message').textContent", 30)
        assert "works once" in other.evaluate("document.getElementById('message').textContent")
        assert other.evaluate("document.cookie") == ""
    assert browser.evaluate("document.cookie") == ""  # HttpOnly


def test_fifty_pages_leave_nothing_behind(browser: Browser, server: Server) -> None:
    """The memory of the server stays where it is, no page stays open, and Ctrl-C ends all
    processes. The last test of this server."""

    def resident(pid: int) -> float:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    children = server.children()
    memory = []
    for i in range(50):
        target = browser.call("Target.createTarget", {"url": f"{server.origin}/"}, "")["targetId"]
        browser.settle(0.15)
        browser.call("Target.closeTarget", {"targetId": target}, "")
        if i % 10 == 9:
            memory.append(resident(server.process.pid))
    visit(browser, server)  # a place is free
    assert memory[-1] - memory[0] < 20, memory
    assert sorted(server.children()) == sorted(children)
    errors = server.close()
    assert errors.strip() == "Ctrl-C ends the server"
    assert server.process.returncode == 0
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < end
        time.sleep(0.1)
