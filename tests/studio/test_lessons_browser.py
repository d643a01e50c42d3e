"""The room of classes and the lessons in a real browser: points of classes by mouse and keys, maps,
the address, questions before answers, and presenter mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from browser import Browser, find
from contrast import CONTRAST

from doxa.studio.classification import boundaries
from doxa.studio.lessons import LESSONS
from studio import NAMED, READY, Server, check_quiet, mouse, place, press, settled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine"),
]

TOUR = "doxaStudio.address.tour"


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
        yield browser


def visit(browser: Browser, server: Server, fragment: str = "", **options: Any) -> None:
    browser.visit(f"{server.origin}/classification{fragment}", **options)
    browser.wait(READY, 120)


def use(browser: Browser, *methods: str, points: str = "[]", classes: int = 2) -> None:
    panels = json.dumps([{"method": name} for name in methods])
    browser.evaluate(
        f"doxaStudio.take({{points: {points}, classes: {classes}, map: 'probability', seed: 0,"
        f" view: {{x0: -4.8, x1: 4.8, y0: -3, y1: 3}}, hidden: [], ambiguity: false,"
        f" panels: {panels}}})"
    )


def test_points_of_classes_by_mouse_and_keys(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "nngp", "ntk")
    before = settled(browser)
    assert all("entropy" not in panel and len(panel["draws"]) == 8 for panel in before)
    for x, kind in ((-1.0, 0), (1.0, 1)):
        browser.evaluate(f"document.querySelectorAll('#kinds button')[{kind}].click()")
        at = place(browser, x, 0.5)
        mouse(browser, "mousePressed", *at)
        mouse(browser, "mouseReleased", *at)
    after = settled(browser)
    assert [point[2] for point in browser.evaluate("doxaStudio.points")] == [0, 1]
    assert all(panel["points"] == 2 and len(panel["entropy"]) == 49 * 31 for panel in after)
    press(browser, "1", 49, "1")  # the selected point is the second one
    browser.settle(0.2)
    assert browser.evaluate("doxaStudio.points[1][2]") == 0
    assert "one class" in browser.wait("document.querySelector('.facts .reason')?.textContent", 60)
    press(browser, "2", 50, "2")
    settled(browser)
    press(browser, "Escape", 27)
    press(browser, "ArrowRight", 39)
    assert "entropy" in browser.evaluate("document.getElementById('said').textContent")
    press(browser, "Enter", 13, "\r")
    assert browser.evaluate("doxaStudio.points[2]") == pytest.approx([0.096, 0, 1], abs=1e-6)
    press(browser, "p", 80, "p")
    press(browser, "Delete", 46)
    settled(browser)
    assert browser.evaluate("doxaStudio.points.length") == 2
    at = place(browser, -1.0, 0.5)
    mouse(browser, "mousePressed", *at)
    for step in range(1, 10):
        mouse(browser, "mouseMoved", at[0] + 4 * step, at[1])
    mouse(browser, "mouseReleased", at[0] + 36, at[1])
    settled(browser)
    assert browser.evaluate("doxaStudio.points[0][0]") > -0.8
    assert browser.evaluate("doxaStudio.points[0][2]") == 0
    check_quiet(browser, server.origin)


def test_maps_values_and_the_shown_python(browser: Browser, server: Server) -> None:
    visit(browser, server)
    use(browser, "nngp", "laplace", points="doxaStudio.facts.presets.three.points", classes=3)
    shown = settled(browser)
    for i, found in enumerate(shown):
        browser.evaluate(f"doxaStudio.panels[{i}].pythonButton.click()")
        code = browser.evaluate("document.getElementById('python-text').textContent")
        browser.evaluate("document.getElementById('python').close()")
        script: dict[str, Any] = {}
        exec(compile(code, "shown", "exec"), script)
        assert found["probability"] == script["probability"].T.tolist()
        assert found["entropy"] == script["entropy"].tolist()
        assert found["aleatoric"] == script["aleatoric"].tolist()
        assert found["epistemic"] == script["epistemic"].tolist()
        drawn = [boundaries(f, script["across"], script["up"]) for f in script["draws"]]
        assert found["draws"] == drawn
    browser.evaluate("document.querySelector('.map[value=epistemic]').click()")
    pressed = "[...document.querySelectorAll('.map[aria-pressed=true]')].map(b => b.value)"
    assert browser.evaluate(pressed) == ["epistemic", "epistemic"]
    assert "1.10 nats (log 3)" in browser.evaluate("document.getElementById('legend').textContent")
    mouse(browser, "mouseMoved", *place(browser, 1.0, 0.0))
    read = browser.evaluate("doxaStudio.panels.map(p => p.readout.textContent)")
    at = 15 * 49 + 29  # the nearest point of the grid
    for text, found in zip(read, shown, strict=True):
        assert f"{found['entropy'][at]:.3f} = {found['aleatoric'][at]:.3f} aleatoric" in text
    browser.evaluate("document.getElementById('ambiguity-show').click()")
    assert browser.evaluate("document.querySelectorAll('#ambiguity-charts svg').length") == 2
    check_quiet(browser, server.origin)


def test_the_address_holds_classes_and_a_link_leads_to_the_room(
    browser: Browser, server: Server
) -> None:
    visit(browser, server)
    use(browser, "nngp", points="[[-1, 0.5, 0], [0.25, -1, 2], [2, 1, 1]]", classes=3)
    shown = settled(browser)
    browser.evaluate("document.querySelector('#maps button[value=entropy]').click()")
    fragment = browser.wait("location.hash.length > 20 && location.hash")
    browser.settle(0.5)
    fragment = browser.evaluate("location.hash")
    visit(browser, server, fragment)
    assert settled(browser)[0]["probability"] == shown[0]["probability"]
    assert browser.evaluate("doxaStudio.map + doxaStudio.classes") == "entropy3"
    wrong = [
        "1", "{}", '{points: [[0, 0, 3]], classes: 3, panels: [{method: "nngp"}]}',
        '{points: [], classes: 9, panels: [{method: "nngp"}]}',
        '{points: [[0, 0]], classes: 2, panels: [{method: "nngp"}]}',
        '{points: [], classes: 2, panels: [{method: "gp"}]}',
    ]  # fmt: skip
    for state in wrong:
        kind = browser.evaluate(
            f"(() => {{ try {{ doxaStudio.checked({state}); return 'taken'; }}"
            " catch (e) { return e.kind; } })()"
        )
        assert kind == "malformed", state
    browser.evaluate(
        "(() => { const box = document.getElementById('points'); box.value = '1, 2, 1\\n3 4 4';"
        " box.dispatchEvent(new Event('change')); })()"
    )
    said = browser.evaluate("document.getElementById('points-said').textContent")
    assert said == "Line 2 is not two numbers and a class from 1 to 3."
    check_quiet(browser, server.origin)


def start_lesson(
    browser: Browser, server: Server, name: str, ready: str = READY, **options: Any
) -> None:
    browser.visit(f"{server.origin}/lessons", **options)
    browser.wait("window.doxaStudio", 60)
    browser.evaluate("sessionStorage.clear()")
    number = [lesson.name for lesson in LESSONS].index(name)
    browser.evaluate(f"document.querySelectorAll('#lessons a')[{number}].click()")
    browser.settle(0.5)
    browser.wait(f"window.doxaStudio && doxaStudio.address && {TOUR}.lesson", 60)
    browser.wait(ready, 120)


def test_every_lesson_is_listed_and_its_states_are_taken(browser: Browser, server: Server) -> None:
    """Each step's room takes its state, and writes the same one into the address."""
    browser.visit(f"{server.origin}/lessons")
    browser.wait("window.doxaStudio", 60)
    titles = browser.evaluate("[...document.querySelectorAll('#lessons h2')].map(h => h.innerText)")
    assert len(titles) == len(LESSONS) == 8
    assert browser.evaluate(NAMED) == []
    check_quiet(browser, server.origin)
    for room, page in (("functions", "/"), ("classification", "/classification")):
        browser.visit(server.origin + page)
        browser.wait(READY, 120)
        for lesson in LESSONS:
            for step in lesson.steps:
                if step.room == room:
                    kept = browser.evaluate(
                        f"(() => {{ const given = {json.dumps(step.state)};"
                        " const { points, panels } = doxaStudio.checked(given);"
                        " return [points, panels]; })()"
                    )
                    assert kept == [step.state["points"], step.state["panels"]]
    start_lesson(browser, server, "samplers", ready="doxaStudio.panels.length > 0")
    for lesson in LESSONS:
        for step in lesson.steps:
            if step.room == "samplers":
                kept = f"doxaStudio.checked({json.dumps(step.state)})"
                assert browser.evaluate(f"{kept}.panels") == step.state["panels"]
                assert browser.evaluate(f"{kept}.at") == step.state["at"]


