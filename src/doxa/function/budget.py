"""What an exact process takes, said before it is taken."""

from __future__ import annotations

import logging

import torch

from doxa.data import free_memory
from doxa.errors import MemoryBudgetError

log = logging.getLogger("doxa")

WORKING = 2  # matrices [N, N] that an evaluation of the evidence holds
_SLACK = 256 << 20  # blocks of covariances, and what they leave for the backward pass


def exact_bytes(rows: int, matrices: int) -> int:
    """What `matrices` factors [N, N] in float64 and the work on them take."""
    return 8 * rows**2 * (matrices + WORKING) + _SLACK


def announce(rows: int, matrices: int, name: str, device: torch.device) -> int:
    """The bytes that `matrices` factors [N, N] and the work on them take: told, and an error where
    they are not there."""
    need = exact_bytes(rows, matrices)
    log.info("%s: %s rows take %.3g GiB (%s bytes)", name, rows, need / 2**30, need)
    free = free_memory(device)
    if need > free:
        raise MemoryBudgetError(
            f"{name} holds {matrices + WORKING} matrices of {rows} × {rows} rows: "
            f"{need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB are free; "
            'fit fewer rows, or use "sparse-gp", which holds none of them'
        )
    return need
