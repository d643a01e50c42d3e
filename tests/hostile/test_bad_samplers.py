"""What a sampler cannot sample is an error or a verdict, be it a log density or a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import ModelError, NumericalError

SAMPLERS: dict[str, Any] = {
    "hmc": doxa.HMC(draws=40, burn_in=30, leapfrog=4),
    "nuts": doxa.NUTS(draws=40, burn_in=30, max_depth=3),
    "mala": doxa.MALA(draws=100, burn_in=60),
    "metropolis": doxa.Metropolis(draws=150, burn_in=100),
    "sgld": doxa.SGLD(draws=40, burn_in=20, thin=1, step_size=1e-2),
    "psgld": doxa.PSGLD(draws=40, burn_in=20, thin=1, step_size=1e-2),
    "sghmc": doxa.SGHMC(draws=40, burn_in=20, thin=1, step_size=1e-2),
    "minibatch-mh": doxa.MinibatchMH(draws=40, burn_in=20, thin=1),
    "cyclical": doxa.CyclicalSGMCMC(cycles=2, draws=10, thin=1, exploration=0.5, step_size=1e-2),
    "constant-sgd": doxa.ConstantSGD(draws=20, burn_in=10, thin=1, probes=5),
}
EXACT = ("hmc", "nuts", "mala", "metropolis")


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


class Net(nn.Module):
    """Two layers, and whatever comes of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.route = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.route(self, x)


def fit(route: Callable[[Any, Tensor], Tensor], name: str, **options: Any) -> Any:
    settings = {"members": 2, "steps": 10, "batch_size": 10} | options
    return doxa.fit(Net(route), table(), SAMPLERS[name], **settings)


@pytest.mark.parametrize("name", SAMPLERS)
def test_outputs_that_are_never_numbers(name: str) -> None:
    posterior = fit(lambda net, x: net.second(net.first(x)) * torch.nan, name)
    assert posterior.status == "diverged"
    assert "2 of 2 members" in posterior.status.reason
    assert "outputs are finite at the start" in posterior.status.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts"])
def test_a_density_that_is_nan_in_places_is_said_by_every_exact_sampler(name: str) -> None:
    """Half of a normal: −inf there would be a support, NaN is a mistake somewhere."""

    def half(p: dict[str, Tensor]) -> Tensor:
        return torch.where(p["x"] > 0.2, torch.nan, -0.5 * p["x"].square())

    draws = doxa.sample(half, {"x": -1.0}, SAMPLERS[name], 4, jitter=0.1)
    assert draws.status == "not-converged"
    words = "log density was NaN at" if name == "metropolis" else "diverged"
    assert words in draws.status.reason
    assert (draws["x"] <= 0.2).all()


@pytest.mark.slow
def test_a_support_is_no_mistake() -> None:
    def half(p: dict[str, Tensor]) -> Tensor:
        return torch.where(p["x"] > 0.2, -torch.inf, -0.5 * p["x"].square())

    method = doxa.Metropolis(draws=1500, burn_in=500)
    draws = doxa.sample(half, {"x": -1.0}, method, 4, jitter=0.1)
    assert draws.diagnostics["undefined"] == 0
    assert draws.status == "ok", draws.status.reason


@pytest.mark.parametrize("name", ["sgld", "psgld", "sghmc", "minibatch-mh"])
def test_a_density_that_is_nan_in_places_stops_chains_of_gradients(name: str) -> None:
    def nowhere(p: dict[str, Tensor]) -> Tensor:
        return torch.where(p["x"].sum() > -0.9, torch.nan, -0.5 * p["x"].square().sum())

    try:
        draws = doxa.sample(nowhere, {"x": [-0.5, -0.5]}, SAMPLERS[name], 2, jitter=0.01)
    except NumericalError as error:
        assert "before its first draw" in str(error)
        assert "became non-finite" in str(error)
    else:
        assert draws.status in ("diverged", "not-converged")
        assert draws.status.reason


CUT = {
    "detached": lambda net, x: net.second(net.first(x)).detach(),
    "detached in part": lambda net, x: net.second(net.first(x).detach()),
    "by way of numpy": lambda net, x: net.second(torch.as_tensor(net.first(x).detach().numpy())),
    "rounded": lambda net, x: net.second(net.first(x)).round(),
}


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = net.first(x)
    return net.second(hidden)


@pytest.mark.parametrize("kind", [*CUT, "no_grad"])
@pytest.mark.parametrize("name", ["hmc", "sgld", "map"])
def test_weights_that_autograd_does_not_see(kind: str, name: str) -> None:
    route = CUT.get(kind, without_gradients)
    method = SAMPLERS.get(name, name)
    with pytest.raises(ModelError, match=r"first\.weight.*no gradient.*requires_grad_\(False\)"):
        doxa.fit(Net(route), table(), method, members=2, steps=5)


