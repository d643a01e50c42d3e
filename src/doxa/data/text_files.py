"""Reading files of tables from unknown sources, and escaping of text cells.

Only regular files are read. A pipe, a device or a folder is an error at once. A compressed file, or
a Parquet file, may unpack to 256 MiB or to 50 times its size, whichever is more (`MOST_UNPACKED`,
`MOST_GROWTH`). A table of text compresses by a factor of 3 to 20; a file that is made to fill the
memory by a factor of 1,000 and more. The user must unpack a larger table: an uncompressed file may
take a third of the machine's memory.

A spreadsheet program runs a cell that begins with = + - @ (or a tab or line break) as a formula. So
text that begins with these and is not a number is written with an apostrophe before it, and read
without it:

    cell        =1+1    -a    @x    -3.5    'tis    '=1+1
    in a file   '=1+1   '-a   '@x   -3.5    'tis    ''=1+1

Text that begins with apostrophes and one of these characters gets one more apostrophe, so that
reading restores every text.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from doxa.errors import DataError, MemoryBudgetError

MOST_UNPACKED = 256 << 20  # bytes
MOST_GROWTH = 50
_MEMORY_A_BYTE = 3  # of a text table: its bytes, its text and its cells

_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_ESCAPED = re.compile(r"'+[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def escape(text: str) -> str:
    """A text cell as it is written to a file."""
    if _FORMULA.match(text) is None or _NUMBER.fullmatch(text) is not None:
        return text
    return f"'{text}"


def unescape(text: str) -> str:
    """A cell of a file as it was before `escape`."""
    return text[1:] if _ESCAPED.match(text) is not None else text


def has_escaped(text: str) -> bool:
    """Whether a cell of a whole file may be escaped."""
    return _ESCAPED.search(text) is not None


def check_regular(path: Path) -> int:
    """The size of a file in bytes; DataError if it is not a regular, readable file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise DataError(f"{path} does not exist") from error
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path} is a folder, not a table")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is no regular file but a pipe, a device or the like")
    return found.st_size


def most_unpacked(size: int) -> int:
    """The largest number of bytes that a compressed file of this size may unpack to."""
    return max(MOST_UNPACKED, MOST_GROWTH * size)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; an error if memory is too small for a table of its size."""
    size = check_regular(path)
    check_memory(size, path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def check_memory(size: int, path: Path) -> None:
    """Raise an error if a table of `size` bytes would not fit into the machine's memory."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return
    if _MEMORY_A_BYTE * size > memory:
        raise MemoryBudgetError(
            f"{path} holds {size / 2**30:.3g} GiB, and reading it as a table takes about "
            f"{_MEMORY_A_BYTE} times as much; this machine has {memory / 2**30:.3g} GiB. In Python "
            "doxa.store.parquet reads a Parquet file a part at a time"
        )
