"""What every local server of doxa shares: who may ask, how much, and the form of an answer.

`Guard` stands before an application (ASGI). It refuses a request before any of its body is read,
and a websocket before it is accepted:

- Host. A server on the loopback address answers only if the Host header names that address and its
  port. A web page whose name an attacker has pointed at 127.0.0.1 (DNS rebinding) has another one.
- Origin. A request that a browser sends for a page of another origin is refused. A `strict` guard
  wants the header on every websocket and every request that is not a GET.
- Sec-Fetch-Site, of a strict guard: same-origin or none, but for the pages that a link may open.
- Access. A function of the request's headers; `bearer` is a token in the Authorization header.
  Secrets are compared in constant time, by `Secret`.

Every answer has the headers of the guard: its policy of contents, no-referrer, no-store, nosniff.
Every error is JSON, {"error": {"type", "message"}}: a `Refusal` with its status, a `DoxaError` with
422 (500 if it is not about the data), anything else with 500 and a number under which the log has
the traceback, and nothing of it in the answer.

`Limits` are numbers that hold before anything is parsed. `read_body` counts the bytes that arrive;
`check_json` finds the depth of nesting without parsing.

`serve` runs an application on sockets that are open already, until SIGTERM or SIGINT. Then it stops
to accept, finishes what it has, and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from doxa.errors import DataError, DoxaError, MethodError, MissingExtra, ModelError, StoreError

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
HEADER_SECONDS = 10.0  # for a client to send the head of a request
LEAST_TOKEN = 16  # characters
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
JSON = "application/json"


@dataclass(frozen=True)
class Limits:
    """What one request may cost, and how many may wait."""

    body: int = 8 << 20  # bytes
    rows: int = 16_384
    columns: int = 10_000
    depth: int = 8  # of nested lists and objects in JSON
    text: int = 10_000  # characters of a cell
    waiting: int = 64  # requests that are read, wait or are computed
    seconds: float = 30.0  # from the head of the request to its answer


class Refusal(Exception):
    """A request that is not answered, with the status of HTTP and a message for the client.

    Parameters
    ----------
    status : int
        The status code.
    message : str
        What is wrong, and what to do.
    headers : mapping of str to str, optional
        Headers of the answer.
    close : bool
        Whether the connection ends with the answer, because the rest of the request is not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {**(headers or {}), **({"connection": "close"} if close else {})}


def described(error: BaseException) -> tuple[int, str, str, Mapping[str, str]]:
    """The status, type, message and headers of the answer to an error."""
    if isinstance(error, Refusal):
        return error.status, "Refusal", error.message, error.headers
    from starlette.exceptions import HTTPException

    if isinstance(error, HTTPException):  # of the routes
        allowed = (error.headers or {}).get("Allow", "")
        what = {404: "there is nothing at this path", 405: f"this path takes {allowed}"}
        message = what.get(error.status_code, str(error.detail))
        return error.status_code, "Refusal", message, error.headers or {}
    if isinstance(error, DoxaError) and not isinstance(error, StoreError | ModelError):
        status = 422 if isinstance(error, DataError | MethodError) else 500
        return status, type(error).__name__, " ".join(str(error).split()), {}
    number = secrets.token_hex(4)
    logger.error("error %s", number, exc_info=error)
    return 500, "InternalError", f"an error of the server; its log has it as {number}", {}


