"""Threads in place of the processes of `torchrun`, with a store of their own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from doxa.driver import processes

Ranks = Callable[..., list[Any]]


def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Calls a function of the rank in several threads, each as if it were a process, and returns
    what each returned or raised."""
    own = threading.local()
    alone = processes._alone

    def launched() -> Any:
        return None if alone.get() else getattr(own, "rank", None)

    monkeypatch.setattr(processes, "TIMEOUT", 20.0)
    monkeypatch.setattr(processes, "launched", launched)
    monkeypatch.setattr(processes, "_calls", _OfThread(own))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def called(function: Callable[[int], Any], size: int = 2) -> list[Any]:
        found: list[Any] = [None] * size
        kept = distributed.HashStore()
        monkeypatch.setattr(processes, "_store", lambda: kept)

        def call(rank: int) -> None:
            own.rank, own.count = (rank, size), itertools.count()
            try:
                found[rank] = function(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive()
        return found

    return called


class _OfThread:
    def __init__(self, own: threading.local) -> None:
        self.own = own

    def __next__(self) -> int:
        number: int = next(self.own.count)
        return number
