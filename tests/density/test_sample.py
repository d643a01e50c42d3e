"""`doxa.sample`: laws known in closed form, engines, files, and all a density can do wrong."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import doxa
from doxa import store
from doxa.density.transforms import Interval
from doxa.errors import DataError, MethodError, ModelError, NumericalError, ShapeError, StoreError
from doxa.method import Clock, Info, Method, Run, Stage, State
from doxa.posterior import Posterior, SamplePosterior, chains

Params = dict[str, Tensor]
SHORT = doxa.HMC(draws=20, burn_in=10, leapfrog=3)


@store.register("test-random-walk")
@dataclass(frozen=True)
class RandomWalk(Method):
    """θ' = θ + scale·ε, accepted by Metropolis' rule; nothing is adapted."""

    name: ClassVar[str] = "test-random-walk"
    draws: int = 200
    scale: float = 1.0

    def init(self, run: Run) -> State:
        value, _ = run.joint(run.start(), run.all_rows(), {})
        return {"theta": run.start(), "log_density": value}

    def stages(self, run: Run) -> list[Stage]:
        def step(run: Run, state: State, batch: Any, clock: Clock) -> tuple[State, Info]:
            theta = state["theta"] + self.scale * clock.noise(run.layout.size)
            value, _ = run.joint(theta, batch, state)
            take = clock.uniform().log() < value - state["log_density"]
            new = {
                "theta": torch.where(take.unsqueeze(1), theta, state["theta"]),
                "log_density": torch.where(take, value, state["log_density"]),
            }
            return new, {"log_density": new["log_density"]}

        return [Stage("walk", step, self.draws, "all", keep=1)]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        assert kept is not None
        return SamplePosterior(
            samples=kept.transpose(0, 1), **run.common(self), **run.shared(state)
        )


def normal(p: Params) -> Tensor:
    return -0.5 * p["x"].square().sum()


def within(values: Tensor, expected: Any, errors: float = 5.0) -> bool:
    """Means over chains and draws within so many Monte Carlo standard errors of the truth."""
    values = values.double()
    effective = chains.ess_bulk(values).clamp(max=values.shape[0] * values.shape[1])
    error = values.flatten(0, 1).std(0) / effective.sqrt()
    away = (values.mean((0, 1)) - torch.as_tensor(expected, dtype=torch.float64)).abs()
    return bool((away < errors * error).all())


@pytest.fixture(scope="module")
def known() -> doxa.Draws:
    """Gamma, Beta, Dirichlet, sorted normals and bounded exponentials, all at once."""

    def log_density(p: Params) -> Tensor:
        gamma = 2 * p["gamma"].log() - 2 * p["gamma"]  # Gamma(3, rate 2)
        beta = p["beta"].log() + 2 * torch.log1p(-p["beta"])  # Beta(2, 3)
        shares = (torch.tensor([1.0, 2.0, 3.0]).double() * p["shares"].log()).sum()
        sorted_normals = -0.5 * p["sorted"].square().sum()
        return gamma + beta + shares + sorted_normals - (p["above"] - 1) + (p["below"] - 1)

    init = {
        "gamma": 1.0, "beta": 0.5, "shares": [1 / 3] * 3, "sorted": [-1.0, 0.0, 1.0],
        "above": 2.0, "below": 0.0,
    }  # fmt: skip
    constraints = {
        "gamma": "positive", "beta": "unit", "shares": "simplex", "sorted": "ordered",
        "above": doxa.transforms.Lower(1.0), "below": doxa.transforms.Upper(1.0),
    }  # fmt: skip
    method = doxa.HMC(draws=1000, burn_in=300, leapfrog=6)
    options = {"constraints": constraints, "seed": 3, "engine": "stack:traced"}
    return doxa.sample(log_density, init, method, 6, **options)


@pytest.mark.slow
def test_laws_with_constraints_have_the_right_moments(known: doxa.Draws) -> None:
    """First and second moments within 5 Monte Carlo errors: 20 comparisons, 1 in 80,000. Sorted
    standard normals: E = (−3/(2√π), 0, 3/(2√π)), E x² = (1 + √3/(2π), 1 − √3/π, …)."""
    assert known.status == "ok", known.status.reason
    assert within(known["gamma"], 1.5)
    assert within(known["gamma"].square(), 3.0)
    assert within(known["beta"], 0.4)
    assert within(known["beta"].square(), 0.2)
    alpha = torch.tensor([2.0, 3.0, 4.0]).double()
    assert within(known["shares"], alpha / 9)
    assert within(known["shares"].square(), alpha * (alpha + 1) / 90)
    end = 1.5 / math.sqrt(math.pi)
    assert within(known["sorted"], [-end, 0.0, end])
    spread = math.sqrt(3) / (2 * math.pi)
    assert within(known["sorted"].square(), [1 + spread, 1 - 2 * spread, 1 + spread])
    assert within(known["above"], 2.0)
    assert within(known["below"], 0.0)


def test_the_moments_would_show_a_missing_jacobian(known: doxa.Draws) -> None:
    """Without log|J| the same chains would follow Gamma(2, 2), Beta(1, 2), Dirichlet(1, 2, 3):
    means that these draws exclude by far more than the tolerance above."""
    assert not within(known["gamma"], 1.0, errors=20)
    assert not within(known["beta"], 1 / 3, errors=12)
    assert not within(known["shares"][..., 0], 1 / 6, errors=10)
    assert not within(known["above"], 1.0, errors=20)


def test_draws_keep_to_their_constraints(known: doxa.Draws) -> None:
    assert (known["gamma"] > 0).all()
    assert ((known["beta"] > 0) & (known["beta"] < 1)).all()
    assert torch.allclose(known["shares"].sum(-1), torch.ones(6, 1000).double(), rtol=1e-12)
    assert (known["sorted"].diff(dim=-1) > 0).all()
    assert (known["above"] > 1).all()
    assert (known["below"] < 1).all()


def test_a_mapping_of_shapes(known: doxa.Draws) -> None:
    assert list(known) == ["gamma", "beta", "shares", "sorted", "above", "below"]
    shapes = {name: tuple(value.shape) for name, value in known.items()}
    assert shapes["gamma"] == (6, 1000)
    assert shapes["shares"] == (6, 1000, 3)
    assert known.theta.shape == (6, 1000, 9)  # a simplex of three has two free values
    assert (known.members, known.count) == (6, 1000)
    with pytest.raises(KeyError, match="gamma"):
        known["gama"]


def test_the_summary_is_arithmetic_on_the_draws(known: doxa.Draws) -> None:
    table = known.summary()
    assert table.names[:5] == ["gamma", "beta", "shares[0]", "shares[1]", "shares[2]"]
    flat = known["shares"][..., 1].flatten()
    row = table.to_dict()["shares[1]"]
    assert row["mean"] == pytest.approx(float(flat.mean()), rel=1e-12)
    assert row["sd"] == pytest.approx(float(flat.std()), rel=1e-12)
    assert row["95%"] == pytest.approx(float(flat.quantile(0.95)), rel=1e-12)
    assert row["mcse"] == pytest.approx(row["sd"] / math.sqrt(row["ess_bulk"]), rel=1e-12)
    assert row["rhat"] == float(chains.rhat(known["shares"])[1])
    assert known.diagnostics["rhat"]["shares[1]"] == row["rhat"]
    assert known.diagnostics["ess_tail"]["gamma"] == float(chains.ess_tail(known["gamma"]))
    assert "shares[1]" in str(table)
    assert "ess_bulk" in str(table)


@pytest.mark.slow
def test_arviz_sees_draws_and_statistics(known: doxa.Draws) -> None:
    pytest.importorskip("arviz_base")
    tree = known.to_arviz()
    assert tree["posterior"]["shares"].shape == (6, 1000, 3)
    stats = tree["sample_stats"]
    assert stats["lp"].shape == (6, 1000)
    assert {"energy", "acceptance_rate", "diverging", "step_size"} <= set(stats.data_vars)
    assert stats["diverging"].dtype == bool
    arviz = pytest.importorskip("arviz_stats.base").array_stats
    theirs = arviz.rhat(tree["posterior"]["gamma"].values, chain_axis=0, draw_axis=1)
    assert float(theirs) == pytest.approx(known.diagnostics["rhat"]["gamma"], rel=1e-9)


def test_log_density_beside_each_draw_is_that_of_the_draw(known: doxa.Draws) -> None:
    p = {k: v[2, 17] for k, v in known.items()}
    gamma = 2 * p["gamma"].log() - 2 * p["gamma"]
    beta = p["beta"].log() + 2 * torch.log1p(-p["beta"])
    shares = (torch.tensor([1.0, 2.0, 3.0]).double() * p["shares"].log()).sum()
    value = gamma + beta + shares - 0.5 * p["sorted"].square().sum()
    value = value - (p["above"] - 1) + (p["below"] - 1)
    for name, own in known.transforms.items():
        _, log_det = own.forward(own.inverse(p[name]))
        value = value + (0.0 if log_det is None else log_det.sum())
    assert float(known.stats["log_density"][2, 17]) == pytest.approx(float(value), rel=1e-9)


def test_saved_and_read_back(known: doxa.Draws, tmp_path: Path) -> None:
    known.save(tmp_path / "draws")
    again = doxa.Draws.load(tmp_path / "draws")
    assert torch.equal(again.theta, known.theta)
    assert torch.equal(again["shares"], known["shares"])
    assert torch.equal(again.stats["energy"], known.stats["energy"])
    assert again.method == known.method
    assert (again.status, again.status.reason) == (known.status, known.status.reason)
    assert again.diagnostics["rhat"] == known.diagnostics["rhat"]
    store.write_artefact(tmp_path / "other", {}, {"kind": "sample"})
    with pytest.raises(StoreError, match="no draws"):
        doxa.Draws.load(tmp_path / "other")


def test_the_same_seed_gives_the_same_draws_and_another_does_not() -> None:
    a, b, c = (doxa.sample(normal, {"x": [0.0, 0.0]}, SHORT, seed=s) for s in (1, 1, 2))
    assert torch.equal(a["x"], b["x"])
    assert not torch.equal(a["x"], c["x"])


def test_a_chain_does_not_depend_on_its_company() -> None:
    """Ids name the noise; rounding differs between one chain and four."""
    walk = RandomWalk(draws=50)
    four = doxa.sample(normal, {"x": [0.0, 0.0]}, walk, 4)
    alone = doxa.sample(normal, {"x": [0.0, 0.0]}, walk, [2, 3])
    assert torch.allclose(alone["x"], four["x"][2:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["stack:eager", "stack:traced", "loop"])
def test_engines_agree(engine: str) -> None:
    """Rows of a regression as a matrix, in float64: the same chain to rounding, for a few steps."""
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)
    y = 0.5 * x + 0.1

    def log_density(p: Params) -> Tensor:
        rest = y - p["slope"] * x - p["level"]
        return -0.5 * (rest / p["noise"]).square().sum() - 21 * p["noise"].log() - p["noise"]

    init = {"slope": 0.0, "level": 0.0, "noise": 1.0}
    method = doxa.HMC(draws=5, burn_in=0, leapfrog=4)
    found = [
        doxa.sample(log_density, init, method, 3, constraints={"noise": "positive"}, engine=how)
        for how in ("stack", engine)
    ]
    assert torch.allclose(found[0].theta, found[1].theta, rtol=1e-9, atol=1e-10)
    assert found[1].diagnostics["engine"] == engine.partition(":")[0]
    assert found[1].diagnostics["mode"] == (engine.partition(":")[2] or "eager")


def test_python_that_vmap_refuses_runs_one_chain_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def branching(p: Params) -> Tensor:
        x = p["x"]
        return -0.5 * x.square() if x > 0 else -2.0 * x.square()

    def plain(p: Params) -> Tensor:
        x = p["x"]
        return torch.where(x > 0, -0.5 * x.square(), -2.0 * x.square())

    walk = RandomWalk(draws=30)
    with caplog.at_level(logging.WARNING, "doxa"):
        loop = doxa.sample(branching, {"x": 0.5}, walk)
    assert loop.diagnostics["engine"] == "loop"
    assert "one chain at a time" in caplog.text
    stack = doxa.sample(plain, {"x": 0.5}, walk)
    assert stack.diagnostics["engine"] == "stack"
    assert torch.allclose(loop["x"], stack["x"], rtol=1e-10)


@pytest.mark.slow
def test_distributions_that_check_their_arguments() -> None:
    """Gamma(3, rate 2) without a word about its support: negative proposals make it raise."""

    def log_density(p: Params) -> Tensor:
        three = torch.tensor(3.0).double()
        return torch.distributions.Gamma(three, 2.0, validate_args=True).log_prob(p["x"])

    draws = doxa.sample(log_density, {"x": 1.5}, RandomWalk(draws=1000, scale=1.5), 4)
    assert draws.diagnostics["raised"] > 50
    assert (draws["x"] > 0).all()
    assert within(draws["x"], 1.5)
    assert within(draws["x"].square(), 3.0)


def test_a_check_inside_the_density_is_never_recorded_away() -> None:
    """Exponential(1).log_prob is finite below 0: only its check keeps draws out of there. A trace
    would lose the check, so that the step runs eagerly though a trace was asked for."""

    def log_density(p: Params) -> Tensor:
        one = torch.tensor(1.0).double()
        return torch.distributions.Exponential(one, validate_args=True).log_prob(p["x"])

    method = doxa.HMC(draws=60, burn_in=30, leapfrog=3)
    draws = doxa.sample(log_density, {"x": 1.5}, method, 2, engine="stack:traced")
    assert draws.diagnostics["mode"] == "eager"
    assert draws.diagnostics["raised"] > 0
    assert (draws["x"] > 0).all()


@pytest.mark.slow
def test_a_density_that_raises_outside_its_support(caplog: pytest.LogCaptureFixture) -> None:
    """log det [[1, r], [r, 1]] by a Cholesky factor that does not exist beyond |r| = 1: p ∝ 1 − r²,
    with variance 1/5. One chain's failure does not stop the others."""

    def log_density(p: Params) -> Tensor:
        r = p["r"]
        one = torch.ones_like(r)
        matrix = torch.stack([torch.stack([one, r]), torch.stack([r, one])])
        return 2 * torch.linalg.cholesky(matrix).diagonal().log().sum()

    with caplog.at_level(logging.WARNING, "doxa"):
        draws = doxa.sample(log_density, {"r": 0.0}, RandomWalk(draws=1500, scale=0.8), 4)
    assert (draws["r"].abs() < 1).all()
    assert draws.diagnostics["raised"] > 100
    assert caplog.text.count("outside the support") == 1
    assert within(draws["r"], 0.0)
    assert within(draws["r"].square(), 0.2)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    method = doxa.HMC(draws=60, burn_in=40, leapfrog=3)
    whole = doxa.sample(normal, {"x": [0.0, 1.0]}, method, 2, seed=5)

    def interrupt(step: int, info: dict[str, Any]) -> None:
        if step >= 70:
            raise KeyboardInterrupt

    where = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        doxa.sample(
            normal, {"x": [0.0, 1.0]}, method, 2, seed=5, checkpoint=where, callbacks=[interrupt]
        )
    resumed = doxa.sample(normal, {"x": [0.0, 1.0]}, method, 2, seed=5, checkpoint=where)
    assert torch.equal(resumed.theta, whole.theta)
    assert torch.equal(resumed.stats["energy"], whole.stats["energy"])
    with pytest.raises(MethodError, match="another fit"):  # told by its values at the starts
        doxa.sample(lambda p: 2 * normal(p), {"x": [0.0, 1.0]}, method, 2, seed=5, checkpoint=where)


