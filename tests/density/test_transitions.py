"""`doxa.transitions`: the bits of `sample`, what a step did, changes between steps, restarts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.density import GradientNoise, RowSum, Transition
from doxa.errors import DataError, MethodError
from doxa.method.trace import Forces, Gradient, Proposal, Trajectory, Tree

Params = dict[str, Tensor]
INIT: dict[str, Any] = {"x": torch.zeros(2), "s": 1.0}
OPTIONS: dict[str, Any] = {
    "members": 3, "constraints": {"s": "positive"}, "steps": 12, "batch_size": 7, "lr": 1e-3,
    "optimizer": doxa.optim.SGD(momentum=0.9),
}  # fmt: skip
ROWS = torch.linspace(-2.0, 3.0, 60).double()


def bare(p: Params) -> Tensor:
    x, s = p["x"], p["s"]
    return -0.5 * x.square().sum() - 0.5 * x.prod() - 0.5 * s.log().square() - s.log()


DENSITIES: dict[str, Any] = {
    "bare": bare,
    "rows": RowSum(
        lambda p, rows: -0.5 * ((rows - p["x"].sum()) / p["s"]).square() - p["s"].log(), ROWS, bare
    ),
    "noise": GradientNoise(bare, std=2.0),
}
SHORT: dict[str, Any] = {"draws": 6, "burn_in": 6, "thin": 2}
STEP: dict[str, Any] = {"step_size": 1e-3}
METHODS: dict[str, Any] = {
    "metropolis": doxa.Metropolis(**SHORT),
    "mala": doxa.MALA(**SHORT),
    "hmc": doxa.HMC(draws=4, burn_in=20, leapfrog=3),
    "hmc, dense mass": doxa.HMC(draws=4, burn_in=20, leapfrog=3, mass="full"),
    "nuts": doxa.NUTS(draws=4, burn_in=20, max_depth=5),
    "sgld": doxa.SGLD(**SHORT, **STEP),
    "psgld": doxa.PSGLD(**SHORT, **STEP),
    "sghmc": doxa.SGHMC(**SHORT, **STEP),
    "sgnht": doxa.get_method("sgnht")(**SHORT, step_size=1e-4),
    "cyclical": doxa.CyclicalSGMCMC(cycles=2, draws=4, thin=1, **STEP),
    "constant-sgd": doxa.ConstantSGD(draws=4, burn_in=4, thin=1, probes=5),
    "minibatch-mh": doxa.MinibatchMH(**SHORT),
    "minibatch-mh, walk": doxa.MinibatchMH(**SHORT, proposal="walk"),
    "svgd": doxa.get_method("svgd")(particles=4),
}
RECORDS: dict[str, list[type]] = {
    "metropolis": [Proposal], "mala": [Proposal, Gradient], "hmc": [Trajectory, Proposal],
    "nuts": [Tree], "minibatch-mh": [Proposal, Gradient], "svgd": [Forces],
}  # fmt: skip


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def paths(steps: list[Transition]) -> Tensor:
    return torch.stack([step.theta for step in steps], 1)


def walk(method: Any, density: Any = bare, **options: Any) -> list[Transition]:
    return list(doxa.transitions(density, INIT, method, **{**OPTIONS, **options}))


KINDS = [
    ("bare", torch.float32), ("rows", torch.float64), ("noise", torch.float32),
    pytest.param("bare", torch.float64, marks=pytest.mark.matrix),
]  # fmt: skip


@pytest.mark.parametrize(("density", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_the_draws_are_those_of_sample_with_records_and_without(
    name: str, density: str, dtype: torch.dtype
) -> None:
    options = {**OPTIONS, "dtype": dtype}
    draws = doxa.sample(DENSITIES[density], INIT, METHODS[name], **options)
    for trace in (False, True):
        chain = doxa.transitions(DENSITIES[density], INIT, METHODS[name], trace=trace, **options)
        steps = list(chain)
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        kept = [step for step in steps if step.kept]
        last = torch.stack([step.theta for step in kept], 1) if kept else steps[-1].theta
        assert same(last, draws.theta)
        assert same(chain.draws().theta, draws.theta)
        assert same(chain.draws()["s"], draws["s"])
        assert chain.draws().status == draws.status
        found = [type(record) for record in steps[-1].trace]
        assert found == (RECORDS.get(name.split(",")[0], found) if trace and "walk" not in name
                         else [Proposal] if trace else [])  # fmt: skip
        assert bool(found) == trace
        assert steps[-1].draw["x"].shape[-1] == 2 and (steps[-1].draw["s"] > 0).all()


@pytest.mark.parametrize("mode", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts", "sgld", "minibatch-mh"])
def test_the_bits_of_recorded_steps_too(name: str, mode: str) -> None:
    """A recorded step leaves no records: it is executed once more for them, and for them alone."""
    options = {**OPTIONS, "engine": f"stack:{mode}"}
    draws = doxa.sample(DENSITIES["rows"], INIT, METHODS[name], **options)
    steps = walk(METHODS[name], DENSITIES["rows"], trace=True, engine=f"stack:{mode}")
    assert same(torch.stack([step.theta for step in steps if step.kept], 1), draws.theta)
    for before, after in itertools.pairwise(steps):
        first = after.trace[0]
        start = first.positions[0] if hasattr(first, "positions") else first.start
        assert same(start, before.theta)
        if hasattr(first, "end"):
            moved = torch.where(first.accepted.unsqueeze(1), first.end, first.start)
            assert torch.allclose(moved, after.theta, rtol=1e-9, atol=1e-9)


def test_a_long_run_in_the_mode_of_the_rule() -> None:
    method = doxa.SGLD(draws=20, burn_in=560, thin=1, step_size=1e-3)
    draws = doxa.sample(bare, INIT, method, **OPTIONS)
    assert draws.diagnostics["mode"] == "traced"
    assert same(paths(walk(method, trace=True)[-20:]), draws.theta)


def test_what_a_proposal_says() -> None:
    steps = walk(METHODS["metropolis"], trace=True)
    for before, after in itertools.pairwise(steps):
        (record,) = after.trace
        assert isinstance(record, Proposal)
        assert same(record.start, before.theta)
        assert same(after.theta, torch.where(record.accepted[:, None], record.end, record.start))
        assert torch.allclose(record.accept, record.log_ratio.exp().clamp(max=1))
        assert same(record.accept, after.info["accept"])
    taken = torch.stack([step.trace[0].accepted for step in steps])  # type: ignore[attr-defined]
    assert 0 < int(taken.sum()) < taken.numel()


def test_langevin_proposals_have_the_density_of_the_paper() -> None:
    """log a = log π(θ')/π(θ) + log q(θ | θ')/q(θ' | θ), from the normals of the proposals."""

    def log_density(p: Params) -> Tensor:
        return -0.25 * p["x"].square().square().sum() - 0.5 * (p["x"] - 1).square().sum()

    chain = doxa.transitions(
        log_density, {"x": torch.zeros(2)}, doxa.MALA(draws=30, burn_in=0), trace=True
    )

    def at(theta: Tensor) -> tuple[Tensor, Tensor]:
        leaf = theta.clone().requires_grad_()
        value = torch.stack([log_density({"x": row}) for row in leaf])
        return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]

    for step in chain:
        proposal = step.trace[0]
        assert isinstance(proposal, Proposal) and proposal.mean is not None
        eps = step.info["step_size"].unsqueeze(1)
        value, grad = at(proposal.start)
        there, back = at(proposal.end)
        mean, other = proposal.start + eps**2 / 2 * grad, proposal.end + eps**2 / 2 * back
        ways = [
            torch.distributions.Normal(centre, eps).log_prob(point).sum(1)
            for centre, point in ((other, proposal.start), (mean, proposal.end))
        ]
        assert torch.allclose(proposal.mean, mean)
        assert torch.allclose(proposal.log_ratio, there - value + ways[0] - ways[1], atol=1e-9)