def json_bytes(value: Any) -> bytes:
    """JSON without NaN and infinity, which it does not have."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")


class Guard:
    """An application behind checks of each request, with errors as JSON.

    Parameters
    ----------
    app : callable
        An ASGI application.
    hosts : collection of str, optional
        The values of the Host header that are answered. Default: any.
    may : callable, optional
        (path, headers) -> None, or a `Refusal`. Default: everybody may.
    strict : bool
        For pages in a browser: websockets and every request that is not a GET need an Origin, and
        the Sec-Fetch-Site header, if there is one, is same-origin or none.
    linked : collection of str
        Paths that a page of another site may link to, of a strict guard. They hold no data.
    headers : mapping of str to str
        Headers of every answer, in place of those of the application.
    """

    def __init__(
        self,
        app: Any,
        hosts: Collection[str] | None = None,
        may: Callable[[str, Headers], None] | None = None,
        strict: bool = False,
        linked: Collection[str] = (),
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        self._app, self._hosts, self._may = app, hosts, may
        self._strict, self._linked = strict, frozenset(linked)
        self._headers = [(k.encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        began = False

        async def with_headers(message: Any) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began, own = True, {name for name, _ in self._headers}
                kept = [(k, v) for k, v in message.get("headers", []) if k.lower() not in own]
                message = {**message, "headers": [*kept, *self._headers]}
            await send(message)

        try:
            self._check(scope)
            await self.admit({**scope, "app": self}, receive, with_headers)
        except Exception as error:
            status, kind, message, headers = described(error)
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": message[:100]})
            elif not began:
                await answer(with_headers, status, kind, message, headers)

    async def admit(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on that has kept the rules, if it has access."""
        if self._may is not None:
            self._may(scope["path"], scope["headers"])
        await self._app(scope, receive, send)  # routes raise errors where the scope has an app

    def _check(self, scope: Any) -> None:
        headers: Headers = scope["headers"]
        host = single(headers, b"host")
        if self._hosts is not None and host not in self._hosts:
            known = " or ".join(sorted(self._hosts))
            raise Refusal(421, f"the Host header must be {known}", close=True)
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        origin = single(headers, b"origin")
        allowed = {f"http://{host}"}
        if not (host or "").startswith("127.0.0.1:"):  # something before it may have ended TLS
            allowed.add(f"https://{host}")
        needed = origin is not None or (self._strict and not reads)
        if needed and origin not in allowed:
            raise Refusal(403, "requests of pages of another origin are not answered", close=True)
        if self._strict and not (reads and scope["path"] in self._linked):
            sites = [
                value.decode("latin-1") for k, value in headers if k.lower() == b"sec-fetch-site"
            ]
            if any(site not in ("same-origin", "none") for site in sites):
                raise Refusal(403, "requests of pages of another site are not answered", close=True)


async def answer(
    send: Any, status: int, kind: str, message: str, headers: Mapping[str, str]
) -> None:
    """Send an error as JSON."""
    body = json_bytes({"error": {"type": kind, "message": message}})
    every = {"content-type": JSON, "content-length": str(len(body)), **headers}
    pairs = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def single(headers: Headers, name: bytes) -> str | None:
    """The value of a header that may stand once; None if it is absent."""
    found = [value for key, value in headers if key.lower() == name]
    if len(found) > 1:
        raise Refusal(400, f"the header {name.decode()} stands more than once", close=True)
    return found[0].decode("latin-1").strip() if found else None


class Secret:
    """A token, of which its digest is kept.

    Parameters
    ----------
    text : str
        The token.
    """

    def __init__(self, text: str) -> None:
        self._digest = self._of(text)

    def equals(self, given: str) -> bool:
        """Whether it is this one, in a time that does not depend on where they differ."""
        return hmac.compare_digest(self._of(given), self._digest)

    @staticmethod
    def _of(text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def bearer(token: str, open_paths: Sequence[str] = ()) -> Callable[[str, Headers], None]:
    """Access by a token in the Authorization header, compared in constant time.

    Parameters
    ----------
    token : str
        The secret, of at least 16 visible ASCII characters.
    open_paths : sequence of str
        Paths that need no token.
    """
    if len(token) < LEAST_TOKEN or re.fullmatch(r"[!-~]+", token) is None:
        raise MethodError(
            f"a token has at least {LEAST_TOKEN} characters, letters, digits and signs without "
            "spaces; python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        )
    secret = Secret(token)

    def may(path: str, headers: Headers) -> None:
        if path in open_paths:
            return
        kind, _, given = (single(headers, b"authorization") or "").partition(" ")
        if not (secret.equals(given.strip()) and kind.lower() == "bearer"):
            raise Refusal(
                401, "give the token: Authorization: Bearer TOKEN",
                {"www-authenticate": "Bearer"}, close=True,
            )  # fmt: skip

    return may


def may_see(may: Callable[[str, Headers], None] | None, headers: Headers) -> bool:
    """Whether a request to an open path has access to the others, too."""
    try:
        if may is not None:
            may("", headers)
    except Refusal:
        return False
    return True


async def read_body(
    headers: Headers, receive: Callable[[], Awaitable[Any]], limits: Limits
) -> bytes:
    """The body of a request. Its bytes are counted while they arrive: the header Content-Length may
    be wrong or absent. A body that is encoded (gzip) is refused."""
    encoded = single(headers, b"content-encoding")
    if encoded not in (None, "", "identity"):
        plain = {"accept-encoding": "identity"}
        raise Refusal(415, f"the body is encoded ({encoded}): send it as it is", plain, close=True)
    most = f"{limits.body:,} bytes"
    length = single(headers, b"content-length")
    if length is not None and int(length) > limits.body:
        raise Refusal(413, f"the body has {int(length):,} bytes, and {most} are read", close=True)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "the client has closed the connection", close=True)
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limits.body:
            raise Refusal(413, f"the body has more than {most}: send less", close=True)
        parts.append(part)
    return b"".join(parts)


# Without backtracking, and with an end for a string that has none: linear in the length.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(body: bytes, depth: int) -> None:
    """Refuse JSON that is nested more deeply, before it is parsed.

    Without its strings, only brackets are kept. Each round removes the innermost pairs, so the
    number of rounds is the depth.
    """
    brackets = _STRING.sub(b"", body).translate(None, _BUT_BRACKETS)
    for _ in range(depth):
        if not brackets:
            return
        shorter = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(brackets):
            raise Refusal(400, "the body is no JSON: its brackets do not match")
        brackets = shorter
    if brackets:
        raise Refusal(400, f"the JSON is nested more than {depth} deep")


def parse_json(body: bytes, depth: int) -> Any:
    """A JSON value without NaN, infinity and repeated keys."""
    check_json(body, depth)
    try:
        return json.loads(
            body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_once
        )
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8, at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {str(error)[:200]}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number; a missing cell is null")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:100]!r} stands more than once in an object")
    return found


