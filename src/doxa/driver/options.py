"""What the caller of a fit decides about its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from doxa import store

Callback = Callable[[int, dict[str, Any]], Any]


@dataclass
class Options:
    """What the caller of `fit` decided about the loop itself."""

    schedule: Any = "cosine"
    patience: int = 20
    checkpoint: store.Checkpoints | None = None
    found: store.Checkpoint | None = None  # to go on from
    checkpoint_seconds: float = 30.0
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    fingerprint: str = ""
    draws_budget: int | None = None  # bytes of kept draws in memory; None: a quarter of the free
