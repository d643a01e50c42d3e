"""Processes that compute for the studio, so that its server computes nothing.

A `Pool` has at most two processes. They are started with the server and wait, without using the
processor. The server sends a `Job` to a process that is free, and passes on what comes back as it
is. Both directions carry JSON texts: nothing is unpickled.

    one job per panel   a newer request of a panel takes the place of the older one, which is
                        cancelled if it runs
    cancel              the process reads the request when the fit calls back. If it still computes
                        after a second, it is killed and replaced
    limits              seconds per job; memory per process, as an error in the job
    failure             an exception, or a process that dies, ends its own job with a message

A process ends with the server, also where the server is killed: it waits for the end of its parent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import math
import multiprocessing
import signal
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from doxa.errors import DoxaError
from doxa.processes import follow_parent

log = logging.getLogger("doxa")

PROCESSES = 2
SECONDS = 120.0  # the longest job
MEMORY = 2 << 30  # bytes of a process, besides those it has when it starts
PATIENCE = 1.0  # seconds between the request to stop and the signal
_FAILED_STARTS = 3  # as many in a row, and no further process is started
_QUEUED = 64  # jobs that wait, of all pages together

# The module of a room, with TASKS, `facts` and `warm_up`.
ROOMS = {
    "functions": "doxa.studio.functions",
    "classification": "doxa.studio.classification",
    "samplers": "doxa.studio.samplers",
    "lessons": "doxa.studio.lessons",
}
CONTINUED = frozenset({"samplers"})  # rooms that continue, in a process, what it computed before


class Cancelled(Exception):
    """A job was cancelled."""


class Call:
    """A running job, for the function that computes it.

    Parameters
    ----------
    number : int
        The number of the job.
    pipe : Connection
        The connection with the server.
    """

    def __init__(self, number: int, pipe: Connection) -> None:
        self.number = number
        self._pipe = pipe
        self._cancelled = False

    def show(self, content: Any) -> None:
        """Send an intermediate result."""
        self.check()
        _put(self._pipe, {"job": self.number, "kind": "shown"}, content)

    @property
    def cancelled(self) -> bool:
        """Whether the server has asked to stop this job."""
        while not self._cancelled and self._pipe.poll():
            asked = json.loads(self._pipe.recv_bytes())
            self._cancelled = asked.get("cancel") == self.number
        return self._cancelled

    def check(self) -> None:
        """Raise `Cancelled` if the job was cancelled."""
        if self.cancelled:
            raise Cancelled


def _put(pipe: Connection, head: dict[str, Any], content: Any) -> None:
    pipe.send_bytes(json.dumps(head).encode())
    pipe.send_bytes(json.dumps(finite(content), allow_nan=False).encode())


def finite(content: Any) -> Any:
    """The content with None in place of numbers that JSON does not have."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return content


def work(pipe: Connection, rooms: dict[str, str], memory: int, given: dict[str, Any]) -> None:
    """The main function of a process: compute jobs until the server ends. `given` has what a room
    begins with, such as the runs that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    follow_parent()
    import torch

    torch.set_num_threads(1)
    modules = {name: importlib.import_module(module) for name, module in rooms.items()}
    _limit_memory(memory)
    for name, content in given.items():
        modules[name].begin(content)
    facts = {name: module.facts() for name, module in modules.items()}
    _put(pipe, {"job": None, "kind": "ready"}, facts)
    for module in modules.values():
        for warm_up in module.warm_up():
            if pipe.poll():  # a person waits
                break
            warm_up()
    while True:
        try:
            asked = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        if "job" not in asked:  # the request to stop a job that has ended
            continue
        call, head = Call(asked["job"], pipe), {"job": asked["job"]}
        try:
            found = modules[asked["room"]].TASKS[asked["task"]](asked["content"], call)
        except Cancelled:
            _put(pipe, head | {"kind": "cancelled"}, None)
        except DoxaError as error:
            _put(pipe, head | {"kind": "problem"}, {"message": " ".join(str(error).split())})
        except MemoryError:
            _put(pipe, head | {"kind": "problem"}, {"message": _no_memory(memory)})
        except Exception as error:  # a room may fail: the process and the other rooms go on
            if isinstance(error, RuntimeError) and "alloc" in str(error):
                _put(pipe, head | {"kind": "problem"}, {"message": _no_memory(memory)})
                continue
            log.exception("studio: %s failed", asked["task"])
            message = f"doxa failed here, which is a bug: {type(error).__name__}: {error}"
            _put(pipe, head | {"kind": "problem"}, {"message": message[:500]})
        else:
            _put(pipe, head | {"kind": "done"}, found)


def _no_memory(memory: int) -> str:
    return (
        f"this needs more memory than a panel may use ({memory / 2**30:.3g} GiB): use fewer draws, "
        "members or units"
    )


def _limit_memory(memory: int) -> None:
    """Limit the address space to what is mapped now, and `memory` bytes more."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return  # not on this system
    size = pages * resource.getpagesize() + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or size < hard:
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))


