"""An artefact: a directory that is replaced atomically, so that it is never incomplete.

    path/tensors.safetensors    all tensors
    path/meta.json              everything else, encoded by `doxa.store.encode`
    path/checksums.sha256       the checksums of both files, in the format of `sha256sum -c`

A new artefact is written beside `path` under a temporary name. Its files and directory are synced,
and then the directory is renamed. POSIX cannot rename onto a non-empty directory, so an old
artefact is first renamed to `.NAME.previous`. If the process is killed between the two renames,
`read_artefact` reads the old artefact under that name.

`write_text` writes a text file atomically, such as results as JSON or tables as Markdown.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from doxa.errors import CorruptedArtefact, DoxaError, StoreError
from doxa.store import tensors as tensor_files
from doxa.store.codec import decode, encode

try:
    import fcntl
except ImportError:  # Windows: abandoned temporary directories are not removed
    fcntl = None  # type: ignore[assignment]

TENSORS, META, CHECKSUMS = "tensors.safetensors", "meta.json", "checksums.sha256"
FILES = frozenset({TENSORS, META, CHECKSUMS})
FORMAT = 1
IN_MEMORY = 1 << 30  # bytes; by default, artefacts up to this size are read into memory
META_MOST, CHECKSUMS_MOST = 64 << 20, 1 << 16  # bytes
_LONGEST = 255 - 32  # bytes; a name of this length leaves room for an ending


def write_artefact(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write an artefact atomically and durably. If this fails, the old content of `path` does not
    change.

    Parameters
    ----------
    path : str or Path
        A directory, which is created together with its parents. An existing artefact is replaced.
        A directory with other files is an error, because these would be deleted.
    tensors : dict of str to Tensor
        Dense tensors of any shape. Views are stored as copies.
    meta : dict
        Values that `encode` accepts.

    Raises
    ------
    StoreError
        A value cannot be stored, the disk is full, permission is missing, or `path` is a file.
    """
    target = Path(os.path.realpath(path))
    contents = pack(tensors, meta)
    with readable_errors("written", target):
        make_directory(target.parent)
        _check_replaceable(target)
        prefix = beside(target, ".tmp-").name
        remove_abandoned(target.parent, prefix)
        with written_aside(target.parent, contents, prefix) as fresh:
            previous = _previous(target)
            if target.exists():
                if previous.exists():  # from a writer that was killed after its second rename
                    shutil.rmtree(previous)
                os.rename(target, previous)
            try:
                os.rename(fresh, target)
            except BaseException:
                if previous.exists():
                    os.rename(previous, target)
                raise
        sync(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def is_artefact(path: str | os.PathLike[str]) -> bool:
    """Whether `read_artefact` can find an artefact at `path`. This includes an old one whose
    replacement was interrupted between the two renames."""
    target = Path(os.path.realpath(path))
    return any((place / META).exists() for place in (target, _previous(target)))


def read_artefact(
    path: str | os.PathLike[str], budget: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors (on the CPU) and meta at `path`, and compare both with their checksums.

    Parameters
    ----------
    path : str or Path
        The directory of the artefact.
    budget : int, optional
        If the tensors take more bytes than this, the large ones are memory-mapped and stay on disk.
        Default: 1 GiB. Changes to mapped tensors are not written to the file, and they do not
        change if the artefact is replaced.

    Returns
    -------
    tuple of (dict of str to Tensor, dict)
        The tensors and meta.

    Raises
    ------
    StoreError
        There is no artefact at `path`, permission is missing, or meta contains an unregistered
        type.
    CorruptedArtefact
        A file is missing, truncated, changed or not a regular file, or has content that doxa would
        not write.
    """
    target = Path(os.path.realpath(path))
    with readable_errors("read", target):
        while True:
            source = target if target.exists() else _previous(target)
            if not source.exists():
                source = target
            identity = os.stat(source).st_ino
            try:
                return _read(source, budget)
            except OSError:  # StoreError included
                if source.exists() and os.stat(source).st_ino == identity:
                    raise  # else the artefact was replaced during reading: read the new one


def _read(source: Path, budget: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    present = set(os.listdir(source))
    if not present & FILES:
        raise StoreError(f"{source} is not a doxa artefact: it has no {CHECKSUMS}")
    missing = sorted(FILES - present)
    if missing:
        raise CorruptedArtefact(f"{source} is damaged: {missing[0]} is missing")
    lines = _bytes(source / CHECKSUMS, CHECKSUMS_MOST).decode("ascii", errors="replace")
    expected = {line[66:]: line[:64] for line in lines.splitlines()}
    meta = _bytes(source / META, META_MOST)
    _check(source / META, hashlib.sha256(meta).hexdigest(), expected)
    path = source / TENSORS
    with regular_file(path) as (file, size):
        mapped = size > (IN_MEMORY if budget is None else budget)
        read = tensor_files.read_mapped if mapped else tensor_files.read_whole
        if size > IN_MEMORY:  # reading takes long, so an invalid header must be found first
            with decoding(path):
                tensor_files.check_size(file, size)
        data, digest = read(file, size)
    _check(path, digest, expected)
    with decoding(source):
        document = json.loads(meta, parse_constant=_no_constant, parse_float=_finite)
        version, content = document["format"], document["meta"]
        if version != FORMAT:
            raise StoreError(
                f"{source} has format {version!r}, this doxa reads {FORMAT}: update doxa"
            )
        tensors = tensor_files.parse(data, share=mapped)
        found = decode(content, "meta")
        if not isinstance(found, dict):
            raise ValueError("meta is no dict")
    return tensors, found


@contextlib.contextmanager
def decoding(path: object) -> Iterator[None]:
    """A context for decoding stored values. Any exception except doxa's own errors is converted to
    `CorruptedArtefact`."""
    try:
        yield
    except DoxaError:
        raise
    except _STRAY as error:
        message = f"{type(error).__name__}: {error}"[:300]
        raise CorruptedArtefact(f"{path} was not written by doxa: {message}") from error


_STRAY = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError, NotImplementedError, MemoryError, BufferError,
)  # fmt: skip  # RecursionError is a RuntimeError


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is larger than a float can hold")
    return number


@contextlib.contextmanager
def regular_file(path: Path) -> Iterator[tuple[Any, int]]:
    """A context with an open file and its size. A link, a pipe or a device raises an error. Reading
    a pipe or a device might never end, and an artefact from another person could link to files that
    this person cannot read."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise CorruptedArtefact(f"{path} is a link, not a file: copy the file itself there")
    with open(os.open(path, flags), "rb", buffering=0) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise CorruptedArtefact(f"{path} is not a regular file")
        yield file, facts.st_size


def _bytes(path: Path, most: int) -> bytearray:
    with regular_file(path) as (file, size):
        if size > most:
            raise CorruptedArtefact(f"{path} has {size:,} bytes; {most:,} is the most it may have")
        return tensor_files.read_bytes(file, size)


def _check(path: Path, found: str, expected: Mapping[str, str]) -> None:
    if found != expected.get(path.name):
        raise CorruptedArtefact(
            f"{path} does not match its checksum: it was truncated or changed after it was "
            "written; use another copy"
        )


class Contents(NamedTuple):
    """The contents of an artefact. They are checked before anything is written."""

    tensors: dict[str, Tensor]
    meta: bytes


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Contents:
    """Prepare tensors and meta for writing. Raises `StoreError` for values that cannot be
    stored."""
    if not isinstance(meta, Mapping):
        raise StoreError(f"meta must be a dict, not {type(meta).__qualname__}")
    document = {"format": FORMAT, "meta": encode(meta, "meta")}
    try:
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
        encoded = text.encode("utf-8")
    except ValueError as error:  # a lone surrogate, which no text file can hold
        raise StoreError(f"meta cannot be written as JSON: {error}") from error
    if len(encoded) > META_MOST:
        raise StoreError(f"meta takes {len(encoded):,} bytes, more than {META_MOST:,}")
    return Contents(tensor_files.storable(tensors), encoded)


@contextlib.contextmanager
def written_aside(parent: Path, contents: Contents, prefix: str) -> Iterator[Path]:
    """A context with a synced directory of these contents. It has a temporary name, and the caller
    renames it."""
    fresh, lock = _temporary_directory(parent, prefix)
    try:
        sums = {
            TENSORS: tensor_files.write(fresh / TENSORS, contents.tensors),
            META: hashlib.sha256(contents.meta).hexdigest(),
        }
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        (fresh / META).write_bytes(contents.meta)
        (fresh / CHECKSUMS).write_bytes(lines.encode())
        for name in (TENSORS, META, CHECKSUMS):  # the first sync usually writes the others too
            sync(fresh / name)
        sync(fresh)
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _temporary_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new locked directory. The lock shows `remove_abandoned` that its writer still runs."""
    while True:
        fresh = parent / f"{prefix}{secrets.token_hex(4)}"
        os.mkdir(fresh)
        try:
            lock = os.open(fresh if fcntl else os.devnull, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process removed it before it was locked
        except BaseException:
            os.rmdir(fresh)
            raise
        if fcntl:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
        if fresh.exists():
            return fresh, lock
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary directories that are not locked, because their writers have ended."""
    if not fcntl:
        return
    for name in os.listdir(parent):
        if not name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(parent / name, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(parent / name, ignore_errors=True)
            finally:
                os.close(lock)


def make_directory(path: Path) -> None:
    """Create a directory and its parents. Each is synced before anything is written to it."""
    if path.is_dir():
        return
    if path.exists():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file or a directory to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows syncs no directories
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def readable_errors(action: str, path: Path) -> Iterator[None]:
    """Convert an `OSError` into a `StoreError` with advice and the same errno."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
        kind = CorruptedArtefact if action == "read" and error.errno == errno.EIO else StoreError
        raised = kind(f"{path} could not be {action}: {reason}")
        raised.errno = error.errno
        raise raised from error


_REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another path",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another path",
    errno.EFBIG: "the file is larger than the system allows (ulimit -f)",
    errno.EACCES: "permission denied; choose a path you own",
    errno.EPERM: "permission denied; choose a path you own",
    errno.EROFS: "the file system is read-only; choose another path",
    errno.ENOENT: "nothing is there",
    errno.ENOTDIR: "it, or a parent of it, is a file; an artefact is a directory",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EIO: "the disk reports an input/output error",
}


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    foreign = sorted(set(os.listdir(target)) - FILES)  # NotADirectoryError for a file
    if foreign:
        raise StoreError(
            f"{target} could not be written: it holds {foreign[0]!r}, which replacing it would "
            "delete; choose another path"
        )


def _previous(target: Path) -> Path:
    return beside(target, ".previous")


def beside(target: Path, ending: str) -> Path:
    """A hidden path next to `target`, with this ending. A long name is replaced by its SHA-256,
    because names have at most 255 bytes, and the ending makes them longer."""
    name = target.name
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return target.with_name(f".{name}{ending}")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Replace the content of a file by `text`, atomically. Its folder is created if necessary."""
    target = Path(path)
    with readable_errors("written", target):
        make_directory(target.parent)
        temporary = beside(target, f".{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        sync(target.parent)
    return target
