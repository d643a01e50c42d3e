"""Every error doxa raises on purpose: what is wrong, where, and what to do.

All inherit `DoxaError` and the built-in exception a caller would expect.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping

__all__ = [
    "CorruptedArtefact",
    "DataError",
    "DoxaError",
    "FolderInUse",
    "MemoryBudgetError",
    "MethodError",
    "MissingExtra",
    "ModelError",
    "NumericalError",
    "ProcessError",
    "ShapeError",
    "StoreError",
    "Unavailable",
    "UnknownSetting",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


class DoxaError(Exception):
    """Base of all errors raised on purpose."""


class DataError(DoxaError, ValueError):
    """The data cannot be used: missing values, wrong length, empty, unknown class."""


class ShapeError(DataError):
    """Two shapes do not fit; nothing is ever broadcast against targets."""


class ModelError(DoxaError, ValueError):
    """The network, likelihood or prior cannot be used as asked."""


class MethodError(DoxaError, ValueError):
    """A method's setting is out of range, or the method cannot do what was asked."""


class UnknownSetting(MethodError, TypeError):
    """A keyword that nothing takes; the message says what was probably meant."""


class DoxaDeprecationWarning(DeprecationWarning):
    """A deprecated name of doxa is used; the message names the one that replaces it."""


class MemoryBudgetError(DoxaError, MemoryError):
    """The result would not fit the memory budget; the message gives its size."""


class NumericalError(DoxaError, ArithmeticError):
    """A computation broke down: a failed Cholesky, a non-finite objective."""


class StoreError(DoxaError, OSError):
    """A file could not be written or read."""


class CorruptedArtefact(StoreError):
    """A stored artefact's contents do not match its checksums."""


class BaseMismatch(ModelError):
    """A posterior was saved without its frozen parameters, and those of the network are others."""


class ProcessError(DoxaError, RuntimeError):
    """The processes of one fit disagree, or one of them has failed or does not answer."""


class FolderInUse(StoreError):
    """Another process or thread is writing to the folder; the message says which, since when."""


class Unavailable(DoxaError, AttributeError):
    """This posterior or predictive does not have the quantity asked for."""


class MissingExtra(DoxaError, ImportError):
    """An optional dependency is needed; the message names the extra."""


def deprecated(old: str, new: str) -> None:
    """Warn that `old` is deprecated. The warning points at the caller outside doxa."""
    ours = ("doxa", "contextlib")  # decorators of doxa's functions are in contextlib
    here = inspect.currentframe()
    frame, level = here and here.f_back, 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    message = f"{old} is deprecated, and will be removed in doxa 0.3: use {new}"
    warnings.warn(message, DoxaDeprecationWarning, stacklevel=level + 1)


def _alike(word: str, name: str) -> bool:
    """Whether a near match may be a typing mistake: `age` is not `target`, although all its letters
    are in it."""
    short, long = sorted((word, name), key=len)
    return short in long or 3 * len(short) > 2 * len(long) - 2


def did_you_mean(
    word: str, known: Iterable[str], most: int = 12, renamed: Mapping[str, str] | None = None
) -> str:
    """'; did you mean 'mlp'?' for a near miss, else '; known: a, b, c'. A near miss of an old name
    in `renamed` suggests the new one."""
    names = [str(name) for name in known]
    lower = {name.lower(): name for name in names}
    every = {old.lower(): new for old, new in (renamed or {}).items()} | lower
    near = difflib.get_close_matches(word.lower(), every, n=12, cutoff=0.6)
    close = [name for name in near if _alike(word.lower(), name)][:2]
    if close:
        meant = dict.fromkeys(every[name] for name in close)
        return f"; did you mean {' or '.join(map(repr, meant))}?"
    listed = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"; known: {listed}" if listed else ""
