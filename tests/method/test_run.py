"""What a method sees: objectives and their gradients, particles, parts, and row weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa import Engine, store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method import AnalyticGradient, Clock, Method, Run, Stage, State, optimise
from doxa.posterior import SamplePosterior


@store.register("test-bare")
@dataclass(frozen=True)
class Bare(Method):
    """Two names, a and b, whose objective is written by the test."""

    name: ClassVar[str] = "test-bare"
    objective: Any = None
    over: tuple[str, ...] = ("theta", "b")
    particles: int = 1

    def __post_init__(self) -> None: ...

    @property
    def width(self) -> int:
        return self.particles

    def init(self, run: Run) -> State:
        return {**run.init_network(), "b": torch.ones(run.size, 2, 3).to(run.n)}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self.objective, run.steps, self.over)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
        posterior = SamplePosterior(
            samples=state["theta"].unsqueeze(1), **run.common(self), **run.shared(state)
        )
        posterior.record.diagnostics["b"] = state["b"]
        return posterior


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()
    return x, x.sum(1, keepdim=True)


def fit(objective: Any, over: tuple[str, ...] = ("theta", "b"), **options: Any) -> Any:
    net = nn.Linear(2, 1).double()
    chosen = {"members": 3, "steps": 1, "lr": 0.1, "schedule": "constant", "optimizer": "sgd"}
    return doxa.fit(net, data(), Bare(objective, over), **{**chosen, **options})


def plain(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """log-likelihood − ½ Σ b⁴ + noise · b, all by autograd."""
    extra = -0.5 * (params["b"] ** 4).sum((1, 2)) + (clock.noise(2, 3) * params["b"]).sum((1, 2))
    return run.log_likelihood(params["theta"], batch) + extra, {}


def partly_known(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """The same, with the gradient of −½ Σ b⁴ handed over."""
    b = params["b"].detach()
    known = AnalyticGradient(-0.5 * (b**4).sum((1, 2)), {"b": lambda grad: grad - 2 * b**3})
    extra = (clock.noise(2, 3) * params["b"]).sum((1, 2))
    return run.log_likelihood(params["theta"], batch) + extra, {}, known


ENGINES = [Engine("stack"), Engine("stack", chunk=2), Engine("loop"), Engine("stack", "traced")]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_name_is_trained_and_what_is_known_counts_the_same(engine: Engine) -> None:
    """In one pass, in chunks and one by one: also the noise is that of each member."""
    want = fit(plain, engine="stack:eager", steps=3)
    got = fit(partly_known, engine=engine, steps=3)
    assert torch.allclose(got.diagnostics["b"], want.diagnostics["b"], rtol=1e-10)
    assert torch.allclose(got.samples, want.samples, rtol=1e-10)
    losses = [(p.history["loss"][-1][1]) for p in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_the_step_is_that_of_gradient_descent_on_minus_the_objective_over_n() -> None:
    """b ← b − lr · (2b³ − ε)/n: with b = 1 and the noise taken out by its own run."""
    quiet = lambda run, params, batch, clock: (  # noqa: E731
        run.log_likelihood(params["theta"], batch) - 0.5 * (params["b"] ** 4).sum((1, 2)),
        {},
    )
    b = fit(quiet).diagnostics["b"]
    assert torch.allclose(b, torch.full_like(b, 1 - 0.1 * 2 / 12))


@pytest.mark.parametrize("likelihood", ["gaussian", doxa.Gaussian(noise=0.3)], ids=str)
def test_likelihood_parameters_are_those_of_the_log_likelihood(likelihood: Any) -> None:
    """Learned or given: log N(y; f, σ²) by hand is what the run computes."""
    seen: list[tuple[Tensor, Tensor]] = []

    def compared(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        theta = params["theta"]
        f = run.outputs(theta, batch.x, params, batch.shared)
        log_noise = run.likelihood_theta(theta)["log_noise"].reshape(run.size, 1, 1)
        z = (batch.y - f) / log_noise.exp()
        by_hand = -0.5 * z.square() - log_noise - 0.5 * math.log(2 * math.pi)
        each = run.log_likelihoods(theta, batch)
        seen.append((by_hand.sum(2).detach(), each.detach()))
        return run.total(each, batch) - (params["b"] ** 2).sum((1, 2)), {}

    fit(compared, likelihood=likelihood, engine="stack:eager")
    for got, want in seen:
        assert torch.allclose(got, want, rtol=1e-10)
    assert seen and seen[0][1].shape == (3, 12)


def test_an_objective_of_the_wrong_shape_is_refused() -> None:
    def total(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        return plain(run, params, batch, clock)[0].sum(), {}

    with pytest.raises(MethodError, match=r"one value per member, \[3\]"):
        fit(total)


def test_a_name_that_the_objective_does_not_use_is_refused() -> None:
    def without(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        return run.log_likelihood(params["theta"], batch), {}

    with pytest.raises(MethodError, match="does not depend on 'b'"):
        fit(without)


def test_the_guard_watches_every_name() -> None:
    """b breaks down while θ stays fine: the member is named, and keeps its last good state."""

    def breaks(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        bad = torch.tensor([m == 1 for m in run.members]).double()
        wild = 1e300 * bad * params["b"].sum((1, 2)) ** 5
        return run.log_likelihood(params["theta"], batch) + wild, {}

    posterior = fit(breaks, steps=20)
    assert posterior.status == "diverged"
    assert "1 of 3 members" in posterior.status.reason
    assert torch.isfinite(posterior.diagnostics["b"]).all()


def test_the_good_state_is_one_whose_loss_was_seen_to_be_finite() -> None:
    """The first step leads to a finite b where the objective is infinite: b is kept as it was."""

    def cliff(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        b = params["b"].sum((1, 2))
        slope = torch.where(b.detach() < 7, 100.0, torch.inf)
        return run.log_likelihood(params["theta"], batch) + slope * b, {}

    posterior = fit(cliff, steps=20, lr=1.0)
    assert posterior.status == "diverged"
    assert torch.equal(posterior.diagnostics["b"], torch.ones(3, 2, 3).double())


def test_the_guard_also_sees_a_name_that_the_loss_does_not_show() -> None:
    """An infinite gradient of b, handed over, while the objective's value stays finite."""

    def hidden(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        bad = torch.tensor([m == 1 for m in run.members])[:, None, None]
        known = AnalyticGradient(
            torch.zeros_like(run.n), {"b": lambda grad: torch.where(bad, torch.inf, grad)}
        )
        return run.log_likelihood(params["theta"], batch), {}, known

    posterior = fit(hidden, steps=20)
    assert posterior.status == "diverged"
    assert "1 of 3 members" in posterior.status.reason
    assert torch.isfinite(posterior.diagnostics["b"]).all()


def test_early_stopping_restores_every_name() -> None:
    """The best state on validation is the whole state, b too."""

    def drift(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        return plain(run, params, batch, clock)[0] * 0 + params["b"].sum((1, 2)) * 10 + (
            run.log_likelihood(params["theta"] * 1.0, batch) * -1
        ), {}  # fmt: skip

    posterior = fit(drift, steps=60, validation=0.3, patience=2, lr=0.05, batch_size=4)
    first, *_ = posterior.history["validation"]
    assert posterior.history["step"][-1] < 60  # it got worse from the start, and stopped
    moved = posterior.diagnostics["b"] - 1
    assert float(moved.abs().max()) == pytest.approx(0.05 * 10 * first[0] / 8, rel=0.5)


class Weighted(doxa.MAP):
    """Members see the first or the second half of the rows."""

    def row_weights(self, run: Run) -> Tensor:
        rows = torch.arange(12)
        return torch.stack([((rows < 6) == (m % 2 == 0)).double() for m in run.members])


@pytest.mark.slow
def test_row_weights_of_a_method_are_each_members_own() -> None:
    x, y = data()
    y = torch.where(torch.arange(12)[:, None] < 6, y, -y)
    options = {"steps": 300, "lr": 0.05, "batch_size": 12, "init": "given", "validation": None}
    net, given = nn.Linear(2, 1).double(), {"likelihood": doxa.Gaussian(noise=0.1)}
    both = doxa.fit(net, (x, y), Weighted(), members=2, **given, **options)
    for m, rows in enumerate((slice(0, 6), slice(6, 12))):
        alone = doxa.fit(net, (x[rows], y[rows]), "map", **given, **{**options, "batch_size": 6})
        assert torch.allclose(both.samples[m], alone.samples[0], rtol=1e-6)


def test_n_is_the_sum_of_each_members_own_weights() -> None:
    """Of the method's and the user's together; parts and particles keep it."""
    seen: list[Tensor] = []

    class Uneven(doxa.MAP):
        def row_weights(self, run: Run) -> Tensor:
            return torch.stack([torch.full((12,), float(m + 1)) for m in run.members])

        def init(self, run: Run) -> State:
            seen.extend([run.n, run.select_members(slice(1, 3)).n, run.expand_particles(2).n])
            return super().init(run)

    weight = torch.tensor([1.0] * 6 + [0.5] * 6)
    net = nn.Linear(2, 1).double()
    options = {"members": 3, "steps": 1, "validation": None}
    doxa.fit(net, data(), Uneven(), sample_weight=weight, **options)
    assert seen[0].tolist() == [9.0, 18.0, 27.0]
    assert seen[1].tolist() == [18.0, 27.0]
    assert seen[2].tolist() == [9.0, 9.0, 18.0, 18.0, 27.0, 27.0]


def test_a_batch_for_particles() -> None:
    x, y = torch.arange(8.0).reshape(8, 1), torch.arange(8.0)
    batch = Batch(x, y, torch.tensor([3.0, 3.0]))
    wide = batch.expand_particles(2)
    assert wide.shared
    assert wide.scale.tolist() == [3.0] * 4
    dealt = batch.split(4)  # two members, four particles each, two rows a particle
    assert dealt.x.shape == (8, 2, 1)
    assert dealt.x[:4, :, 0].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert torch.equal(dealt.x[:4], dealt.x[4:])
    assert dealt.scale.tolist() == [12.0] * 8  # n/B with a quarter of the rows
    own = Batch(torch.stack([x, x + 10]), torch.stack([y, y + 10]), torch.ones(2), shared=False)
    assert own.split(2).y.tolist() == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [10, 12, 14, 16],
        [11, 13, 15, 17],
    ]
    assert own.expand_particles(2).y.tolist() == [[*range(8)]] * 2 + [[*range(10, 18)]] * 2
    weighted = Batch(x, y, torch.ones(2), torch.arange(8.0))
    assert weighted.split(2).weight.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]] * 2
    uneven = batch.split(3)  # a ninth row is added, and counts for nothing
    assert uneven.y[:3].tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 0]]
    assert uneven.weight[3:].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]