def test_starts_are_near_init_in_free_space_and_differ() -> None:
    walk = RandomWalk(draws=1, scale=1e-9)
    draws = doxa.sample(
        lambda p: -p["x"].log().square().sum(), {"x": [1.0, 1.0]}, walk, 8, jitter=0.5,
        constraints={"x": "positive"},
    )  # fmt: skip
    assert (draws.theta.abs() < 0.5 + 1e-6).all()
    assert draws.theta.unique().numel() == 16
    exact = doxa.sample(normal, [{"x": float(m)} for m in range(3)], walk, 3)
    assert torch.allclose(exact["x"][:, 0], torch.arange(3.0).double(), atol=1e-6)


def test_a_jittered_start_outside_the_support_is_drawn_nearer() -> None:
    """Uniform on (−0.01, 0.01) without saying so: nearly every start within ±1 lies outside."""

    def narrow(p: Params) -> Tensor:
        return torch.where(p["x"].abs() < 0.01, 0.0 * p["x"], -torch.inf)

    draws = doxa.sample(narrow, {"x": 0.0}, RandomWalk(draws=5, scale=0.001), 8)
    assert (draws["x"].abs() < 0.01).all()


def flagged(density: Any, error: type[Exception], words: str, init: Any = None, **kw: Any) -> None:
    with pytest.raises(error, match=words):
        doxa.sample(density, {"x": [1.0, 2.0]} if init is None else init, SHORT, **kw)


