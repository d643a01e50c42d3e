"""A lock so that each folder has one writer at a time.

    parent/.NAME.lock    locked by the operating system while `parent/NAME` is written

The lock is on the open file (flock; on Windows a locked byte). The existence of the file means
nothing. If a process is killed in any way, the system releases the lock, and the file that remains
does not block other processes. Each call of `exclusive` opens the file again, so two threads of one
process exclude each other as two processes do. The file is beside the folder, because saving
replaces the folder itself. Reading needs no lock, because artefacts are always complete.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from doxa.errors import FolderInUse, StoreError
from doxa.store.artefact import beside, make_directory, readable_errors

logger = logging.getLogger(__name__)

_INSIDE = ".lock"  # the lock file in the folder itself, if none can be created beside it
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_MOST = 4096  # the largest number of bytes of the holder's description
_BYTE = 1 << 30  # the position of the byte that Windows locks, after all bytes that are read

_ATTEMPTS = 100

_held: set[int] = set()


@contextlib.contextmanager
def exclusive(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which the folder at `path` is locked against all other writers.

    Parameters
    ----------
    path : str or Path
        The folder. It need not exist yet.

    Raises
    ------
    FolderInUse
        Another process, or another thread of this one, has the lock. The message names it.
    StoreError
        A lock file cannot be created there.
    """
    target = Path(os.path.realpath(path))
    with readable_errors("locked", target):
        made = _missing(target.parent)
        place, descriptor = _acquire(target)
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)
        _release(place, descriptor)
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for folder in made:
                os.rmdir(folder)


def _missing(folder: Path) -> list[Path]:
    """The folders that must be created for this folder to exist, innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def _acquire(target: Path) -> tuple[Path, int]:
    place = beside(target, ".lock")
    for attempt in itertools.count():
        try:
            make_directory(target.parent)
            descriptor = _open(place)
        except FileNotFoundError:  # another process has just removed the folders
            if attempt == _ATTEMPTS:
                raise
            continue
        except OSError as error:
            if error.errno not in _NO_PERMISSION or not target.is_dir():
                raise
            place = target / _INSIDE
            descriptor = _open(place)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StoreError(f"{place} is not a regular file; remove it")
            _lock(descriptor, target)
            if _is_there(place, descriptor):
                _describe(descriptor)
                return place, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has just removed it: open the file again
    raise AssertionError


def _open(place: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(place, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{place} is a link; remove it") from error
        raise


def _lock(descriptor: int, target: Path) -> None:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:  # a file system without locks
            logger.warning("%s cannot be locked (%s): let one fit write there", target, error)
            return
        raise FolderInUse(
            f"{target} is being written by {_holder(descriptor)}; wait until it ends, or choose "
            "another folder"
        ) from error


def _is_there(place: Path, descriptor: int) -> bool:
    """Whether the locked file still has its name, so that other processes open the same file."""
    try:
        found = os.stat(place, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _describe(descriptor: int) -> None:
    """Write the holder of the lock into the file, for the error message of other processes."""
    facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, json.dumps(facts).encode())


def _holder(descriptor: int) -> str:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        facts = json.loads(os.read(descriptor, _MOST))
        pid, host, since = int(facts["pid"]), str(facts["host"])[:100], str(facts["since"])[:40]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"
    own = " (this one)" if pid == os.getpid() and host == socket.gethostname() else ""
    return f"process {pid}{own} on {host!r} since {since!r}"


def _release(place: Path, descriptor: int) -> None:
    """Remove the file while it is still locked, so that no process can lock a removed file."""
    with contextlib.suppress(OSError):
        if sys.platform != "win32" and _is_there(place, descriptor):
            os.unlink(place)
    os.close(descriptor)
    if sys.platform == "win32":  # an open file cannot be removed there
        with contextlib.suppress(OSError):
            os.unlink(place)


def _close_in_child() -> None:
    """Close the lock file in a forked worker. The worker may run longer than the process that has
    the lock, and would keep it."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