def import_server(extra: str = "serve") -> tuple[Any, Any]:
    """Starlette and uvicorn, of the extra that has them."""
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise MissingExtra(
            f"a server needs the extra {extra!r}: pip install 'doxa[{extra}]'"
        ) from error
    return starlette, uvicorn


def is_loopback(host: str) -> bool:
    """Whether a server on this address can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_hosts(host: str, port: int) -> list[str]:
    """The values of the Host header of a server on a loopback address."""
    own = f"[{host.strip('[]')}]" if ":" in host else host
    names = list(dict.fromkeys(["127.0.0.1", "localhost", "[::1]", own]))
    return [f"{name}:{port}" for name in names] + names * (port == 80)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 lets the system choose."""
    where = host.strip("[]")
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            where, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(kind, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(1024)
        except BaseException:
            made.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MethodError(
            f"no server can listen on {host}, port {port}: {reason}; choose another --port (0: any "
            "that is free) or --host"
        ) from error
    return made


def serve(
    app: Any,
    listening: socket.socket,
    drain: float,
    stop: threading.Event | None = None,
    **settings: Any,
) -> None:
    """Answer requests until SIGTERM, SIGINT or `stop`; then finish what was accepted.

    Parameters
    ----------
    app : callable
        An ASGI application.
    listening : socket
        Where it listens; closed at the end.
    drain : float
        The most seconds for requests that are being answered when the server is stopped.
    stop : threading.Event, optional
        Stops the server as a signal does; for a server that is not in the main thread.
    settings
        Of uvicorn, in place of those here: websockets, for one.
    """
    _, uvicorn = import_server()
    own = {
        "http": _protocol(), "ws": "none", "lifespan": "off", "loop": "asyncio",
        "log_config": None, "log_level": "error", "access_log": False, "proxy_headers": False,
        "server_header": False, "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": max(1, round(drain)),
    }  # fmt: skip
    config = uvicorn.Config(app, **(own | settings))
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # uvicorn would end by the signal, not with 0

    async def watch() -> None:
        while stop is not None and not stop.is_set():
            await asyncio.sleep(0.05)
        server.should_exit = server.should_exit or stop is not None

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def end() -> None:
            server.should_exit = True

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError):  # Windows
                    loop.add_signal_handler(number, end)
        watching = asyncio.create_task(watch())
        try:
            await server.serve(sockets=[listening])
        finally:
            watching.cancel()

    asyncio.run(run())


def _protocol() -> Any:
    """uvicorn's HTTP protocol, with a limit on the time for the head of a request, and an error in
    JSON for what is no HTTP."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        _head: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def _watch(self) -> None:
            waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
            if not waits and self._head is not None:
                self._head.cancel()
                self._head = None
            elif waits and self._head is None:
                self._head = self.loop.call_later(HEADER_SECONDS, self._give_up)

        def _give_up(self) -> None:
            self._head = None
            if self.conn.their_state is h11.IDLE:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._head is not None:
                self._head.cancel()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            body = json_bytes({"error": {"type": "Refusal", "message": "this is no HTTP request"}})
            headers = [
                ("content-type", JSON), ("content-length", str(len(body))), ("connection", "close")
            ]  # fmt: skip
            with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
                parts = [
                    self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"")),
                    self.conn.send(h11.Data(data=body)), self.conn.send(h11.EndOfMessage()),
                ]  # fmt: skip
                self.transport.write(b"".join(part or b"" for part in parts))
            self.transport.close()

    return Protocol


@contextlib.contextmanager
def slot(held: list[int], most: int) -> Iterator[None]:
    """A place among the requests that a server holds; 429 if there is none."""
    if held[0] >= most:
        raise Refusal(
            429, f"{most} requests are waiting: try again later", {"retry-after": "1"}, close=True
        )  # fmt: skip
    held[0] += 1
    try:
        yield
    finally:
        held[0] -= 1
