"""Mistakes with densities and files: each is one of doxa's errors, with words that help.

A row is what is done, the error, and what its message says: what is wrong, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mistakes import (
    Row,
    fit,
    listed,
    numbers,
)
from torch import Tensor

import doxa
from doxa.errors import (
    DataError,
    DoxaError,
    MethodError,
    ModelError,
    NumericalError,
    ShapeError,
    StoreError,
)  # fmt: skip

nan, inf = float("nan"), float("inf")


def density(p: dict[str, Tensor]) -> Tensor:
    return -p["a"].square().sum()


def short() -> Any:
    return doxa.HMC(draws=4, burn_in=2, leapfrog=2)


SAMPLE: dict[str, Row] = {
    "no function": (
        lambda: doxa.sample(3, {"a": 0.0}, short()), MethodError, "log_density must be a function",
    ),
    "a density that is no number": (
        lambda: doxa.sample(lambda p: p["a"].expand(3), {"a": 0.0}, short()), ShapeError,
        "must return a scalar",
    ),
    "a density that is a float": (
        lambda: doxa.sample(lambda p: 1.0, {"a": 0.0}, short()), ModelError, "tensor",
    ),
    "a density that is NaN": (
        lambda: doxa.sample(lambda p: p["a"] * nan, {"a": 0.0}, short()), NumericalError, "nan",
    ),
    "a density that fails": (
        lambda: doxa.sample(lambda p: p["b"], {"a": 0.0}, short()), ModelError, "'b'",
    ),
    "no start": (lambda: doxa.sample(density, {}, short()), DoxaError, "init"),
    "a start in words": (
        lambda: doxa.sample(density, {"a": "zero"}, short()), DoxaError, "init 'a'",
    ),
    "a start outside": (
        lambda: doxa.sample(density, {"a": -1.0}, short(), constraints={"a": "positive"}),
        DataError, "init 'a' lies outside.*above 0",
    ),
    "a constraint of nothing": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), constraints={"b": "positive"}), DoxaError,
        "'b'",
    ),
    "a constraint that is none": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), constraints={"a": "positiv"}), DoxaError,
        "positive",
    ),
    "a method that cannot": (
        lambda: doxa.sample(density, {"a": 0.0}, "laplace"), DoxaError,
        "needs a network.*hmc, nuts",
    ),
    "no chains": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), 0), MethodError, "members must be",
    ),
    "jitter below zero": (
        lambda: doxa.sample(density, {"a": 0.0}, short(), jitter=-1), DoxaError, "jitter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake, error, words", listed(sample=SAMPLE))
def test_a_mistake_is_named(mistake: Callable[[], Any], error: type[DoxaError], words: str) -> None:
    with pytest.raises(error, match=words):
        mistake()


def test_a_density_says_which_parameters_there_are() -> None:
    draws = doxa.sample(density, {"a": 0.0}, short(), 2)
    with pytest.raises(KeyError, match=r"no parameter is called 'mu'; there are \['a'\]"):
        draws["mu"]


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder that is not there": (lambda p: doxa.load(p / "nowhere"), "nowhere"),
    "a file": (lambda p: doxa.load(p / "file"), "file"),
    "an empty folder": (lambda p: doxa.load(p / "empty"), "empty"),
    "a folder of others": (lambda p: doxa.load(p / "foreign"), "foreign"),
    "a damaged posterior": (lambda p: doxa.load(p / "damaged"), "damaged"),
    "onto a file": (lambda p: numbers().save(p / "file"), "file"),
    "into a file": (lambda p: numbers().save(p / "file" / "run"), "file"),
    "over what is another's": (lambda p: numbers().save(p / "foreign"), r"thesis\.tex"),
    "a checkpoint in a file": (lambda p: fit(checkpoint=p / "file"), "file"),
    "draws of a posterior": (lambda p: doxa.Draws.load(p / "good"), "no draws.*doxa.load"),
    "a posterior of draws": (lambda p: doxa.load(p / "draws"), r"doxa\.Draws\.load"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    (path / "file").write_text("hello")
    for name in ("empty", "foreign"):
        (path / name).mkdir()
    (path / "foreign" / "thesis.tex").write_text("precious")
    for name in ("good", "damaged"):
        numbers().save(path / name)
    tensors = path / "damaged" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    doxa.sample(density, {"a": 0.0}, short(), 2).save(path / "draws")
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_path_that_is_not_what_it_should_be(folder: Path, name: str) -> None:
    mistake, words = FILES[name]
    with pytest.raises(StoreError, match=words):
        mistake(folder)
