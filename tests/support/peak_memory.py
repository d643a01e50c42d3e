"""`python peak_memory.py METHOD [HIDDEN MEMBERS]`: the planned and the measured memory of a fit, in
bytes, as JSON.

It runs in a process of its own: in one that has done other work, a fit uses memory that was freed
but is still counted as resident, and the growth that is measured is too small.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from short import short_settings
from torch import nn

import doxa
from doxa.method.method import Workload


def network(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


def rows(count: int = 128, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, columns, generator=g)
    return x, x[:, 0].sin() + 0.1 * torch.randn(count, generator=g)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(name: str, hidden: int = 0, members: int = 3) -> dict[str, int]:
    """Three members of a million weights, or members of a given width with held-out rows. A fit of
    a small network comes first: what torch itself takes for the first fit of a process is not
    counted."""
    settings = short_settings(name)
    if "rank" in {field.name for field in fields(doxa.get_method(name))}:
        settings["rank"] = 2 if name == "swag" else 10
    method = doxa.get_method(name)(**settings)
    planned: list[int] = []
    plan = type(method).planned_bytes

    def recorded(self: doxa.Method, work: Workload) -> int:
        planned.append(plan(self, work))
        return planned[-1]

    type(method).planned_bytes = recorded  # type: ignore[method-assign]
    options: dict[str, Any] = {"members": members, "steps": 4, "batch_size": 32, "progress": False}
    data = rows()
    if hidden:
        options["validation"], data = 0.1, rows(1024)
    doxa.fit(network(8), data, method, **options)
    gc.collect()
    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    doxa.fit(network(hidden or 1024), data, method, **options)
    done.set()
    watching.join()
    return {"planned": planned[-1], "measured": peak - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
