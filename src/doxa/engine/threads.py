"""How many threads torch uses for a piece of work: a rule about the work.

Threads that share a small matrix product wait for each other longer than they compute, and on a
machine that others use a waiting thread waits for its turn: some 45 ms a product, however small. So
only a large product gets as many threads as torch was set to; everything else gets one. The number
decides how sums are split, hence bits: it does not depend on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_LARGE = 1e8  # multiplications: some 3 ms of one core in single precision

_most: ContextVar[int | None] = ContextVar("doxa_threads", default=None)


def undecided() -> bool:
    """Whether there are threads to choose among: else nobody need know how much work there is."""
    return (_most.get() or torch.get_num_threads()) > 1


@contextmanager
def threads_for(product: float) -> Iterator[None]:
    """Within it, and in what it decorates, the threads that suit work whose largest matrix product
    has so many multiplications: those that torch is set to outside the outermost block, or one.
    What was set before is restored, also after an error."""
    before = torch.get_num_threads()
    most = _most.get() or before
    token = _most.set(most)
    torch.set_num_threads(most if product >= _LARGE else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _most.reset(token)