@dataclass
class Job:
    """A request of a panel.

    Parameters
    ----------
    panel : hashable
        The panel: (page, name). It has one job at a time.
    room, task : str
        What to compute.
    content : object
        The request, as JSON has it.
    deliver : callable
        `deliver(kind, content)` is called with each result: the kind is "shown", "done", "problem"
        or "cancelled", the content a JSON text.
    number : int
        Set by the pool.
    """

    panel: Hashable
    room: str
    task: str
    content: Any
    deliver: Callable[[str, bytes], None]
    number: int = 0
    cancelled: bool = False


@dataclass
class _Worker:
    """A process, and the job that it computes."""

    process: Any
    pipe: Connection
    ready: bool = False
    job: Job | None = None
    head: dict[str, Any] | None = None  # of the content that follows
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    panels: set[Hashable] = field(default_factory=set)  # that it can continue


class Pool:
    """Processes that compute jobs, one per process at a time. All methods run in the event loop.

    Parameters
    ----------
    processes : int
        At most this number of processes.
    rooms : dict of str to str
        The modules that have the tasks.
    seconds : float
        The longest job.
    memory : int
        Bytes per process, besides those it has when it starts.
    given : dict of str to object
        What rooms begin with, as JSON has it: their function `begin` takes it.
    """

    def __init__(
        self,
        processes: int = PROCESSES,
        rooms: dict[str, str] | None = None,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        given: dict[str, Any] | None = None,
    ) -> None:
        self.facts: asyncio.Future[bytes] | None = None  # what rooms say about themselves, as JSON
        self._processes, self._rooms = processes, rooms or ROOMS
        self._seconds, self._memory, self._given = seconds, memory, given or {}
        self._workers: list[_Worker] = []
        self._waiting: dict[Hashable, Job] = {}
        self._jobs, self._failed = 0, 0
        self._open = False

    async def start(self) -> None:
        self._open = True
        self.facts = asyncio.get_running_loop().create_future()
        for _ in range(self._processes):
            self._start_one()

    def close(self) -> None:
        """End all processes."""
        self._open = False
        for worker in list(self._workers):
            self._end(worker)
        self._waiting.clear()
        if self.facts is not None and not self.facts.done():
            self.facts.cancel()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, job: Job) -> None:
        """Compute a job as soon as a process is free. An older job of the same panel is cancelled,
        or does not start at all."""
        self.cancel(job.panel)
        if not self._workers:
            _refuse(job, "no process can be started to compute: see the terminal")
            return
        if len(self._waiting) >= _QUEUED:
            _refuse(job, "too many requests wait to be computed: try again")
            return
        self._jobs += 1
        job.number = self._jobs
        self._waiting[job.panel] = job
        self._assign()

    def cancel(self, panel: Hashable) -> None:
        """Cancel the job of a panel: by a message, and after a second by a signal."""
        waiting = self._waiting.pop(panel, None)
        if waiting is not None:
            waiting.deliver("cancelled", b"null")
        for worker in self._workers:
            job = worker.job
            if job is not None and job.panel == panel and not job.cancelled:
                self._stop(worker, job)

    def leave(self, page: Hashable) -> None:
        """Cancel all jobs of a page that was closed."""
        panels = [*self._waiting, *(w.job.panel for w in self._workers if w.job is not None)]
        for panel in panels:
            if isinstance(panel, tuple) and panel[0] == page:
                self.cancel(panel)
        for worker in self._workers:
            left = {p for p in worker.panels if isinstance(p, tuple) and p[0] == page}
            worker.panels -= left

    def _start_one(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(theirs, self._rooms, self._memory, self._given), daemon=True,
            name="doxa studio worker",
        )  # fmt: skip
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, worker)

    def _assign(self) -> None:
        for worker in list(self._workers):
            if not self._waiting:
                return
            if not worker.ready or worker.job is not None:
                continue
            job = next((j for j in self._waiting.values() if self._suits(worker, j)), None)
            if job is None:
                continue
            del self._waiting[job.panel]
            for each in self._workers:
                each.panels.discard(job.panel)
            if job.room in CONTINUED:
                worker.panels.add(job.panel)
            worker.job = job
            asked = {"job": job.number, "room": job.room, "task": job.task, "content": job.content}
            later = asyncio.get_running_loop().call_later
            worker.timers.append(later(self._seconds, self._too_long, worker, job))
            try:
                worker.pipe.send_bytes(json.dumps(asked).encode())
            except OSError:
                self._died(worker)

    def _suits(self, worker: _Worker, job: Job) -> bool:
        """Whether a process should compute a job: not if another one can continue the panel and
        will soon be free, unless this one has nothing to continue."""
        owner = next((each for each in self._workers if job.panel in each.panels), None)
        if owner is None or owner is worker or not worker.panels:
            return True
        return owner.job is not None and owner.job.room not in CONTINUED

    def _stop(self, worker: _Worker, job: Job) -> None:
        job.cancelled = True
        try:
            worker.pipe.send_bytes(json.dumps({"cancel": job.number}).encode())
        except OSError:
            self._died(worker)
            return
        later = asyncio.get_running_loop().call_later
        worker.timers.append(later(PATIENCE, self._kill_for, worker, job))

    def _kill_for(self, worker: _Worker, job: Job) -> None:
        """Replace a process that still computes a job that was cancelled."""
        if worker.job is job and worker in self._workers:
            self._free(worker)
            job.deliver("cancelled", b"null")
            self._end(worker)
            self._replace()

    def _too_long(self, worker: _Worker, job: Job) -> None:
        if worker.job is job:
            _refuse(job, f"this took more than {self._seconds:g} seconds and was stopped: use "
                         "fewer steps, draws or members")  # fmt: skip
            job.deliver = _nothing
            self._stop(worker, job)

    def _read(self, worker: _Worker) -> None:
        """Read what a process has sent: a head, then a content."""
        try:
            part = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            self._died(worker)
            return
        if worker.head is None:
            worker.head = json.loads(part)
            return
        head, worker.head = worker.head, None
        if head["kind"] == "ready":
            worker.ready, self._failed = True, 0
            if self.facts is not None and not self.facts.done():
                self.facts.set_result(part)
        job = worker.job
        if job is not None and head["job"] == job.number:
            if head["kind"] != "shown":
                self._free(worker)
            if not (job.cancelled and head["kind"] == "shown"):
                job.deliver(head["kind"], part)
        self._assign()

    def _free(self, worker: _Worker) -> None:
        worker.job = None
        for timer in worker.timers:
            timer.cancel()
        worker.timers.clear()

    def _died(self, worker: _Worker) -> None:
        """Replace a process that has ended by itself, and say so."""
        if worker not in self._workers:
            return
        job = worker.job
        self._free(worker)
        if not worker.ready:
            self._failed += 1
        self._end(worker)
        if job is not None:
            _refuse(job, "the process that computed this ended unexpectedly, perhaps for lack of "
                         "memory; another one takes its place")  # fmt: skip
        self._replace()

    def _replace(self) -> None:
        if not self._open:
            return
        if self._failed < _FAILED_STARTS:
            self._start_one()
            self._assign()
        elif not self._workers:
            log.error("studio: processes end before they are ready, and no more are started")
            for job in list(self._waiting.values()):
                _refuse(job, "no process can be started to compute: see the terminal")
            self._waiting.clear()

    def _end(self, worker: _Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            self._free(worker)
            asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
            worker.pipe.close()
        worker.process.kill()
        worker.process.join(5.0)


def _refuse(job: Job, message: str) -> None:
    job.deliver("problem", json.dumps({"message": message}).encode())


def _nothing(kind: str, content: bytes) -> None:
    """For a job whose end was said already."""
