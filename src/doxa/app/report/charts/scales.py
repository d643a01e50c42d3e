"""From values to places on a chart: ranges, round ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

LARGEST = 1e300  # beyond it differences overflow


def finite(values: Iterable[float]) -> np.ndarray:
    """The values that can be drawn."""
    given = np.asarray(
        list(values) if not isinstance(values, np.ndarray) else values, float
    ).ravel()
    return given[np.isfinite(given) & (np.abs(given) < LARGEST)]


def extent(parts: Sequence[Iterable[float]]) -> tuple[float, float]:
    """The range of everything finite; (0, 1) of nothing, and never of width zero."""
    known = [values for values in map(finite, parts) if values.size]
    if not known:
        return 0.0, 1.0
    low = float(min(values.min() for values in known))
    high = float(max(values.max() for values in known))
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.5 * max(abs(low), abs(high)) or 0.5
        return low - margin, high + margin
    return low, high


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values inside [low, high]: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough), 10.0 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels with as many digits as tell them apart."""
    if not values:
        return []
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
    largest = max(map(abs, values))
    if largest >= 1e6 or (largest and largest < 1e-3):
        return [short(v) for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:,.{digits}f}".replace("-", "−") for v in (v + 0.0 for v in values)]


def short(value: float, digits: int = 3) -> str:
    """A number for people: about `digits` significant ones, a true minus, words for the rest."""
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
    text = f"{value:,.{places}f}"
    return text.replace("-", "−")


@dataclass(frozen=True)
class Scale:
    """A line from [low, high] to pixels [start, end]; what lies outside is clamped just beyond."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = min(max((value - self.low) / (self.high - self.low), -0.02), 1.02)
        return self.start + share * (self.end - self.start)
