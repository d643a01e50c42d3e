"""`doxa studio` as a person starts it, and what every page of it is checked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from browser import Browser

NAMED = """
[...document.querySelectorAll("button, input, select, textarea, canvas, summary, a")].filter(e => {
  if (!e.checkVisibility() || e.closest("[aria-hidden=true]")) return false;
  const label = e.getAttribute("aria-label") || e.ariaLabel || e.textContent.trim()
    || (e.labels && [...e.labels].map(l => l.textContent.trim()).join(""));
  return !label; }).map(e => e.outerHTML.slice(0, 120))
"""


READY = (
    "window.doxaStudio && doxaStudio.panels.length > 0 && doxaStudio.panels.every("
    "p => p.element.getAttribute('aria-busy') === 'false')"
)
SHOWN = "doxaStudio.panels.map(p => JSON.stringify(p.plane.data))"


class Server:
    """`doxa studio`, as a person starts it."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "doxa", "studio", "--no-browser", *words], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"COLUMNS": "300"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.origin = "/".join(self.address.split("/")[:3])

    def children(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                found.append(int(path.parent.name))
        return found

    def close(self) -> str:
        """End it by Ctrl-C, and return what it wrote on standard error."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.communicate(timeout=60)[1]
        finally:
            self.process.kill()


def check_quiet(browser: Browser, origin: str) -> None:
    """No error in the console, and no request to another host."""
    assert browser.seen("Runtime.exceptionThrown") == []
    assert [e["entry"]["text"] for e in browser.seen("Log.entryAdded")] == []
    assert browser.seen("Runtime.consoleAPICalled") == []
    asked = [e["request"]["url"] for e in browser.seen("Network.requestWillBeSent")]
    asked += [e["url"] for e in browser.seen("Network.webSocketCreated")]
    own = (origin, origin.replace("http", "ws"), "data:", "blob:")
    assert asked != []
    assert [url for url in asked if not url.startswith(own)] == []


def press(browser: Browser, key: str, code: int = 0, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", {
            "type": kind, "key": key, "windowsVirtualKeyCode": code, **more,
        })  # fmt: skip


def settled(browser: Browser) -> list[Any]:
    """What the panels show, once all have their last answer."""
    browser.settle(0.15)
    browser.wait(READY, 120)
    return [json.loads(text) for text in browser.evaluate(SHOWN)]


def mouse(browser: Browser, kind: str, x: float, y: float) -> None:
    browser.call("Input.dispatchMouseEvent", {
        "type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1,
    })  # fmt: skip


def place(browser: Browser, x: float, y: float) -> list[float]:
    """The pixel of a point of the first panel's plane."""
    return browser.evaluate(
        f"(() => {{ const p = doxaStudio.panels[0].plane, b = p.canvas.getBoundingClientRect();"
        f" const q = p.toPixel({x}, {y}); return [b.left + q[0], b.top + q[1]]; }})()"
    )
