"""GP against scikit-learn, closed forms and refits; the anchor is in statistical/."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern, WhiteKernel
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, MemoryBudgetError, MethodError, ModelError, StoreError
from doxa.function.evidence import Evidence, Problem
from doxa.function.kernels import Composed, KernelFunction, register_kernel

NOISE = 0.2


def rows(n: int = 30, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 2))
    f = np.sin(2 * x[:, :1]) + 0.3 * x[:, 1:]
    y = f * np.linspace(1, 2, outputs) + NOISE * rng.normal(size=(n, outputs))
    return torch.from_numpy(x), torch.from_numpy(y)


def fixed(data: tuple[Tensor, Tensor], kernel: Any = "rbf", **settings: Any) -> Any:
    options = {k: settings.pop(k) for k in ("standardize", "sample_weight") if k in settings}
    settings = {"noise": NOISE, "learn_kernel": False} | settings
    if isinstance(kernel, str):
        settings = {"variance": 1.3} | settings
        if kernel != "linear":
            settings = {"lengthscale": 0.9} | settings
    return doxa.fit(None, data, doxa.GP(kernel, **settings), **options)


PEERS = {
    "rbf": 1.3 * RBF(0.9),
    "matern": 1.3 * Matern(0.9, nu=2.5),
    "linear": 1.3 * DotProduct(0.0, "fixed"),
}


@pytest.mark.parametrize("kernel", PEERS)
def test_equal_to_scikit_learn_at_the_same_hyper_parameters(kernel: str) -> None:
    x, y = rows()
    x_new = torch.linspace(-3, 3, 20).double().reshape(10, 2)
    peer = GaussianProcessRegressor(PEERS[kernel], alpha=NOISE**2, optimizer=None)
    peer.fit(x.numpy(), y.numpy()[:, 0])
    mean, covariance = peer.predict(x_new.numpy(), return_cov=True)
    posterior = fixed((x, y), kernel)
    p = posterior.predict(x_new)
    assert np.allclose(p.mean[:, 0], mean, rtol=1e-8, atol=1e-9)
    assert np.allclose(p.epistemic[:, 0], np.diag(covariance), rtol=1e-6, atol=1e-9)
    assert np.allclose(p.aleatoric, NOISE**2)
    evidence = peer.log_marginal_likelihood_value_
    assert posterior.log_evidence == pytest.approx(evidence, rel=1e-9)


def test_fitted_hyper_parameters_are_those_of_scikit_learn() -> None:
    x, y = rows(40)
    kernel = ConstantKernel(1.0) * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    peer = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=0)
    peer.fit(x.numpy(), y.numpy()[:, 0])
    ours = doxa.fit(None, (x, y), doxa.GP(ard=True, hyperprior=False))
    assert ours.log_evidence == pytest.approx(peer.log_marginal_likelihood_value_, abs=1e-5)
    assert float(ours.log_noise.exp()) == pytest.approx(
        math.sqrt(peer.kernel_.k2.noise_level), rel=1e-3
    )
    lengths = ours.diagnostics["kernel"]["rbf.lengthscale"]
    assert np.allclose(np.ravel(lengths), peer.kernel_.k1.k2.length_scale, rtol=1e-2)


def test_several_outputs_share_the_kernel() -> None:
    x, y = rows(outputs=3)
    together = fixed((x, y))
    alone = [fixed((x, y[:, o])) for o in range(3)]
    p = together.predict(x[:6])
    assert p.mean.shape == (6, 3)
    assert together.log_evidence == pytest.approx(sum(each.log_evidence for each in alone))
    for o in range(3):
        assert torch.allclose(p.mean[:, o], alone[o].predict(x[:6]).mean)


def test_outputs_that_share_a_noise_level_count_the_constant_each() -> None:
    """scipy's log N(y_o; 0, K + σ²I), added up over three outputs, at a noise that is not given."""
    x, y = rows(outputs=3)
    method = doxa.GP("rbf", lengthscale=0.8, variance=1.5, learn_kernel=False)
    ours = doxa.fit(None, (x, y), method)
    assert ours.log_noise.shape == (1,)
    kernel = 1.5 * np.exp(-0.5 * np.square(x.numpy()[:, None] - x.numpy()[None]).sum(2) / 0.8**2)
    covariance = kernel + float(ours.log_noise.exp()) ** 2 * np.eye(len(x))
    want = multivariate_normal(np.zeros(len(x)), covariance).logpdf(y.numpy().T).sum()
    assert ours.log_evidence == pytest.approx(want, rel=1e-8)