def test_what_a_trajectory_says() -> None:
    """Its points follow the leapfrog of the paper, and its ends are the proposal."""
    method = doxa.HMC(draws=12, burn_in=0, leapfrog=5)

    def log_density(p: Params) -> Tensor:
        return -0.5 * (p["x"] * torch.tensor([1.0, 4.0]).double() * p["x"]).sum()

    for step in doxa.transitions(log_density, {"x": torch.ones(2)}, method, trace=True):
        path, proposal = step.trace
        assert isinstance(path, Trajectory) and isinstance(proposal, Proposal)
        curvature, eps = torch.tensor([1.0, 4.0]).double(), path.step_size.unsqueeze(1)
        theta, momentum = path.positions[0], path.momenta[0]
        for i in range(1, 6):
            momentum = momentum - eps / 2 * curvature * theta
            theta = theta + eps * momentum
            momentum = momentum - eps / 2 * curvature * theta
            assert torch.allclose(theta, path.positions[i])
            assert torch.allclose(momentum, path.momenta[i])
        kinetic = 0.5 * path.momenta.square().sum(2)
        energies = kinetic + 0.5 * (curvature * path.positions.square()).sum(2)
        assert torch.allclose(path.energies, energies)
        assert torch.allclose(proposal.log_ratio, energies[0] - energies[-1])
        assert same(proposal.start, path.positions[0]) and same(proposal.end, path.positions[-1])


