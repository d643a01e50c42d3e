"""Burn-in: Stan's windows, the paper's dual averaging, and the mass from a window's draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from bare_density import bare_run, gaussian, sample
from torch import Tensor

import doxa
from doxa.mcmc.hamiltonian import (
    average,
    forget,
    learn_mass,
    observe,
    seek_step,
    start_dual,
    start_mass,
    windows,
)


def test_windows_are_those_of_stans_manual() -> None:
    """Of 1,000 transitions: 75 fast, slow ones of 25, 50, 100, 200 and 500, and 50 fast."""
    assert windows(1000) == [75, 100, 150, 250, 450, 950]
    assert windows(150) == [75, 100]
    assert windows(100) == [15, 80]  # below 150, 15 % and 20 at the end
    assert windows(20) == [3, 14]
    assert windows(19) == []


@pytest.mark.parametrize("burn_in", [20, 99, 149, 150, 151, 230, 500, 777, 2000, 10000])
def test_windows_grow_and_leave_room_for_the_end(burn_in: int) -> None:
    bounds = windows(burn_in)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert burn_in - bounds[-1] == (50 if burn_in >= 150 else min(20, burn_in // 3))
    assert all(later >= 2 * size for size, later in itertools.pairwise(sizes))


def test_dual_averaging_is_the_papers_recursion() -> None:
    """Hoffman & Gelman's algorithm 5, as a loop over floats."""
    accept = torch.rand(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = torch.tensor([0.8, 0.6], dtype=torch.float64)
    state = start_dual(torch.tensor([0.3, 2.0], dtype=torch.float64))
    for rate in accept:
        state = average(state, rate, target)
    for c, first in enumerate((0.3, 2.0)):
        centre, error, averaged, log_step = math.log(10 * first), 0.0, 0.0, 0.0
        for m, rate in enumerate(accept[:, c].tolist(), start=1):
            error = (1 - 1 / (m + 10)) * error + (float(target[c]) - rate) / (m + 10)
            log_step = centre - math.sqrt(m) / 0.05 * error
            averaged = m**-0.75 * log_step + (1 - m**-0.75) * averaged
        assert float(state["step"][c]) == pytest.approx(math.exp(log_step), rel=1e-12)
        assert float(state["dual.log_step"][c]) == pytest.approx(averaged, rel=1e-12)


def walk(kind: str, count: int = 60) -> tuple[dict[str, Tensor], Tensor]:
    """A window of draws seen by Welford's update, the second of four parameters held fixed."""
    g = torch.Generator().manual_seed(3)
    draws = 5 + torch.randn(count, 2, 4, generator=g, dtype=torch.float64)
    draws[..., 3] += draws[..., 0]
    draws[..., 1] = 7.0
    unfixed = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64).expand(2, 4)
    state = {"theta": draws[0], **start_mass(unfixed, kind)}
    for i, draw in enumerate([*draws[:3], *draws]):
        if i == 3:
            state = forget(state)
        state = {**state, "theta": draw}
        state |= observe(state)
    return state, draws


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_mass_is_the_windows_covariance_shrunk_towards_its_diagonal(kind: str) -> None:
    state, draws = walk(kind)
    metric = learn_mass(state)["metric"]
    n, moving = len(draws), [0, 2, 3]
    for c in range(2):
        covariance = torch.cov(draws[:, c].T)
        want = n / (n + 5) * covariance + 1e-3 * 5 / (n + 5) * covariance.diagonal().diag()
        if kind == "diagonal":
            assert torch.allclose(metric[c, moving].square(), want.diagonal()[moving], rtol=1e-12)
            assert metric[c, 1] == 0
        else:
            got = metric[c] @ metric[c].T
            block = [[i] for i in moving]
            assert torch.allclose(got[block, moving], want[block, moving], rtol=1e-10)
            assert (got[1] == 0).all()
            assert want[0, 3].abs() > 0.3  # there is a correlation to be kept