def test_particles_have_starts_and_noise_of_their_own() -> None:
    """Also as parts of the members; and none depends on which others there are."""
    seen: dict[str, Tensor] = {}

    class Look(doxa.MAP):
        width = 4

        def init(self, run: Run) -> State:
            wide = run.expand_particles(4)
            clock = Clock(torch.tensor(0), torch.tensor(0.0), 1, run.noise("test"))
            seen["start"], seen["noise"] = wide.start(), clock.expand_particles(4).noise(5)
            assert torch.equal(wide.select_members(slice(4, 8)).start(), seen["start"][4:8])
            assert wide.size == 4 * run.size
            return super().init(run)

    doxa.fit(doxa.nets.mlp(2, 1), data(), Look(), members=[3, 7], steps=1)
    both = dict(seen)
    for name, value in both.items():
        assert len({tuple(row) for row in value.tolist()}) == 8, name
    doxa.fit(doxa.nets.mlp(2, 1), data(), Look(), members=[7], steps=1)
    for name, value in both.items():
        assert torch.equal(seen[name], value[4:]), name


def test_particles_can_be_kept(tmp_path: Path) -> None:
    """As [draws, M, K, P], in memory and on disk."""
    shapes: list[tuple[int, ...]] = []
    drawn: list[Tensor] = []

    @store.register("test-kept-particles")
    @dataclass(frozen=True)
    class Kept(doxa.SVGD):
        def stages(self, run: Run) -> Iterable[Stage]:
            (stage,) = super().stages(run)
            yield replace(stage, keep=5, validates=False)

        def finish(self, run: Run, state: State, kept: Tensor | None) -> Any:
            assert kept is not None
            shapes.append(tuple(kept.shape))
            drawn.append(kept.clone())
            assert torch.equal(kept[-1], state["theta"])
            return super().finish(run, state, kept)

    for folder in (None, tmp_path / "run"):
        options = {"members": 2, "steps": 20, "checkpoint": folder, "validation": None}
        doxa.fit(nn.Linear(2, 1).double(), data(), Kept(particles=3), **options)
    assert shapes == [(4, 2, 3, 4)] * 2
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("event", [(3,), (2, 3)], ids=["two axes", "three axes"])
@pytest.mark.parametrize(
    ("method", "name"),
    [("linear", "log_evidence"), ("laplace", "log_evidence"), ("mean-field", "elbo"),
     ("mc-dropout", "objective")],
)  # fmt: skip
def test_densities_are_in_units_of_y(method: str, name: str, event: tuple[int, ...]) -> None:
    """The same fit to 1000 y: every number of a row costs log 1000. Targets of three axes have one
    scale for all, those of two one a column."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, generator=g).double()
    y = torch.randn(20, *event, generator=g).double() + x[:, :1].reshape(20, *(1 for _ in event))
    size = y[0].numel()
    hidden = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, size), nn.Unflatten(1, event))
    options: dict[str, Any] = {"standardize": True, "steps": 3, "init": "given"}
    values = [
        getattr(
            doxa.fit(
                None if method == "linear" else hidden.double(), (x, c * y), method, **options
            ),
            name,
        )
        for c in (1.0, 1000.0)
    ]
    assert values[1] - values[0] == pytest.approx(-20 * size * math.log(1000.0), rel=1e-6)
