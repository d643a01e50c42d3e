"""What was saved by an earlier version loads, is what it was, and gives the answers it gave.

The artefacts were written once, by `make_artefacts.py`, with the answers of that version beside
them; they are never rewritten to suit later code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from artefact_cases import CASES, DRAWS, FOLDER, Case, answers, answers_of_draws, facts
from torch import Tensor

import doxa
from doxa.store import read_artefact

RELATIVE = 1e-6


def assert_told_again(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every number, relative to the largest of its tensor."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert got[name].dtype == value.dtype, name
        error = (got[name].double() - value.double()).abs().max()
        worst = float(error / value.double().abs().max().clamp(min=1e-12))
        assert worst <= RELATIVE, f"{name}: {worst:.3g}"


def test_every_kind_is_there_and_every_artefact_is_described() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*CASES, "draws"}
    kinds = {"sample", "gaussian", "implicit", "laplace", "linear", "process", "mixture"}
    assert {case.kind for case in CASES.values()} == kinds | {"transformed"}


@pytest.fixture(params=CASES.items(), ids=lambda item: item[0])
def stored(request: pytest.FixtureRequest) -> tuple[Case, Any, dict[str, Tensor], dict[str, Any]]:
    name, case = request.param
    if case.kind == "process":
        pytest.importorskip("gpytorch")
    tensors, meta = read_artefact(FOLDER / name / "answers")
    return case, doxa.load(FOLDER / name / "posterior"), tensors, meta


def test_it_gives_the_answers_it_gave(stored: Any) -> None:
    _, posterior, want, _ = stored
    x, y = want.pop("x"), want.pop("y")
    assert_told_again(answers(posterior, x, y), want)


def test_it_is_what_it_was(stored: Any) -> None:
    case, posterior, _, meta = stored
    assert posterior.kind == case.kind
    assert posterior.method == case.method
    assert type(posterior.method) is type(case.method)
    assert posterior.base_likelihood.name == case.likelihood
    assert posterior.dtype == torch.float64
    got = facts(posterior)
    assert got.keys() == meta.keys()
    for name, value in meta.items():
        close = isinstance(value, float)
        assert got[name] == (pytest.approx(value, rel=RELATIVE) if close else value), name


def test_draws_of_a_log_density() -> None:
    want, meta = read_artefact(FOLDER / "draws" / "answers")
    draws = doxa.Draws.load(FOLDER / "draws" / "draws")
    assert_told_again(answers_of_draws(draws), want)
    assert draws.method == DRAWS
    assert list(draws) == ["loc", "scale"]
    assert (draws.status, draws.status.reason) == (meta["status"], meta["reason"])
