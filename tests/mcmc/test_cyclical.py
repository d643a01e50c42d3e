"""Cyclical step sizes: the exact moments of each cycle, and what the cycles are for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import assert_moments, predicted, target

import doxa
from doxa.errors import MethodError


@pytest.mark.parametrize(
    ("inner", "friction", "temperature"),
    [
        ("sgld", 1.0, 1.0),
        ("sghmc", 0.3, 0.5),
        pytest.param("sgld", 1.0, 0.5, marks=pytest.mark.slow),
        pytest.param("sghmc", 0.3, 1.0, marks=pytest.mark.slow),
    ],
)
def test_moments_over_all_cycles(inner: str, friction: float, temperature: float) -> None:
    """Two cycles from a cold start, mini-batches shuffled anew in every stage: mean and covariance
    of the kept draws from the recursion with η_k = η₀/2 (1 + cos πk/K), without noise while it
    explores."""
    goal = target(n=32)
    first = 0.3 / goal.precision.max()
    method = doxa.CyclicalSGMCMC(inner, 2, 20, 5, 0.5, first, 0.3, temperature)
    assert method.length == 200
    posterior = goal.fit(method, members=200, batch_size=8)
    assert posterior.samples.shape[1] == 40
    eta = [first / 2 * (1 + math.cos(math.pi * k / 200)) for k in range(200)]
    kept = list(range(5, 101, 5))
    want = predicted(
        goal, [eta[:100], eta[100:]] * 2, [[], kept] * 2, batch=8, friction=friction,
        temperature=[0.0, temperature] * 2,
    )  # fmt: skip
    assert_moments(posterior, goal, want, power=0.08)


@pytest.mark.slow
def test_the_last_part_of_a_cycle_samples_the_posterior() -> None:
    """Long cycles: the mean over draws is the posterior's, the variance within 10 % of it (the
    bias at the mean step of the sampling part, and the short memory of its end)."""
    goal = target(n=16)
    method = doxa.CyclicalSGMCMC("sgld", 2, 40, 10, 0.5, 0.3 / goal.precision.max())
    posterior = goal.fit(method, copies=300, members=1, batch_size=16)
    draws = posterior.samples.unflatten(2, (-1, 3)).flatten(0, 2).numpy()
    std = np.diag(goal.precision) ** -0.5
    assert (np.abs(draws.mean(0) - goal.mean) < 0.06 * std).all()
    assert (np.abs(draws.var(0) / std**2 - 1) < 0.1).all()


@pytest.mark.slow
def test_one_chain_visits_several_modes() -> None:
    """y = θ² + noise has two modes, ±1. Chains of eight cycles, whose hot steps throw θ across,
    visit both; SGLD at its calm step never leaves the mode it found."""

    class Square(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return self.theta.square().expand(x.shape[0], 1)

    y = 1 + 0.5 * torch.randn(20, 1, generator=torch.Generator().manual_seed(0)).double()
    data = torch.zeros(20, 1, dtype=torch.float64), y
    curvature = 4 * 20 / 0.25

    def share(method: Any) -> float:
        model = doxa.Model(Square(), doxa.Gaussian(0.5))
        posterior = doxa.fit(model, data, method, members=30, batch_size=10, init="given")
        sides = (posterior.samples[..., 0] > 0).double().mean(1)
        assert torch.allclose(posterior.samples.abs().mean(), torch.tensor(1.0).double(), atol=0.1)
        return float(((sides > 0) & (sides < 1)).double().mean())

    cyclical = doxa.CyclicalSGMCMC("sgld", 8, 10, 10, 0.5, step_size=2.2 / curvature)
    calm = doxa.SGLD(80, 100, 10, step_size=0.1 / curvature, decay=0.0)
    assert share(cyclical) > 0.5
    assert share(calm) == 0.0


@pytest.mark.parametrize(
    "setting",
    [{"inner": "hmc"}, {"cycles": 0}, {"exploration": 1.0}, {"friction": 0.0}, {"friction": 1.5}],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.CyclicalSGMCMC(**setting)
