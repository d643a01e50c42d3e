"""Several processes that make one fit: `torchrun`, or any launcher that sets its variables.

    torchrun --nproc-per-node 4 script.py

Each process runs the same script, and each call of `doxa.fit` is made by all of them. They divide
the blocks of the fit (`blocks.py`, `store/claims.py`) through a folder, and every process returns
the same posterior. They talk through the key-value store of `torch.distributed`, and make a process
group only where they divide sums over rows (`method/row_sums.py`).

    launched        the number of this process and of all; None for one process
    opened          a context: a call of all processes
    together        the same as a decorator, of `fit` and of `compare_arrays`
    alone           a context in which calls are of this process alone
    World           what the processes of a call say to each other
    all_of          the values of all processes, in the call that they are in

Calls may be nested: a command or a comparison makes several fits. A block is trained by one process
alone, so that what happens in it (a callback that fits or saves) is of that process only.

A process never waits for ever: while it waits, and while it trains, it sees that another one has
failed, and raises an error with its number, its block and its message. It is an error of the same
type where the type is one of `doxa.errors`, and a `ProcessError` otherwise. If several processes
fail, all raise the type of the first, so that a program which catches an error goes on alike in
all of them. After `TIMEOUT` seconds without an answer a process raises a `ProcessError`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from doxa import errors
from doxa.driver.blocks import others
from doxa.errors import DoxaError, MemoryBudgetError, ProcessError
from doxa.method import Method, Run
from doxa.method.row_sums import Together
from doxa.posterior import Posterior
from doxa.posterior.base import writing
from doxa.store.artefact import readable_errors
from doxa.store.process_log import ProcessLog
from doxa.store.tensors import bytes_of

log = logging.getLogger("doxa")

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT = float(os.environ.get("DOXA_PROCESS_TIMEOUT", "1800"))  # seconds
LEAVE = 10.0  # seconds that a process which failed waits for the others
_POLL = 0.05  # seconds between looks at the store
SAME_CALL = "All of them have to pass the same network, data and settings"
SAME_MACHINES = (
    "They have read the same blocks, so that their machines, versions of torch or numbers of "
    "threads differ: use equal ones"
)
_alone: ContextVar[bool] = ContextVar("doxa_alone", default=False)
_calls = itertools.count()


def launched() -> tuple[int, int] | None:
    """(rank, number of processes) of a launcher; None for one process, or if DOXA_PROCESSES=alone
    asks for calls of each process of its own."""
    if os.environ.get("DOXA_PROCESSES", "") == "alone" or _alone.get():
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, size) if size > 1 else None


def is_first() -> bool:
    """Whether this is process 0, or the only one: it prints and writes."""
    found = launched()
    return found is None or found[0] == 0


@cache
def _store() -> Any:
    """The key-value store of the launched processes."""
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    if not distributed.is_available():
        raise ProcessError(
            "this torch has no torch.distributed: start one process, or install another build"
        )
    found = next(iter(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT))))[0]
    return distributed.PrefixStore("doxa", found)


@contextmanager
def alone() -> Iterator[None]:
    """A context in which a fit is of this process alone."""
    tokens = _alone.set(True), others.set(None), writing.set(None)
    try:
        yield
    finally:
        writing.reset(tokens[2])
        others.reset(tokens[1])
        _alone.reset(tokens[0])


@contextmanager
def opened(tell: Callable[[BaseException], None] | None = None) -> Iterator[World | None]:
    """A context for a call that all launched processes make; None for one process. Within another
    one it is a part of that call. `tell` is called with an error that ends it, while the launcher
    still lets every process live."""
    found, outer = launched(), others.get()
    if found is None:
        yield None
        return
    name = f"call{next(_calls)}" if outer is None else outer.inner()
    with World(*found, name, outer, tell) as world:
        token = others.set(world)
        try:
            yield world
        finally:
            others.reset(token)


def together(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call of all launched processes, which share its blocks."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        with opened():
            return function(*args, **given)

    return called


def all_of(what: str, value: Any) -> list[Any]:
    """The values of all processes of this call, in order of their numbers; of one process, its own.
    They are numbers, texts and lists of them."""
    world = others.get()
    found: list[Any] = [value] if world is None else world.exchange(what, value)
    return found


class World:
    """The processes of one call.

    Parameters
    ----------
    rank, size : int
        The number of this process, and of all.
    call : str
        The name of the call, the same in all processes.
    outer : World, optional
        The call that this one is a part of.
    tell : callable, optional
        Called with the error that ends the call.
    """

    def __init__(
        self, rank: int, size: int, call: str, outer: World | None = None,
        tell: Callable[[BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.call, self.outer = rank, size, call, outer
        self.tell = tell
        self.block = ""  # the block that this process trains, for messages
        self.log: ProcessLog = ProcessLog(rank, call) if outer is None else outer.log
        self._wrote = writing.get()  # how paths were written before this call
        self._exchanges, self._folders, self._inner = (itertools.count() for _ in range(3))
        self._temporary: str | None = None
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._written: Counter[str] = Counter()
        self._store: Any = None

    def inner(self) -> str:
        """The name of the next call that is a part of this one."""
        return f"{self.call}.{next(self._inner)}"

    def __enter__(self) -> World:
        try:
            self._store = _store()
        except (RuntimeError, ValueError) as error:
            raise ProcessError(
                f"process {self.rank} of {self.size} cannot reach the others: {error}; check "
                "MASTER_ADDR and MASTER_PORT, or set DOXA_PROCESSES=alone for a fit of its own"
            ) from error
        if self.outer is None:
            self.log.__enter__()
            threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
            self.log.note(f"process {self.rank} of {self.size}, {threads}")
        writing.set(self.writing)  # from here on, process 0 saves
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        raised = error
        try:
            if raised is None:
                try:
                    self.exchange("end", "")
                except Exception as late:
                    raised = late
            if raised is None:
                writing.set(self.writing)
                return
            writing.set(self._wrote)
            if not isinstance(raised, OfAnother):
                raised = self._fail(raised)
            if self.tell is not None:
                self.tell(raised)
            if self.outer is None and isinstance(raised, Exception):
                self._leave()
            if raised is not error:
                raise raised from error
        finally:
            if self._made is not None:
                self._made.cleanup()
            if self.outer is None:
                end = "has ended" if raised is None else f"ends with {type(raised).__name__}"
                self.log.note(end)
                self.log.__exit__()

    @contextmanager
    def training(self, block: str) -> Iterator[None]:
        """A context for what this process does alone, with its name for messages."""
        self.block = block
        self.log.note(f"block {block} begins")
        with alone():
            yield
        self.log.note(f"block {block} has ended")
        self.block = ""  # not after an error, whose message has it

    def _fail(self, error: BaseException) -> BaseException:
        """Say that this process has failed. Returns the error to raise: that of another process, if
        it was first and is of another type."""
        self.log.error(error)
        name = type(error).__name__
        facts = {"rank": self.rank, "block": self.block, "type": name, "message": str(error)}
        try:
            number = self._store.add(f"{self.call}/failures", 1)
            self._store.set(f"{self.call}/failure/{number}", json.dumps(facts))
            if number == 1 or not isinstance(error, Exception):
                return error
            first = self._failure()
        except RuntimeError:  # the others are gone
            return error
        return error if first["type"] == name else self._error_of(first)

    def _leave(self) -> None:
        """After an error, wait a few seconds until the others know of it: a launcher ends them when
        this process ends, and they would not say why."""
        keys = [f"{self.call}/left/{rank}" for rank in range(self.size)]
        end = time.monotonic() + min(LEAVE, TIMEOUT)
        with contextlib.suppress(RuntimeError):
            self._store.set(keys[self.rank], "")
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(_POLL)

    def _failure(self) -> dict[str, Any]:
        """The first failure of this call."""
        found: dict[str, Any] = json.loads(self._store.get(f"{self.call}/failure/1"))
        return found

    def _error_of(self, failure: Mapping[str, Any]) -> Exception:
        where = f" in block {failure['block']}" if failure["block"] else ""
        return of_another(failure["type"])(
            f"process {failure['rank']} of {self.size} failed{where}: {failure['type']}: "
            f"{failure['message']}. This is process {self.rank}"
        )

    def check(self) -> None:
        """Raise an error if another process has failed, in this call or in one around it."""
        try:
            failed = self._store.add(f"{self.call}/failures", 0)
            failure = self._failure() if failed else None
        except RuntimeError as error:
            raise OtherFailed(
                f"process {self.rank} of {self.size} has lost the others: {error}"
            ) from error
        if failure is not None:
            raise self._error_of(failure)
        if self.outer is not None:
            self.outer.check()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in order of their numbers."""
        name = f"{self.call}/{next(self._exchanges)}/{what}"
        self._put(f"{name}/{self.rank}", json.dumps(value))
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._wait(keys, what)
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _put(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise OtherFailed(
                f"process {self.rank} of {self.size} has lost the others: {error}"
            ) from error

    def _wait(self, keys: list[str], what: str) -> None:
        began, pause = time.monotonic(), _POLL / 16
        while True:
            self.check()
            if self._store.check(keys):  # one request, of however many processes
                return
            if time.monotonic() - began > TIMEOUT:
                missing = [key for key in keys if not self._store.check([key])]
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                raise ProcessError(
                    f"no answer from process {ranks} in {TIMEOUT:g} seconds ({what}): every "
                    "process has to make the same calls of doxa.fit in the same order; "
                    "DOXA_PROCESSES=alone makes each call one of its own process"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL)

    def compare(self, facts: Mapping[str, str], advice: str = SAME_CALL) -> None:
        """Raise an error that names the processes whose facts differ from those of process 0."""
        every = self.exchange("facts", dict(facts))
        for name in facts:
            differ = [rank for rank, own in enumerate(every) if own.get(name) != every[0][name]]
            if differ:
                listed = ", ".join(map(str, differ))
                raise ProcessError(
                    f"{name} differs between the processes of one fit: process {listed} from "
                    f"process 0. {advice}"
                )

    def folder(self, checkpoint: str | Path | None) -> Path:
        """The folder of the blocks, which all processes see."""
        if checkpoint is not None:
            return Path(checkpoint)
        hosts = self.exchange("hosts", socket.gethostname())
        if len(set(hosts)) > 1:
            raise ProcessError(
                f"the processes are on {len(set(hosts))} machines ({', '.join(sorted(set(hosts)))})"
                ": pass checkpoint= with a folder that all of them see"
            )
        if self._temporary is None:
            if self.rank == 0:
                with readable_errors("written", Path(tempfile.gettempdir())):
                    self._made = tempfile.TemporaryDirectory(
                        prefix="doxa-blocks-", ignore_cleanup_errors=True
                    )
            made = "" if self._made is None else self._made.name
            self._temporary = str(self.exchange("folder", made)[0])
        return Path(self._temporary) / str(next(self._folders))

    def dividing_rows(self) -> Together:
        """These processes, as a group that computes sums over rows."""
        from torch import distributed

        name = f"{self.call}/rows/{next(self._exchanges)}"
        return Together(
            self.rank, self.size, distributed.PrefixStore(name, self._store), self.check, TIMEOUT
        )

    @contextmanager
    def writing(self, what: str) -> Iterator[bool]:
        """A context for a path that process 0 writes: True there. The others wait until it has, as
        often as they come to it. Process 0 waits for nobody: it may also write alone."""
        self._written[what] += 1
        key = f"{self.call}/written/{self._written[what]}/{what}/0"
        if self.rank:
            self._wait([key], f"process 0 writes {what}")
            yield False
            return
        try:
            yield True
        except BaseException as error:
            self._fail(error)
            raise
        self._put(key, "")


class OfAnother:
    """An error of another process."""


class OtherFailed(OfAnother, ProcessError):
    """Another process has failed."""


@cache
def of_another(name: str) -> type[Exception]:
    """The type of an error of another process: the same, if it is one of `doxa.errors`."""
    kind = MemoryBudgetError if name == "OutOfMemoryError" else getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DoxaError)) or kind is ProcessError:
        return OtherFailed
    return type(kind.__name__, (OfAnother, kind), {"__module__": kind.__module__})


