"""NUTS: the tree against a naive recursion, its moments against closed forms and against HMC."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from bare_density import Chains, bare_run, clocks, gaussian, sample
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.mcmc.convergence import concerns
from doxa.mcmc.kernel import Point
from doxa.mcmc.nuts import Parts, _branch, check_turning, merge, new_leaf
from doxa.posterior.chains import ebfmi


def errors(draws: Tensor, want: Tensor) -> Tensor:
    """(mean − want) in standard errors, from the chains' own means, which are independent."""
    means = draws.mean(1)  # [M, P]
    return (means.mean(0) - want) / (means.std(0) / math.sqrt(len(means)))


def assert_moments(chains: Chains, mean: Tensor, covariance: Tensor, most: float = 4.5) -> None:
    """First and second moments along the principal axes, the narrow ones too."""
    variance, axes = torch.linalg.eigh(covariance)
    along = (chains.draws - mean) @ axes
    assert errors(along, torch.zeros_like(mean)).abs().max() < most
    assert errors(along.square(), variance).abs().max() < most
    ratio = along.flatten(0, 1).square().mean(0) / variance
    assert ((ratio - 1).abs() < 0.2).all()  # the standard errors are small enough to say something


def correlated(size: int, condition: float = 1e3) -> Tensor:
    g = torch.Generator().manual_seed(size)
    axes = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64)).Q
    scales = torch.logspace(-math.log10(condition), 0, size, dtype=torch.float64)
    return axes @ torch.diag(scales) @ axes.T


def starts(chains: int, size: int) -> Tensor:
    return torch.randn(chains, size, generator=torch.Generator().manual_seed(9)).double()


CASES = {
    "nuts": (doxa.NUTS(draws=60, burn_in=100), 2, 1e2),
}
LONG = {
    "hmc": (doxa.HMC(draws=200, burn_in=150, leapfrog=30), 2, 1e3),
    "hmc, dense": (doxa.HMC(draws=200, burn_in=300, leapfrog=12, mass="full"), 20, 1e3),
    "nuts": (doxa.NUTS(draws=150, burn_in=150), 2, 1e3),
    "nuts, dense": (doxa.NUTS(draws=120, burn_in=200, mass="full"), 20, 1e3),
}


def hold(method: Any, size: int, condition: float) -> None:
    """60 chains; at most 40 comparisons at 4.5 standard errors (t with 59 degrees of freedom: 3e-5
    each): a chance of 1e-3."""
    mean = torch.linspace(-3, 3, size, dtype=torch.float64)
    covariance = correlated(size, condition)
    chains = sample(gaussian(covariance, mean), starts(60, size), method)
    assert_moments(chains, mean, covariance)
    assert chains.told["divergent"].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_correlated_gaussians(name: str) -> None:
    hold(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_ill_conditioned_gaussians(name: str) -> None:
    hold(*LONG[name])


@pytest.mark.slow
def test_a_dense_mass_makes_an_ill_conditioned_gaussian_round() -> None:
    """Of condition 10⁴ in 10 dimensions: each chain's F Fᵀ has the target's covariance, and trees
    are as short as on a round one, where a diagonal mass needs some √10⁴ steps."""
    covariance = correlated(10, 1e4)
    chains = sample(gaussian(covariance), starts(8, 10), doxa.NUTS(draws=30, burn_in=350,
                                                                   mass="full"))  # fmt: skip
    metric = chains.state["metric"]
    whitened = torch.linalg.solve(torch.linalg.cholesky(covariance), metric)
    values = torch.linalg.svdvals(whitened)
    assert values.max() < 1.6  # of 200 draws or more in 10 dimensions: 1 ± √(10/200) and slack
    assert values.min() > 0.5
    assert chains.told["leapfrogs"].mean() < 16


@pytest.mark.parametrize("step", [0.4, 0.8, 1.3])
def test_a_transition_leaves_a_gaussian_as_it_was(step: float) -> None:
    """30,000 chains from exact draws: the mean of |θ|², 3 in three dimensions, within 4 standard
    errors after six transitions, which have forgotten where they began."""
    count = 30_000
    theta = torch.randn(count, 3, generator=torch.Generator().manual_seed(0)).double()
    run = bare_run(lambda theta: -0.5 * theta.square().sum(1), theta)
    method = doxa.NUTS(draws=1, burn_in=0)
    state = method._arrive(run, method.init(run))
    state["step"] = torch.full((count,), step, dtype=torch.float64)
    for clock in clocks(run, 6):
        state, _ = method.transition(run, state, run.all_rows(), clock)
    before, after = theta.square().sum(1), state["theta"].square().sum(1)
    assert abs(float(after.mean()) - 3) < 4 * math.sqrt(6 / count)
    assert abs(float(torch.corrcoef(torch.stack([before, after]))[0, 1])) < 0.1


@pytest.mark.slow
def test_nuts_and_hmc_agree_where_there_is_no_closed_form() -> None:
    """A banana: four moments at 4.5 standard errors of the difference."""

    def banana(theta: Tensor) -> Tensor:
        x, y = theta.unbind(1)
        return -0.5 * x.square() - 2 * (y - x.square()).square()

    one = sample(banana, starts(60, 2), doxa.NUTS(draws=60, burn_in=80))
    two = sample(banana, starts(60, 2), doxa.HMC(draws=200, burn_in=150, leapfrog=12), seed=1)
    for power in (1, 2):
        a, b = (c.draws.pow(power).mean(1) for c in (one, two))
        error = ((a.var(0) + b.var(0)) / 60).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 4.5 * error).all()
    x = one.draws[..., 0]  # x is standard normal, by construction
    assert errors(torch.stack([x, x.square()], 2), torch.tensor([0.0, 1.0])).abs().max() < 4.5