def test_fewer_draws_than_parameters_make_no_narrow_directions() -> None:
    """20 draws of 60 independent parameters: their covariance has rank 19, the metric is round.
    A parameter that is held fixed counts neither as a parameter nor as a correlation."""
    unfixed = torch.ones(2, 61).double()
    unfixed[:, 0] = 0.0
    state = start_mass(unfixed, "full")
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20, 2, 61, generator=generator).double() * unfixed
    draws[..., 2] = 0.8 * draws[..., 1] + 0.6 * draws[..., 2]  # there is something to be kept
    for theta in draws:
        state |= observe({**state, "theta": theta})
    factor = learn_mass({**state, "theta": theta})["metric"][:, 1:, 1:]
    values = torch.linalg.svdvals(factor)
    assert (values.max(1).values / values.min(1).values < 5).all()
    pairs = torch.triu_indices(60, 60, 1).unbind()
    for c in range(2):  # by its formula, n = 20 and P = 60
        seen = draws[:, c, 1:].T
        squares = torch.corrcoef(seen)[pairs].square()
        share = (1 - 20 / 60) * ((1 - squares).square().sum() / 19 / squares.sum()).clamp(max=1)
        want = (1 - share) * 20 / 25 * torch.cov(seen)[pairs]
        assert 0.1 < share < 0.9
        assert torch.allclose((factor[c] @ factor[c].T)[pairs], want, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_mass_follows_the_units_of_each_parameter(kind: str) -> None:
    """Parameters in units of 10⁻⁶ and 10⁶: the metric in those units, to rounding."""
    units = torch.tensor([1e-6, 1.0, 1e6, 1.0], dtype=torch.float64)
    state, draws = walk(kind)
    scaled = start_mass(torch.tensor([1.0, 0.0, 1.0, 1.0]).double().expand(2, 4), kind)
    for draw in draws:
        scaled |= observe({**scaled, "theta": draw * units})
    got = learn_mass({**scaled, "theta": state["theta"]})["metric"]
    want = learn_mass(state)["metric"] * (units if kind == "diagonal" else units[:, None])
    assert torch.allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_chain_that_stood_still_keeps_its_metric(kind: str) -> None:
    """Else its parameters would count as fixed from then on."""
    state, draws = walk(kind)
    before = state["metric"].clone()
    stuck = forget(state)
    for draw in draws:
        stuck["theta"] = torch.stack([draws[0, 0], draw[1]])
        stuck |= observe(stuck)
    after = learn_mass(stuck)["metric"]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_a_new_window_has_seen_nothing(kind: str) -> None:
    state = learn_mass(walk(kind)[0])
    assert all((v == 0).all() for k, v in state.items() if k.startswith("welford."))


def test_the_first_step_size_follows_the_scale_of_the_target() -> None:
    """A thousand times narrower, a thousand times smaller, from whatever it starts at; a single
    step of the size found is accepted with a probability neither near 0 nor 1."""
    found = {}
    for scale in (1e-3, 1.0):
        density = gaussian(scale**2 * torch.eye(10, dtype=torch.float64))
        noise = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
        run = bare_run(density, scale * noise.double())
        method = doxa.HMC(draws=1, burn_in=20)
        state = method._arrive(run, method.init(run))
        joint = lambda theta, run=run: run.joint(theta, run.all_rows(), {})  # noqa: E731
        for first in (1e-6, 1e3):
            state["step"] = torch.full_like(state["step"], first)
            step = seek_step(joint, state, run.noise("seek"))
            found[scale, first] = float(step.median())
            assert 0.3 * scale < found[scale, first] < 4 * scale


@pytest.mark.slow
@pytest.mark.parametrize("method", [doxa.HMC, doxa.NUTS])
def test_burn_in_meets_its_target_acceptance(method: type) -> None:
    """Mean acceptance of 16 chains in 10 dimensions within 0.1 of the target, or above it: the
    averaged step size errs on the safe side."""
    density = gaussian(torch.diag(torch.logspace(-1, 1, 10, dtype=torch.float64)))
    start = torch.randn(16, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = {}
    for target in (0.6, 0.9):
        chosen = {"leapfrog": 4} if method is doxa.HMC else {"max_depth": 3}
        settings = {"draws": 30, "burn_in": 110, "target_accept": target, **chosen}
        seen[target] = float(sample(density, start, method(**settings)).told["accept"].mean())
        assert target - 0.1 < seen[target]
    assert seen[0.6] < seen[0.9] < 0.99
