"""The doors of a local server: who may come in, and with what headers pages leave.

A page in a browser can send requests to a server on the same machine, whichever site it is from.
The rules below let in the person who started the server, and no page of another site:

    Host             exactly one of the server's own names, with its port (no DNS rebinding)
    Origin           on a websocket and on every request that is not a GET: the request's own host
    Sec-Fetch-Site   same-origin or none, for everything but the pages that a link may open
    session          a random id in a cookie, for everything but the pages that exchange the token

The token in the printed address is exchanged once, by a POST of the page that it opens, for a
session id. The id is in a cookie that scripts cannot read and other sites do not send. Its name has
the port, since the cookies of one host are shared by all its ports.

`Doors` is plain ASGI middleware: it needs no framework, and checks a websocket before it is
accepted.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
EXCHANGE = "/enter"  # POST: the token for a session
LARGEST_BODY = 4096  # bytes of a request
_CLOSED = 1008  # the code of a websocket that is refused

_MESSAGES = {
    "host": "This server answers to its own address only: open the address that was printed.",
    "origin": "This request came from another site.",
    "session": "Open the address that was printed when the server started.",
    "token": "This address was used before, or is of another server: the token in it works once. "
    "Start the server again for a new one.",
    "large": "This request is too large.",
}


class Doors:
    """ASGI middleware that lets in one person's browser.

    Parameters
    ----------
    app : callable
        The application behind the doors.
    port : int
        The port of the server.
    hosts : iterable of str
        Further values of the header `Host` to accept, such as that of a tunnel.
    public : iterable of str
        Paths that need no session: the pages that exchange the token, and what they load.
    linked : iterable of str
        Paths that a link of another site may open. They must not contain data.
    token : str, optional
        The token of the printed address. Default: a random one.
    """

    def __init__(
        self,
        app: App,
        port: int,
        hosts: Iterable[str] = (),
        public: Iterable[str] = (),
        linked: Iterable[str] = ("/",),
        token: str | None = None,
    ) -> None:
        self.app = app
        self.hosts = frozenset({f"127.0.0.1:{port}", *hosts})
        self.public = frozenset({*public, EXCHANGE})
        self.linked = frozenset(linked)
        self.cookie = f"doxa_studio_{port}"
        self.token: str | None = token or secrets.token_urlsafe(32)
        self._sessions: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check all rules before the websocket is accepted."""
        headers = _headers(scope)
        refused = self._refused(headers, needs_origin=True, linked=False)
        if refused is None and not self._has_session(headers):
            refused = "session"
        if refused is None:
            await self.app(scope, receive, send)
            return
        message = await receive()
        if message["type"] == "websocket.connect":
            await send({"type": "websocket.close", "code": _CLOSED, "reason": refused})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = _headers(scope), scope["path"]

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in HEADERS}
                kept = [(k, v) for k, v in message.get("headers", ()) if k.lower() not in own]
                message = {**message, "headers": [*kept, *HEADERS]}
            await send(message)

        reads = scope["method"] in ("GET", "HEAD")
        refused = self._refused(headers, not reads, linked=reads and path in self.linked)
        if refused is not None:
            await _answer(with_headers, 403, {"message": _MESSAGES[refused]})
        elif path == EXCHANGE and scope["method"] == "POST":
            await self._exchange(headers, receive, with_headers)
        elif path in self.linked and (scope["query_string"] or not self._has_session(headers)):
            inside = {**scope, "path": EXCHANGE, "raw_path": EXCHANGE.encode()}
            await self.app(inside, receive, with_headers)
        elif path in self.public or self._has_session(headers):
            await self.app(scope, receive, with_headers)
        else:
            await _answer(with_headers, 401, {"message": _MESSAGES["session"]})

    def _refused(
        self, headers: dict[str, list[str]], needs_origin: bool, linked: bool
    ) -> str | None:
        """The first rule that a request breaks, or None."""
        host = headers.get("host", [])
        if len(host) != 1 or host[0] not in self.hosts:
            return "host"
        origin = headers.get("origin", [])
        allowed = {f"http://{host[0]}"}
        if not host[0].startswith("127.0.0.1:"):  # a tunnel may have ended TLS
            allowed.add(f"https://{host[0]}")
        if (needs_origin or origin) and (len(origin) != 1 or origin[0] not in allowed):
            return "origin"
        site = headers.get("sec-fetch-site", [])
        if not linked and any(value not in ("same-origin", "none") for value in site):
            return "origin"
        return None

    def _has_session(self, headers: dict[str, list[str]]) -> bool:
        for line in headers.get("cookie", []):
            for part in line.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self.cookie and any(_same(value, known) for known in self._sessions):
                    return True
        return False

    async def _exchange(self, headers: dict[str, list[str]], receive: Receive, send: Send) -> None:
        """Exchange the token for a session, once."""
        body = await _body(receive)
        if body is None:
            await _answer(send, 413, {"message": _MESSAGES["large"]})
            return
        try:
            found = json.loads(body)
            given = found.get("token") if isinstance(found, dict) else None
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, str) and self.token is not None and _same(given, self.token):
            self.token = None
            session = secrets.token_urlsafe(32)
            self._sessions.add(session)
            cookie = f"{self.cookie}={session}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 200, {}, [(b"set-cookie", cookie.encode())])
        elif self._has_session(headers):
            await _answer(send, 200, {})
        else:
            await _answer(send, 403, {"message": _MESSAGES["token"]})


def _same(given: str, known: str) -> bool:
    """Whether two secrets are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), known.encode())


def _headers(scope: Scope) -> dict[str, list[str]]:
    """The values of each header, by its name in lower case."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


async def _body(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too large."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        body += message.get("body", b"")
        if len(body) > LARGEST_BODY:
            return None
        if not message.get("more_body", False):
            return body


async def _answer(
    send: Send, status: int, content: dict[str, Any], headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps(content).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
