"""Geweke's (2004) joint-distribution test of every kernel with an acceptance test.

    λ ~ Gamma(5, 4),  μ | λ ~ N(0, 1/(κλ)),  y_i | μ, λ ~ N(μ, 1/λ),  i = 1 … 3

sampled in the free coordinates θ = (μ, φ = log λ). Thousands of chains begin with exact draws of
(θ, y) and alternate y ~ p(y | θ) with one transition of the kernel that is to leave p(θ | y)
invariant. A correct kernel leaves the joint distribution as it was, so that after any number of
sweeps the moments of θ are those of the prior, known in closed form; and chains are independent,
so that their standard errors are too. Five moments at |z| < 4: a correct kernel fails by chance
with probability 3e-4. Then bugs are planted, and each must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bare_density import bare_run, clocks
from scipy.special import polygamma, psi
from torch import Tensor

import doxa
from doxa.mcmc import hamiltonian, hmc, mala, metropolis, nuts
from doxa.mcmc.kernel import Point, pull, push

SHAPE, RATE, KAPPA, ROWS = 5.0, 4.0, 0.5, 3
CHAINS, SWEEPS = 16000, 12

KERNELS: dict[str, Any] = {
    "metropolis": doxa.Metropolis(draws=1, burn_in=0),
    "mala": doxa.MALA(draws=1, burn_in=0),
    "mala, dense mass": doxa.MALA(draws=1, burn_in=0, mass="full"),
    "hmc": doxa.HMC(draws=1, burn_in=0, leapfrog=3),
    "hmc, one step": doxa.HMC(draws=1, burn_in=0, leapfrog=1, jitter=1.0),
    "hmc, dense mass": doxa.HMC(draws=1, burn_in=0, leapfrog=3, mass="full"),
    "nuts": doxa.NUTS(draws=1, burn_in=0, max_depth=4),
    "nuts, dense mass": doxa.NUTS(draws=1, burn_in=0, max_depth=4, mass="full"),
    "nuts, cut short": doxa.NUTS(draws=1, burn_in=0, max_depth=1),
}
STEP = {"metropolis": 0.8}


def exact() -> dict[str, float]:
    """Prior moments of (μ, φ)."""
    mean = float(psi(SHAPE)) - math.log(RATE)
    return {
        "μ": 0.0, "μ²": RATE / (SHAPE - 1) / KAPPA, "φ": mean,
        "φ²": float(polygamma(1, SHAPE)) + mean**2, "μφ": 0.0,
    }  # fmt: skip


def observed(theta: Tensor) -> dict[str, Tensor]:
    mu, phi = theta.unbind(1)
    return {"μ": mu, "μ²": mu.square(), "φ": phi, "φ²": phi.square(), "μφ": mu * phi}


def log_joint(theta: Tensor, y: Tensor, jacobian: bool = True) -> Tensor:
    mu, phi = theta.unbind(1)
    precision = phi.exp()
    prior = (SHAPE - 1) * phi - RATE * precision + (phi if jacobian else 0.0)
    prior = prior + 0.5 * phi - 0.5 * KAPPA * precision * mu.square()
    fit = 0.5 * ROWS * phi - 0.5 * precision * (y - mu.unsqueeze(1)).square().sum(1)
    return prior + fit


def z_scores(name: str, *, jacobian: bool = True, seed: int = 0) -> dict[str, float]:
    """How far each moment is from the prior's after all sweeps, in standard errors."""
    method = KERNELS[name]
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    halves = normal(CHAINS, int(2 * SHAPE)).square().sum(1)  # χ² of 2·shape degrees of freedom
    precision = halves / (2 * RATE)
    mu = normal(CHAINS) / (KAPPA * precision).sqrt()
    theta = torch.stack([mu, precision.log()], 1)
    data: dict[str, Tensor] = {}
    run = bare_run(lambda theta: log_joint(theta, data["y"], jacobian), theta, seed)
    state = method.init(run)
    state["step"] = torch.full_like(state["step"], STEP.get(name, 0.7))
    if state["metric"].ndim == 3:  # a mass that is neither the identity nor the covariance
        factor = torch.tensor([[0.8, 0.0], [0.3, 0.6]], dtype=torch.float64)
        state["metric"] = factor.expand(CHAINS, 2, 2).clone()
    for clock in clocks(run, SWEEPS):
        mu, phi = state["theta"].unbind(1)
        data["y"] = mu.unsqueeze(1) + normal(CHAINS, ROWS) * (-0.5 * phi).exp().unsqueeze(1)
        state = method._arrive(run, state)
        state, _ = method.transition(run, state, run.all_rows(), clock)
    values, want = observed(state["theta"]), exact()
    return {
        k: float((v.mean() - want[k]) / (v.std() / math.sqrt(CHAINS))) for k, v in values.items()
    }