def test_a_question_is_answered_before_the_next_state(browser: Browser, server: Server) -> None:
    start_lesson(browser, server, "label")
    assert browser.evaluate("location.hash.split('/')[1]") == "label.0"
    assert browser.evaluate(f"{TOUR}.next.disabled") is True
    settled(browser)
    browser.evaluate("document.querySelectorAll('.option')[1].click()")  # the wrong one
    assert browser.evaluate("document.querySelector('.option .chip.warn') !== null") is True
    assert browser.evaluate(f"{TOUR}.next.disabled") is False
    before = len(browser.evaluate("doxaStudio.points"))
    browser.evaluate(f"{TOUR}.next.click()")
    browser.wait("location.hash.split('/')[1] === 'label.1'", 60)
    settled(browser)
    assert len(browser.evaluate("doxaStudio.points")) == before + 1
    assert "It is different" in browser.evaluate("document.querySelector('.tour').innerText")
    browser.evaluate("document.getElementById('clear').click()")  # what a person changes …
    browser.settle(0.5)
    assert browser.evaluate("location.hash.split('/')[1]") == "label.1"
    browser.evaluate("[...document.querySelectorAll('.tour button')].find(b => "
                     "b.textContent === 'Reset').click()")  # fmt: skip
    browser.wait(f"doxaStudio.points.length === {before + 1}", 30)  # … can be reset
    browser.evaluate("history.back()")
    browser.wait("doxaStudio.points.length === 0", 30)
    check_quiet(browser, server.origin)


