"""Fields that declare what they may hold: each helper at its bounds, beyond them, and off type."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import doxa
from doxa import store
from doxa.errors import MethodError
from doxa.method import Method
from doxa.method.method import (
    Rule,
    between,
    check_fields,
    flag,
    one_of,
    plain,
    positive,
    rules,
    whole,
)


class Thing:
    """What a plain field may hold."""


@store.register("test-all-fields")
@dataclass(frozen=True)
class Settings(Method):
    name: ClassVar[str] = "test-all-fields"

    draws: int = whole(100, least=1)
    depth: int = whole(10, least=1, most=20)
    seed: int | None = whole(None, least=0)
    scale: float = positive(1.0, per_run=True)
    step: float | None = positive(None, per_run=True)
    rate: float = between(0.5, 0, 1)
    share: float = between(0.5, 0, 1, "[)")
    friction: float = between(0.5, 0, 1, "(]")
    p: float | None = between(None, 0, 1, "()", because="it is a probability")
    decay: float = between(0.55, 0.5, 1, "(]", also=(0,))
    weight: float = between(0.0, 0, math.inf)
    train: bool = flag(True)
    correction: str = one_of("freeze", "none", "gamma")
    shape: str = one_of("diagonal", "dense", default="dense")
    tune: str | None = one_of(None, "evidence")
    kernel: str | Thing = one_of("rbf", or_a=Thing, called="a thing")
    extra: Thing | None = plain(None, Thing, "a thing")


TINY = math.nextafter(0, 1)
BELOW_ZERO, BELOW_ONE = -TINY, math.nextafter(1, 0)
ABOVE_ONE, ABOVE_HALF = math.nextafter(1, 2), math.nextafter(0.5, 1)

ACCEPTED: dict[str, list[Any]] = {
    "draws": [1, 10**30, np.int8(1), np.uint64(7)],
    "depth": [1, 20, np.int64(20)],
    "seed": [None, 0, 3],
    "scale": [TINY, 1e308, 2, np.float32(0.1), np.int64(3), Fraction(1, 3)],
    "step": [None, 0.1, 1, np.float64(0.1)],
    "rate": [0, 1, 0.0, 1.0, -0.0, np.float64(1.0)],
    "share": [0, BELOW_ONE, np.float16(0.0)],
    "friction": [1, TINY, np.int64(1)],
    "p": [None, TINY, BELOW_ONE],
    "decay": [0, 0.0, 1, ABOVE_HALF, np.float64(0.0), np.int32(0)],
    "weight": [0, 0.0, 1e308],
    "train": [True, False, np.bool_(False)],
    "correction": ["freeze", "none", "gamma", np.str_("gamma")],
    "shape": ["diagonal", "dense"],
    "tune": [None, "evidence"],
    "kernel": ["rbf", Thing()],
    "extra": [None, Thing()],
}

NOT_NUMBERS: list[Any] = [
    True, False, np.bool_(True), "1", "", math.nan, math.inf, -math.inf, np.float32("nan"),
    np.float64("inf"), 1j, [1], (1,), np.array(1.0), np.array([0.5, 0.6]), torch.tensor(1.0),
]  # fmt: skip
NOT_NAMES: list[Any] = [True, 0, 1.0, ["rbf"], b"rbf", np.array(["rbf", "none"]), Thing, object()]

REFUSED: dict[str, list[Any]] = {
    "draws": [0, -1, 1.0, 1.5, np.float64(2.0), np.int8(0), None, *NOT_NUMBERS],
    "depth": [0, 21, 2.0, None, *NOT_NUMBERS],
    "seed": [-1, 0.0, *NOT_NUMBERS],
    "scale": [0, 0.0, -0.0, BELOW_ZERO, -1, 10**400, None, np.float64(0.0), *NOT_NUMBERS],
    "step": [0, -1e-3, np.int64(0), *NOT_NUMBERS],
    "rate": [BELOW_ZERO, ABOVE_ONE, 2, np.float32(-0.1), None, *NOT_NUMBERS],
    "share": [1, 1.0, BELOW_ZERO, None, *NOT_NUMBERS],
    "friction": [0, 0.0, ABOVE_ONE, None, *NOT_NUMBERS],
    "p": [0, 1, 0.0, 1.0, -0.5, 1.5, *NOT_NUMBERS],
    "decay": [0.5, ABOVE_ONE, TINY, -0.6, None, *NOT_NUMBERS],
    "weight": [BELOW_ZERO, 10**400, None, *NOT_NUMBERS],
    "train": [0, 1, "yes", "True", None, np.int64(1), 1.0],
    "correction": ["", "Freeze", "none ", None, *NOT_NAMES],
    "shape": ["sparse", None, *NOT_NAMES],
    "tune": ["validation", "None", *NOT_NAMES],
    "kernel": ["spline", None, *NOT_NAMES],
    "extra": ["a thing", Thing, 3, True],
}


def each(values: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{i}")
        for name, column in values.items()
        for i, value in enumerate(column)
    ]


@pytest.mark.parametrize(("name", "value"), each(ACCEPTED))
def test_what_is_allowed_is_kept_as_it_was_given(name: str, value: Any) -> None:
    assert getattr(Settings(**{name: value}), name) is value


@pytest.mark.parametrize(("name", "value"), each(REFUSED))
def test_what_is_not_allowed_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(MethodError) as caught:
        Settings(**{name: value})
    message, words = str(caught.value), rules(Settings)[name].words(name)
    assert message.startswith(f"{name} must be {words}, not {value!r}")


def test_every_helper_is_tried() -> None:
    assert set(ACCEPTED) == set(REFUSED) == {f.name for f in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draws": 0}, "draws must be a whole number, at least 1, not 0"),
        ({"depth": 21}, "depth must be a whole number from 1 to 20, not 21"),
        ({"seed": -1}, "seed must be a whole number, at least 0, or None, not -1"),
        ({"scale": 0.0}, "scale must be positive (scale > 0), not 0.0"),
        ({"scale": math.inf}, "scale must be positive (scale > 0), not inf: it has to be finite"),
        ({"step": "fast"}, "step must be positive (step > 0), or None, not 'fast'"),
        ({"share": 1.0}, "share must be a number, 0 ≤ share < 1, not 1.0"),
        ({"friction": 0}, "friction must be a number, 0 < friction ≤ 1, not 0"),
        ({"p": 2}, "p must be a number, 0 < p < 1, or None, not 2: it is a probability"),
        ({"decay": 0.5}, "decay must be a number, 0.5 < decay ≤ 1, or 0, not 0.5"),
        ({"weight": -1}, "weight must be a number, weight ≥ 0, not -1"),
        ({"train": 1}, "train must be True or False, not 1"),
        ({"tune": "x"}, "tune must be one of None, 'evidence', not 'x'"),
        ({"kernel": 3}, "kernel must be one of 'rbf', or a thing, not 3"),
        ({"extra": 3}, "extra must be a thing, or None, not 3"),
    ],
)
def test_the_message_names_the_field_what_is_allowed_and_the_value(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(MethodError) as caught:
        Settings(**settings)
    assert str(caught.value) == message


def test_the_helpers_make_ordinary_fields() -> None:
    """Order, defaults, equality, hash and storage are those of a plain dataclass."""
    method = Settings()
    plain_values = [100, 10, None, 1.0, None, 0.5, 0.5, 0.5, None, 0.55, 0.0, True, "freeze",
                    "dense", None, "rbf", None]  # fmt: skip
    assert list(method.settings().values()) == plain_values
    assert Settings(*plain_values) == method
    assert hash(Settings(3)) == hash(Settings(draws=3)) != hash(method)
    assert Settings(3) != method
    changed = Settings(np.int64(3), scale=np.float64(0.25), correction="none")
    assert store.decode(store.encode(changed)) == changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.draws = 3  # type: ignore[misc]


def test_replace_checks_again() -> None:
    with pytest.raises(MethodError, match="depth must be"):
        dataclasses.replace(Settings(), depth=0)


def test_a_bad_value_in_a_stored_method_is_refused() -> None:
    stored: Any = store.encode(Settings())
    with pytest.raises(doxa.errors.StoreError, match="draws must be"):
        store.decode(stored | {"draws": 0})


def test_a_grid_may_vary_what_says_so_and_nothing_else() -> None:
    assert Settings().per_run == ("scale", "step")
    assert doxa.MAP().per_run == ()
    assert doxa.BayesianLinear().per_run == ("degree", "lengthscale", "prior_std", "noise")
    assert doxa.SGHMC().per_run == ("step_size", "friction", "temperature")
    table = torch.zeros(4, 1), torch.zeros(4, 1)
    with pytest.raises(MethodError, match=r"\['draws'\].*may vary \['likelihood', 'lr', 'prior', "):
        doxa.fit(doxa.nets.mlp(1, 1), table, Settings(), runs=doxa.Runs(grid={"draws": [1, 2]}))


def test_a_grid_may_hold_tensors_of_one_number() -> None:
    x = torch.linspace(-1, 1, 8).double()[:, None]
    grid = {"noise": torch.tensor([0.5, 2.0])}
    method = doxa.BayesianLinear(prior_std=1.0)
    sweep = doxa.fit(None, (x, x), method, runs=doxa.Runs(grid=grid))
    one, two = (float(posterior.predict(x).aleatoric[0]) for posterior in sweep)
    assert (one, two) == pytest.approx((0.25, 4.0))


def test_fields_without_a_rule_are_left_to_the_method() -> None:
    @dataclass(frozen=True)
    class Other(Method):
        size: int = 3
        noted: int = dataclasses.field(default=1, metadata={"unit": "rows"})

    other = Other(size="many", noted=-1)  # type: ignore[arg-type]
    check_fields(other)
    assert rules(other) == {}


def test_a_comparison_of_fields_finds_them_in_order() -> None:
    """The method's own check comes after the fields', and may rely on them."""

    @dataclass(frozen=True)
    class Pair(Method):
        low: float = between(0.0, 0, 1)
        high: float = between(1.0, 0, 1)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.low >= self.high:
                raise MethodError("low must be below high")

    with pytest.raises(MethodError, match="high must be a number"):
        Pair(high="much")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="low must be below high"):
        Pair(0.6, 0.5)


def test_a_rule_alone_allows_nothing_silently() -> None:
    with pytest.raises(NotImplementedError):
        Rule().allows(1)
