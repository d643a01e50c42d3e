"""The studio in Chromium: the time from a moved point to the first new picture.

    python -m benchmarks.studio                        a table; two minutes
    python -m benchmarks.studio --pictures docs/figures     those of docs/studio.md

The time runs from the change of a point in the page to the frame that shows the answer: message,
process, fit, numbers as JSON, drawing. 40 points, one network of 50 units. A method that trains
shows the fit on its way first, which is what is timed. The second table is of the room of classes.
For the samplers: frames and steps per second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from browser import Browser, find

READY = (
    "window.doxaStudio && doxaStudio.panels.length > 0 && doxaStudio.panels.every("
    "p => p.element.getAttribute('aria-busy') === 'false')"
)
EXACT = {"linear": ["linear"], "gp": ["gp"], "nngp": ["nngp"],
         "four panels": ["gp", "linear", "nngp", "gp"]}  # fmt: skip
QUICK = ("linear", "gp", "nngp", "ntk")
TRAINED = {name: [name] for name in ("map", "laplace", "deep-ensemble", "mc-dropout", "hmc")}
CLASSES = {name: [name] for name in ("nngp", "ntk", "map", "laplace", "deep-ensemble", "hmc")}
STATES = {
    "functions": """{ points: doxaStudio.facts.presets["two noises"].slice(0, 40), seed: 0,
        hidden: [], view: { x0: -5, x1: 5, y0: -3, y1: 3 },
        panels: METHODS.map(method => ({ method })) }""",
    "classification": """{ points: doxaStudio.facts.presets.moons.points.map(p => [...p]), seed: 0,
        classes: 2, map: "probability", hidden: [], ambiguity: false,
        view: { x0: -4.8, x1: 4.8, y0: -3, y1: 3 },
        panels: METHODS.map(method => ({ method })) }""",
}  # of the rooms, with 40 points
SECONDS = 10  # of the measurement of the idle server
TIMED = """
(async () => {
  const settled = () => new Promise(done => { const look = () =>
    doxaStudio.panels.every(p => p.element.getAttribute("aria-busy") === "false")
      ? done() : setTimeout(look, 20); look(); });
  doxaStudio.take(STATE);
  await settled();
  const times = [];
  for (let i = 0; i < COUNT; i++) {
    const before = doxaStudio.panels.map(p => p.shown || 0), start = performance.now();
    doxaStudio.moveTo(0, -3.5 + 0.01 * i, 0.5);
    times.push(await new Promise(done => { const look = () =>
      doxaStudio.panels.every((p, k) => p.shown > before[k])
        ? requestAnimationFrame(() => done(performance.now() - start))
        : setTimeout(look, 1); look(); }));
    await settled();
  }
  times.sort((a, b) => a - b);
  window.timed = JSON.stringify([times[times.length >> 1], times[Math.floor(times.length * 0.95)]]);
})()
"""


def time_panels(browser: Browser, room: str, methods: list[str], count: int) -> tuple[float, float]:
    """The median and the 95 % quantile of the reaction, in milliseconds."""
    browser.evaluate("window.timed = ''")
    code = TIMED.replace("STATE", STATES[room]).replace("METHODS", json.dumps(methods))
    browser.call("Runtime.evaluate", {"expression": code.replace("COUNT", str(count))})
    middle, high = json.loads(browser.wait("window.timed", 600))
    return middle, high


def print_table(browser: Browser, room: str, rows: dict[str, list[str]], count: int) -> None:
    print(f"\n| {room} | median, ms | 95 %, ms |\n|---|---|---|")
    for name, methods in rows.items():
        quick = all(method in QUICK for method in methods)
        many = count if quick else max(5, count // 5)
        middle, high = time_panels(browser, room, methods, many)
        print(f"| {name} | {middle:.0f} | {high:.0f} |", flush=True)


PLAYED = """
(async () => {
  doxaStudio.take(doxaStudio.checked({ target: "banana", chains: 2, spread: 1, speed: 50,
    panels: ["metropolis", "hmc", "sgld", "mala"].slice(0, COUNT).map(sampler => ({ sampler })) }));
  const wait = (ms) => new Promise(done => setTimeout(done, ms));
  while (!doxaStudio.panels.every(p => p.frames.length >= 30)) await wait(20);
  doxaStudio.play(true);
  const times = [], start = performance.now();
  while (performance.now() - start < 1000 * SECONDS)
    times.push(await new Promise(requestAnimationFrame));
  const steps = doxaStudio.time / SECONDS;
  doxaStudio.play(false);
  const changed = [];
  for (let i = 0; i < 10; i++) {
    const panel = doxaStudio.panels[0], before = performance.now();
    panel.change("step_size", 0.5 + 0.01 * i);
    while (panel.frames.length <= doxaStudio.time) await wait(1);
    await new Promise(requestAnimationFrame);
    changed.push(performance.now() - before);
  }
  changed.sort((a, b) => a - b);
  window.timed = JSON.stringify([times.length / SECONDS, steps, changed[5], doxaStudio.time]);
})()
"""


def time_samplers(browser: Browser, origin: str) -> None:
    """Frames and steps per second of panels that play at 50 steps per second, and the time from a
    live change to the picture of the next step."""
    browser.visit(f"{origin}/samplers")
    browser.wait("window.doxaStudio && doxaStudio.panels.length > 0", 300)
    print("\n| samplers | frames/s | steps/s | live change, ms | at step |\n|---|---|---|---|---|")
    for count in (1, 4):
        browser.evaluate("window.timed = ''")
        code = PLAYED.replace("COUNT", str(count)).replace("SECONDS", str(SECONDS))
        browser.call("Runtime.evaluate", {"expression": code})
        frames, steps, changed, at = json.loads(browser.wait("window.timed", 600))
        print(f"| {count} | {frames:.0f} | {steps:.0f} | {changed:.0f} | {at:.0f} |")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def take_pictures(browser: Browser, origin: str, folder: Path) -> None:
    def shot(name: str, page: str, width: int, height: int, dark: bool = False) -> None:
        browser.visit(origin + page, width, height, dark)
        browser.wait(READY, 300)
        browser.settle(0.5)
        browser.screenshot(folder / f"studio_{name}.png", whole=False)

    def fragment() -> str:
        browser.evaluate("document.getElementById('link').click()")
        browser.wait(READY, 300)
        return str(browser.wait("location.hash"))

    browser.evaluate(
        "doxaStudio.take({points: doxaStudio.facts.presets.gap, seed: 0, hidden: ['prior'], view: "
        "{x0: -5, x1: 5, y0: -3, y1: 3}, panels: [{method: 'gp'}, {method: 'hmc'}]})"
    )
    page = f"/{fragment()}"
    shot("functions", page, 1240, 760)
    shot("dark", page, 1240, 760, dark=True)
    shot("phone", page, 390, 844)
    browser.visit(f"{origin}/classification")
    browser.wait(READY, 300)
    browser.evaluate(
        "doxaStudio.take({...doxaStudio.defaults(), ...doxaStudio.facts.presets.overlap, hidden: "
        "[], map: 'epistemic', panels: [{method: 'nngp'}, {method: 'hmc'}]})"
    )
    page = f"/classification{fragment()}"
    shot("classes", page, 1240, 900)
    shot("classes_dark", page, 1240, 900, dark=True)
    shot("classes_phone", page, 390, 844)
    browser.visit(f"{origin}/lessons")
    browser.wait("window.doxaStudio", 60)
    at = browser.evaluate(
        "[...document.querySelectorAll('#lessons a')].map(a => a.getAttribute('href'))"
        ".find(a => a.endsWith('averaging.0'))"
    )
    shot("lesson", at, 1240, 900)
    browser.evaluate("document.querySelectorAll('.option')[1].click()")
    browser.evaluate("doxaStudio.address.tour.next.click()")
    browser.settle(1.0)
    browser.wait(READY, 300)
    browser.evaluate("scrollTo(0, 0)")
    browser.screenshot(folder / "studio_lesson.png", whole=False)
    take_pictures_of_samplers(browser, origin, folder)


def take_pictures_of_samplers(browser: Browser, origin: str, folder: Path) -> None:
    pictures: list[tuple[str, int, int, bool, dict[str, Any]]] = [
        ("samplers", 1240, 1000, False, {
            "target": "banana", "panels": [{"sampler": "nuts"}, {"sampler": "sgld"}], "chains": 4,
            "spread": 1, "at": 60}),
        ("samplers_phone", 390, 844, False, {
            "target": "mixture", "panels": [{"sampler": "svgd"}], "spread": 2, "at": 25}),
        ("samplers_dark", 1240, 1000, True, {
            "target": "network", "panels": [{"sampler": "hmc"}, {"sampler": "sghmc"}],
            "chains": 2, "spread": 1, "at": 120}),
    ]  # fmt: skip
    for name, width, height, dark, state in pictures:
        browser.visit(f"{origin}/samplers", width, height, dark)
        browser.wait("window.doxaStudio && doxaStudio.panels.length > 0", 300)
        browser.evaluate(f"doxaStudio.take(doxaStudio.checked({json.dumps(state)}))")
        browser.wait(
            "doxaStudio.picture && doxaStudio.panels.every(p => p.frames.length > doxaStudio.time)",
            300,
        )
        browser.evaluate(
            "scrollTo(0, innerWidth < 600 ? document.querySelector('.player').offsetTop : 0)"
        )
        browser.settle(0.5)
        browser.screenshot(folder / f"studio_{name}.png", whole=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="the folder of the pictures")
    parser.add_argument("--count", type=int, default=40, help="moved points for each row")
    given = parser.parse_args()
    if find() is None:
        raise SystemExit("there is no Chromium on this machine")
    server = subprocess.Popen(
        [sys.executable, "-m", "doxa", "studio", "--no-browser"], text=True,
        stdout=subprocess.PIPE, env=os.environ | {"COLUMNS": "300"},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with Browser() as browser:
            browser.visit(address)
            browser.wait(READY, 300)
            if given.pictures is not None:
                take_pictures(browser, address.partition("/?")[0], given.pictures)
                return
            browser.settle(10.0)  # the processes warm up
            print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
            print_table(browser, "functions", EXACT | TRAINED, given.count)
            browser.visit(address.partition("/?")[0] + "/classification")
            browser.wait(READY, 300)
            print_table(browser, "classification", CLASSES, given.count)
            time_samplers(browser, address.partition("/?")[0])
            browser.visit("about:blank")
            before = processor_seconds(server.pid)
            browser.settle(SECONDS)
            idle = (processor_seconds(server.pid) - before) / SECONDS
            print(f"\nidle server: {100 * idle:.1f} % of a processor")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    main()
