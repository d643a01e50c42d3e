"""Settings, networks and priors as a person would write them."""

from __future__ import annotations

import dataclasses
from typing import Any

LONGEST = 300


def settings(method: Any) -> list[tuple[str, Any, bool]]:
    """(field, value, whether it is the default) of every hyper-parameter."""
    if not dataclasses.is_dataclass(method):
        return []
    rows = []
    for each in dataclasses.fields(method):
        if each.init and each.compare:
            value = getattr(method, each.name)
            rows.append((each.name, value, bool(_default(each) == value)))
    return rows


def network(builder: tuple[str, dict[str, Any]]) -> str:
    name, options = builder
    if name == "mlp":
        widths = [options["inputs"], *options["hidden"], options["outputs"]]
        drop = f", dropout {options['dropout']:g}" if options.get("dropout") else ""
        return f"MLP {'–'.join(map(str, widths))}, {options['activation']}{drop}"
    return f"{name}({', '.join(f'{k}={describe(v)}' for k, v in options.items())})"


def prior(given: Any) -> str:
    if isinstance(given, dict):
        return "; ".join(f"{name}: {prior(each)}" for name, each in given.items())
    inner = ", ".join(f"{name} {describe(value)}" for name, value, _ in settings(given))
    return type(given).__name__ + (f", {inner}" if inner else "")


def describe(value: Any) -> str:
    """A setting as a person would write it."""
    if value is None:
        return "chosen by the method"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [f"{name}={describe(each)}" for name, each, same in settings(value) if not same]
        text = type(value).__name__ + (f"({', '.join(inner)})" if inner else "")
    elif isinstance(value, dict):
        named = [f"{str(name).replace('_', ' ')} {describe(each)}" for name, each in value.items()]
        text = ", ".join(named)
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(describe(each) for each in value) + "]"
    elif hasattr(value, "shape") and hasattr(value, "tolist"):
        text = describe(value.tolist()) if value.numel() <= 8 else f"tensor {list(value.shape)}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default is not dataclasses.MISSING:
        return each.default
    factory = each.default_factory
    return None if factory is dataclasses.MISSING else factory()