@pytest.mark.slow
def test_weights_that_are_fixed_or_not_used_are_no_mistake() -> None:
    fixed = Net(without_gradients)
    fixed.first.requires_grad_(False)
    assert doxa.fit(fixed, table(), SAMPLERS["hmc"], members=2).samples.shape[2] == 3 + 1 + 1
    unused = Net(lambda net, x: net.second(x.sum(1, keepdim=True).expand(-1, 3)))
    posterior = doxa.fit(unused, table(), SAMPLERS["hmc"], members=2)
    assert posterior.samples.shape[2] == 6 + 3 + 3 + 1 + 1
    dead = Net(lambda net, x: net.second(torch.relu(net.first(x) - 1e6)))
    doxa.fit(dead, table(), "map", steps=3)


@pytest.mark.parametrize("name", EXACT)
def test_a_start_where_the_likelihood_is_zero(name: str) -> None:
    """Counts of 4 where the log rate is −10³⁸: log p overflows to −inf there and all around."""
    x, _ = table()
    net = Net(lambda net, x: net.second(net.first(x)) - 1e38)
    posterior = doxa.fit(
        net, (x, torch.full((30,), 4)), SAMPLERS[name], members=2, likelihood="poisson"
    )
    assert posterior.status != "ok"
    assert posterior.status.reason


def test_a_start_outside_the_support_of_a_density() -> None:
    def positive(p: dict[str, Tensor]) -> Tensor:
        return p["x"].log().sum() - p["x"].sum()

    for name in EXACT:
        with pytest.raises(NumericalError, match=r"nan|outside the support"):
            doxa.sample(positive, {"x": [-1.0, 1.0]}, SAMPLERS[name])

    def bounded(p: dict[str, Tensor]) -> Tensor:
        inside = (p["x"].abs() < 1).all()
        return torch.where(inside, -0.5 * p["x"].square().sum(), -torch.inf)

    with pytest.raises(NumericalError, match="outside the support"):
        doxa.sample(bounded, {"x": [2.0, 0.0]}, SAMPLERS["hmc"])


STUCK = {
    "hmc": doxa.HMC(draws=20, burn_in=0, leapfrog=1),
    "metropolis": doxa.Metropolis(draws=60, burn_in=0, scale=1e6),
    "sgld": doxa.SGLD(draws=30, burn_in=0, thin=1, step_size=1e-300),
    "sghmc": doxa.SGHMC(draws=30, burn_in=0, thin=1, step_size=1e-300),
    "minibatch-mh": doxa.MinibatchMH(draws=30, burn_in=0, thin=1, step_size=1e6),
}


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", STUCK)
def test_chains_that_stick_are_named(name: str, members: int) -> None:
    """A single one, too: that it agrees with itself proves nothing."""
    x, y = table()
    posterior = doxa.fit(doxa.nets.mlp(2, 1), (x, 1e4 * y), STUCK[name], members=members)
    assert posterior.status == "not-converged"
    assert f"{members} of {members} chains hardly move (chain 0" in posterior.status.reason

    def narrow(p: dict[str, Tensor]) -> Tensor:
        return -0.5e12 * p["x"].square().sum()

    starts = [{"x": [1.0, 1.0]} for _ in range(members)]
    draws = doxa.sample(narrow, starts, STUCK[name], members)
    assert draws.status == "not-converged"
    assert "hardly move" in draws.status.reason


def test_one_chain_among_many_that_sticks_is_named() -> None:
    """A needle of a mode that holds whoever starts in it."""

    def needle(p: dict[str, Tensor]) -> Tensor:
        far = -0.5 * ((p["x"] - 50.0) / 1e-6).square() + 40.0
        return torch.logaddexp(-0.5 * p["x"].square(), far)

    starts = [{"x": 0.0}, {"x": 0.3}, {"x": 50.0}]
    draws = doxa.sample(needle, starts, doxa.Metropolis(draws=100, burn_in=0), 3)
    assert draws.status == "not-converged"
    assert "1 of 3 chains hardly move (chain 2" in draws.status.reason


def test_a_run_without_a_single_draw_is_an_error() -> None:
    def breaks(p: dict[str, Tensor]) -> Tensor:
        return p["x"].sum() * torch.where(p["x"].sum() > 1.0, torch.nan, 1.0)

    method = doxa.SGLD(draws=5, burn_in=200, thin=2, step_size=0.05)
    with pytest.raises(NumericalError, match=r"before its first draw.*non-finite"):
        doxa.sample(breaks, {"x": 0.9}, method, 2, jitter=0.01)
