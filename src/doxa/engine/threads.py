"""What torch is set to for the time of a computation: the number of threads, and its modes.

Threads that share a small matrix product wait for each other longer than they compute, and on a
machine that others use a waiting thread waits for its turn: some 45 ms a product, however small. So
only a large product gets as many threads as torch was set to; everything else gets one. The number
decides how sums are split, hence bits: it does not depend on how busy the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LARGE = 1e8  # multiplications: some 3 ms of one core in single precision
_CAST = ("cpu", "cuda", "mps", "xpu")  # where autocast may be on

_most: ContextVar[int | None] = ContextVar("doxa_threads", default=None)


class _Outside:
    """How many threads torch is set to where no block of `threads_for` runs.

    `torch.set_num_threads` sets the number of the thread that calls it, and also the one that new
    threads of the program begin with: a thread that begins while a block runs elsewhere finds that
    block's 1. It takes the number that was found before the first of these blocks instead. (A
    thread that was set to 1 by itself cannot be told from such a one, only while others compute.)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._number = 0, 1

    def enter(self) -> int:
        """The number of this thread, before its outermost block."""
        found = torch.get_num_threads()
        with self._lock:
            if self._inside == 0:
                self._number = found
            self._inside += 1
            return self._number if found == 1 else found

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1


_outside = _Outside()


def undecided() -> bool:
    """Whether there are threads to choose among: else nobody need know how much work there is."""
    return (_most.get() or torch.get_num_threads()) > 1


@contextmanager
def threads_for(product: float) -> Iterator[None]:
    """Within it, and in what it decorates, the threads that suit work whose largest matrix product
    has so many multiplications: those that torch is set to outside the outermost block, or one.
    What was set before is restored, also after an error."""
    outermost = _most.get() is None
    before = _outside.enter() if outermost else torch.get_num_threads()
    most = _most.get() or before
    token = _most.set(most)
    torch.set_num_threads(most if product >= _LARGE else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _most.reset(token)
        if outermost:
            _outside.leave()


class _Convolutions:
    """cuDNN's convolutions are deterministic while something is trained: by default the gradients
    of some are sums in no fixed order, and the same seed would give other bits on a GPU. The switch
    belongs to the process, so that it is put back when the last of several threads leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, False

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cudnn.deterministic
                torch.backends.cudnn.deterministic = True
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cudnn.deterministic = self._before


_convolutions = _Convolutions()


class default_modes:  # noqa: N801  (a context, like torch.no_grad)
    """Within it, and in what it decorates, torch computes as in a program that set no mode: without
    autocast, and with the CPU as the default device; where something is trained, also with
    gradients, out of inference mode, and with deterministic convolutions. Half precision that a fit
    is asked for is set inside.

    Modes belong to a thread: no other one notices. The default type (`torch.set_default_dtype`)
    belongs to the process, so it is left alone.

    Parameters
    ----------
    train: whether something is trained.
    """

    def __init__(self, train: bool = False) -> None:
        self._train = train
        self._stack: ExitStack | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """A function whose every call is within such a context."""

        @wraps(function)
        def within(*args: P.args, **options: P.kwargs) -> R:
            with default_modes(self._train):
                return function(*args, **options)

        return within

    def __enter__(self) -> None:
        found: list[Any] = [
            torch.autocast(kind, enabled=False) for kind in _CAST if torch.is_autocast_enabled(kind)
        ]
        if torch.get_default_device().type != "cpu":
            found.append(torch.device("cpu"))
        if self._train and torch.is_inference_mode_enabled():
            found.append(torch.inference_mode(False))
        if self._train and not torch.is_grad_enabled():
            found.append(torch.enable_grad())
        if found:
            self._stack = ExitStack()
            for context in found:
                self._stack.enter_context(context)
        if self._train:
            _convolutions.enter()

    def __exit__(self, *error: Any) -> None:
        if self._train:
            _convolutions.leave()
        if self._stack is not None:
            self._stack.__exit__(*error)
