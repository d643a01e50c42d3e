"""The draws of many chains in one file. They are appended one by one, and mapped at the end.

    [members, capacity, size]    numbers; all draws of one member, then those of the next

The draws of a member are contiguous, as in a posterior, so the finished file can be used as the
tensor without a copy. The length of the file is known at the start. The space is reserved then, so
that a full disk is an error before the first step. Without a folder, the file has no name, and the
system removes it with its last reference, also if the process is killed. In a folder, its name is
`draws`, and it is beside the checkpoints. A checkpoint contains the number of draws and their
CRC-32, but not the draws.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.errors import CorruptedArtefact
from doxa.store.artefact import make_directory, readable_errors, sync
from doxa.store.tensors import PIECE, bytes_of, mapped

NAME = "draws"


class DrawsFile:
    """A file of draws [members, size], which are appended one by one.

    Parameters
    ----------
    shape : sequence of int
        (members, capacity, size). The capacity is the largest number of draws per member.
    dtype : torch.dtype
        The type of the draws.
    folder : Path, optional
        The folder of the file. Default: a file without a name, in the folder for temporary files.
    budget : int
        If the draws take at most this number of bytes, `tensor` returns them in memory.
    saved : sequence of int, optional
        For a resumed run, (count, crc) of the draws in the file, as `at` returned them.
    device : torch.device or str
        The device of draws that are returned in memory.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        folder: Path | None = None,
        budget: int = 0,
        saved: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.members, self.capacity, self.size = shape
        self.dtype = dtype
        self.budget = budget
        self.device = device
        self.count, self.crc = 0, 0
        self._folder = folder
        self._row = self.size * dtype.itemsize
        with readable_errors("written", self.path):
            self._file: Any = self._create() if saved is None or not saved[0] else self._open()
        if saved is not None and saved[0]:
            self._take_up(*saved)

    @property
    def path(self) -> Path:
        return Path(tempfile.gettempdir()) if self._folder is None else self._folder / NAME

    @property
    def bytes(self) -> int:
        return self.members * self.capacity * self._row

    @property
    def at(self) -> list[int]:
        """The number of draws per member and their checksum, for a checkpoint."""
        return [self.count, self.crc]

    def __len__(self) -> int:
        return self.count

    def append(self, theta: Tensor) -> None:
        data = bytes_of(theta)
        with readable_errors("written", self.path):
            for m in range(self.members):
                self._write(data[m * self._row : (m + 1) * self._row], self._offset(m, self.count))
        self.crc = zlib.crc32(data, self.crc)
        self.count += 1

    def extend(self, rows: Tensor) -> None:
        """Append several draws [n, size]. There must be one member."""
        data = bytes_of(rows)
        with readable_errors("written", self.path):
            self._write(data, self._offset(0, self.count))
        self.crc = zlib.crc32(data, self.crc)
        self.count += len(rows)

    def put(self, parts: Sequence[Tensor]) -> None:
        """Write all draws at once, from parts [members, capacity, size] in the order of members."""
        member = 0
        with readable_errors("written", self.path):
            for part in parts:
                for draws in part:
                    self._write(bytes_of(draws), self._offset(member, 0))
                    member += 1
        self.count = self.capacity

    def sync(self) -> None:
        """Force the draws to the disk."""
        with readable_errors("written", self.path):
            os.fsync(self._file.fileno())

    @cached_property
    def _mapped(self) -> Tensor:
        file = self if self.count == self.capacity else self._shortened()
        with readable_errors("read", self.path):
            data = mapped(file._file.fileno(), file.bytes)
        return data.view(self.dtype).reshape(self.members, self.count, self.size)

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The draws so far of the members `rows`, [K, count, size]. They are in memory, on the
        device, if all draws fit the budget, and else mapped. Nothing can be appended afterwards."""
        part = self._mapped[rows]
        fits = self._mapped.nbytes <= self.budget
        return part.to(self.device, copy=True) if fits else part

    def _offset(self, member: int, draw: int) -> int:
        return (member * self.capacity + draw) * self._row

    def _write(self, data: Any, offset: int) -> None:
        while len(data):
            done = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[done:], offset + done

    def _create(self) -> Any:
        """Create a file of the full length. An old file of the same name is removed, and not
        overwritten, because a posterior may still read it."""
        if self._folder is None:
            file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        else:
            make_directory(self._folder)
            fresh = self._folder / f".{NAME}.new"
            file = open(fresh, "w+b", buffering=0)  # noqa: SIM115
        try:
            if hasattr(os, "posix_fallocate") and self.bytes:
                os.posix_fallocate(file.fileno(), 0, self.bytes)
            else:
                os.ftruncate(file.fileno(), self.bytes)
            if self._folder is not None:
                os.replace(fresh, self.path)
                sync(self._folder)
        except BaseException:
            file.close()
            if self._folder is not None:
                fresh.unlink(missing_ok=True)
            raise
        return file

    def _open(self) -> Any:
        try:
            return open(self.path, "r+b", buffering=0)
        except FileNotFoundError as error:
            raise CorruptedArtefact(
                f"{self.path} is missing: the checkpoint's draws were in it; remove "
                f"{self._folder} to start afresh"
            ) from error

    def _take_up(self, count: int, crc: int) -> None:
        """Continue after `count` draws in the file. Raises an error if their checksum is not
        `crc`."""
        with readable_errors("read", self.path):
            fits = os.fstat(self._file.fileno()).st_size == self.bytes
            found = 0
            for t in range(count if fits else 0):
                for m in range(self.members):
                    row = os.pread(self._file.fileno(), self._row, self._offset(m, t))
                    found = zlib.crc32(row, found)
        if not fits or found != crc:
            raise CorruptedArtefact(
                f"{self.path} does not hold the checkpoint's draws: it was truncated or changed; "
                f"remove {self._folder} to start afresh"
            )
        self.count, self.crc = count, crc

    def _shortened(self) -> DrawsFile:
        """A copy of the file with the existing draws only, for a run that ended early."""
        short = DrawsFile((self.members, self.count, self.size), self.dtype)
        with readable_errors("written", short.path):
            for m in range(self.members):
                start, stop = self._offset(m, 0), self._offset(m, self.count)
                for at in range(start, stop, PIECE):
                    piece = os.pread(self._file.fileno(), min(PIECE, stop - at), at)
                    short._write(memoryview(piece), short._offset(m, 0) + at - start)
        short.count = self.count
        return short