def test_what_a_tree_says() -> None:
    """Doublings of 1, 2, 4, … nodes at either end, a leapfrog step apart; one node is taken."""
    method = doxa.NUTS(draws=15, burn_in=30)
    before: Tensor | None = None
    depths = set()
    for step in doxa.transitions(bare, INIT, method, constraints={"s": "positive"}, trace=True):
        (tree,) = step.trace
        assert isinstance(tree, Tree)
        if before is not None:
            assert same(tree.positions[0], before)
        before = step.theta
        which = torch.arange(len(tree.chosen))
        assert same(tree.positions[tree.chosen, which], step.theta)
        assert tree.reached[tree.chosen, which].all()
        assert torch.allclose(tree.energies[tree.chosen, which], step.info["energy"])
        deepest = int(step.info["depth"].max())
        depths.add(deepest)
        assert len(tree.forward) in (deepest, deepest + 1)
        nodes = tree.doubling.bincount()
        assert nodes[0] == 1 and (nodes[1:-1] == 2 ** torch.arange(len(nodes) - 2)).all()
        leapfrogs = tree.reached[1:].sum(0)
        assert torch.equal(leapfrogs, (step.info["leapfrogs"] - step.info["divergent"]).long())
    assert max(depths) >= 2


def test_what_a_gradient_says() -> None:
    """The noisy gradient is that of the batch; the full one is that of all rows."""
    method = doxa.SGHMC(draws=10, burn_in=10, thin=1, step_size=1e-3)
    for name in ("bare", "rows", "noise"):
        velocity = None
        for step in walk(method, DENSITIES[name], trace=True):
            (record,) = step.trace
            assert isinstance(record, Gradient) and record.velocity is not None
            assert torch.allclose(step.theta, record.start + record.moved)
            leaf = record.start.clone().requires_grad_()
            natural = {"x": leaf[:, :2], "s": leaf[:, 2].exp()}
            each = [DENSITIES[name]({k: v[m] for k, v in natural.items()}) for m in range(3)]
            value = torch.stack(each) + leaf[:, 2]
            exact = torch.autograd.grad(value.sum(), leaf)[0]
            full = record.noisy if record.full is None else record.full
            assert torch.allclose(full, exact)
            assert (record.full is None) == (name == "bare")
            assert name == "bare" or not torch.allclose(record.noisy, exact)
            velocity = record.velocity
        assert velocity is not None


