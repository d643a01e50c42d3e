"""Which weights are uncertain: all, the last layer's, or those that a predicate or names choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    elif isinstance(subset, tuple):
        found = [name for name in names if name in subset]
    else:
        raise ModelError(f"subset must be 'all', 'last_layer' or a predicate, not {subset!r}")
    if not found:
        raise ModelError(f"subset {subset!r} selects no parameter; there are {list(names)}")
    return tuple(found)
