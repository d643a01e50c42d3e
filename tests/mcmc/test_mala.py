"""MALA: its acceptance rate, its law on known densities, and networks.

Its kernel is in `test_geweke.py`, with planted bugs, its proposals in
`tests/density/test_transitions.py`, and the exact posterior of a linear network in
`tests/statistical/test_anchor.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import doxa
from doxa.errors import MethodError
from doxa.posterior import chains


@pytest.mark.parametrize("target", [0.574, 0.8])
def test_burn_in_reaches_the_acceptance_rate(target: float) -> None:
    method = doxa.MALA(draws=150, burn_in=250, target_accept=target)
    draws = doxa.sample(lambda p: -0.5 * p["x"].square().sum(), {"x": torch.zeros(30)}, method, 12)
    accept = draws.diagnostics["accept"]
    assert sum(accept) / 12 == pytest.approx(target, abs=0.05)
    assert max(abs(each - target) for each in accept) < 0.15
    assert "leapfrogs" not in draws.diagnostics


def test_a_density_with_skew_scales_and_correlation() -> None:
    """Gamma(3, 2), and a normal whose correlation is 0.9 and whose scales differ by 100: means and
    variances within 5 standard errors."""
    covariance = torch.tensor([[1.0, 0.009], [0.009, 1e-4]]).double()
    precision = torch.linalg.inv(covariance)

    def log_density(p: dict[str, torch.Tensor]) -> torch.Tensor:
        x, g = p["x"], p["g"]
        return -0.5 * x @ precision @ x + 2 * g.log() - 2 * g

    method = doxa.MALA(draws=400, burn_in=400, mass="full")
    draws = doxa.sample(
        log_density, {"x": torch.zeros(2), "g": 1.0}, method, members=16,
        constraints={"g": "positive"}, jitter=0.1,
    )  # fmt: skip
    exact = {
        "x": (torch.zeros(2).double(), covariance.diagonal()),
        "g": (torch.tensor(1.5).double(), torch.tensor(0.75).double()),
    }
    for name, (mean, variance) in exact.items():
        for values, truth in ((draws[name], mean), ((draws[name] - mean).square(), variance)):
            effective = chains.ess_bulk(values).clamp(max=values[..., 0].numel())
            error = values.flatten(0, 1).std(0) / effective.sqrt()
            assert ((values.mean((0, 1)) - truth).abs() < 5 * error).all()
    assert draws.diagnostics["divergences"] == 0


def test_a_temperature_widens_the_draws() -> None:
    method = doxa.MALA(draws=100, burn_in=150, thin=2, temperature=4.0)
    draws = doxa.sample(
        lambda p: -0.5 * p["x"].square().sum(), {"x": torch.zeros(20)}, method, members=20
    )
    error = math.sqrt(2 * 6 / draws["x"].numel())  # draws are correlated over about six
    assert float(draws["x"].var()) == pytest.approx(4.0, rel=5 * error)


def test_a_subset_leaves_the_rest_at_its_point() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = doxa.fit(
        net, (x, x[:, :1]), doxa.MALA(draws=20, burn_in=30), subset="last_layer", members=2,
        steps=20,
    )  # fmt: skip
    draws = posterior.draw()
    assert draws["0.weight"].reshape(2, 20, -1).std(1).max() == 0
    assert draws["2.weight"].reshape(2, 20, -1).std(1).min() > 0


def test_one_leapfrog_step_of_hmc_is_a_step_of_mala() -> None:
    """The same acceptance and the same law; random numbers are used in another order."""
    means = {}
    for name, method in {
        "mala": doxa.MALA(draws=300, burn_in=0),
        "hmc": doxa.HMC(draws=300, burn_in=0, leapfrog=1, jitter=1.0),
    }.items():
        chain = doxa.transitions(
            lambda p: -0.25 * p["x"].square().square().sum(), {"x": torch.zeros(3)}, method, 60,
            changes=[(0, "step_size", 0.9)],
        )  # fmt: skip
        means[name] = torch.stack([step.info["accept"] for step in chain]).mean((0, 1))
    assert float(means["mala"]) == pytest.approx(float(means["hmc"]), abs=0.01)


def test_settings_are_checked() -> None:
    for bad in ({"draws": 0}, {"target_accept": 1.0}, {"mass": "round"}, {"temperature": 0.0},
                {"thin": 0}, {"burn_in": -1}):  # fmt: skip
        with pytest.raises(MethodError):
            doxa.MALA(**bad)  # type: ignore[arg-type]