def test_the_forces_of_particles() -> None:
    """They add up to the move of plain SGD, and vanish for repulsion where there is one place."""
    method = doxa.get_method("svgd")(particles=5)
    options: dict[str, Any] = {"optimizer": doxa.optim.SGD(momentum=0.0), "lr": 0.1, "steps": 5}
    before: Tensor | None = None
    for step in walk(method, trace=True, **options):
        (forces,) = step.trace
        assert isinstance(forces, Forces)
        assert step.theta.shape == (3, 5, 3)
        assert before is None or same(forces.positions, before)
        before = step.theta
        moved = forces.positions + 0.1 * (forces.drift + forces.repulsion)
        assert torch.allclose(step.theta, moved)
        assert torch.allclose(forces.repulsion.sum(1), torch.zeros(3, 3).double(), atol=1e-12)
        away = forces.positions[:, :, None] - forces.positions[:, None]
        kernel = (-away.square().sum(3) / forces.bandwidth[:, None, None]).exp()
        assert torch.allclose(forces.kernel, kernel)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_path_of_an_optimiser(momentum: float) -> None:
    """Gradient descent with momentum, as on paper."""
    options = {"optimizer": doxa.optim.SGD(momentum=momentum), "lr": 0.05, "steps": 20}
    steps = walk(doxa.MAP(), trace=True, **options)
    first = steps[0].trace[0]
    assert isinstance(first, Gradient)
    theta, u = first.start, torch.zeros_like(first.start)
    for step in steps:
        leaf = theta.clone().requires_grad_()
        natural = {"x": leaf[:, :2], "s": leaf[:, 2].exp()}
        each = [bare({k: v[m] for k, v in natural.items()}) for m in range(3)]
        value = torch.stack(each) + leaf[:, 2]
        u = momentum * u - torch.autograd.grad(value.sum(), leaf)[0]
        theta = theta - 0.05 * u
        assert torch.allclose(step.theta, theta)
    with pytest.raises(MethodError, match=r"keeps no draws.*doxa.transitions"):
        doxa.sample(bare, INIT, doxa.MAP(), **{**OPTIONS, **options})


