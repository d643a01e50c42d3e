"""What a method's field may hold, said once, where the field is declared.

    draws: int = whole(100, least=1)
    step: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, ends="(]")
    correction: str = one_of("freeze", "none", "gamma")

Each helper gives a dataclass field with its default and a `Rule`. The check of a method's settings
(`check_fields`), the flags of the command line and their help read that rule, and nothing else says
what is allowed. A default of None allows None, which stands for what `fit` or the data decide.
`per_run=True` lets a grid of runs vary the field: its values are then [M], one a member. What two
fields ask of each other is checked by the method.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from doxa.errors import MethodError

Ends = Literal["[]", "[)", "(]", "()"]  # which ends of an interval belong to it

_KEY = "doxa.rule"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What one field may hold.

    none: None is allowed. per_run: a grid of runs may vary it. because: the reason for the rule,
    where its words alone would not say.
    """

    none: bool = False
    per_run: bool = False
    because: str = ""

    def allows(self, value: Any) -> bool:
        return self.none if value is None else self.holds(value)

    def words(self, name: str) -> str:
        """What is allowed, as it stands after "must be" and in the help."""
        return self.described(name) + (", or None" if self.none else "")

    def holds(self, value: Any) -> bool:
        """Whether a value that is not None is allowed."""
        raise NotImplementedError

    def described(self, name: str) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Whole(Rule):
    """A whole number of any integer type, from `least` to `most`."""

    least: int
    most: int | None = None

    def holds(self, value: Any) -> bool:
        if not isinstance(value, Integral) or isinstance(value, bool):
            return False
        return self.least <= int(value) and (self.most is None or int(value) <= self.most)

    def described(self, name: str) -> str:
        if self.most is None:
            return f"a whole number, at least {self.least}"
        return f"a whole number from {self.least} to {self.most}"


@dataclass(frozen=True, kw_only=True)
class Number(Rule):
    """A finite number in an interval, or one of those listed in `also`."""

    low: float
    high: float = math.inf
    ends: Ends = "[]"
    also: tuple[float, ...] = ()

    def holds(self, value: Any) -> bool:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            number = float(value)
        except OverflowError:  # a whole number that no float holds
            return False
        above = number > self.low or (self.ends[0] == "[" and number == self.low)
        below = number < self.high or (self.ends[1] == "]" and number == self.high)
        return (math.isfinite(number) and above and below) or number in self.also

    def described(self, name: str) -> str:
        left, right = ("≤" if end in "[]" else "<" for end in self.ends)
        if self.high == math.inf:
            words = f"a number, {name} {'≥' if left == '≤' else '>'} {self.low:g}"
            words = f"positive ({name} > 0)" if (self.low, left) == (0, "<") else words
        else:
            words = f"a number, {self.low:g} {left} {name} {right} {self.high:g}"
        return ", or ".join([words, *(f"{number:g}" for number in self.also)])


@dataclass(frozen=True, kw_only=True)
class Flag(Rule):
    """True or False; 0 and 1 are numbers."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool | np.bool_)

    def described(self, name: str) -> str:
        return "True or False"


@dataclass(frozen=True, kw_only=True)
class Choice(Rule):
    """One of some names (None may be among them), or an object of one of some types."""

    choices: tuple[str | None, ...] = ()
    kinds: Any = ()  # as isinstance takes them
    called: str = ""  # the objects, in words

    def holds(self, value: Any) -> bool:
        named = isinstance(value, str) and value in self.choices
        return named or isinstance(value, self.kinds)

    def allows(self, value: Any) -> bool:
        return (value is None and None in self.choices) or super().allows(value)

    def described(self, name: str) -> str:
        names = "one of " + ", ".join(map(repr, self.choices)) if self.choices else ""
        return ", or ".join(filter(None, [names, self.called]))


def whole(
    default: int | None, least: int, most: int | None = None, *, per_run: bool = False
) -> Any:
    """A whole number, at least `least` and, where it is given, at most `most`."""
    return _declared(default, Whole(none=default is None, per_run=per_run, least=least, most=most))


def positive(default: float | None, *, per_run: bool = False) -> Any:
    """A finite number above zero."""
    return _declared(default, Number(none=default is None, per_run=per_run, low=0, ends="()"))


def between(
    default: float | None,
    low: float,
    high: float,
    ends: Ends = "[]",
    *,
    also: tuple[float, ...] = (),
    because: str = "",
    per_run: bool = False,
) -> Any:
    """A number from `low` to `high`, with or without either end; `also` are values besides."""
    rule = Number(
        none=default is None, per_run=per_run, because=because,
        low=low, high=high, ends=ends, also=also,
    )  # fmt: skip
    return _declared(default, rule)


def flag(default: bool | None) -> Any:
    """True or False."""
    return _declared(default, Flag(none=default is None))


_FIRST: Any = object()


def one_of(*choices: str | None, default: Any = _FIRST, or_a: Any = (), called: str = "") -> Any:
    """One of some names, the first unless `default` says which; or an object of a type (or one of
    some), `called` in words."""
    rule = Choice(choices=choices, kinds=or_a, called=called)
    return _declared(choices[0] if default is _FIRST else default, rule)


def plain(default: Any, kind: Any, called: str) -> Any:
    """An object of a type (or one of some), `called` in words: the method looks into it itself."""
    return _declared(default, Choice(none=default is None, kinds=kind, called=called))


def rules(method: Any) -> dict[str, Rule]:
    """The declared rules of a method or of its class, by field."""
    declared = {f.name: f.metadata.get(_KEY) for f in dataclasses.fields(method)}
    return {name: rule for name, rule in declared.items() if rule is not None}


def check_fields(method: Any) -> None:
    """Each field holds what it declares, or an error says what that is."""
    for name, rule in rules(method).items():
        value = getattr(method, name)
        if not rule.allows(value):
            endless = isinstance(value, float | np.floating) and not math.isfinite(value)
            because = rule.because or ("it has to be finite" if endless else "")
            said = f"{name} must be {rule.words(name)}, not {value!r}"
            raise MethodError(f"{said}: {because}" if because else said)


def _declared(default: Any, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: rule})
