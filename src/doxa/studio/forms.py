"""The methods of a room and their settings, for the forms of a page.

A form is made of the fields that a method declares (`doxa.method.method`): the same declarations
check its values, make the options of the command line and write its help. `read_settings` turns the
values of a form into settings. A method is made of them afterwards, which checks them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import re
from typing import Any

import doxa
from doxa.errors import MethodError, did_you_mean
from doxa.method.method import Choice, Flag, Number, Rule, Whole, rules
from doxa.registry import Row

_LONGEST_TEXT = 60  # characters of a setting that is text, such as a kernel
_LARGEST = 1_000_000
_NEEDED = {"flows": "zuko", "gp": "gpytorch"}  # the package of an extra


def methods_for(task: str) -> list[Row]:
    """The methods for "regression" or "classification" that are installed."""
    return [row for row in doxa.methods() if task in row.tasks and _installed(row)]


def _installed(row: Row) -> bool:
    package = _NEEDED.get(row.extra or "")
    return package is None or importlib.util.find_spec(package) is not None


def is_exact(name: str) -> bool:
    """Whether nothing is trained by steps, so that an answer comes at once."""
    cls = doxa.get_method(name)
    return not cls.needs_network and (not cls.uses_rate or cls.default_steps == 0)


def describe(row: Row, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a page says about a method, and the fields of its form, without those in `hidden`."""
    cls = doxa.get_method(row.name)
    help_of = {k: v for each in reversed(cls.__mro__) for k, v in _documented(each).items()}
    fields = [
        field | {"help": help_of.get(name, "")}
        for name, rule in rules(cls).items()
        if name not in hidden and (field := _field(cls, name, rule)) is not None
    ]
    return {
        "name": row.name, "family": row.family, "summary": row.summary, "paper": row.paper,
        "network": cls.needs_network, "exact": is_exact(row.name), "draws": "draws" in rules(cls),
        "members": cls.default_members, "gaussian": cls.regression_only or not cls.needs_network,
        "settings": fields,
    }  # fmt: skip


def _field(cls: Any, name: str, rule: Rule) -> dict[str, Any] | None:
    """The field of a form; None if only Python can give its values."""
    default = {f.name: f.default for f in dataclasses.fields(cls)}[name]
    if default is dataclasses.MISSING:
        return None
    found: dict[str, Any] = {
        "name": name, "default": default, "none": rule.none, "allowed": rule.words(name),
    }  # fmt: skip
    if isinstance(rule, Whole):
        return found | {"kind": "whole", "least": rule.least, "most": rule.most}
    if isinstance(rule, Number):
        high = rule.high if math.isfinite(rule.high) else None
        return found | {"kind": "number", "least": rule.low, "most": high, "open": rule.ends}
    if isinstance(rule, Flag):
        return found | {"kind": "flag"}
    if isinstance(rule, Choice):
        choices = list(rule.choices)
        if choices and (default is None or isinstance(default, str)):
            if rule.none and None not in choices:
                choices.insert(0, None)
            return found | {"kind": "choice", "choices": choices}
        kinds = rule.kinds if isinstance(rule.kinds, tuple) else (rule.kinds,)
        if str in kinds and isinstance(default, str):
            return found | {"kind": "text"}
    return None


def _documented(cls: Any) -> dict[str, str]:
    """The description of each parameter in a numpydoc docstring."""
    text = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    found = re.search(r"^Parameters\n-+\n(.*?)(?=\n\n\w|\n\w+\n-+\n|\Z)", text, re.DOTALL | re.M)
    parts: dict[str, list[str]] = {}
    names: list[str] = []
    for line in (found[1] if found else "").splitlines():
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.partition(" : ")[0].split(",")]
        else:
            for name in names:
                parts.setdefault(name, []).append(line.strip())
    return {name: " ".join(lines).strip() for name, lines in parts.items()}


def read_settings(name: str, given: Any, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a method from the values of a form, without those that are defaults.

    Parameters
    ----------
    name : str
        The name of the method.
    given : dict
        The values by field: numbers, text, truth values or None.
    hidden : tuple of str
        Fields that the form does not have.
    """
    if not isinstance(given, dict):
        raise MethodError(f"the settings of {name} must be names and values, not {given!r:.80}")
    cls = doxa.get_method(name)
    declared, found = rules(cls), {}
    for key, value in given.items():
        rule = declared.get(key) if key not in hidden else None
        field = None if rule is None else _field(cls, key, rule)
        if rule is None or field is None:
            known = sorted(set(declared) - set(hidden))
            raise MethodError(f"{name} has no setting {key!r:.80} here{did_you_mean(key, known)}")
        if isinstance(value, float) and isinstance(rule, Whole) and value.is_integer():
            value = int(value)
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            raise MethodError(f"{key} has at most {_LONGEST_TEXT} characters here")
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
            raise MethodError(f"{key} is at most {_LARGEST:,} here, not {value:.3g}")
        if isinstance(value, dict | list):
            raise MethodError(f"{key} must be {rule.words(key)}")
        if value != field["default"] or type(value) is not type(field["default"]):
            found[key] = value
    return found