def test_each_output_may_have_its_own_noise() -> None:
    x, y = rows(60, outputs=2)
    y[:, 1] += torch.from_numpy(np.random.default_rng(7).normal(size=60))
    learned = doxa.fit(None, (x, y), "gp", likelihood=doxa.Gaussian(per_output=True))
    quiet, loud = learned.log_noise.exp()[0].tolist()
    assert quiet < 0.4 < loud
    given = doxa.fit(
        None, (x, y), doxa.GP(learn_kernel=False), likelihood=doxa.Gaussian(noise=(0.2, 0.9))
    )
    assert torch.allclose(given.predict(x).aleatoric[0], torch.tensor([0.04, 0.81]).double())


def test_draws_are_joint_over_rows() -> None:
    """5,000 draws at 4 rows: 16 covariances within 5 standard errors (chance 1e-5)."""
    x, y = rows()
    x_new = torch.tensor([[0.0, 0.0], [0.1, 0.0], [3.0, 3.0], [3.2, 3.0]]).double()
    peer = GaussianProcessRegressor(PEERS["rbf"], alpha=NOISE**2, optimizer=None)
    mean, covariance = peer.fit(x, y[:, 0]).predict(x_new.numpy(), return_cov=True)
    f = fixed((x, y)).functions(x_new, 5000)[..., 0].numpy()
    variance = np.diag(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / 5000)
    assert (np.abs(np.cov(f.T) - covariance) < 5 * error).all()
    assert (np.abs(f.mean(0) - mean) < 5 * np.sqrt(variance / 5000)).all()


def test_draws_at_repeated_rows_agree() -> None:
    x, y = rows()
    f = fixed((x, y)).functions(x[[0, 0, 1]], 20)
    assert torch.allclose(f[:, 0], f[:, 1], atol=1e-4)


def test_conditioning_is_refitting() -> None:
    x, y = rows(40, outputs=2)
    whole = fixed((x, y))
    part = fixed((x[:25], y[:25])).condition(x[25:], y[25:])
    assert part.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)
    assert torch.allclose(part.predict(x).mean, whole.predict(x).mean, rtol=1e-9)
    assert torch.allclose(part.predict(x).variance, whole.predict(x).variance, rtol=1e-9)


def test_rows_that_are_added_to_weighted_ones_weigh_one(tmp_path: Path) -> None:
    """As a fit to all rows, the new ones with weight 1; also after saving, where the factor is
    computed anew."""
    x, y = rows()
    weight = torch.linspace(0.2, 2.0, 25).double()
    part = fixed((x[:25], y[:25]), sample_weight=weight).condition(x[25:], y[25:])
    whole = fixed((x, y), sample_weight=torch.cat([weight, torch.ones(5).double()]))
    part.save(tmp_path / "run")
    for found in (part, doxa.load(tmp_path / "run")):
        assert torch.allclose(found.predict(x).mean, whole.predict(x).mean, atol=1e-9)
        assert torch.allclose(found.predict(x).variance, whole.predict(x).variance, atol=1e-9)


def test_members_with_the_same_hyper_parameters_have_one_evidence() -> None:
    """The mean of three evidences that are the same, by scipy: not their sum."""
    x, y = rows()
    method = doxa.GP(noise=NOISE, lengthscale=0.9, variance=1.3, learn_kernel=False)
    distance = torch.cdist(x, x).square()
    covariance = 1.3 * (-0.5 * distance / 0.81).exp() + NOISE**2 * torch.eye(30).double()
    want = multivariate_normal(np.zeros(30), covariance.numpy()).logpdf(y[:, 0].numpy())
    assert doxa.fit(None, (x, y), method, members=3).log_evidence == pytest.approx(want, rel=1e-9)


