"""What a network returns: the tensor, or the tuple of heads, that a likelihood is about.

A dict, a dataclass or a named tuple holds several things under names; the likelihood is about the
one that `Model(net, output=...)` names, else about "logits", else about the only tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from doxa.errors import ModelError

Name = str | tuple[str, ...] | None


def output_name(name: Any) -> str | tuple[str, ...]:
    """The name of an output, or the names of several, checked."""
    if isinstance(name, str):
        return name
    if not isinstance(name, tuple | list) or not all(isinstance(each, str) for each in name):
        raise ModelError(
            f"output must be the name of an output, or a tuple of names for several heads, not "
            f"{name!r}"
        )
    return tuple(name)


def pick(given: Any, name: Name, heads: bool) -> Any:
    """What the likelihood is about, of what a network gave; `heads`: it has one for each output."""
    if name is None and (isinstance(given, Tensor) or (heads and isinstance(given, tuple))):
        return given
    parts = _parts(given)
    if parts is None:
        if name is None:
            return given
        raise ModelError(
            f"the network gives a {type(given).__name__}, which names no outputs: leave out "
            f"output={name!r}"
        )
    if name is None:
        name = _only(parts, heads)
    missing = [n for n in ((name,) if isinstance(name, str) else name) if n not in parts]
    if missing:
        raise ModelError(f"the network gives no output named {missing[0]!r}; {_there_are(parts)}")
    return parts[name] if isinstance(name, str) else tuple(parts[each] for each in name)


def _parts(given: Any) -> dict[str, Any] | None:
    """What was given under names, but for None; None where there are no names."""
    if isinstance(given, Mapping):  # also a transformer's output, which leaves None out
        parts = dict(given)
    elif is_dataclass(given):
        parts = {field.name: getattr(given, field.name) for field in fields(given)}
    elif hasattr(given, "_asdict"):
        parts = given._asdict()
    elif isinstance(given, Tensor | list | tuple) or not hasattr(given, "__dict__"):
        return None
    else:
        parts = vars(given)
    return {name: part for name, part in parts.items() if part is not None}


def _only(parts: Mapping[str, Any], heads: bool) -> str:
    """The output that needs no naming."""
    tensors = [name for name, part in parts.items() if isinstance(part, Tensor)]
    if not heads and "logits" in tensors:
        return "logits"
    if not heads and len(tensors) == 1:
        return tensors[0]
    example = repr(tuple(tensors)) if heads else repr(tensors[0]) if tensors else "…"
    raise ModelError(
        f"the network gives several outputs under names; {_there_are(parts)}: say which the "
        f"likelihood is about, like Model(net, output={example})"
    )


def _there_are(parts: Mapping[str, Any]) -> str:
    return f"there are {', '.join(map(repr, parts)) or 'none'}"


def check_rows(one: Any, two: Any) -> None:
    """Outputs for one row and for two must be tensors with the rows first."""
    given = [v if isinstance(v, list | tuple) else (v,) for v in (one, two)]
    for count, leaves in enumerate(given, 1):
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ModelError(
                    "the network must give a tensor, or a tuple of tensors for several heads, not "
                    f"{type(leaf).__name__}"
                )
            if leaf.ndim == 0 or leaf.shape[0] != count:
                raise ModelError(
                    f"the network gives shape {list(leaf.shape)} for {count} row(s) of x: the "
                    "first axis must be the rows, also for one: squeeze(-1), not squeeze()"
                )
