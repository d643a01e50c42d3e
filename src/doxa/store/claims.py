"""Which process trains a block: leases in a folder, and the results of blocks.

    blocks/cut.json             the cut of the fit, written by the first process
    blocks/00000-00004/lease    who trains this block: host, process and a nonce, and a count
    blocks/00000-00004/NONCE    the checkpoints of that process
    blocks/00000-00004/result   the result, an artefact

A lease is created atomically. A thread of its process counts it up every few seconds. Another
process takes the block if it saw no renewal for `EXPIRES` seconds of its own clock, or if it knows
that the process has ended. No clocks are compared between machines.

Two processes may then train the same block: one that was stopped for a while goes on. This costs
time and nothing else. Each writes below its own nonce, and the first complete result gets the name
`result` by an atomic rename. Both results have the same bits, so a later one is dropped; if its
hash differs, that is an error (`ProcessError`), because no fit could then be repeated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from doxa.errors import MethodError, ProcessError, StoreError
from doxa.store.artefact import (
    CHECKSUMS,
    decoding,
    make_directory,
    read_artefact,
    readable_errors,
    write_artefact,
    write_text,
)
from doxa.store.checkpoints import Checkpoints
from doxa.store.draws import NAME as DRAWS

log = logging.getLogger("doxa")

POLL = 0.1  # seconds between looks at what other processes do
RENEW = 3.0  # seconds between renewals of a lease
EXPIRES = 30.0  # seconds without a renewal after which a block is taken
FOLDER, LEASE, RESULT, CUT = "blocks", "lease", "result", "cut.json"
_FREE = "free-"  # checkpoints that their process has released


@dataclass
class Seen:
    """The last renewal of each lease that this process saw, on its own clock."""

    renewals: dict[Path, tuple[str, float]] = field(default_factory=dict)

    def expired(self, path: Path, text: str) -> bool:
        """Whether the lease has had this text for too long."""
        before = self.renewals.get(path)
        if before is None or before[0] != text:
            self.renewals[path] = text, time.monotonic()
            return False
        return time.monotonic() - before[1] > EXPIRES


class Lease:
    """The lease of this process on a block, renewed by a thread within the context.

    Parameters
    ----------
    path : Path
        Its file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.nonce = path, secrets.token_hex(6)
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="doxa-lease")

    def create(self) -> bool:
        """Create the file. False if there is one."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._text().encode())
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._thread.join()
        if holder(_read(self.path)) == self.nonce:
            self.path.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps({"nonce": self.nonce, "count": self._count, **this_process()})

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            if holder(_read(self.path)) != self.nonce:
                log.warning("another process has taken %s, after a pause of this one", self.path)
                return
            self._count += 1
            fresh = self.path.with_name(f".{LEASE}-{self.nonce}")
            try:
                fresh.write_text(self._text(), encoding="utf-8")
                os.replace(fresh, self.path)
            except OSError as error:
                log.warning("%s cannot be renewed (%s)", self.path, error)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _facts(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def holder(text: str) -> str:
    """The nonce in the text of a lease; empty if there is none."""
    return str(_facts(text).get("nonce", ""))


def this_process() -> dict[str, Any]:
    """What identifies this process on its machine. A number is used again by later processes, and
    by other containers, so the start of the process and its name space belong to it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "space": _space(), "pid": pid, "start": _start(pid)}


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When a process has started; empty if it has ended, or where the system does not say it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def has_ended(facts: Mapping[str, Any]) -> bool:
    """Whether the process of a lease is known to have ended. False if that cannot be known."""
    own = this_process()
    same = own["space"] and all(facts.get(name) == own[name] for name in ("host", "space"))
    pid = facts.get("pid")
    if not same or type(pid) is not int or not facts.get("start"):
        return False
    return _start(pid) != facts["start"]