def test_densities_that_cannot_be_sampled() -> None:
    flagged(lambda p: p["x"].sum() * torch.nan, NumericalError, "is nan at the start")
    flagged(lambda p: (-p["x"]).log().sum(), NumericalError, "is nan at the start")
    flagged(lambda p: p["x"].sum() + torch.inf, NumericalError, "is inf at the start")
    flagged(lambda p: p["x"].sum() - torch.inf, NumericalError, "outside the support")
    flagged(lambda p: -p["x"].square(), ShapeError, r"scalar.*\[2\]")
    flagged(lambda p: -p["x"].square().sum().reshape(1), ShapeError, r"scalar.*\[1\]")
    flagged(lambda p: normal(p).item(), ModelError, "tensor.*not float")
    flagged(lambda p: None, ModelError, "tensor.*not NoneType")
    flagged(lambda p: normal(p).long(), ModelError, "real number, got torch.int64")
    flagged(lambda p: normal(p).detach(), ModelError, "no gradient")
    flagged(lambda p: torch.tensor(1.0), ModelError, "no gradient")
    flagged(lambda p: p["y"].sum(), ModelError, "fails at the start: KeyError")
    flagged(lambda p: p["x"] @ torch.ones(2), ModelError, "parameters are torch.float64")
    flagged(lambda p: p["x"].sqrt().sum(), NumericalError, "not finite", {"x": [0.0, 1.0]})
    flagged(3.0, MethodError, "must be a function")