def test_presenter_mode_goes_by_arrow_keys_to_another_room(
    browser: Browser, server: Server
) -> None:
    start_lesson(browser, server, "label")
    browser.evaluate(f"{TOUR}.present(true); {TOUR}.show()")
    large = browser.evaluate(
        "parseFloat(getComputedStyle(document.querySelector('.say')).fontSize)"
    )
    assert large >= 24
    for step in range(3):
        assert browser.evaluate(f"{TOUR}.answered") is False
        press(browser, "ArrowRight", 39)  # reveals
        browser.wait(f"{TOUR}.answered", 30)
        press(browser, "ArrowRight", 39)  # goes on
        browser.wait(f"window.doxaStudio && doxaStudio.address && {TOUR} && "
                     f"{TOUR}.step === {step + 1}", 60)  # fmt: skip
        browser.wait(READY, 120)
    assert browser.evaluate("location.pathname") == "/classification"
    assert browser.evaluate("document.documentElement.className").split() == [
        "touring", "presenter",
    ]  # fmt: skip
    press(browser, "r", 82, "r")
    assert browser.evaluate(f"{TOUR}.answered") is True
    press(browser, "ArrowLeft", 37)
    browser.wait("location.pathname === '/'", 60)
    browser.wait(READY, 120)
    press(browser, "Escape", 27)
    assert browser.evaluate("document.documentElement.className") == "touring"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 375])
def test_names_contrast_and_width(dark: bool, width: int, browser: Browser, server: Server) -> None:
    options = {"width": width, "height": 812, "dark": dark}
    visit(browser, server, **options)
    browser.evaluate("doxaStudio.panels.forEach(p => p.settingsButton.click())")
    browser.evaluate("doxaStudio.openAmbiguity(true)")
    for map_ in ("probability", "epistemic"):
        browser.evaluate(f"doxaStudio.useMap('{map_}')")
        browser.settle(0.3)
        assert browser.evaluate(NAMED) == []
        assert [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    check_quiet(browser, server.origin)
    start_lesson(browser, server, "averaging", **options)
    browser.evaluate("document.querySelectorAll('.option')[0].click()")
    for presenting in ("false", "true"):
        browser.evaluate(f"{TOUR}.present({presenting}); {TOUR}.show()")
        browser.settle(0.3)
        assert browser.evaluate(NAMED) == []
        assert [one for one in browser.evaluate(CONTRAST) if one[0] < 4.5] == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate("sessionStorage.clear()")
