"""The server of the studio: envelopes, limits, and pages that fail alone. No process computes here:
the pool answers at once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra 'studio' is not installed")

from doxa.errors import DataError, DoxaError
from doxa.studio import functions, samplers, server
from doxa.studio.server import MOST_PAGES, PanelRequest, build
from doxa.studio.workers import Job

PORT = 8765
HOST = f"127.0.0.1:{PORT}"


class AtOnce:
    """In place of the pool: answers with the request."""

    def __init__(self) -> None:
        self.facts: Any = None
        self.jobs: list[Job] = []
        self.cancelled: list[Any] = []
        self.left: list[Any] = []

    async def start(self) -> None:
        self.facts = asyncio.get_running_loop().create_future()
        self.facts.set_result(b'{"functions": {}}')

    def close(self) -> None:
        self.facts.cancel()

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        if job.task == "explode":
            raise RuntimeError("a bug of the server")
        job.deliver("done", json.dumps(job.content).encode())

    def cancel(self, panel: Any) -> None:
        self.cancelled.append(panel)

    def leave(self, page: Any) -> None:
        self.left.append(page)


class Page:
    """A browser's end of a websocket."""

    def __init__(self, app: Any, cookie: str) -> None:
        self._in: asyncio.Queue[Any] = asyncio.Queue()
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        headers = {
            "host": HOST, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin",
            "cookie": cookie,
        }  # fmt: skip
        scope = {
            "type": "websocket", "path": "/ws", "query_string": b"", "subprotocols": [],
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }  # fmt: skip
        self._in.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(app(scope, self._in.get, self._out.put))

    async def read(self) -> Any:
        message = await asyncio.wait_for(self._out.get(), 30)
        return json.loads(message["text"]) if "text" in message else message

    def write(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        self._in.put_nowait({"type": "websocket.receive", "text": text})

    async def leave(self) -> None:
        self._in.put_nowait({"type": "websocket.disconnect", "code": 1001})
        await asyncio.wait_for(self.task, 30)


Open = Callable[[], Coroutine[Any, Any, Page]]


def run(test: Callable[[Open, AtOnce], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        pool = AtOnce()
        await pool.start()
        doors, _ = build(PORT, pool=pool)  # type: ignore[arg-type]
        session = doors.open_session()

        async def open_page() -> Page:
            page = Page(doors, f"{doors.cookie}={session}")
            assert (await page.read())["type"] == "websocket.accept"
            return page

        await test(open_page, pool)

    asyncio.run(main())


def ask(**changes: Any) -> dict[str, Any]:
    return {
        "type": "ask", "room": "functions", "task": "panel", "panel": "p", "number": 1,
        "content": {"x": [0.1]},
    } | changes  # fmt: skip


def test_a_page_asks_and_is_answered() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        page = await open_page()
        assert await page.read() == {"type": "facts", "content": {"functions": {}}}
        page.write(ask(number=7))
        assert await page.read() == {
            "type": "answer", "panel": "p", "number": 7, "kind": "done", "content": {"x": [0.1]},
        }  # fmt: skip
        page.write({"type": "cancel", "panel": "p"})
        await page.leave()
        assert pool.cancelled == [pool.jobs[0].panel]
        assert pool.left == [pool.jobs[0].panel[0]]  # type: ignore[index]

    run(test)


def test_two_pages_have_panels_of_their_own() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        pages = [await open_page() for _ in range(2)]
        for page in pages:
            await page.read()
            page.write(ask())
            await page.read()
        assert len({job.panel for job in pool.jobs}) == 2

    run(test)


WRONG = [
    "", "{", "[]", "1", "null", '"ask"', "{}", "[" * 5000, '{"type": "ask", "panel": NaN}',
    {"type": "eval", "panel": "p"}, {"type": "ask"}, {"type": "cancel"},
    {"type": "cancel", "panel": ""}, {"type": "cancel", "panel": "p" * 41},
    {"type": "cancel", "panel": ["p"]}, ask(room="os"), ask(room=None), ask(room=["functions"]),
    ask(task=""), ask(task=1), ask(task="t" * 41), ask(number=-1), ask(number="1"),
    ask(number=True), ask(number=2**53), ask(number=1.5),
]  # fmt: skip


def test_what_is_no_request_is_refused_and_the_page_goes_on() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        page = await open_page()
        await page.read()
        for wrong in WRONG:
            page.write(wrong)
            assert (await page.read())["type"] == "refused", wrong
        assert pool.jobs == []
        page.write(ask())
        assert (await page.read())["kind"] == "done"

    run(test)


@pytest.mark.parametrize(
    ("messages", "code"),
    [(["x" * (server.LARGEST_MESSAGE + 1)], 1009),
     (["é" * (server.LARGEST_MESSAGE // 2 + 1)], 1009), (["{}"] * 400, 1008)],
    ids=["size", "bytes", "rate"],
)  # fmt: skip
def test_a_page_beyond_its_limits_is_closed(messages: list[str], code: int) -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        page, other = await open_page(), await open_page()
        for message in messages:
            page.write(message)
        while (got := await page.read())["type"] != "websocket.close":
            pass
        assert got["code"] == code
        await asyncio.wait_for(page.task, 30)
        await other.read()
        other.write(ask())
        assert (await other.read())["kind"] == "done"

    run(test)


def test_bytes_are_no_message() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        page = await open_page()
        await page.read()
        page._in.put_nowait({"type": "websocket.receive", "bytes": b"{}"})
        assert (await page.read())["code"] == 1003

    run(test)


def test_an_idle_page_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE", 0.05)

    async def test(open_page: Open, pool: AtOnce) -> None:
        page = await open_page()
        await page.read()
        assert (await page.read())["code"] == 1001

    run(test)


def test_there_are_at_most_so_many_pages() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        pages = [await open_page() for _ in range(MOST_PAGES)]
        late = await open_page()
        assert (await late.read())["type"] == "refused"
        assert (await late.read())["code"] == 1013
        await pages[0].leave()
        again = await open_page()
        assert (await again.read())["type"] == "facts"

    run(test)


def test_a_bug_behind_one_page_ends_no_other() -> None:
    async def test(open_page: Open, pool: AtOnce) -> None:
        page, other = await open_page(), await open_page()
        await page.read(), await other.read()
        page.write(ask(task="explode"))
        await asyncio.wait([page.task], timeout=30)
        other.write(ask())
        assert (await other.read())["kind"] == "done"
        assert len(pool.left) == 1

    run(test)


def test_a_page_that_does_not_read_holds_little() -> None:
    page = server.Page(AtOnce())  # type: ignore[arg-type]
    for _ in range(10 * server._UNSENT):
        page.send({"type": "refused"})
    assert page.unsent.qsize() == server._UNSENT


@pytest.mark.parametrize("name", ["", "a b", "evil/", "a\r\nb", "x" * 300, "http://a"])
def test_a_host_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="name:port"):
        server.serve(0, [name])


def mutate(value: Any, draw: random.Random) -> Any:
    """A value with a random part replaced by something else."""
    odd = [None, True, -1, 0, 10**30, 1.5, 1e308, "", "x", "\ud800", "<b>", [], {}, [[]], [None]]
    if draw.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return draw.choice(odd)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = draw.choice(list(keys))
    new = value.copy()
    if draw.random() < 0.15:
        del new[key]
    else:
        new[key] = mutate(value[key], draw)
    return new


class Call:
    number, cancelled = 1, False

    def show(self, content: Any) -> None:
        json.dumps(content)

    def check(self) -> None:
        pass


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Send messages with errors: envelopes are refused or answered, and rooms raise errors of doxa
    only. The numbers of both that were accepted."""
    draw, accepted, computed = random.Random(seed), 0, 0
    base = {
        "points": [[-1.0, 0.5], [0.0, 0.1], [1.0, -0.4]], "method": "gp",
        "settings": {"refine": 3, "kernel": "rbf"}, "noise": 0.3, "seed": 0, "low": -5, "high": 5,
        "steps": 5, "members": 1, "depth": 1, "width": 4, "activation": "tanh", "prior": 1.0,
        "evaluate": False,
    }  # fmt: skip
    for i in range(count):
        message: Any = ask(content=base)
        if i % 2:
            message = mutate(message, draw)
        text = json.dumps(message)
        if i % 10 == 1:
            at = draw.randrange(len(text))
            text = text[:at] + chr(draw.randrange(1, 300)) + text[at + 1 :]
        try:
            PanelRequest.read(text)
            accepted += 1
        except DataError:
            pass
        room = draw.choice(["panel", "path", "orders", "distance"])
        try:
            functions.TASKS[room](mutate(base, draw), Call())  # type: ignore[arg-type]
            computed += 1
        except DoxaError as error:
            assert len(str(error)) < 2000
    return accepted, computed


@pytest.mark.slow
def test_messages_with_errors() -> None:
    accepted, computed = fuzz(300, 0)
    assert 150 < accepted < 300
    assert 0 < computed < 250


@pytest.mark.slow
@pytest.mark.matrix
def test_ten_thousand_messages_with_errors() -> None:
    accepted, computed = fuzz(10_000, 1)
    assert 5_000 < accepted < 10_000
    assert computed > 0


def fuzz_samplers(count: int, seed: int) -> int:
    """Send contents with errors to the room of samplers, which raises errors of doxa only. The
    number of those that were computed."""
    draw, computed = random.Random(seed), 0
    recipe = {
        "target": "banana", "text": "-x**2 - y**2", "sampler": "hmc", "seed": 0, "chains": 2,
        "settings": {"leapfrog": 2, "jitter": 1.0, "burn_in": 2}, "initial": {"step_size": 0.1},
        "changes": [[1, "mass", 2.0], [2, "restart", [0.5, 0.5]]], "start": [0.1, 0.2],
        "spread": 0.5, "noise": 1.0,
    }  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "frames": {"recipe": recipe, "done": 1, "count": 3},
        "python": {"recipe": recipe, "done": 3},
        "target": {"target": "typed", "text": "-x**2 - y**2", "view": [-2, 2, -1, 1]},
    }
    for _ in range(count):
        task = draw.choice(list(contents))
        try:
            samplers.TASKS[task](mutate(contents[task], draw), Call())  # type: ignore[arg-type]
            computed += 1
        except DoxaError as error:
            assert len(str(error)) < 2000
    return computed


def test_contents_with_errors_for_samplers() -> None:
    assert 3 < fuzz_samplers(60, 0) < 50


@pytest.mark.slow
@pytest.mark.matrix
def test_ten_thousand_contents_with_errors_for_samplers() -> None:
    assert 300 < fuzz_samplers(10_000, 1) < 8_000
