"""Seconds on a device that works ahead of the program."""

from __future__ import annotations

from functools import cache

import torch

import doxa


@cache
def warm_up(device: str) -> None:
    """A short fit before the clock starts: the first one on a GPU pays for its libraries."""
    if torch.device(device).type == "cuda":
        short_fit(device)


def short_fit(device: str) -> None:
    x, y = torch.zeros(64, 1, 28, 28, device=device), torch.arange(64, device=device) % 10
    doxa.fit(
        doxa.nets.lenet5(), (x, y), "map", likelihood="categorical", device=device, steps=50,
        validation=None, progress=False,
    )  # fmt: skip
    wait(device)


def wait(device: torch.device | str) -> None:
    """Until the device is done, so that a clock tells the truth."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
