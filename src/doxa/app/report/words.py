"""Numbers and verdicts in plain words."""

from __future__ import annotations

import math

from doxa.app.report.markup import Html, tag

MARKS = {"good": "✓", "slight": "○", "warning": "!", "bad": "✕", "none": "–"}


def mark(verdict: str, words: str) -> Html:
    """A pill: a sign, words and a colour that all say the same."""
    look = verdict if verdict in MARKS else "none"
    return tag("span", {"class": f"mark {look}"}, f"{MARKS[look]} {words}")


def count(number: int, thing: str, things: str | None = None) -> str:
    """1 row, 2 rows."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


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
    """The difference of two shares."""
    return f"{100.0 * abs(difference):.1f} percentage points"


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def chance_of_share(share: float, n: int) -> float:
    """1.96 standard errors of a share seen in n independent cases: the 95 % band of chance."""
    return 1.96 * math.sqrt(max(share * (1.0 - share), 0.0) / max(n, 1))
