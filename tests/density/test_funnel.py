"""Neal's funnel, which no sampler with one step size explores: it must be said, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import doxa


def funnel(p: dict[str, Tensor]) -> Tensor:
    """v ~ N(0, 3²), x_i | v ~ N(0, eᵛ), i = 1 … 9 (Neal, 2003)."""
    v, x = p["v"], p["x"]
    return -v.square() / 18 - 0.5 * (x.square() * (-v).exp() + v).sum()


def judged(method: Any, chains: int = 4) -> doxa.Draws:
    return doxa.sample(funnel, {"v": 0.0, "x": torch.zeros(9)}, method, chains, progress=False)


REASONS = ("diverged", "E-BFMI", "R-hat", "hardly move")


def check(draws: doxa.Draws) -> None:
    """Not only R-hat: the sampler itself says what is wrong with the geometry."""
    assert draws.status == "not-converged"
    assert any(words in draws.status.reason for words in REASONS), draws.status.reason
    assert min(draws.diagnostics["ebfmi"]) < 0.3 or draws.diagnostics["divergences"] > 0


@pytest.mark.slow
def test_it_is_said_of_short_chains() -> None:
    check(judged(doxa.HMC(draws=120, burn_in=120, leapfrog=6)))


@pytest.mark.slow
@pytest.mark.parametrize("method", [doxa.NUTS(), doxa.HMC()], ids=lambda m: m.name)
def test_it_is_said_of_the_defaults(method: Any) -> None:
    draws = judged(method)
    check(draws)
    ess = min(draws.diagnostics["ess_bulk"].values())
    assert ess < 100 * draws.members, "with so many effective draws it might be right"


@pytest.mark.slow
def test_a_funnel_that_was_straightened_is_fine() -> None:
    """x = e^(v/2) z: the same distribution, and no alarm; v has its mean and spread, within 5
    standard errors of 400 effective draws or more (1 in 10⁶)."""

    def straight(p: dict[str, Tensor]) -> Tensor:
        return -p["v"].square() / 18 - 0.5 * p["z"].square().sum()

    draws = doxa.sample(straight, {"v": 0.0, "z": torch.zeros(9)}, doxa.NUTS(), 4, progress=False)
    assert draws.status == "ok", draws.status.reason
    v = draws["v"].flatten()
    assert abs(float(v.mean())) < 5 * 3 / 20
    assert abs(float(v.var()) / 9 - 1) < 5 * (2 / 400) ** 0.5
