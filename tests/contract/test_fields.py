"""Every field of every method declares what it may hold, and holds to it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from doxa.app.fitting import fields_of, make_method
from doxa.errors import MethodError
from doxa.method.method import Choice, Flag, Number, Rule, Whole, rules

Check = Callable[..., None]
NEVER: list[Any] = [math.nan, math.inf, -math.inf, [1], np.array([1.0, 2.0]), object()]


def beyond(rule: Rule) -> list[Any]:
    """Values just outside of what is declared, and of other types."""
    values = [*NEVER] if rule.none or None in getattr(rule, "choices", ()) else [*NEVER, None]
    if isinstance(rule, Whole):
        values += [rule.least - 1, rule.least + 0.5, float(rule.least), True, str(rule.least)]
        values += [] if rule.most is None else [rule.most + 1]
    elif isinstance(rule, Number):
        low, high = rule.low, rule.high
        values += [math.nextafter(low, -math.inf) if rule.ends[0] == "[" else low, True, "0.6"]
        values += [math.nextafter(high, math.inf) if rule.ends[1] == "]" else high]
    elif isinstance(rule, Choice):
        values += ["no such choice", "", 1, *([] if rule.allows(True) else [True])]
    else:
        assert isinstance(rule, Flag)
        values += [0, 1, "true"]
    return values


def within(rule: Rule) -> list[Any]:
    """The ends that belong to it, what is just inside of those that do not, all choices."""
    values: list[Any] = [None] if rule.none else []
    if isinstance(rule, Whole):
        values += [rule.least, np.int64(rule.least)]
        values += [] if rule.most is None else [rule.most]
    elif isinstance(rule, Number):
        low, high = rule.low, rule.high
        values += [low if rule.ends[0] == "[" else math.nextafter(low, math.inf), *rule.also]
        values += [high if rule.ends[1] == "]" else math.nextafter(high, -math.inf)]
        values += [np.float64(value) for value in values if value is not None]
    elif isinstance(rule, Choice):
        values += [*rule.choices]
    else:
        values += [True, False]
    return values


def test_every_field_declares_what_it_may_hold(case: Any) -> None:
    assert list(rules(case.cls)) == [f.name for f in dataclasses.fields(case.cls)]
    case.cls()  # the defaults are allowed


def test_what_crosses_a_bound_is_refused_by_name(case: Any) -> None:
    for name, rule in rules(case.cls).items():
        for value in beyond(rule):
            with pytest.raises(MethodError) as caught:
                case.cls(**{name: value})
            assert str(caught.value).startswith(f"{name} must be {rule.words(name)}, not ")


def test_what_is_within_is_accepted_unless_another_field_forbids_it(case: Any) -> None:
    for name, rule in rules(case.cls).items():
        for value in within(rule):
            try:
                method = case.cls(**{name: value})
            except MethodError as error:
                others = [other for other in rules(case.cls) if other != name]
                assert any(other in str(error) for other in others), error
                assert f"must be {rule.words(name)}" not in str(error)
            else:
                assert getattr(method, name) is value


def test_the_command_line_shows_and_enforces_what_is_allowed(case: Any) -> None:
    shown = {name: allowed for name, _, _, allowed in fields_of(case.cls)}
    assert shown == {name: rule.words(name) for name, rule in rules(case.cls).items()}
    for name, rule in rules(case.cls).items():
        with pytest.raises(MethodError) as caught:
            make_method(case.name, [f"{name}=nonsense"])
        assert shown[name] in str(caught.value)
        if isinstance(rule, Choice):
            for choice in rule.choices:
                try:
                    made = make_method(case.name, [f"{name}={choice}"])
                except MethodError as error:
                    assert shown[name] not in str(error)  # another field forbids it
                else:
                    assert getattr(made, name) == choice


@pytest.mark.by_family
def test_a_grid_over_another_field_says_what_may_vary(case: Any) -> None:
    own = case.method().per_run
    assert set(own) <= set(case.method().settings())
    for name in set(case.method().settings()) - set(own):
        with pytest.raises(MethodError) as caught:
            case.fit(runs=doxa.Runs(grid={name: [1, 2]}))
        assert f"['{name}'] cannot differ between the runs" in str(caught.value)
        assert all(repr(each) in str(caught.value) for each in (*own, "lr"))
        rows = [torch.arange(25), torch.arange(40)]
        with pytest.raises(MethodError, match="cannot differ between the runs"):
            case.fit(runs=doxa.Runs(rows=rows, per_split={name: [1, 2]}))


# What a field's two values are where they are not its default and a little less, and the settings
# without which it would mean nothing.
GRIDS: dict[str, tuple[list[float], dict[str, Any]]] = {
    "mc-dropout.p": ([0.1, 0.3], {}),
    "constant-sgd.step_size": ([0.01, 0.03], {}),
    "constant-sgd.temperature": ([0.01, 0.02], {}),  # ε* is then below what is stable
    "linear.degree": ([1, 2], {"features": "polynomial"}),
    "linear.lengthscale": ([0.5, 1.0], {"features": "rbf", "count": 5}),
    "linear.prior_std": ([0.5, 2.0], {}),
    "linear.noise": ([0.5, 2.0], {}),
    "gp.noise": ([0.5, 2.0], {"learn_kernel": False}),
    "gp.lengthscale": ([0.5, 2.0], {"learn_kernel": False}),
    "gp.variance": ([0.5, 2.0], {"learn_kernel": False}),
    "sparse-gp.lengthscale": ([0.5, 2.0], {}),
    "sparse-gp.variance": ([0.5, 2.0], {}),
    "deep-gp.lengthscale": ([0.5, 2.0], {}),
    "deep-gp.variance": ([0.5, 2.0], {}),
}


def test_every_field_a_grid_may_vary_makes_the_run_it_would_be_alone(
    regression: Any, answers: Any, assert_close: Check
) -> None:
    """A field that is read as `self.x` has the same value for all runs: they are then not what they
    are alone. Every method reads its own fields, so that no other can stand for it."""
    case, options = regression, {"dtype": torch.float64, "steps": 5, "members": 2}
    x, y = case.data()
    known = {key.partition(".")[2] for key in GRIDS if key.startswith(f"{case.name}.")}
    assert known <= set(case.method().per_run)
    for name in case.method().per_run:
        default = getattr(case.cls(), name) or 2e-4
        values, needed = GRIDS.get(f"{case.name}.{name}", ([0.9 * default, default], {}))
        sweep = case.fit(settings=needed, runs=doxa.Runs(grid={name: values}), **options)
        got = [answers(posterior.predict(x), y) for posterior in sweep]
        assert not torch.equal(got[0]["log_prob"], got[1]["log_prob"]), name
        alone = case.fit(settings={**needed, name: values[0]}, **options)  # not the default
        assert_close(got[0], answers(alone.predict(x), y), case.fast.rounding)


@pytest.mark.slow
def test_every_field_a_grid_may_vary_does_so_under_other_settings(
    regression: Any, answers: Any, assert_close: Check
) -> None:
    """The same beside settings that are not the defaults, which may take another way."""
    case, options = regression, {"dtype": torch.float64, "steps": 5, "members": 2}
    x, y = case.data()
    for name in case.method().per_run:
        key = f"{case.name}.{name}"
        default = getattr(case.cls(), name) or 2e-4
        values, needed = GRIDS.get(key, ([0.9 * default, default], {}))
        others = {k: v for k, v in case.fast.changed.items() if k != name}
        settings = {**others, **case.fast.many_steps, **needed}
        try:
            sweep = case.fit(settings=settings, runs=doxa.Runs(grid={name: values}), **options)
        except MethodError:
            continue  # settings that do not go together
        alone = case.fit(settings={**settings, name: values[0]}, **options)
        assert_close(
            answers(sweep[0].predict(x), y), answers(alone.predict(x), y), case.fast.rounding
        )
