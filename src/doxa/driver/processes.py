"""Several processes that make one fit: `torchrun`, or any launcher that sets its variables.

    torchrun --nproc-per-node 4 script.py

Each process runs the same script, and each call of `doxa.fit` is made by all of them. They divide
the blocks of the fit (`blocks.py`, `store/claims.py`) through a folder, and every process returns
the same posterior. They talk through the key-value store of `torch.distributed`, and make a process
group only where they divide sums over rows (`method/row_sums.py`).

    launched        the number of this process and of all; None for one process
    together        decorator of `fit`: one call of all processes
    alone           a context in which calls are of this process alone
    World           what the processes of a call say to each other

A process never waits for ever: while it waits, it sees that another one has failed, and raises
`ProcessError` with its number, its block and its message. After `TIMEOUT` seconds without an answer
it raises the same error.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from doxa.driver.blocks import others
from doxa.errors import ProcessError
from doxa.method import Method, Run
from doxa.method.row_sums import Together
from doxa.posterior.base import writing
from doxa.store.tensors import bytes_of

log = logging.getLogger("doxa")

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT = float(os.environ.get("DOXA_PROCESS_TIMEOUT", "1800"))  # seconds
_POLL = 0.05  # seconds between looks at the store
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
    token, inner = _alone.set(True), others.set(None)
    try:
        yield
    finally:
        _alone.reset(token)
        others.reset(inner)


def together(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call of all launched processes, which share its blocks."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        found = launched()
        if found is None or others.get() is not None:
            return function(*args, **given)
        with World(*found, f"fit{next(_calls)}") as world:
            token = others.set(world)
            try:
                return function(*args, **given)
            finally:
                others.reset(token)

    return called


class World:
    """The processes of one call.

    Parameters
    ----------
    rank, size : int
        The number of this process, and of all.
    call : str
        The name of the call, the same in all processes.
    """

    def __init__(self, rank: int, size: int, call: str) -> None:
        self.rank, self.size, self.call = rank, size, call
        self.block = ""  # the block that this process trains, for messages
        self._exchanges, self._folders = itertools.count(), itertools.count()
        self._temporary: str | None = None
        self._made: tempfile.TemporaryDirectory[str] | None = None
        self._written: Counter[str] = Counter()
        self._store: Any = None

    def __enter__(self) -> World:
        try:
            self._store = _store()
        except (RuntimeError, ValueError) as error:
            raise ProcessError(
                f"process {self.rank} of {self.size} cannot reach the others: {error}; check "
                "MASTER_ADDR and MASTER_PORT, or set DOXA_PROCESSES=alone for a fit of its own"
            ) from error
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.exchange("end", "")
                writing.set(self.writing)  # from here on, process 0 saves
            elif not isinstance(error, OtherFailed):
                self._fail(error)
        finally:
            if self._made is not None:
                self._made.cleanup()

    def _fail(self, error: BaseException) -> None:
        where = f" in block {self.block}" if self.block else ""
        text = f"process {self.rank} of {self.size} failed{where}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            number = self._store.add(f"{self.call}/failures", 1)
            self._store.set(f"{self.call}/failure/{number}", text)

    def check(self) -> None:
        """Raise an error if another process has failed."""
        try:
            if not self._store.add(f"{self.call}/failures", 0):
                return
            text = self._store.get(f"{self.call}/failure/1").decode()
        except RuntimeError as error:
            raise OtherFailed(
                f"process {self.rank} of {self.size} has lost the others: {error}"
            ) from error
        raise OtherFailed(f"{text}. This is process {self.rank}")

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The values of all processes, in order of their numbers."""
        name = f"{self.call}/{next(self._exchanges)}/{what}"
        self._put(f"{name}/{self.rank}", json.dumps(value))
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self._wait(keys, what)
        return [json.loads(self._store.get(key)) for key in keys]

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
            missing = [key for key in keys if not self._store.check([key])]
            if not missing:
                return
            if time.monotonic() - began > TIMEOUT:
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                raise ProcessError(
                    f"no answer from process {ranks} in {TIMEOUT:g} seconds ({what}): every "
                    "process has to make the same calls of doxa.fit in the same order; "
                    "DOXA_PROCESSES=alone makes each call one of its own process"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL)

    def compare(self, facts: Mapping[str, str]) -> None:
        """Raise an error that names the processes whose facts differ from those of process 0."""
        every = self.exchange("facts", dict(facts))
        for name in facts:
            differ = [rank for rank, own in enumerate(every) if own.get(name) != every[0][name]]
            if differ:
                listed = ", ".join(map(str, differ))
                raise ProcessError(
                    f"{name} differs between the processes of one fit: process {listed} from "
                    "process 0. All of them have to pass the same network, data and settings"
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


class OtherFailed(ProcessError):
    """Another process has failed."""


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


def _digest(values: list[Any], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for value in values:
        if isinstance(value, torch.Tensor):
            digest.update(f"{list(value.shape)} {value.dtype}".encode())
            digest.update(bytes_of(value.detach().cpu()))
    return digest.hexdigest()
