"""The doors of the studio: a guard of `doxa.http` whose access is a session in a cookie.

A page in a browser can send requests to a server on the same machine, whichever site it is from.
The guard is strict: it lets in pages of its own origin only. And everything but the pages that
exchange the token needs a session: a random id in a cookie.

The token in the printed address is exchanged once, by a POST of the page that it opens, for a
session id. The id is in a cookie that scripts cannot read and other sites do not send. Its name has
the port, since the cookies of one host are shared by all its ports.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from doxa.http import HEADERS, JSON, Guard, Headers, Limits, Refusal, Secret, parse_json, read_body

POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self'; frame-ancestors 'none'"
)
EXCHANGE = "/enter"  # POST: the token for a session
LARGEST_BODY = 4096  # bytes of the request that exchanges it


class Doors(Guard):
    """A guard that lets in one person's browser.

    Parameters
    ----------
    app : callable
        The application behind the doors (ASGI).
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
        app: Any,
        port: int,
        hosts: Iterable[str] = (),
        public: Iterable[str] = (),
        linked: Iterable[str] = ("/",),
        token: str | None = None,
    ) -> None:
        more = {
            "content-security-policy": POLICY, "x-frame-options": "DENY",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
        }  # fmt: skip
        names = frozenset({f"127.0.0.1:{port}", *hosts})
        super().__init__(
            app, names, self._need_session, strict=True, linked=(*linked,), headers=HEADERS | more
        )
        self.public = frozenset({*public, EXCHANGE})
        self.cookie = f"doxa_studio_{port}"
        self.token = token or secrets.token_urlsafe(32)
        self._secret: Secret | None = Secret(self.token)
        self._sessions: list[Secret] = []

    async def admit(self, scope: Any, receive: Any, send: Any) -> None:
        """Exchange the token, or pass the request on. The page of the printed address is opened
        with its token, or by a link without a session: it is the one that exchanges the token."""
        path, headers = scope["path"], scope["headers"]
        if path == EXCHANGE and scope["type"] == "http" and scope["method"] == "POST":
            await self._exchange(headers, receive, send)
            return
        asks = scope.get("query_string") or not self._has_session(headers)
        if path in self._linked and scope["type"] == "http" and asks:
            scope = {**scope, "path": EXCHANGE, "raw_path": EXCHANGE.encode()}
        await super().admit(scope, receive, send)

    def open_session(self) -> str:
        """A new session: the value of its cookie."""
        session = secrets.token_urlsafe(32)
        self._sessions.append(Secret(session))
        return session

    def _need_session(self, path: str, headers: Headers) -> None:
        if path not in self.public and not self._has_session(headers):
            raise Refusal(401, "open the address that was printed when the server started")

    def _has_session(self, headers: Headers) -> bool:
        for key, line in headers:
            for part in line.decode("latin-1").split(";") if key.lower() == b"cookie" else ():
                name, _, value = part.strip().partition("=")
                if name == self.cookie and any(known.equals(value) for known in self._sessions):
                    return True
        return False

    async def _exchange(self, headers: Headers, receive: Any, send: Any) -> None:
        """Exchange the token for a session, once."""
        body = await read_body(headers, receive, Limits(body=LARGEST_BODY))
        try:
            found = parse_json(body, 1)
        except Refusal:
            found = None
        given = found.get("token") if isinstance(found, dict) else None
        more = []
        if isinstance(given, str) and self._secret is not None and self._secret.equals(given):
            self._secret = None
            cookie = f"{self.cookie}={self.open_session()}; HttpOnly; SameSite=Strict; Path=/"
            more = [(b"set-cookie", cookie.encode())]
        elif not self._has_session(headers):
            raise Refusal(
                403, "this address was used before, or is of another server: the token in it works "
                "once. Start the server again for a new one",
            )  # fmt: skip
        own = [(b"content-type", JSON.encode()), (b"content-length", b"2"), *more]
        await send({"type": "http.response.start", "status": 200, "headers": own})
        await send({"type": "http.response.body", "body": b"{}"})