def test_conditioning_extends_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows more: what is decomposed is 5 × 5, for both members at once."""
    x, y = rows(40)
    posterior = doxa.fit(None, (x[:35], y[:35]), doxa.GP(refine=1), members=2)
    sizes, decompose = [], torch.linalg.cholesky_ex

    def counted(matrix: Tensor, *args: Any, **kw: Any) -> Any:
        sizes.append(tuple(matrix.shape))
        return decompose(matrix, *args, **kw)

    monkeypatch.setattr("torch.linalg.cholesky_ex", counted)
    posterior.condition(x[35:], y[35:]).predict(x)
    assert sizes == [(2, 1, 5, 5)]


def test_conditioning_chains_in_the_units_of_y() -> None:
    x, y = rows(30)
    y = 50 * y + 10
    now = fixed((x[:20], y[:20]), noise=10.0, standardize=True)
    gain = now.condition(x[20:], y[20:]).log_evidence - now.log_evidence
    chained = 0.0
    for i in range(20, 30):
        chained += float(now.predict(x[i : i + 1]).log_prob(y[i : i + 1]))
        now = now.condition(x[i : i + 1], y[i : i + 1])
    assert gain == pytest.approx(chained, rel=1e-8)


def test_row_weights_count_rows() -> None:
    """A weight of 2 is a row twice, a weight of 0 no row."""
    x, y = rows(20)
    weight = torch.ones(20).double()
    weight[:5], weight[5:8] = 2.0, 0.0
    index = torch.cat([torch.arange(5), torch.arange(5), torch.arange(8, 20)])
    weighted, repeated = fixed((x, y), sample_weight=weight), fixed((x[index], y[index]))
    assert torch.allclose(weighted.predict(x).mean, repeated.predict(x).mean)
    assert torch.allclose(weighted.predict(x).variance, repeated.predict(x).variance)
    assert weighted.log_evidence is None


def test_runs_of_unequal_length_are_separate_fits() -> None:
    x, y = rows(30)
    splits = [torch.arange(18), torch.arange(5, 30)]
    options: dict[str, Any] = {"steps": 30, "standardize": True}
    sweep = doxa.fit(None, (x, y), "gp", runs=doxa.Runs(rows=splits), **options)
    for run, split in zip(sweep, splits, strict=True):
        alone = doxa.fit(None, (x[split], y[split]), "gp", **options)
        assert run.log_evidence == pytest.approx(alone.log_evidence, rel=1e-8)
        assert torch.allclose(run.predict(x).mean, alone.predict(x).mean, rtol=1e-6)


def test_a_grid_over_lengthscales() -> None:
    data = rows()
    method = doxa.GP(noise=NOISE, variance=1.3, learn_kernel=False)
    sweep = doxa.fit(None, data, method, runs=doxa.Runs(grid={"lengthscale": [0.1, 0.9]}))
    for run, lengthscale in zip(sweep, (0.1, 0.9), strict=True):
        alone = fixed(data, lengthscale=lengthscale)
        assert run.log_evidence == pytest.approx(alone.log_evidence, rel=1e-10)
    assert sweep.select("evidence") is sweep[1]


def test_members_start_elsewhere_and_are_averaged() -> None:
    x, y = rows()
    method = doxa.GP(refine=0)
    posterior = doxa.fit(None, (x, y), method, members=3, steps=5)
    assert len({tuple(row) for row in posterior.hyper.tolist()}) == 3
    p = posterior.predict(x)
    alone = doxa.fit(None, (x, y), method, members=[2], steps=5)
    assert torch.equal(alone.hyper[0], posterior.hyper[2])
    assert p.mean.shape == (30, 1)
    assert posterior.functions(x, 4).shape == (4, 30, 1)


def test_scale_of_the_data_does_not_matter() -> None:
    """x and y in other units, without standardisation: the same fit, in those units."""
    x, y = rows(40)
    one = doxa.fit(None, (x, y), "gp", steps=100)
    other = doxa.fit(None, (1e4 * x, 1e3 * y), "gp", steps=100)
    assert torch.allclose(other.predict(1e4 * x).mean, 1e3 * one.predict(x).mean, rtol=1e-6)
    change = -40 * math.log(1e3)
    assert other.log_evidence - one.log_evidence == pytest.approx(change, rel=1e-8)


def test_hyper_parameters_are_logarithms() -> None:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = (torch.tensor(v).double() for v in (2, 3))
    function = KernelFunction(kernel)
    assert torch.allclose(function.start().exp(), torch.tensor([2.0, 3.0]).double())
    x = rows(5)[0]
    logs = torch.tensor([0.5, -0.2]).double()
    expected = math.exp(0.5) * (-0.5 * torch.cdist(x, x).square() / math.exp(-0.4)).exp()
    assert torch.allclose(function(logs, x, x), expected, rtol=1e-8)
    assert torch.allclose(function(logs, x, x, True), expected.diagonal(), rtol=1e-8)
    assert float(kernel.outputscale.detach()) == pytest.approx(2.0)  # the module is not changed


@pytest.mark.parametrize("levels", [1, 2])
def test_the_evidences_gradient(levels: int) -> None:
    """By differences, for two members with weights, a padding row and shared or own noise."""
    x, y = rows(8, outputs=2)
    weight = torch.tensor([1.0, 2.0, 0.5, 1, 1, 1, 1, 0]).double().expand(2, -1)
    kernel = Composed("rbf * linear + matern32", 2)
    problem = Problem(kernel, x, y, weight, weight.sum(1), None)
    logs = 0.3 * torch.from_numpy(np.random.default_rng(0).normal(size=(2, 6 + levels)))
    assert torch.autograd.gradcheck(lambda t: Evidence.apply(t, problem), logs.requires_grad_())


@pytest.mark.filterwarnings("error")
def test_a_sum_with_a_linear_kernel_has_no_jitter() -> None:
    x, _ = rows(20)
    kernel = (gpytorch.kernels.RBFKernel() + gpytorch.kernels.LinearKernel()).double()
    function = KernelFunction(kernel)
    zero = torch.zeros(2).double()
    expected = (-0.5 * torch.cdist(x, x).square()).exp() + x @ x.T
    assert torch.allclose(function(zero, x, x), expected, rtol=1e-12, atol=1e-13)


def test_refining_reaches_the_top() -> None:
    """The gradient of the evidence vanishes, for a kernel of four hyper-parameters."""
    x, y = rows(40)
    posterior = doxa.fit(None, (x, y), doxa.GP("matern", hyperprior=False))
    logs = torch.cat([posterior.hyper, posterior.log_noise[:, None]], 1)
    problem = Problem(posterior.kernel, x, y, None, torch.tensor([40.0]).double(), None)
    assert problem.gradient(logs, problem.solve(logs)).abs().max() < 1e-3


@pytest.mark.parametrize(("count", "weight"), [(49, 1.0), (50, 0.0)])
def test_few_rows_have_a_prior_over_hyper_parameters(count: int, weight: float) -> None:
    """At the top, the gradient of the evidence is that of ½ Σ (log θ − log θ₀)²; of 50 rows 0."""
    x = torch.linspace(-2, 2, count, dtype=torch.float64)[:, None]
    y = torch.sin(3 * x) + 0.2 * torch.randn(
        x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    posterior = doxa.fit(None, (x, y), "gp")
    logs = torch.cat([posterior.hyper, posterior.log_noise[:, None]], 1)
    n = torch.tensor([float(count)]).double()
    problem = Problem(posterior.kernel, x, y, None, n, None)
    centre = torch.stack([  # variance, lengthscale, noise
        y.square().mean(), 2**0.5 * x.std(correction=0), 0.5 * y.std(correction=0)
    ]).log()  # fmt: skip
    slope = problem.gradient(logs, problem.solve(logs))
    torch.testing.assert_close(slope, weight * (logs - centre), atol=2e-3, rtol=0)
    same = doxa.fit(None, (x, y), doxa.GP(hyperprior=count < 50))
    assert torch.equal(same.hyper, posterior.hyper)


def test_intervals_hold_with_twelve_rows() -> None:
    """Ten tables with six columns. Without a prior the noise fell to zero in three fits, and the
    intervals of the others held .65 at −1.9 nats below a constant."""
    held, gains = [], []
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(1012, 6, generator=g)
        y = x[:, 0] + 0.5 * torch.randn(1012, generator=g)
        posterior = doxa.fit(None, (x[:12], y[:12]), "gp", standardize=True)
        assert posterior.status == "ok", posterior.status.reason
        p, new = posterior.predict(x[12:]), y[12:]
        low, high = p.interval(0.9)
        held.append(float(((new >= low) & (new <= high)).float().mean()))
        constant = torch.distributions.Normal(y[:12].mean(), y[:12].std()).log_prob(new)
        gains.append(float((p.log_prob(new) - constant).mean()))
    assert sum(held) / 10 > 0.78  # a standard error of 0.02
    assert sum(gains) / 10 > 0


def test_noise_that_vanishes_is_said() -> None:
    """Rows that repeat each other: the evidence has no top, and grows as σ falls."""
    x, y = rows(12)
    posterior = doxa.fit(None, (x.repeat(3, 1), y.repeat(3, 1)), "gp")
    assert posterior.status == "degenerate"
    assert "noise=" in posterior.status.reason
    assert float(posterior.log_noise.exp()) == pytest.approx(1e-3 * float(y.std(correction=0)))


def test_a_fit_that_stops_short_says_so() -> None:
    x, y = rows(40)
    posterior = doxa.fit(None, (x, y), doxa.GP(refine=1), steps=1)
    assert posterior.status == "not-converged"
    assert "raise refine" in posterior.status.reason
    assert doxa.fit(None, (x, y), "gp").status == "ok"


@register_kernel("test-sum")
def summed(lengthscale: float) -> gpytorch.kernels.Kernel:
    smooth = gpytorch.kernels.RBFKernel()
    smooth.lengthscale = lengthscale
    return smooth + gpytorch.kernels.LinearKernel()


@pytest.mark.parametrize("kernel", ["rbf", "matern", "linear", "built"])
def test_saved_and_loaded_without_training_data(tmp_path: Path, kernel: str) -> None:
    x, y = rows(outputs=2)
    made = summed(lengthscale=0.7) if kernel == "built" else kernel
    posterior = doxa.fit(None, (x, y), doxa.GP(made), steps=5, standardize=True)
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert loaded.log_evidence == posterior.log_evidence
    assert loaded.method == posterior.method
    assert torch.equal(loaded.predict(x).variance, posterior.predict(x).variance)
    assert torch.equal(loaded.functions(x, 3), posterior.functions(x, 3))
    assert loaded.condition(x, y).log_evidence == posterior.condition(x, y).log_evidence


def test_a_kernel_starts_from_its_own_values() -> None:
    data = rows()
    kernel = summed(lengthscale=0.7)
    kernel.kernels[1].variance = 2.5
    posterior = doxa.fit(None, data, doxa.GP(kernel, learn_kernel=False, noise=NOISE))
    peer = GaussianProcessRegressor(
        RBF(0.7) + 2.5 * DotProduct(0.0, "fixed"), alpha=NOISE**2, optimizer=None
    ).fit(data[0], data[1][:, 0])
    evidence = peer.log_marginal_likelihood_value_
    assert posterior.log_evidence == pytest.approx(evidence, rel=1e-6)  # 0.7 is float32 in it
    doxa.fit(None, data, doxa.GP(kernel), steps=3)
    assert float(kernel.kernels[1].variance.detach()) == 2.5  # the user's kernel is not changed


def test_an_unregistered_kernel_works_but_is_not_saved(tmp_path: Path) -> None:
    x, y = rows()
    kernel = gpytorch.kernels.RBFKernel()
    kernel.builder = "an attribute of the user's own"
    posterior = doxa.fit(None, (x, y), doxa.GP(kernel), steps=3)
    assert torch.isfinite(posterior.predict(x).mean).all()
    with pytest.raises(StoreError, match="register_kernel"):
        posterior.save(tmp_path / "run")


def test_float32_data_is_computed_in_float64() -> None:
    """Smooth data without noise: K + σ²I has a condition number of 1e10."""
    x = torch.linspace(0, 1, 60)[:, None]
    y = (3 * x).sin()
    p = fixed((x, y), noise=1e-4, lengthscale=1.0, variance=1.0).predict(x)
    assert p.mean.dtype == torch.float32
    assert (p.mean - y).abs().max() < 1e-3


def test_one_row() -> None:
    x, y = rows(1)
    p = doxa.fit(None, (x, y), "gp", steps=5).predict(x)
    assert torch.isfinite(p.mean).all()
    assert (p.variance > 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "spline"}, "kernel must be .* no kernel 'spline'"),
        ({"kernel": 3}, "kernel must be"),
        ({"noise": 0.0}, "noise must be positive"),
        ({"kernel": gpytorch.kernels.RBFKernel(), "lengthscale": 1.0}, "named kernels"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        doxa.GP(**settings)


def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows()
    with pytest.raises(MethodError, match="Gaussian"):
        doxa.fit(None, (x, y), "gp", likelihood="student-t")
    with pytest.raises(ModelError, match="pass None"):
        doxa.fit(nn.Linear(2, 1).double(), (x, y), "gp")
    with pytest.raises(DataError, match="one array"):
        doxa.fit(None, (torch.zeros(30, 2, 2), y), "gp")
    posterior = fixed((x, y))
    monkeypatch.setattr("doxa.posterior.process.free_memory", lambda device: 1000)
    with pytest.raises(MemoryBudgetError, match="joint draws"):
        posterior.functions(x)
