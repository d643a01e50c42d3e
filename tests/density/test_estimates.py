"""Sums over rows and stated gradient noise: the estimates, and the laws of samplers on them.

Laws are those of quadratic potentials, where the stationary variance is known. Each is compared at
5 standard errors of the estimated variance, √(2τ/N) of N numbers that are correlated over τ draws
(τ is bounded from the autocorrelation of the linear recursion): a correct sampler fails with
probability 6e-7.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from doxa.density import GradientNoise, RowSum
from doxa.density.density import Density
from doxa.density.transforms import Real
from doxa.errors import DataError, MethodError, ModelError, ShapeError

Params = dict[str, Tensor]
WIDE = {"x": torch.zeros(40)}
LONG: dict[str, Any] = {"draws": 40, "burn_in": 60, "thin": 10}
MEMBERS = 20


def quadratic(curvature: float) -> Any:
    return lambda p: -0.5 * curvature * p["x"].square().sum()


def close(values: Tensor, exact: float, tau: float) -> bool:
    """The mean square of draws that are correlated over `tau` of them."""
    error = math.sqrt(2 * max(1.0, tau) / values.numel())
    return abs(float(values.square().mean()) / exact - 1) < 5 * error


def drawn(method: Any, density: Any, init: Any = None, **options: Any) -> Tensor:
    options = {"members": MEMBERS, **options}
    return doxa.sample(density, init or WIDE, method, **options)["x"]


@pytest.mark.parametrize("heat", [1.0, 2.0])
@pytest.mark.parametrize("std", [0.0, 3.0])
def test_sgld(std: float, heat: float) -> None:
    eta, curvature = 0.2, 1.5
    method = doxa.SGLD(**LONG, step_size=eta, decay=0, temperature=heat)
    values = drawn(method, GradientNoise(quadratic(curvature), std=std))
    exact = heat / curvature * (1 + eta * std**2 / (2 * heat)) / (1 - eta * curvature / 2)
    assert close(values, exact, 1.0)
    assert not close(values, exact * 1.1, 1.0)  # the check has some power


@pytest.mark.parametrize("taken", [0.0, 0.1])
@pytest.mark.slow
def test_sghmc(taken: float) -> None:
    """β̂ takes back the noise of the gradients where it is ηC/2T."""
    eta, alpha, curvature = 0.05, 0.3, 1.0
    std = math.sqrt(2 * 0.1 / eta)  # ηC/2 = 0.1
    method = doxa.SGHMC(**LONG, step_size=eta, friction=alpha, gradient_noise=taken)
    values = drawn(method, GradientNoise(quadratic(curvature), std=std))
    exact = (1 + (0.1 - taken) / alpha) / (1 - eta * curvature / (4 - 2 * alpha)) / curvature
    assert close(values, exact, 2.0)


@pytest.mark.slow
def test_sgnht() -> None:
    """α (2 − α − ηλ/2) = 2a + ηC/T, and the variance is (1 − α/2) T/λ for many weights."""
    eta, a, std = 0.02, 0.05, 2.0
    method = doxa.get_method("sgnht")(
        draws=20, burn_in=280, thin=10, step_size=eta, friction=a, coupling=0.02
    )
    values = drawn(
        method, GradientNoise(quadratic(1.0), std=std), {"x": torch.zeros(400)}, members=8
    )
    heat, b = 2 * a + eta * std**2, 2 - eta / 2
    alpha = (b - math.sqrt(b * b - 4 * heat)) / 2
    assert float(values.square().mean()) == pytest.approx(1 - alpha / 2, rel=0.02)


def lyapunov(a: Tensor, c: Tensor, rate: float) -> Tensor:
    """Σ of AΣ + ΣA − εAΣA = εC."""
    eye = torch.eye(len(a)).double()
    system = torch.kron(a, eye) + torch.kron(eye, a) - rate * torch.kron(a, a)
    return torch.linalg.solve(system, rate * c.flatten()).reshape(a.shape)


@pytest.mark.slow
def test_constant_sgd_with_a_stated_covariance() -> None:
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    c = torch.tensor([[4.0, -1.0], [-1.0, 2.0]]).double()
    rate = 0.2

    def log_density(p: Params) -> Tensor:
        return -0.5 * p["x"] @ a.to(p["x"]) @ p["x"]

    method = doxa.ConstantSGD(draws=30, burn_in=60, thin=10, step_size=rate)
    density = GradientNoise(log_density, covariance=c)
    values = drawn(method, density, {"x": torch.zeros(2)}, members=300, steps=60).flatten(0, 1)
    exact = lyapunov(a, c, rate)
    found = values.T @ values / len(values)
    scale = exact.diagonal().sqrt()
    assert ((found - exact).abs() < 5 * scale[:, None] * scale * math.sqrt(4 / len(values))).all()


@pytest.mark.slow
def test_the_optimal_rate_of_constant_sgd_follows_from_the_stated_noise() -> None:
    """ε* = 2TD/(n tr C), with n = 1."""
    density = GradientNoise(quadratic(0.5), std=4.0)
    method = doxa.ConstantSGD(draws=5, burn_in=5, thin=1, probes=300)
    draws = doxa.sample(density, WIDE, method, 2, steps=100)
    assert not draws.diagnostics["step_size_limited"]
    for rate in draws.diagnostics["step_size"]:
        assert rate == pytest.approx(2 / 16, rel=5 * math.sqrt(2 / (40 * 300)))


ROWS = torch.randn(60, 40, generator=torch.Generator().manual_seed(3)).double()


def rows_of_normals() -> RowSum:
    """60 rows of N(x, 1) for each of 40 columns, and a prior N(0, 1)."""
    return RowSum(
        lambda p, rows: -0.5 * (rows - p["x"]).square().sum(1), ROWS,
        lambda p: -0.5 * p["x"].square().sum(),
    )  # fmt: skip


@pytest.mark.slow
def test_rows_give_the_posterior_of_all_rows() -> None:
    """The mean and the variance in closed form, by HMC (all rows) and SGLD with all rows."""
    mean, precision = ROWS.sum(0) / 61, 61.0
    exact = doxa.HMC(draws=40, burn_in=60, leapfrog=5)
    assert close((drawn(exact, rows_of_normals()) - mean) * math.sqrt(precision), 1.0, 2.0)
    eta = 0.3 / precision
    method = doxa.SGLD(**LONG, step_size=eta, decay=0)
    values = (drawn(method, rows_of_normals(), batch_size=60) - mean) * math.sqrt(precision)
    assert close(values, 1 / (1 - 0.15), 1.0)


def test_batches_of_rows_have_the_noise_of_the_rows() -> None:
    """Constant SGD on independent batches of B rows: C = (1/B) Cov of the rows' gradients of the
    mean loss, A = 61/60; the rate is for the mean loss."""
    rate, size = 0.3, 5
    method = doxa.ConstantSGD(**LONG, step_size=rate)
    values = drawn(method, rows_of_normals(), batch_size=size, steps=60)
    noise = ROWS.var(0, unbiased=False) / size
    a = 61 / 60
    exact = rate * noise / (2 * a - rate * a * a)
    found = (values - ROWS.sum(0) / 61).square().mean((0, 1))
    error = math.sqrt(2 * 1.5 / (MEMBERS * 40))
    assert ((found / exact - 1).abs() < 5 * error).all()


@pytest.mark.parametrize("proposal", ["langevin", "walk"])
def test_minibatch_mh_is_exact_without_noise_and_too_wide_with_it(proposal: str) -> None:
    init, options = {"x": torch.zeros(2)}, {"lr": 0.3, "members": 200}
    method = doxa.MinibatchMH(draws=20, burn_in=150, thin=10, proposal=proposal)
    narrow = drawn(method, GradientNoise(quadratic(1.0), std=0.0), init, **options)
    assert close(narrow, 1.0, 4.0)
    wide = drawn(method, GradientNoise(quadratic(1.0), std=2.0), init, **options)
    assert float(wide.var()) > 1.15


@pytest.mark.parametrize("name", ["hmc", "mala", "nuts", "metropolis"])
def test_exact_samplers_see_no_noise(name: str) -> None:
    settings = {"draws": 10, "burn_in": 20}
    one, other = (
        drawn(doxa.get_method(name)(**settings), density)
        for density in (quadratic(1.0), GradientNoise(quadratic(1.0), std=5.0))
    )
    assert torch.equal(one, other)


def test_particles_of_svgd_are_draws() -> None:
    """At rest the forces on each particle are opposite, and Stein's identity holds: the mean is
    exact, and the spread of 30 particles on a line is that of the density."""
    density = lambda p: -0.5 * ((p["x"] - 2) / 0.5).square().sum()  # noqa: E731
    method = doxa.get_method("svgd")(particles=30)
    draws = doxa.sample(density, {"x": torch.zeros(1)}, method, 2, steps=400, lr=0.1,
                        schedule="cosine")  # fmt: skip
    assert draws["x"].shape == (2, 30, 1)
    assert draws.status == "not-evaluated" and "no chain" in draws.status.reason
    assert draws["x"].mean((1, 2)).tolist() == pytest.approx([2.0, 2.0], abs=0.01)
    assert draws["x"].std(1).flatten().tolist() == pytest.approx([0.5, 0.5], rel=0.06)
    chain = doxa.transitions(density, {"x": torch.zeros(1)}, method, 2, steps=400, lr=0.1,
                             schedule="cosine", trace=True)  # fmt: skip
    *_, last = chain
    forces: Any = last.trace[0]
    assert (forces.drift + forces.repulsion).abs().max() < 1e-2 * forces.drift.abs().max()


def test_an_epoch_of_batches_adds_up() -> None:
    """The mean of the estimates over an epoch is the density, and so is that of their gradients;
    a change of θ within a step has the noise of that step."""
    from doxa.density.sample import prepare
    from doxa.method import FitSettings

    def run(density: Any) -> Any:
        return prepare(
            density, WIDE, "sgld", 3, constraints=None, seed=0, jitter=1.0, dtype=torch.float64,
            device=None, engine="auto", batch_size=6, steps=1, lr=None, schedule="constant",
            optimizer="adam", settings=FitSettings(),
        ).run  # fmt: skip

    rows = run(rows_of_normals())
    theta, feed = rows.start(), rows.open("mini", "sample", 10)
    each = [rows.joint(theta, feed.batch(t), {}) for t in range(10)]
    whole = rows.joint(theta, rows.all_rows(), {})
    for i in range(2):
        assert torch.allclose(torch.stack([one[i] for one in each]).mean(0), whole[i])
    noisy = run(GradientNoise(quadratic(1.0), std=3.0))
    theta, feed = noisy.start(), noisy.open("mini", "sample", 10)
    first, again, later = (noisy.joint(theta, feed.batch(t), {})[1] for t in (4, 4, 5))
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert torch.equal(noisy.joint(theta, noisy.all_rows(), {})[1], -theta)
    ahead = noisy.joint(theta + 1e-3, feed.batch(4), {})[0] - noisy.joint(
        theta - 1e-3, feed.batch(4), {}
    )[0]  # fmt: skip
    assert torch.allclose(ahead / 2e-3, first.sum(1), rtol=1e-6)


def test_rows_may_be_several_tensors_and_one_chain() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, generator=g), torch.randn(30, generator=g)
    density = RowSum(
        lambda p, rows: -0.5 * (rows["y"] - rows["x"] @ p["w"]).square(), {"x": x, "y": y}
    )
    for members in (1, 3):
        for engine in ("stack", "loop"):
            draws = doxa.sample(
                density, {"w": torch.zeros(2)}, doxa.SGLD(draws=5, burn_in=5, step_size=1e-3),
                members, batch_size=4, engine=engine,
            )  # fmt: skip
            assert torch.isfinite(draws["w"]).all() and draws["w"].shape == (members, 5, 2)
    one = Density(density, {"w": (2,)}, {"w": Real()})
    w = torch.randn(2, generator=g).double()
    by_hand = -0.5 * (y.double() - x.double() @ w).square().sum()
    assert torch.allclose(one(w.unsqueeze(0))[0], by_hand)


def test_a_chain_does_not_depend_on_the_others() -> None:
    method = doxa.SGHMC(draws=5, burn_in=10, thin=1, step_size=1e-3)
    for density in (rows_of_normals(), GradientNoise(quadratic(1.0), std=2.0)):
        starts = [{"x": torch.full((40,), float(m))} for m in range(3)]
        together = doxa.sample(density, starts, method, [4, 5, 6], batch_size=6)
        alone = doxa.sample(density, starts[1:2], method, [5], batch_size=6)
        assert torch.allclose(together["x"][1], alone["x"][0], rtol=1e-10)


def test_what_cannot_be_used() -> None:
    normal = quadratic(1.0)
    for settings, error, words in (
        ({}, MethodError, "std or covariance"),
        ({"std": 1.0, "covariance": torch.eye(2)}, MethodError, "not both"),
    ):
        with pytest.raises(error, match=words):
            GradientNoise(normal, **settings)  # type: ignore[arg-type]
    for std, kind, text in (
        (-1.0, DataError, "at least 0"), (torch.ones(3), ShapeError, "40 free numbers"),
        ({"y": 1.0}, MethodError, "one entry for each of"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            doxa.sample(GradientNoise(normal, std=std), WIDE, "sgld")
    with pytest.raises(ShapeError, match=r"must be \[40, 40\]"):
        doxa.sample(GradientNoise(normal, covariance=torch.eye(2)), WIDE, "sgld")
    with pytest.raises(DataError, match="positive definite"):
        doxa.sample(GradientNoise(normal, covariance=-torch.eye(40)), WIDE, "sgld")
    with pytest.raises(DataError, match="rows must be a tensor"):
        RowSum(lambda p, rows: rows, [1.0, 2.0])
    with pytest.raises(ShapeError, match="same number of rows"):
        RowSum(lambda p, rows: rows, (torch.zeros(3), torch.zeros(4)))
    with pytest.raises((ModelError, ShapeError), match="one number per row"):
        doxa.sample(RowSum(lambda p, rows: p["x"].sum(), ROWS), WIDE, "sgld")
