"""Parallel calls, in processes with one thread each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

Outcome = Callable[[], Any]  # returns the result of a call, or raises its exception


def side_by_side(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], jobs: int
) -> Iterator[tuple[int, Outcome]]:
    """(number of a call, its outcome), as calls finish; one job runs them here, one by one.

    `function` is defined in a module, so that another process can import it.
    """
    if jobs == 1:
        for i, given in enumerate(arguments):
            yield i, lambda given=given: function(*given)  # type: ignore[misc]
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(arguments)) or 1, context, _begin) as pool:
        waiting = {pool.submit(function, *given): i for i, given in enumerate(arguments)}
        for done in as_completed(waiting):
            yield waiting[done], done.result


def cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _begin() -> None:
    """Set up a process: one thread, and an end with its parent."""
    torch.set_num_threads(1)
    follow_parent()


def follow_parent() -> None:
    """Exit when the parent of this process has ended, in whatever way."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
