"""One method of each family, where the parts that methods share are tested."""

from __future__ import annotations

from typing import Any

import pytest

import doxa
from doxa.registry import Row


def first_of_each() -> frozenset[str]:
    """The first method of each family and kind of answer (evidence, a bound, neither)."""
    first: dict[Any, str] = {}
    for row in doxa.methods():
        first.setdefault((row.family, row.evidence, row.elbo), row.name)
    return frozenset(first.values())


def of_rows() -> list[Row]:
    """The methods that learn from rows; the others learn from tasks."""
    return [row for row in doxa.methods() if row.tasks != ("tasks",)]


def one_of_each_quick(names: list[Any]) -> list[Any]:
    """Parameters of a test, methods' names or tuples that begin with one: those that are not the
    first of their kind are slow."""
    quick = first_of_each()
    name = lambda value: value if isinstance(value, str) else value[0]  # noqa: E731
    return [value if name(value) in quick else _slow(value) for value in names]


def _slow(value: Any) -> Any:
    values = (value,) if isinstance(value, str) else value
    return pytest.param(*values, marks=pytest.mark.slow)
