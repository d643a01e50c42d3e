"""Which weights are uncertain: all, the last layer's, or those that a predicate, names or shell
patterns choose ("*lora_*": a network's adapters).

Only trainable weights are asked about: what has `requires_grad=False` is no weight, but part of the
network that all members share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from doxa.errors import ModelError

Subset = str | Callable[[str], bool] | tuple[str, ...]


def chosen(subset: Subset, names: Sequence[str], head: str | None) -> tuple[str, ...]:
    """Those of a network's weights that are uncertain; `head` is the layer that runs last."""
    if subset == "all":
        return tuple(names)
    if subset == "last_layer":
        if head is None:
            raise ModelError("subset='last_layer' needs model.build(x) first")
        prefix = f"{head}." if head else ""
        found = [name for name in names if name.startswith(prefix)]
    elif callable(subset):
        found = [name for name in names if subset(name)]
    elif isinstance(subset, tuple) or _is_pattern(subset):
        found = _matched(subset if isinstance(subset, tuple) else (subset,), names)
    else:
        raise ModelError(
            "subset must be 'all', 'last_layer', a pattern such as '*lora_*', a tuple of names or "
            f"a predicate, not {subset!r}"
        )
    if not found:
        raise ModelError(
            f"subset {subset!r} selects no trainable parameter; there are {list(names)}"
        )
    return tuple(found)


def _is_pattern(subset: object) -> bool:
    return isinstance(subset, str) and any(mark in subset for mark in "*?[")


def _matched(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names that are listed, or that a pattern matches."""
    return [n for n in names if any(n == p or fnmatchcase(n, p) for p in patterns)]
