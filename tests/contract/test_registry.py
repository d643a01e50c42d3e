"""A method is one row, one frozen dataclass and one name, everywhere the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import doxa
from doxa import store
from doxa.app.fitting import make_method
from doxa.errors import MethodError


def test_the_row_the_class_and_the_command_line_use_one_name(case: Any) -> None:
    assert case.cls.name == case.row.name
    assert getattr(doxa, case.cls.__name__) is case.cls
    assert case.cls.__name__ in doxa.__all__
    assert make_method(case.name) == case.cls()


def test_a_method_is_a_frozen_dataclass(case: Any) -> None:
    method = case.method()
    assert dataclasses.is_dataclass(method)
    assert method == case.method()
    assert hash(method) == hash(case.method())
    for name in method.settings():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, name, None)


def test_settings_survive_json(case: Any) -> None:
    for settings in ({}, case.fast.settings, case.fast.changed):
        method = case.cls(**settings)
        text = json.dumps(store.encode(method), allow_nan=False)
        again = store.decode(json.loads(text))
        assert type(again) is case.cls
        assert again == method
    assert json.loads(text)["type"] == case.name


def test_changed_settings_are_not_the_defaults(case: Any) -> None:
    defaults = case.cls().settings()
    assert all(defaults[name] != value for name, value in case.fast.changed.items())


def test_every_setting_can_be_given_on_the_command_line(case: Any) -> None:
    settings = {**case.cls().settings(), **case.fast.changed}
    plain = {k: v for k, v in settings.items() if isinstance(v, int | float | str | None)}
    given = [f"{name.replace('_', '-')}={value}" for name, value in plain.items()]
    assert make_method(case.name, given) == case.cls(**case.fast.changed)


def test_unknown_settings_and_grids_are_refused(case: Any) -> None:
    with pytest.raises(MethodError, match="no setting 'nonsense'"):
        make_method(case.name, ["nonsense=1"])
    with pytest.raises(MethodError, match="nonsense"):
        case.fit(runs=doxa.Runs(grid={"nonsense": [1, 2]}))


def test_the_table_names_a_task_and_a_paper(case: Any) -> None:
    assert set(case.row.tasks) <= {"regression", "classification", "tasks"}
    assert case.row.paper
    assert case.row.summary
    assert case.row.gives
    assert case.name in repr(doxa.methods())


def test_the_settings_that_a_row_names_are_the_methods_own(case: Any) -> None:
    for settings in (case.row.short, case.row.demo.settings):
        method = case.cls(**settings)
        assert {name: getattr(method, name) for name in settings} == dict(settings)


def test_a_row_needs_no_more_than_what_it_always_had() -> None:
    """As rows of other packages do."""
    row = doxa.registry.Row("n", "m:C", "point", "what it is", "a paper", "a network", "1")
    assert (row.module, row.class_name) == ("m", "C")
    assert row.demo.left_out == "" and not row.short
    assert "| `n` | what it is | 1 |  |" in doxa.registry.MethodTable([row]).markdown()


def test_a_regression_method_refuses_classes(case: Any) -> None:
    if "classification" in case.row.tasks:
        return
    with pytest.raises(MethodError, match="regression"):
        case.fit(likelihood="bernoulli")