def worst(name: str, **options: Any) -> float:
    return max(abs(z) for z in z_scores(name, **options).values())


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_leaves_the_joint_distribution_as_it_was(name: str) -> None:
    z = z_scores(name)
    assert max(abs(value) for value in z.values()) < 4, z


@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts"])
def test_chains_move(name: str) -> None:
    """Else every kernel would pass: the density is that of the data, and transitions are taken."""
    y = torch.zeros(200, ROWS, dtype=torch.float64)
    start = torch.zeros(200, 2, dtype=torch.float64)
    run = bare_run(lambda theta: log_joint(theta, y), start)
    method = KERNELS[name]
    state = method._arrive(run, method.init(run))
    state["step"] = torch.full_like(state["step"], STEP.get(name, 0.7))
    state, _ = method.transition(run, state, run.all_rows(), next(clocks(run, 1)))
    assert (state["theta"] != 0).all(1).double().mean() > 0.15


def wrong_sign(patch: pytest.MonkeyPatch) -> None:
    for module in (hmc, mala, metropolis):
        right = module.acceptance
        patch.setattr(module, "acceptance", lambda change, right=right: right(-change))
    energy = Point.energy.fget  # NUTS weighs its points by it
    grow = nuts.grow

    def flipped(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Point, "energy", property(lambda self: -energy(self)))
            return grow(*args)

    patch.setattr(nuts, "grow", flipped)


def everything_is_taken(patch: pytest.MonkeyPatch) -> None:
    """The acceptance max(1, ·) of the lecture's slide; in NUTS the newest point, always."""
    for module in (hmc, mala, metropolis):
        patch.setattr(module, "acceptance", torch.ones_like)
    new_leaf = nuts.new_leaf

    def newest(density: Any, branch: Any) -> Any:
        certain = torch.full_like(branch["luck"], -torch.inf)
        return new_leaf(density, {**branch, "luck": certain})

    patch.setattr(nuts, "new_leaf", newest)


def missing_half_step(patch: pytest.MonkeyPatch) -> None:
    def kick_and_drift(
        density: Any, point: Any, metric: Any, step: Any, steps: int = 1, path: Any = None
    ) -> Point:
        theta, momentum, value, grad = point
        for _ in range(steps):
            momentum = momentum + step * pull(metric, grad)
            theta = theta + step * push(metric, momentum)
            value, grad = density(theta)
        return Point(theta, momentum, value, grad)

    patch.setattr(hmc, "leapfrog", kick_and_drift)
    patch.setattr(mala, "leapfrog", kick_and_drift)
    patch.setattr(nuts, "leapfrog", kick_and_drift)


def momentum_not_refreshed(patch: pytest.MonkeyPatch) -> None:
    depart = hamiltonian.Hamiltonian.depart
    first: dict[str, Tensor] = {}

    def stale(self: Any, state: Any, clock: Any) -> Point:
        point = depart(self, state, clock)
        return point._replace(momentum=first.setdefault("momentum", point.momentum))

    patch.setattr(hamiltonian.Hamiltonian, "depart", stale)


Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: list[tuple[str, Plant]] = [
    *[(name, wrong_sign) for name in ("metropolis", "mala", "hmc", "nuts")],
    *[(name, everything_is_taken) for name in ("metropolis", "mala", "hmc", "nuts")],
    *[(name, missing_half_step) for name in ("mala", "hmc", "hmc, dense mass", "nuts")],
    *[(name, momentum_not_refreshed) for name in ("mala", "hmc", "nuts")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plant"), BUGS, ids=lambda v: getattr(v, "__name__", v))
def test_a_planted_bug_is_found(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert worst(name) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts"])
def test_a_missing_jacobian_is_found(name: str) -> None:
    assert worst(name, jacobian=False) > 5