def test_gradients_that_are_wrong_in_part() -> None:
    def one_unused(p: Params) -> Tensor:
        return normal(p) - p["y"].detach().square()

    flagged(one_unused, ModelError, "does not depend on 'y'", {"x": 1.0, "y": 2.0})

    def half_detached(p: Params) -> Tensor:
        return -(p["x"].detach() * p["x"]).sum()

    flagged(half_detached, ModelError, "does not agree with finite differences")


def test_a_random_density_is_refused() -> None:
    counter = itertools.count()
    flagged(lambda p: normal(p) + next(counter), ModelError, "random")


def test_starts_that_cannot_be_used() -> None:
    flagged(normal, DataError, "empty", {})
    flagged(normal, DataError, "must be a dict", torch.zeros(3))
    flagged(normal, DataError, "must be strings", {0: 1.0})
    flagged(normal, DataError, "NaN or infinite", {"x": [0.0, math.nan]})
    flagged(normal, DataError, "boolean", {"x": [True, False]})
    flagged(normal, DataError, "complex", {"x": torch.zeros(2, dtype=torch.complex64)})
    flagged(normal, DataError, "empty, of shape", {"x": torch.zeros(0)})
    flagged(normal, DataError, "encode them as numbers", {"x": "zero"})
    flagged(normal, ShapeError, "2 starts for 4 chains", [{"x": 1.0}, {"x": 2.0}])
    flagged(normal, ShapeError, "has shapes", [{"x": 1.0}, {"x": [2.0, 1.0]}], members=2)
    flagged(lambda p: p["x"].log().sum() - p["x"].sum(), NumericalError, "start of chain 1",
            [{"x": 1.0}, {"x": 0.0}], members=2)  # fmt: skip


