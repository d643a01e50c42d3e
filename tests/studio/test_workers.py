"""The processes of the studio: one job per panel, cancelled, limited, replaced, and never left.

A process takes seconds to start, since it imports torch: the tests of jobs share one pool, and what
a test waits for is an event, never a time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from doxa.studio import workers
from doxa.studio.workers import Job, Pool, finite

pytestmark = pytest.mark.slow

ROOMS = {"test": "studio_room"}
LONG = 120.0  # seconds after which a test fails


class Panel:
    """What came back for the jobs of a panel."""

    def __init__(self, name: str = "a", page: int = 1) -> None:
        self.key = (page, name)
        self.got: list[tuple[str, Any]] = []
        self._more = asyncio.Event()

    def ask(self, pool: Pool, task: str, content: Any = None) -> Job:
        def deliver(kind: str, text: bytes) -> None:
            self.got.append((kind, json.loads(text)))
            self._more.set()

        job = Job(self.key, "test", task, content, deliver)
        pool.submit(job)
        return job

    async def until(self, there: Callable[[list[tuple[str, Any]]], bool]) -> None:
        while not there(self.got):
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), LONG)

    async def end(self, count: int = 1) -> tuple[str, Any]:
        """The last of a number of results that are not intermediate."""
        ends = lambda got: [one for one in got if one[0] != "shown"]  # noqa: E731
        await self.until(lambda got: len(ends(got)) >= count)
        return ends(self.got)[count - 1]


def run(test: Callable[[Pool], Coroutine[Any, Any, None]], **options: Any) -> Pool:
    pool = Pool(**({"processes": 1, "rooms": ROOMS} | options))

    async def main() -> None:
        await pool.start()
        try:
            assert pool.facts is not None
            await asyncio.wait_for(asyncio.shield(pool.facts), LONG)
            await test(pool)
        finally:
            pool.close()

    asyncio.run(main())
    return pool


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_jobs_of_one_process() -> None:
    """In one pool: an answer; failures, which end nothing; numbers that JSON does not have; a job
    that is superseded or cancelled, by a message and by a signal; a process that dies."""

    async def test(pool: Pool) -> None:
        first = pool.pids
        one = Panel()
        one.ask(pool, "echo", {"x": [0.1, 1e-300]})
        assert await one.end() == ("done", {"x": [0.1, 1e-300]})
        one.ask(pool, "fail")
        assert await one.end(2) == ("problem", {"message": "these points cannot be fitted"})
        one.ask(pool, "bug", 5)
        kind, content = await one.end(3)
        assert kind == "problem"
        assert "IndexError" in content["message"]
        one.ask(pool, "strange")
        kind, content = await one.end(4)
        assert content == {"values": [1.5, None, None], "pid": first[0]}
        assert pool.pids == first

        # Superseded while it runs: the process reads the request, and takes the newer job.
        two = Panel("b")
        two.ask(pool, "steps", 100_000)
        await two.until(lambda got: len(got) > 1)
        two.ask(pool, "echo", "new")
        assert [await two.end(k) for k in (1, 2)] == [("cancelled", None), ("done", "new")]
        assert pool.pids == first

        # Superseded while it waits: it never runs.
        three, four = Panel("c"), Panel("d")
        three.ask(pool, "steps", 100_000)
        await three.until(lambda got: len(got) > 0)
        four.ask(pool, "die")
        four.ask(pool, "echo", "the newer one")
        pool.cancel(three.key)
        assert [await four.end(k) for k in (1, 2)] == [
            ("cancelled", None),
            ("done", "the newer one"),
        ]
        assert pool.pids == first

        # A job that does not ask whether it was cancelled is ended by a signal, and replaced.
        five = Panel("e")
        five.ask(pool, "deaf", 10 * LONG)
        began = time.monotonic()
        five.ask(pool, "echo", "after")
        assert [await five.end(k) for k in (1, 2)] == [("cancelled", None), ("done", "after")]
        assert time.monotonic() - began >= workers.PATIENCE
        second = pool.pids
        assert len(second) == 1
        assert second != first
        assert gone(first[0])

        # A process that dies says so, and another one takes its place.
        six = Panel("f")
        six.ask(pool, "die")
        kind, content = await six.end()
        assert kind == "problem"
        assert "ended unexpectedly" in content["message"]
        six.ask(pool, "echo", 1)
        assert await six.end(2) == ("done", 1)

        # A page that leaves takes its jobs with it, and no others.
        seven, eight = Panel("g", page=7), Panel("h", page=8)
        seven.ask(pool, "steps", 100_000)
        await seven.until(lambda got: len(got) > 0)
        eight.ask(pool, "echo", 8)
        pool.leave(7)
        assert await eight.end() == ("done", 8)
        assert await seven.end() == ("cancelled", None)

    pool = run(test)
    assert pool.pids == []


def test_limits_of_time_and_memory() -> None:
    async def test(pool: Pool) -> None:
        one = Panel()
        one.ask(pool, "memory", 4 << 30)
        kind, content = await one.end()
        assert kind == "problem"
        assert "memory" in content["message"]
        assert pool.pids == first
        one.ask(pool, "memory", 1 << 20)  # the process goes on
        assert await one.end(2) == ("done", 0.0)
        one.ask(pool, "steps", 100_000)
        kind, content = await one.end(3)
        assert kind == "problem"
        assert "more than 2 seconds" in content["message"]
        one.ask(pool, "echo", 1)
        assert await one.end(4) == ("done", 1)

    first: list[int] = []

    async def with_first(pool: Pool) -> None:
        first.extend(pool.pids)
        await test(pool)

    run(with_first, seconds=2.0, memory=1 << 30)


def test_processes_that_cannot_start_are_not_started_for_ever() -> None:
    pool = Pool(1, {"test": "studio_room_that_is_not_there"})

    async def main() -> None:
        await pool.start()
        panel = Panel()
        panel.ask(pool, "echo", 1)
        kind, content = await panel.end()
        assert kind == "problem"
        assert "no process can be started" in content["message"]
        panel.ask(pool, "echo", 1)
        assert (await panel.end(2))[0] == "problem"
        pool.close()

    asyncio.run(main())
    assert pool.pids == []


SERVER = """
import asyncio, sys
from doxa.studio.workers import Pool
async def main():
    pool = Pool(2, {"test": "studio_room"})
    await pool.start()
    await pool.facts
    sys.stdout.write(" ".join(map(str, pool.pids)) + chr(10))
    sys.stdout.flush()
    await asyncio.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_server(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    paths = [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    server = subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py")], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 2
        server.send_signal(how)
        server.wait(LONG)
        wait_for(lambda: all(map(gone, pids)))
    finally:
        server.kill()
        server.wait()


def test_numbers_that_json_does_not_have() -> None:
    values = {"a": [1.0, float("nan")], "b": (float("-inf"), None, "x", True)}
    assert finite(values) == {"a": [1.0, None], "b": [None, None, "x", True]}
