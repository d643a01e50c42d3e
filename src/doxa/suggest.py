"""The end of an error message about a name nobody knows: the closest names, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], most: int = 12) -> str:
    """'; did you mean 'mlp'?' for a near miss, else '; known: a, b, c'."""
    names = [str(name) for name in known]
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), lower, n=2, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(repr(lower[name]) for name in close)}?"
    listed = ", ".join(names[:most]) + (", ..." if len(names) > most else "")
    return f"; known: {listed}" if listed else ""
