"""The server of the studio: static pages, and one websocket per page.

A page sends requests as JSON texts, and gets answers:

    {"type": "ask", "room": …, "task": …, "panel": …, "number": n, "content": …}
    {"type": "cancel", "panel": …}

    {"type": "facts", "content": …}                                  once, when the page is open
    {"type": "answer", "panel": …, "number": n, "kind": …, "content": …}
    {"type": "refused", "message": …}                                a request that was no request

The kind of an answer is "shown" for an intermediate result, and then "done", "problem" or
"cancelled". The server reads the envelope, and passes on contents as they are: it computes nothing.
What is wrong with one request is answered to its page, and ends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doxa import http
from doxa.errors import DataError
from doxa.studio.doors import EXCHANGE, Doors
from doxa.studio.workers import ROOMS, Job, Pool

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

log = logging.getLogger("doxa")

HOST = "127.0.0.1"
MOST_PAGES = 20
LARGEST_MESSAGE = 64 << 10  # bytes
RATE, BURST = 100.0, 200.0  # messages per second, and at once
IDLE = 1800.0  # seconds without a message
_LONGEST_NAME = 40
_UNSENT = 200  # answers that wait for a page that does not read

PAGES = Path(__file__).parent / "pages"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What the page that exchanges the token loads: without a session.
PUBLIC = ("/pages/enter.js", "/pages/studio.css", "/pages/icon.svg", "/pages/strings.js")
# The pages of rooms, which a link of another site may open: they hold no data.
ROOM_PAGES = {
    "/": "/pages/index.html",
    "/classification": "/pages/classification.html",
    "/samplers": "/pages/samplers.html",
    "/lessons": "/pages/lessons.html",
}


@dataclass(frozen=True)
class Room:
    """A room that the command line opens, besides those that need nothing.

    Parameters
    ----------
    name : str
        Its page is `/name`, the file `pages/name.html`.
    module : str
        Where processes find its tasks.
    given : dict
        What it begins with, as JSON has it.
    posts : mapping of str to callable
        Answers to requests that are no GET, by their path.
    close : callable
        Called when the server ends.
    """

    name: str
    module: str
    given: dict[str, Any]
    posts: Mapping[str, Callable[[Request], Any]] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class PanelRequest:
    """A request of a page, with its envelope checked."""

    kind: str
    panel: str
    room: str = ""
    task: str = ""
    number: int = 0
    content: Any = None

    @classmethod
    def read(cls, text: str, rooms: Collection[str] = ROOMS) -> PanelRequest:
        try:
            found = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise DataError("a message must be JSON") from error
        if not isinstance(found, dict):
            raise DataError("a message must be an object")
        kind, panel = found.get("type"), found.get("panel")
        if kind not in ("ask", "cancel"):
            raise DataError("the type of a message is ask or cancel")
        if not isinstance(panel, str) or not 0 < len(panel) <= _LONGEST_NAME:
            raise DataError("a message needs the name of its panel")
        if kind == "cancel":
            return cls(kind, panel)
        room, task, number = found.get("room"), found.get("task"), found.get("number")
        if not (isinstance(room, str) and room in rooms):
            raise DataError("a request needs a room")
        if not isinstance(task, str) or not 0 < len(task) <= _LONGEST_NAME:
            raise DataError("a request needs a task")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**53:
            raise DataError("a request needs a number")
        return cls(kind, panel, room, task, number, found.get("content"))


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class Page:
    """One open page: its requests, and the answers that wait to be sent."""

    def __init__(self, pool: Pool, rooms: Collection[str] = ROOMS) -> None:
        self.pool, self._rooms = pool, rooms
        self.unsent: asyncio.Queue[bytes] = asyncio.Queue(_UNSENT)
        self._allowance, self._last = BURST, time.monotonic()

    def allowed(self) -> bool:
        """Whether one more message is within the rate."""
        now = time.monotonic()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._last)) - 1.0
        self._last = now
        return self._allowance >= 0.0

    def send(self, head: dict[str, Any], content: bytes | None = None) -> None:
        """Send a message, whose content is a JSON text. A page that does not read loses some."""
        text = json.dumps(head).encode()
        if content is not None:
            text = text[:-1] + b', "content": ' + content + b"}"
        with contextlib.suppress(asyncio.QueueFull):
            self.unsent.put_nowait(text)

    def receive(self, text: str) -> None:
        try:
            asked = PanelRequest.read(text, self._rooms)
        except DataError as error:
            self.send({"type": "refused", "message": str(error)})
            return
        panel = (id(self), asked.panel)
        if asked.kind == "cancel":
            self.pool.cancel(panel)
            return
        head = {"type": "answer", "panel": asked.panel, "number": asked.number}

        def deliver(kind: str, content: bytes) -> None:
            self.send(head | {"kind": kind}, content)

        self.pool.submit(Job(panel, asked.room, asked.task, asked.content, deliver))

    def close(self) -> None:
        self.pool.leave(id(self))


class Studio:
    """The application behind the doors.

    Parameters
    ----------
    pool : Pool
        The processes that compute. They are started and ended with the application.
    rooms : sequence of Room
        Those that the command line opens.
    """

    def __init__(self, pool: Pool, rooms: Sequence[Room] = ()) -> None:
        self.pool, self.rooms = pool, rooms
        self._named = ROOM_PAGES | {EXCHANGE: "/pages/enter.html"}
        self._named |= {f"/{room.name}": f"/pages/{room.name}.html" for room in rooms}
        self.pages: set[Page] = set()
        self._files = {
            f"/pages/{path.name}": path for path in sorted(PAGES.iterdir()) if path.suffix in TYPES
        }

    def app(self) -> Any:
        """The application, as ASGI."""
        http.import_server("studio")
        from starlette.applications import Starlette
        from starlette.routing import Route, WebSocketRoute

        @contextlib.asynccontextmanager
        async def lifespan(app: Any) -> AsyncIterator[None]:
            await self.pool.start()
            try:
                yield
            finally:
                self.pool.close()
                for room in self.rooms:
                    room.close()

        posts = {path: answer for room in self.rooms for path, answer in room.posts.items()}
        routes = [
            *(Route(path, self._file) for path in (*self._named, "/pages/{name}")),
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
            WebSocketRoute("/ws", self._connected),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def _file(self, request: Request) -> Response:
        from starlette.responses import Response

        path = self._files.get(self._named.get(request.url.path, request.url.path))
        if path is None:
            return Response("there is no such page", 404, media_type="text/plain")
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    async def _connected(self, websocket: WebSocket) -> None:
        """Serve one page, until it leaves or breaks a limit."""
        await websocket.accept()
        if len(self.pages) >= MOST_PAGES:
            message = f"{MOST_PAGES} pages are open, which is the most: close one"
            await websocket.send_json({"type": "refused", "message": message})
            await websocket.close(1013)
            return
        page = Page(self.pool, {*ROOMS, *(room.name for room in self.rooms)})
        self.pages.add(page)
        sending = asyncio.create_task(self._send(websocket, page))
        try:
            code = await self._receive(websocket, page)
            if code is not None:
                await websocket.close(code)
        except RuntimeError as error:  # the page has gone while it was written to
            log.debug("studio: %s", error)
        finally:
            self.pages.discard(page)
            page.close()
            sending.cancel()

    async def _receive(self, websocket: WebSocket, page: Page) -> int | None:
        """Read messages. The result is the code to close with; None if the page has left."""
        while True:
            try:
                message = await asyncio.wait_for(websocket.receive(), IDLE)
            except TimeoutError:
                return 1001
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            if text is None:
                return 1003
            if len(text) > LARGEST_MESSAGE or len(text.encode(errors="replace")) > LARGEST_MESSAGE:
                return 1009
            if not page.allowed():
                return 1008
            page.receive(text)

    async def _send(self, websocket: WebSocket, page: Page) -> None:
        facts = self.pool.facts
        with contextlib.suppress(RuntimeError):
            if facts is not None:
                page.send({"type": "facts"}, await asyncio.shield(facts))
            while True:
                text = await page.unsent.get()
                await websocket.send_text(text.decode())


def build(
    port: int, hosts: Sequence[str] = (), pool: Pool | None = None, rooms: Sequence[Room] = ()
) -> tuple[Doors, Studio]:
    """The application with its doors, for a server on this port."""
    modules, given = {r.name: r.module for r in rooms}, {r.name: r.given for r in rooms}
    studio = Studio(pool or Pool(rooms=ROOMS | modules, given=given), rooms)
    linked = (*ROOM_PAGES, *(f"/{room.name}" for room in rooms))
    return Doors(studio.app(), port, hosts, PUBLIC, linked), studio


def serve(
    port: int = 0, hosts: Sequence[str] = (), announce: Any = None, rooms: Sequence[Room] = ()
) -> None:
    """Run the studio until it is interrupted.

    Parameters
    ----------
    port : int
        The port; 0 chooses a free one.
    hosts : sequence of str
        Further values of the header `Host`, with port, such as that of a tunnel.
    announce : callable, optional
        Called with the address, once the server listens.
    rooms : sequence of Room
        Rooms of what the command line names. The address is that of the first.
    """
    for name in hosts:
        _check_host(name)
    http.import_server("studio")
    listening = http.listen(HOST, port)
    port = listening.getsockname()[1]
    doors, _ = build(port, hosts, rooms=rooms)
    if announce is not None:
        path = f"/{rooms[0].name}" if rooms else "/"
        announce(f"http://{HOST}:{port}{path}?token={doors.token}")
    http.serve(
        doors, listening, drain=1.0, lifespan="on", ws="websockets-sansio",
        ws_max_size=LARGEST_MESSAGE, ws_ping_interval=60.0, timeout_keep_alive=5,
        limit_concurrency=8 * MOST_PAGES,
    )  # fmt: skip


def _check_host(name: str) -> None:
    plain = name and all(c.isalnum() or c in ".-:[]" for c in name)
    if not plain or len(name) > 255:
        raise DataError(f"--allow-host takes a host as browsers send it, name:port, not {name!r}")
