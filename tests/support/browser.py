"""A headless Chromium over its debugging pipe: standard library only.

With --remote-debugging-pipe the browser reads commands from file descriptor 3 and writes answers
and events to 4, as JSON texts that each end in a NUL byte (Chrome DevTools Protocol).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip

# Becomes the browser, with the two pipes as its descriptors 3 and 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser, one page at a time. What the page did is in `events`, by method name."""

    def __init__(self) -> None:
        program = find()
        assert program is not None, "no Chromium"
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(command_read), str(answer_write), program,
             *FLAGS[:-1], f"--user-data-dir={self.folder.name}", FLAGS[-1]],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)
        self._buffer, self._next, self.session = b"", 0, ""
        self._page = ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close", session="")
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file in a page of its own, and start the record of what it does."""
        self.visit(file.resolve().as_uri(), width, height, dark)

    def visit(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load an address in a page of its own, and start the record of what it does."""
        target = self.call("Target.createTarget", {"url": "about:blank"}, "")["targetId"]
        if self._page:
            self.call("Target.closeTarget", {"targetId": self._page}, "")
        self._page = target
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True}, "")
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.events.clear()
        self.call("Page.navigate", {"url": address})
        self._wait_for("Page.loadEventFired")
        self.settle()

    def settle(self, seconds: float = 0.5) -> None:
        """Let what is under way happen."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._receive(left)

    def seen(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def evaluate(self, expression: str) -> Any:
        """A JavaScript value; the page's own policy does not bind its debugger."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> Any:
        """The value of a JavaScript expression, once it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"this did not become true: {expression}"
            self.settle(0.05)
        return value

    def screenshot(self, file: Path, whole: bool = True) -> None:
        options = {"format": "png", "captureBeyondViewport": whole}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", options)["data"]))

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params or {}}
        session = self.session if session is None else session
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            answer = self._receive(1.0)
            if answer is not None and answer.get("id") == message["id"]:
                assert "error" not in answer, answer
                return dict(answer["result"])
        raise AssertionError(f"{method} was not answered")

    def _wait_for(self, method: str) -> None:
        end = time.monotonic() + 60.0
        while not self.seen(method):
            assert time.monotonic() < end, f"{method} did not happen"
            self._receive(1.0)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message, events also kept; None if none came in time."""
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], seconds)[0]:
                return None
            part = os.read(self._read, 1 << 20)
            assert part, "the browser is gone"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