def turns(left: list[Tensor], right: list[Tensor]) -> bool:
    """Stan's criterion on the union of two neighbouring stretches, and across their border."""

    def back(p: Tensor, q: Tensor, total: Tensor) -> bool:
        return bool(p @ total <= 0) or bool(q @ total <= 0)

    one, two = torch.stack(left).sum(0), torch.stack(right).sum(0)
    return (
        back(left[0], right[-1], one + two)
        or back(left[0], right[0], one + right[0])
        or back(left[-1], right[-1], two + left[-1])
    )


def recursive(momenta: list[Tensor]) -> bool:
    """Whether any balanced subtree turns back, the whole included."""
    if len(momenta) == 1:
        return False
    half = len(momenta) // 2
    left, right = momenta[:half], momenta[half:]
    return recursive(left) or recursive(right) or turns(left, right)


def parts(leaf: Any) -> Parts:
    return Parts(lambda values: values, leaf, check_turning, merge)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3, 4, 5])
def test_the_iterative_tree_is_the_recursive_one(level: int) -> None:
    """300 random sequences of momenta, not of any dynamics: which of them turn back, by leaves
    and checkpoints, and by recursion."""
    count, chains = 2**level, 300
    g = torch.Generator().manual_seed(level)
    bend = torch.randn(chains, count, generator=g).double() * 3 / math.sqrt(count)
    angle = bend.cumsum(1)
    momenta = torch.stack([angle.cos(), angle.sin()], 2)  # [M, count, 2]
    seen: list[int] = []

    def leaf(branch: dict[str, Tensor]) -> dict[str, Tensor]:
        momentum = momenta[:, len(seen)]
        seen.append(1)
        return {**branch, "momentum": momentum, "sum": branch["sum"] + momentum}

    zero = torch.zeros(chains, 2).double()
    active = torch.ones(chains, dtype=torch.bool)
    near = {"momentum": zero, "sum": zero, "active": active}
    branch, first = _branch(parts(leaf), near, (zero[:, 0],) * count)
    assert torch.equal(first, momenta[:, 0])
    want = torch.tensor([not recursive(list(own)) for own in momenta])
    assert torch.equal(branch["active"], want)
    if level > 1:
        assert 0.05 < want.double().mean() < 0.95


def test_leaves_are_drawn_by_their_weight() -> None:
    """20,000 equal chains and one branch of four leaves: each is taken as often as exp(−H) says,
    within 4 standard errors."""
    chains = 20_000
    density = lambda theta: (-theta[:, 0].pow(4), -4 * theta.pow(3))  # noqa: E731
    theta = torch.full((chains, 1), 0.5, dtype=torch.float64)
    near = Point(theta, torch.ones_like(theta), *density(theta))
    visited: list[Tensor] = []

    def leaf(branch: dict[str, Tensor]) -> dict[str, Tensor]:
        branch = new_leaf(density, branch)
        value, grad = density(branch["theta"])
        point = Point(branch["theta"], branch["momentum"], value, grad)
        visited.append(torch.stack([point.theta[0, 0], point.energy[0]]))
        return branch

    zero = torch.zeros(chains).double()
    start = {
        **near._asdict(), **dict.fromkeys(("accept", "leapfrogs", "divergent"), zero),
        **{f"taken.{name}": getattr(near, name) for name in (*Point._fields, "energy")},
        "metric": torch.ones_like(theta), "step": torch.full_like(theta, 0.3),
        "start": near.energy, "active": torch.ones(chains, dtype=torch.bool),
        "weight": zero - torch.inf, "sum": torch.zeros_like(theta),
    }  # fmt: skip
    luck = torch.rand(4, chains, generator=torch.Generator().manual_seed(1)).double().log()
    branch, _ = _branch(parts(leaf), start, luck.unbind(0))
    places, energies = torch.stack(visited).unbind(1)
    want = (-energies).softmax(0)
    assert want.max() - want.min() > 0.02
    shares = (branch["taken.theta"] == places).double().mean(0)
    assert ((shares - want).abs() < 4 * (want * (1 - want) / chains).sqrt()).all()
    total = torch.logsumexp(near.energy[0] - energies, 0)
    assert torch.allclose(branch["weight"], total.expand(chains), rtol=1e-12)


