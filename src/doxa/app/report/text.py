"""Numbers, counts, settings, networks and priors as plain text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LONGEST_SETTING = 300  # largest number of characters of a setting


def short(value: float, digits: int = 3) -> str:
    """A number with about `digits` significant digits and a true minus sign."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(power)}".replace("-", "−")
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{places}f}".replace("-", "−")


def percent(share: float, digits: int | None = None) -> str:
    if not math.isfinite(share):
        return "undefined"
    if 0.9995 <= share < 1.0:
        return "> 99.9 %"
    if 0.0 < share < 0.0005:
        return "< 0.1 %"
    value = 100.0 * share
    if digits is None:
        digits = 1 if 0.0 < value < 99.95 and abs(value - round(value)) >= 0.05 else 0
    return f"{value:.{digits}f} %"


def points(difference: float) -> str:
    """The difference of two shares, in percentage points."""
    return f"{100.0 * abs(difference):.1f} percentage points"


def count(number: int, thing: str, things: str | None = None) -> str:
    """A number and what it counts, such as "1 row" or "2 rows"."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def listed(words: Sequence[str]) -> str:
    """Words as a list in a sentence, such as "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def capitalized(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[:1].upper() + sentence[1:]


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def settings(method: Any) -> list[tuple[str, Any, bool]]:
    """(field, value, whether it is the default) of every hyper-parameter. NumPy numbers become
    Python numbers, whose repr is valid code."""
    if not dataclasses.is_dataclass(method):
        return []
    return [
        (each.name, value, bool(_default(each) == value))
        for each in dataclasses.fields(method)
        if each.init and each.compare
        for given in [getattr(method, each.name)]
        for value in [given.item() if isinstance(given, np.generic) else given]
    ]


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default is not dataclasses.MISSING:
        return each.default
    return None if each.default_factory is dataclasses.MISSING else each.default_factory()


def describe(value: Any) -> str:
    """The value of a setting as short text."""
    if isinstance(value, np.generic):  # a NumPy number
        value = value.item()
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
    elif isinstance(value, torch.Tensor | np.ndarray):
        few = math.prod(value.shape) <= 8
        text = describe(value.tolist()) if few else f"tensor {list(value.shape)}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST_SETTING else text[: LONGEST_SETTING - 1] + "…"


def describe_network(builder: tuple[str, dict[str, Any]]) -> str:
    name, options = builder
    if name == "mlp":
        widths = [options["inputs"], *options["hidden"], options["outputs"]]
        drop = f", dropout {options['dropout']:g}" if options.get("dropout") else ""
        return f"MLP {'–'.join(map(str, widths))}, {options['activation']}{drop}"
    return f"{name}({', '.join(f'{k}={describe(v)}' for k, v in options.items())})"


def describe_prior(prior: Any) -> str:
    if isinstance(prior, dict):
        return "; ".join(f"{name}: {describe_prior(each)}" for name, each in prior.items())
    inner = ", ".join(f"{name} {describe(value)}" for name, value, _ in settings(prior))
    return type(prior).__name__ + (f", {inner}" if inner else "")
