"""Ctrl-C between steps, where everything that changes is consistent and can be checkpointed."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("doxa")


class Interrupts:
    """Turns the first Ctrl-C into `pending`, for the loop to act on; a second one is immediate.

    Only while the block runs, only in the main thread, and only where Python's own handler is in
    place: a program with a handler of its own keeps it.
    """

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.pending = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if self.deferred and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
        log.warning("interrupted: stopping after this step; press Ctrl-C again to stop at once")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