@pytest.mark.slow
def test_what_is_told_of_a_transition() -> None:
    chains = sample(gaussian(correlated(3)), starts(6, 3), doxa.NUTS(draws=40, burn_in=60,
                                                                     max_depth=5))  # fmt: skip
    told = chains.told
    assert (told["leapfrogs"] <= 31).all()
    whole = told["leapfrogs"] == 2 ** told["depth"] - 1
    assert whole.double().mean() > 0.2  # else the last doubling was given up half way
    assert (told["leapfrogs"] >= 2 ** told["depth"] - 1).all()
    assert ((told["accept"] > 0) & (told["accept"] <= 1)).all()
    assert (told["saturated"] == (told["depth"] == 5)).logical_or(told["saturated"] == 0).all()
    report = doxa.NUTS(draws=40).report(chains.state)
    assert report["ebfmi"] == pytest.approx(ebfmi(told["energy"]).tolist(), rel=1e-9)
    assert report["tree_depth"] == pytest.approx(told["depth"].mean(1).tolist(), rel=1e-12)


def judged(density: Any, method: Any, chains: int = 4, size: int = 2, scale: float = 1.0) -> Any:
    done = sample(density, scale * starts(chains, size), method)
    return method.finish(done.run, done.state, done.draws.transpose(0, 1))


@pytest.mark.slow
def test_divergences_are_said() -> None:
    """A funnel, whose neck is too narrow for the step size that its mouth asks for."""

    def funnel(theta: Tensor) -> Tensor:
        v, x = theta[:, 0], theta[:, 1:]
        return -v.square() / 18 - 0.5 * (x.square() * (-v).exp().unsqueeze(1) + v[:, None]).sum(1)

    hasty = doxa.NUTS(draws=150, burn_in=100, max_depth=5, target_accept=0.5)
    posterior = judged(funnel, hasty, size=9)
    assert posterior.diagnostics["divergences"] > 0
    assert posterior.status == "not-converged"
    assert "diverged" in posterior.status.reason
    assert "target_accept" in posterior.status.reason


def test_saturated_trees_are_said_without_alarm(caplog: pytest.LogCaptureFixture) -> None:
    density = gaussian(torch.eye(2, dtype=torch.float64))
    posterior = judged(density, doxa.NUTS(draws=200, burn_in=30, max_depth=1))
    assert posterior.diagnostics["saturated_share"] > 0.1
    assert any("max_depth" in words for words in posterior.diagnostics["warnings"])
    assert "max_depth" in caplog.text or "max_depth" in posterior.status.reason


def test_what_is_said_of_a_hamiltonian_sampler() -> None:
    """Serious: more than 1 in 500 transitions divergent, E-BFMI below 0.3. Else a word."""
    fine = {"divergences": 0, "divergent_share": 0.0, "ebfmi": [0.9, 1.1], "transitions": 500,
            "saturated_share": 0.0}  # fmt: skip
    assert concerns(fine) == []
    cases = [({"divergences": 2, "divergent_share": 0.001}, False, "diverged"),
             ({"divergences": 9, "divergent_share": 0.005}, True, "diverged"),
             ({"ebfmi": [0.9, 0.2]}, True, "E-BFMI is 0.20"),
             ({"saturated_share": 0.4}, False, "max_depth")]  # fmt: skip
    for change, serious, words in cases:
        ((alarm, said),) = concerns({**fine, **change})
        assert alarm is serious
        assert words in said
    assert concerns({**fine, "ebfmi": [0.1], "transitions": 20}) == []  # too few to say


def test_a_subset_leaves_the_rest_at_its_point() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = doxa.fit(
        net, (x, x[:, :1]), doxa.NUTS(draws=8, burn_in=20, max_depth=3), subset="last_layer",
        members=2, steps=20,
    )  # fmt: skip
    draws = posterior.draw()
    assert draws["0.weight"].reshape(2, 8, -1).std(1).max() == 0
    assert draws["2.weight"].reshape(2, 8, -1).std(1).min() > 0


def test_settings_are_checked() -> None:
    for bad in ({"draws": 0}, {"max_depth": 0}, {"target_accept": 1.0}, {"mass": "round"},
                {"temperature": 0.0}, {"thin": 0}, {"burn_in": -1}):  # fmt: skip
        with pytest.raises(MethodError):
            doxa.NUTS(**bad)


@pytest.mark.parametrize("method", ["nuts", "hmc", "metropolis", "sgld", "sghmc", "psgld"])
def test_four_chains_unless_asked(method: str) -> None:
    """So many that R-hat can compare them; as docs/sampling.md and `doxa.sample` say."""
    assert doxa.get_method(method).default_members == 4