@dataclass
class Place:
    """The folder of a block.

    Parameters
    ----------
    path : Path
    digest : str
        The fingerprint of the fit.
    first : Path, optional
        A folder with checkpoints of this block from before, which are copied.
    """

    path: Path
    digest: str
    first: Path | None = None

    @property
    def done(self) -> bool:
        return (self.path / RESULT).is_dir()

    def claim(self, seen: Seen) -> Lease | None:
        """The lease, or None if another process has it."""
        with readable_errors("written", self.path):
            make_directory(self.path)
            lease = Lease(self.path / LEASE)
            if lease.create():
                return lease
            text = _read(lease.path)
            facts = _facts(text)
            if not has_ended(facts) and not seen.expired(lease.path, text):
                return None
            log.info(
                "%s: process %s on %s has %s; this one goes on", self.path.name,
                facts.get("pid"), facts.get("host"),
                "ended" if has_ended(facts) else "not renewed its lease",
            )  # fmt: skip
            old = lease.path.with_name(f".{LEASE}-old-{lease.nonce}")
            try:
                os.rename(lease.path, old)
            except FileNotFoundError:
                return None  # another process was faster
            if _read(old) != text:  # it was renewed, or taken, at this moment
                with contextlib.suppress(FileExistsError):
                    os.link(old, lease.path)
                old.unlink()
                return None
            old.unlink()
            return lease if lease.create() else None

    def checkpoints(self, lease: Lease) -> Path:
        """The folder for the checkpoints of this process, with those that another has left."""
        own = self.path / lease.nonce
        with readable_errors("written", own):
            self._take_over(own)
            make_directory(own)
            write_text(own / "owner", json.dumps(this_process()))
        return own

    def _take_over(self, own: Path) -> None:
        """Move or copy the checkpoints that are furthest. Those of a process that may still run are
        copied."""
        others = [p for p in self.path.iterdir() if p.is_dir() and p.name not in (RESULT, own.name)]
        if self.first is not None:
            others.append(self.first)
        at: dict[Path, int] = {}
        for other in others:
            try:
                found = Checkpoints(other).latest()
            except StoreError as error:
                log.warning("checkpoints in %s are not used: %s", other, error)
                continue
            if found is not None:
                at[other] = found.step
        if not at:
            return
        best = max(at, key=lambda path: at[path])
        ours = best.parent == self.path
        free = best.name.startswith(_FREE) or has_ended(_facts(_read(best / "owner")))
        if ours and free:
            os.rename(best, own)
            return
        make_directory(own)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(best / DRAWS, own / DRAWS)
        for name in os.listdir(best):
            if Checkpoints.is_name(name):
                try:
                    shutil.copytree(best / name, own / name)
                except (shutil.Error, FileNotFoundError):  # its process has removed it just now
                    shutil.rmtree(own / name, ignore_errors=True)

    def release(self, lease: Lease) -> None:
        """Leave the checkpoints to the next process."""
        with contextlib.suppress(OSError):
            os.rename(self.path / lease.nonce, self.path / f"{_FREE}{lease.nonce}")

    def publish(self, lease: Lease, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Give the complete result its name, and remove the checkpoints."""
        own = self.path / lease.nonce
        fresh = own / RESULT
        write_artefact(fresh, tensors, {**meta, "fingerprint": self.digest, "by": this_process()})
        with readable_errors("written", self.path):
            self.rename(fresh)
        shutil.rmtree(own, ignore_errors=True)
        for other in self.path.iterdir():  # of processes that have ended
            ended = other.is_dir() and has_ended(_facts(_read(other / "owner")))
            if ended or other.name.startswith(_FREE):
                shutil.rmtree(other, ignore_errors=True)

    def rename(self, fresh: Path) -> None:
        """Give a complete result its name. If there is one, they must be the same."""
        ours = _sum(fresh)
        try:
            os.rename(fresh, self.path / RESULT)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self._compare(ours)

    def _compare(self, ours: str) -> None:
        if _sum(self.path / RESULT) != ours:
            raise ProcessError(
                f"two processes have trained {self.path} and have different results: the machines, "
                "the versions of torch or the numbers of threads differ; use equal ones, or remove "
                "the folder to start over on one"
            )
        log.info("%s was also trained by another process, with the same result", self.path)

    def result(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The published result."""
        tensors, meta = read_artefact(self.path / RESULT)
        if meta.get("fingerprint") != self.digest:
            raise other_fit(self.path)
        return tensors, meta


def divide(
    count: int, attempt: Callable[[int], bool], first: int = 0, look: Callable[[], Any] = int
) -> None:
    """Do pieces of work that other processes may do: those that nobody has, until all are done.

    Parameters
    ----------
    count : int
        The number of pieces.
    attempt : callable
        Does piece i, unless another process is doing it. Returns whether it is done, by anybody.
    first : int
        The piece to begin with, another one in each process.
    look : callable
        Called before each attempt; it may raise an error.
    """
    waiting = [(first + i) % count for i in range(count)]
    while waiting:
        before = len(waiting)
        for i in list(waiting):
            look()
            if attempt(i):
                waiting.remove(i)
        if len(waiting) == before:
            time.sleep(POLL)


def join(folders: Iterable[str | Path], to: str | Path) -> Path:
    """Join the results of blocks that were trained in several folders.

    The fit itself, with `checkpoint=to`, then reads the results, and trains only what is missing.

    Parameters
    ----------
    folders : iterable of str or Path
        The folders that were `checkpoint=` of `doxa.fit` or `doxa.blocks`.
    to : str or Path
        The folder with all results. It may be one of `folders`.

    Returns
    -------
    Path
        `to`.

    Raises
    ------
    MethodError
        A folder has no blocks, or those of another fit.
    ProcessError
        Two folders have different results of the same block.
    """
    target = Path(to)
    for folder in map(Path, folders):
        cuts = sorted(folder.glob(f"**/{FOLDER}/{CUT}"))
        if not cuts:
            raise MethodError(
                f"{folder} has no blocks of a fit: give folders that were checkpoint= of "
                "doxa.blocks, or of a fit with several blocks"
            )
        for path in cuts:
            there = target / path.parent.relative_to(folder)
            if there.resolve() == path.parent.resolve():
                continue
            cut = _facts(_read(path))
            digest = str(cut.pop("fingerprint", ""))
            if agreed_cut(there, digest, cut) != {"fingerprint": digest, **cut}:
                raise MethodError(f"{folder} and {target} have different blocks of the same fit")
            for result in sorted(path.parent.glob(f"*/{RESULT}")):
                _copy(result, there / result.parent.name, digest)
    return target


def _copy(result: Path, to: Path, digest: str) -> None:
    """Copy a result into the folder of its block, atomically."""
    read_artefact(result)  # its checksums are right
    place = Place(to, digest)
    with readable_errors("written", to):
        make_directory(to)
        fresh = to / f".{RESULT}-{secrets.token_hex(6)}"
        try:
            shutil.copytree(result, fresh)
            place.rename(fresh)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def other_fit(path: Path) -> MethodError:
    return MethodError(
        f"the blocks in {path} belong to another fit (other data, method, seed or members): use "
        "another folder, or remove it to start over"
    )


def _sum(artefact: Path) -> str:
    """The checksum of the tensors of an artefact."""
    return _read(artefact / CHECKSUMS).split(" ", 1)[0]


def agreed_cut(folder: Path, digest: str, cut: Mapping[str, Any]) -> dict[str, Any]:
    """The cut that the first process has written: {"fingerprint", "size", "engine"}. Processes that
    come later use it, also where a rule would now choose another."""
    path = folder / CUT
    with readable_errors("written", folder):
        make_directory(folder)
        fresh = folder / f".{CUT}-{secrets.token_hex(6)}"
        fresh.write_text(json.dumps({"fingerprint": digest, **cut}), encoding="utf-8")
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            if not path.exists():
                os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
    found = _facts(_read(path))
    with decoding(path):
        if found["fingerprint"] != digest:
            raise other_fit(folder)
        if type(found["size"]) is not int or found["size"] < 1:
            raise ValueError(f"{found['size']!r} is no number of members")
    return found
