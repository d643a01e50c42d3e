"""A server in a thread of the test, its client, and posteriors that wait or draw jointly."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import numpy as np

from doxa import http as shared
from doxa.app.serve import application
from doxa.app.serve.batching import Batcher

SECONDS = 60  # nothing in a test waits longer


class Server:
    """One run behind a port that the system chose; ends with the `with` block."""

    def __init__(
        self, run: tuple[Any, Any], token: str | None = None, host: str = "127.0.0.1",
        hosts: list[str] | None = None, exact: bool = False, wait: float = 0.002,
        posterior: Any = None, drain: float = 20.0, **limits: Any,
    ) -> None:  # fmt: skip
        loaded, schema = run
        self.batcher = Batcher(posterior or loaded, schema, exact, wait)
        self._socket = shared.listen(host, 0)
        self.port = self._socket.getsockname()[1]
        may = None if token is None else shared.bearer(token, ("/health",))
        self.app = application(
            loaded, schema, "name", self.batcher, shared.Limits(**limits),
            shared.loopback_hosts(host, self.port) if hosts is None else hosts, may,
        )  # fmt: skip
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=shared.serve, args=(self.app, self._socket, drain, self.stop), daemon=True
        )

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop.set()
        self.thread.join(SECONDS)
        self.batcher.close()
        assert not self.thread.is_alive()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def predict(self, value: Any, expect: int = 200, headers: dict[str, str] | None = None) -> Any:
        """The JSON of an answer to rows as JSON; bytes are sent as they are."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        status, _, content = self.ask("POST", "/predict", body, given)
        assert status == expect, content
        return json.loads(content)

    def raw(self, data: bytes, expected: int = 1 << 16) -> bytes:
        """What comes back for some bytes on a connection, until the server closes it."""
        import socket

        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as client:
            client.sendall(data)
            found = b""
            while part := client.recv(expected):
                found += part
        return found


class Gated:
    """A posterior whose predictions wait until the gate is open, and are counted."""

    def __init__(self, posterior: Any) -> None:
        self._posterior = posterior
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._posterior, name)

    def close(self) -> None:
        self.gate.clear()
        self.entered.clear()
        self.rows.clear()

    def predict(self, x: Any) -> Any:
        self.rows.append(len(x))
        self.entered.set()
        assert self.gate.wait(SECONDS)
        if np.any(np.asarray(x) == 666.0):
            raise RuntimeError("a bug of the server, with a secret in its message")
        return self._posterior.predict(x)
