"""Ctrl-C between steps, where everything that changes is consistent and can be checkpointed."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger("doxa")


class Interrupts:
    """Whether Ctrl-C was pressed, for the loop to act on."""

    pending = False

    @contextmanager
    def deferred(self) -> Iterator[Interrupts]:
        """Turns the first Ctrl-C into `pending`; a second one is immediate.

        Only while the block runs, only in the main thread, and only where Python's own handler is
        in place: a program with a handler of its own keeps it.
        """
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        ours = main and before is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
        log.warning("interrupted: stopping after this step; press Ctrl-C again to stop at once")