def test_constraints_that_cannot_be_used() -> None:
    flagged(normal, MethodError, "'y', which is not in init", constraints={"y": "positive"})
    flagged(normal, MethodError, "unknown constraint", constraints={"x": "possitive"})
    flagged(normal, DataError, "outside its constraint", {"x": -1.0}, constraints={"x": "positive"})
    flagged(normal, DataError, r"Interval\(low=2", {"x": 1.0}, constraints={"x": Interval(2, 3)})
    flagged(normal, DataError, "sum 1", {"x": [0.5, 0.6]}, constraints={"x": "simplex"})
    flagged(normal, ShapeError, "2 entries", {"x": 1.0}, constraints={"x": "simplex"})


def test_settings_that_cannot_be_used() -> None:
    flagged(normal, MethodError, "members", members=0)
    flagged(normal, MethodError, "jitter", jitter=-1.0)
    flagged(normal, MethodError, "dtype", dtype=torch.int32)
    flagged(normal, MethodError, "engine", engine="warp")
    for name, words in (("mean-field", "needs a network"), ("map", "keeps no draws")):
        with pytest.raises(MethodError, match=words):
            doxa.sample(normal, {"x": 0.0}, name)


def test_a_chain_that_sticks_is_named() -> None:
    """A needle of a mode at 50, from which no step of size one is ever accepted."""

    def needle(p: Params) -> Tensor:
        far = -0.5 * ((p["x"] - 50.0) / 1e-6).square() + 40.0
        return torch.logaddexp(-0.5 * p["x"].square(), far)

    starts = [{"x": 0.0}, {"x": 50.0}, {"x": 0.5}]
    draws = doxa.sample(needle, starts, RandomWalk(draws=300), 3)
    assert draws.status == "not-converged"
    assert "chain 1" in draws.status.reason
    assert "hardly move" in draws.status.reason
    assert draws.diagnostics["moved"][1] == 0.0


def test_chains_in_different_modes_are_named() -> None:
    def modes(p: Params) -> Tensor:
        return torch.logaddexp(-0.5 * (p["x"] - 30).square(), -0.5 * (p["x"] + 30).square())

    draws = doxa.sample(modes, [{"x": -30.0}, {"x": 30.0}], RandomWalk(draws=300), 2)
    assert draws.status == "not-converged"
    assert "R-hat of x" in draws.status.reason


def test_a_run_that_is_stopped_says_so() -> None:
    draws = doxa.sample(
        normal, {"x": 0.0}, RandomWalk(draws=2000), callbacks=[lambda step, info: step > 900]
    )
    assert draws.count < 2000
    assert draws.status in ("stopped", "not-converged")
    assert draws.status.reason


def test_single_precision_on_request() -> None:
    draws = doxa.sample(normal, {"x": [0.0, 1.0]}, SHORT, dtype=torch.float32)
    assert draws["x"].dtype == torch.float32
    assert doxa.sample(normal, {"x": [0, 1]}, SHORT)["x"].dtype == torch.float64
