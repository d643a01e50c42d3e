"""A room for tests of the processes of the studio: tasks that wait, fail, die and take memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from doxa.errors import DataError


def echo(content: Any, call: Any) -> Any:
    return content


def steps(content: Any, call: Any) -> Any:
    """Show a number, again and again, until cancelled."""
    for i in range(int(content)):
        call.show(i)
        time.sleep(0.01)
    return "end"


def deaf(content: Any, call: Any) -> Any:
    """Compute without asking whether it was cancelled."""
    time.sleep(float(content))
    return "end"


def fail(content: Any, call: Any) -> Any:
    raise DataError("these points\ncannot be fitted")


def bug(content: Any, call: Any) -> Any:
    return [1, 2][int(content)]


def die(content: Any, call: Any) -> Any:
    os._exit(3)


def memory(content: Any, call: Any) -> Any:
    return float(torch.zeros(int(content), dtype=torch.uint8).sum())


def strange(content: Any, call: Any) -> Any:
    return {"values": [1.5, float("nan"), float("inf")], "pid": os.getpid()}


TASKS: dict[str, Callable[[Any, Any], Any]] = {
    "echo": echo, "steps": steps, "deaf": deaf, "fail": fail, "bug": bug, "die": die,
    "memory": memory, "strange": strange,
}  # fmt: skip


def facts() -> dict[str, Any]:
    return {"pid": os.getpid()}


def warm_up() -> Iterator[Callable[[], object]]:
    yield lambda: None