def digests(run: Run, method: Method, fingerprint: str, more: Mapping[str, Any]) -> dict[str, str]:
    """What has to be the same in all processes: {name: digest}. Of data in memory, every row."""
    data, model = run.rows, run.problem.model
    rows = [*tree_flatten((data.x, data.y))[0], data.weight, data.group, *data.rows]
    if data.source is not None:
        rows = [data.weight, data.group, *data.rows]
    held = [] if data.validation is None else list(data.validation)
    fixed = {} if model is None else model.fixed
    weights = [run.initial, *(fixed[name] for name in sorted(fixed))]
    return {
        "the data": _digest([*rows, *held]),
        "the network": _digest(weights, str([(e.name, e.shape) for e in run.layout.entries])),
        "the settings": _digest([], json.dumps([fingerprint, more], sort_keys=True, default=repr)),
    }


def result_digests(posteriors: Sequence[Posterior]) -> dict[str, str]:
    """What every process has to have at the end of a fit: {name: digest}."""
    tensors, words = [], []
    for posterior in posteriors:
        own = posterior.tensors()
        tensors += [own[name] for name in sorted(own)]
        words.append(f"{sorted(own)} {posterior.status} {posterior.validation!r}")
    return {"the posterior": _digest(tensors, "\n".join(words))}


def _digest(values: list[Any], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for value in values:
        if isinstance(value, torch.Tensor):
            digest.update(f"{list(value.shape)} {value.dtype}".encode())
            digest.update(bytes_of(value.detach().cpu()))
    return digest.hexdigest()
