"""The log of a process of a fit by several: `process-RANK.log` in the folder of the fit.

    2026-03-01 10:00:00 node1:4711 call0: process 1 of 4, 1 thread, torch 2.13.0
    2026-03-01 10:00:01 node1:4711 call0: block 00002-00004 begins
    2026-03-01 10:00:41 node1:4711 call0: block 00002-00004 has ended

Lines are added at the end of the file, so that restarts and later calls are in the same one. It
also has what this process logs (the logger "doxa", at the level that the program has chosen), and
the traceback of an error. `DOXA_PROCESS_LOGS` names another folder, and is needed for a log of
calls that have none. A log that cannot be written, on a full disk, never stops a fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import traceback
from pathlib import Path

FOLDER = "DOXA_PROCESS_LOGS"  # the variable that names a folder for all logs

log = logging.getLogger("doxa")


class ProcessLog(logging.Handler):
    """The lines of one call of one process.

    Parameters
    ----------
    rank : int
        The number of the process.
    call : str
        The name of the call.
    """

    def __init__(self, rank: int, call: str) -> None:
        super().__init__()
        self.rank, self.call = rank, call
        self.path: Path | None = None
        self._thread = threading.get_ident()
        self._waiting: list[str] = []  # lines from before the folder was known
        named = os.environ.get(FOLDER)
        if named:
            self.put_in(Path(named))

    def put_in(self, folder: Path) -> None:
        """Write into this folder from now on, unless there is a folder already."""
        if self.path is not None:
            return
        self.path = folder / f"process-{self.rank}.log"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._append("".join(self._waiting))
        self._waiting = []

    def note(self, text: str) -> None:
        """Add a line, or several."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        line = f"{now} {socket.gethostname()}:{os.getpid()} {self.call}: {text}\n"
        if self.path is None:
            self._waiting.append(line)
        else:
            self._append(line)

    def error(self, error: BaseException) -> None:
        """Add an error, with its traceback."""
        lines = traceback.format_exception(error)
        self.note("failed\n" + "".join(lines).rstrip("\n"))

    def emit(self, record: logging.LogRecord) -> None:
        """Add what this thread of the process logs."""
        if record.thread == self._thread:
            self.note(f"{record.levelname.lower()}: {record.getMessage()}")

    def __enter__(self) -> ProcessLog:
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)

    def _append(self, text: str) -> None:
        """Write at the end of the file. A full disk, or a folder that was removed because the fit
        is saved, is no error: the log is the first thing to do without."""
        assert self.path is not None
        with contextlib.suppress(OSError):
            if text and self.path.parent.is_dir():
                with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