CHANGED: dict[str, list[tuple[int, str, Any]]] = {
    "metropolis": [(3, "step_size", 0.1), (8, "temperature", 4.0), (12, "mass", 2.0)],
    "mala": [(3, "step_size", 0.1), (8, "temperature", 4.0), (12, "mass", 2.0)],
    "hmc": [(10, "mass", 4.0), (21, "step_size", [0.1, 0.2, 0.3]), (22, "temperature", 3.0)],
    "hmc, dense mass": [(21, "mass", 4.0)],
    "nuts": [(20, "step_size", 0.2), (22, "temperature", 2.0)],
    "sgld": [(0, "step_size", 1e-2), (6, "temperature", 9.0), (9, "batch_size", 3)],
    "psgld": [(7, "step_size", 1e-2)],
    "sghmc": [(7, "friction", 0.5)],
    "sgnht": [(7, "temperature", 5.0)],
    "cyclical": [(3, "temperature", 5.0)],
    "constant-sgd": [(18, "step_size", 0.3), (19, "batch_size", 2)],
    "minibatch-mh": [(4, "step_size", 0.5), (9, "temperature", 2.0)],
    "svgd": [(4, "temperature", 0.1), (6, "bandwidth", 3.0), (8, "lr", 0.1)],
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_begin_with_the_next_step_and_can_be_repeated(name: str) -> None:
    plan = CHANGED[name]
    density = DENSITIES["rows"]
    chain = doxa.transitions(density, INIT, METHODS[name], **OPTIONS)
    seen = []
    asked = iter([*plan, (10**9, "", None)])
    at, control, value = next(asked)
    while True:
        while at == len(seen):
            chain.change(control, value)
            at, control, value = next(asked)
        step = next(chain, None)
        if step is None:
            break
        seen.append(step)
    assert [(at, control) for at, control, _ in chain.changes] == [p[:2] for p in plan]
    plain = paths(walk(METHODS[name], density))
    first = plan[0][0]
    assert len(seen) == plain.shape[1]
    assert same(paths(seen)[:, :first], plain[:, :first])
    assert not same(paths(seen)[:, first:], plain[:, first:])
    again = walk(METHODS[name], density, changes=chain.changes, trace=True)
    assert same(paths(again), paths(seen))
    engine = walk(METHODS[name], density, changes=plan, engine="stack:eager")
    assert same(paths(engine), paths(seen))


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_a_changed_setting_has_the_law_of_that_setting(mode: str) -> None:
    """SGLD of a standard normal at T = 1, then 4, also in a recorded step."""
    method = doxa.SGLD(draws=4000, burn_in=0, thin=1, step_size=0.2, decay=0)
    steps = list(
        doxa.transitions(
            lambda p: -0.5 * p["x"].square().sum(), {"x": torch.zeros(20)}, method, members=2,
            changes=[(2000, "temperature", 4.0)], engine=f"stack:{mode}",
        )
    )  # fmt: skip
    values = paths(steps)
    for part, heat in ((slice(100, 2000), 1.0), (slice(2100, None), 4.0)):
        exact = heat / (1 - 0.2 / 2)
        # 40 chains of 1,900 steps, variances correlated over 1/ηλ = 5 steps: 40 · 1900 / 5
        assert float(values[:, part].var()) == pytest.approx(exact, rel=5 * (2 * 5 / 76000) ** 0.5)


@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts"])
def test_a_changed_temperature_is_that_of_points_that_stay(name: str) -> None:
    """The density of a point at which a proposal is rejected is at the new temperature too."""
    steps = list(
        doxa.transitions(
            lambda p: -0.5 * p["x"].square().sum(), {"x": torch.zeros(3)}, METHODS[name], 20,
            changes=[(4, "temperature", 4.0)],
        )
    )  # fmt: skip
    for step in steps[:8]:
        heat = 1.0 if step.number <= 4 else 4.0
        exact = -0.5 * step.theta.square().sum(1) / heat
        assert torch.allclose(step.info["log_density"], exact)


def test_settings_that_cannot_change() -> None:
    chain = doxa.transitions(bare, INIT, METHODS["hmc"], **OPTIONS)
    assert set(chain.controls) == {"step_size", "temperature", "mass"}
    for name, value in (("leapfrog", 3), ("batch_size", 3), ("stepsize", 0.1)):
        with pytest.raises(MethodError, match="may change between two steps"):
            chain.change(name, value)
    for value in (0.0, -1.0, float("nan"), [1.0, 2.0], "fast"):
        chain = doxa.transitions(bare, INIT, METHODS["hmc"], **OPTIONS)
        with pytest.raises(MethodError, match="step_size must be"):
            chain.change("step_size", value)
    friction = doxa.transitions(bare, INIT, METHODS["sghmc"], **OPTIONS)
    with pytest.raises(MethodError, match="friction must be"):
        friction.change("friction", 1.5)
    with pytest.raises(MethodError, match="batch_size must be"):
        doxa.transitions(DENSITIES["rows"], INIT, METHODS["sgld"], **OPTIONS).change(
            "batch_size", 2.5
        )


@pytest.mark.parametrize("name", ["metropolis", "mala", "hmc", "nuts", "sghmc", "svgd"])
def test_a_click_sets_a_start(name: str) -> None:
    chain = doxa.transitions(bare, INIT, METHODS[name], trace=True, **OPTIONS)
    for _ in range(5):
        next(chain)
    chain.restart({"x": [3.0, -2.0], "s": 0.5})
    record = next(chain).trace[0]
    start = record.start if hasattr(record, "start") else record.positions[0]
    if name == "svgd":
        start = record.positions.flatten(0, 1)  # type: ignore[attr-defined]
        away = start[:, :2] - torch.tensor([3.0, -2.0]).double()
        assert len(start.unique(dim=0)) == 12 and away.abs().max() <= 1.0
        return
    natural = chain.natural(start)
    assert torch.allclose(natural["x"], torch.tensor([3.0, -2.0]).double())
    assert torch.allclose(natural["s"], torch.tensor(0.5).double())
    assert chain.changes == [(5, "restart", {"x": [3.0, -2.0], "s": 0.5})]
    plain, again = walk(METHODS[name]), walk(METHODS[name], changes=chain.changes)
    assert same(paths(plain)[:, :5], paths(again)[:, :5])
    assert not same(again[5].theta, plain[5].theta)
    assert same(paths(again)[:, 6:], paths(list(chain)))


def test_starts_that_are_given_are_used() -> None:
    starts = [{"x": torch.tensor([float(m), 1.0]), "s": 1.0} for m in range(3)]
    chain = doxa.transitions(bare, starts, METHODS["hmc"], trace=True, **OPTIONS)
    (path, _) = next(chain).trace
    assert isinstance(path, Trajectory)
    assert torch.equal(chain.natural(path.positions[0])["x"][:, 0], torch.arange(3).double())
    with pytest.raises(DataError, match="constraint"):
        chain.restart({"x": torch.zeros(2), "s": -1.0})
    with pytest.raises(DataError, match="parameters are"):
        chain.restart({"x": torch.zeros(3), "s": 1.0})


def test_a_chain_leaves_the_callers_modes_alone() -> None:
    """Threads, gradients and the generator of the caller, between steps and after them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            chain = doxa.transitions(bare, INIT, METHODS["hmc"], **OPTIONS)
            for step in itertools.islice(chain, 3):
                assert torch.get_num_threads() == 2 and not torch.is_grad_enabled()
                assert step.number > 0
            chain.close()
            assert torch.get_num_threads() == 2
        assert list(chain) == []
    finally:
        torch.set_num_threads(threads)


def test_two_chains_at_once_and_draws_before_the_end() -> None:
    chains = [doxa.transitions(bare, INIT, METHODS["sgld"], seed=k, **OPTIONS) for k in range(2)]
    both = [list(step) for step in zip(*chains, strict=True)]
    for k in range(2):
        alone = walk(METHODS["sgld"], seed=k)
        assert same(paths([step[k] for step in both]), paths(alone))
    chain = doxa.transitions(bare, INIT, METHODS["sgld"], **OPTIONS)
    with pytest.raises(MethodError, match="no step"):
        chain.draws()
    for step in chain:
        if step.number == 12:
            break
    some = chain.draws()
    rest = list(chain)
    assert some.count == 3 and len(rest) == 6
    assert same(chain.draws().theta[:, :3], some.theta)


@pytest.mark.parametrize("name", ["hmc", "nuts", "mala"])
def test_records_are_turned_on_and_off_between_steps(name: str) -> None:
    """Records are those of the traced steps alone, and draws do not depend on them."""
    method = doxa.get_method(name)(draws=12, burn_in=0)
    density = lambda p: -0.5 * p["x"].square().sum()  # noqa: E731
    run = lambda **more: doxa.transitions(  # noqa: E731
        density, {"x": torch.ones(2)}, method, members=2, engine="stack:eager", **more
    )
    whole = list(run(trace=True))
    chain = run()
    assert chain.traced is False
    steps = []
    for i in range(12):
        chain.traced = 4 <= i < 8
        steps.append(next(chain))
    assert [bool(step.trace) for step in steps] == [4 <= i < 8 for i in range(12)]
    for step, other in zip(steps, whole, strict=True):
        assert torch.equal(step.theta, other.theta)
        for mine, its in zip(step.trace, other.trace, strict=bool(step.trace)):
            for field in mine.__dataclass_fields__:
                one, two = getattr(mine, field), getattr(its, field)
                assert one is two is None or torch.equal(one, two)
    with pytest.raises(MethodError, match="traced"):
        chain.traced = 1  # type: ignore[assignment]
