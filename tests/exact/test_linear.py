"""BayesianLinear against closed forms, scipy and refits; the anchor is in statistical/."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, MethodError, ShapeError, StoreError, Unavailable


def rows(n: int = 30, inputs: int = 2, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, inputs))
    y = x @ rng.normal(size=(inputs, outputs)) + 0.5 + 0.3 * rng.normal(size=(n, outputs))
    return torch.from_numpy(x), torch.from_numpy(y)


def marginal(phi: Any, y: Any, noise: float, std: float) -> float:
    """log N(y; 0, σ²I + s²ΦΦᵀ), the columns of y independent."""
    phi, y = np.asarray(phi), np.asarray(y)
    normal = multivariate_normal(
        np.zeros(len(phi)), noise**2 * np.eye(len(phi)) + std**2 * phi @ phi.T
    )
    return float(sum(normal.logpdf(column) for column in y.T))


def fit(data: tuple[Tensor, Tensor], runs: Any = None, **settings: Any) -> Any:
    features = settings.pop("features", None)
    options = {k: settings.pop(k) for k in ("standardize", "sample_weight") if k in settings}
    method = doxa.BayesianLinear(features, **settings)
    return doxa.fit(None, data, method, runs=runs, **options)


def test_several_outputs_are_independent_regressions() -> None:
    x, y = rows(outputs=3)
    together = fit((x, y), noise=0.3, prior_std=2.0)
    phi = np.column_stack([x, np.ones(len(x))])
    assert together.log_evidence == pytest.approx(marginal(phi, y, 0.3, 2.0), rel=1e-10)
    p = together.predict(x)
    for o in range(3):
        alone = fit((x, y[:, o]), noise=0.3, prior_std=2.0).predict(x)
        assert torch.allclose(p.mean[:, o], alone.mean, rtol=1e-10)
        assert torch.allclose(p.variance[:, o], alone.variance, rtol=1e-10)


@pytest.mark.parametrize("given", [{}, {"noise": 0.4}, {"prior_std": 0.7}])
def test_evidence_is_at_its_maximum(given: dict[str, float]) -> None:
    """scipy's maximum of the marginal density from several starts is not above ours."""
    x, y = rows(n=25)
    phi = np.column_stack([x, np.ones(25)])
    ours = fit((x, y), **given)
    names = [name for name in ("noise", "prior_std") if name not in given]

    def loss(logs: Any) -> float:
        chosen = given | dict(zip(names, np.exp(logs), strict=True))
        return -marginal(phi, y, chosen["noise"], chosen["prior_std"])

    starts = [np.full(len(names), v) for v in (-2.0, 0.0, 1.0)]
    best = max(-minimize(loss, s, method="Nelder-Mead", tol=1e-10).fun for s in starts)
    assert ours.log_evidence == pytest.approx(best, abs=1e-7)


def test_each_output_may_have_its_own_noise() -> None:
    """At the maximum over (σ_1, σ_2, s) no step to either side gains."""
    x, y = rows(n=60, outputs=2)
    y[:, 1] += torch.from_numpy(np.random.default_rng(9).normal(size=60))
    ours = doxa.fit(None, (x, y), "linear", likelihood=doxa.Gaussian(per_output=True))
    assert ours.noise.shape == (1, 2)
    noise, std = ours.noise[0].numpy(), float(ours.prior_std)
    assert noise[0] < 0.5 < noise[1]
    phi = np.column_stack([x, np.ones(60)])

    def total(noise: Any, std: float) -> float:
        return sum(marginal(phi, y[:, o : o + 1], noise[o], std) for o in range(2))

    best = total(noise, std)
    assert ours.log_evidence == pytest.approx(best, rel=1e-10)
    for o in range(2):
        for factor in (0.99, 1.01):
            moved = noise.copy()
            moved[o] *= factor
            assert total(moved, std) < best
    assert max(total(noise, 0.98 * std), total(noise, 1.02 * std)) < best


def test_maximum_likelihood_noise() -> None:
    x, y = rows()
    ours = fit((x, y), tune="ml")
    phi = np.column_stack([x, np.ones(len(x))])
    residual = y.numpy() - phi @ np.linalg.lstsq(phi, y.numpy(), rcond=None)[0]
    assert float(ours.noise) == pytest.approx(math.sqrt(np.mean(residual**2)), rel=1e-10)
    assert float(ours.prior_std) == 1.0


def test_conditioning_is_refitting() -> None:
    x, y = rows(n=40, outputs=2)
    settings = {"noise": 0.3, "prior_std": 1.5, "features": "polynomial", "degree": 2}
    whole = fit((x, y), **settings)
    part = fit((x[:25], y[:25]), **settings).condition(x[25:], y[25:])
    assert part.log_evidence == pytest.approx(whole.log_evidence, rel=1e-10)
    assert torch.allclose(part.predict(x).mean, whole.predict(x).mean, rtol=1e-10)
    assert torch.allclose(part.predict(x).variance, whole.predict(x).variance, rtol=1e-10)
    with pytest.raises(ShapeError, match="3 rows and y 2"):
        part.condition(x[:3], y[:2])


def test_conditioning_in_the_units_of_y() -> None:
    x, y = rows(n=40)
    first = fit((x[:30], 100 * y[:30] + 7), noise=30.0, prior_std=1.0, standardize=True)
    more = first.condition(x[30:], 100 * y[30:] + 7)
    gain = more.log_evidence - first.log_evidence  # = log p(new | old), which chains
    chained = 0.0
    for i in range(30, 40):
        target = 100 * y[i : i + 1] + 7
        chained += float(first.predict(x[i : i + 1]).log_prob(target))
        first = first.condition(x[i : i + 1], target)
    assert gain == pytest.approx(chained, rel=1e-9)


def test_standardisation_is_counted_in_the_evidence() -> None:
    """y in other units: the density changes by the Jacobian, the noise by the scale."""
    x, y = rows()
    one, other = (fit((x, scale * y + 3.0), standardize=True) for scale in (1.0, 1000.0))
    change = -len(x) * math.log(1000.0)
    assert other.log_evidence - one.log_evidence == pytest.approx(change, rel=1e-9)
    assert float(other.noise) == pytest.approx(1000 * float(one.noise), rel=1e-9)
    assert torch.allclose(other.predict(x).mean, 1000 * (one.predict(x).mean - 3) + 3, rtol=1e-9)


def test_runs_of_unequal_length_are_separate_fits() -> None:
    x, y = rows(n=40)
    splits = [range(25), range(40), range(10, 40)]
    sweep = fit((x, y), doxa.Runs(rows=splits), standardize=True)
    for run, split in zip(sweep, splits, strict=True):
        index = torch.tensor(list(split))
        alone = fit((x[index], y[index]), standardize=True)
        assert run.log_evidence == pytest.approx(alone.log_evidence, rel=1e-9)
        assert torch.allclose(run.predict(x).mean, alone.predict(x).mean, rtol=1e-8)


def test_a_grid_over_degree_is_separate_fits() -> None:
    x, y = rows(n=40)
    degrees = [0, 1, 2, 4]
    settings: dict[str, Any] = {"features": "polynomial", "noise": 0.5}
    sweep = fit((x, y), doxa.Runs(grid={"degree": degrees}), **settings)
    for run, degree in zip(sweep, degrees, strict=True):
        alone = fit((x, y), degree=degree, **settings)
        assert run.mean.shape == alone.mean.shape
        assert run.log_evidence == pytest.approx(alone.log_evidence, rel=1e-8)
        assert torch.allclose(run.predict(x).variance, alone.predict(x).variance, rtol=1e-6)


def test_polynomial_features_are_all_monomials() -> None:
    from sklearn.preprocessing import PolynomialFeatures

    x, y = rows(inputs=3)
    phi = fit((x, y), features="polynomial", degree=3).features(x).numpy()
    theirs = PolynomialFeatures(3).fit_transform(x.numpy())
    assert phi.shape == theirs.shape == (30, 20)
    order = np.lexsort(phi.round(9)), np.lexsort(theirs.round(9))
    assert np.allclose(phi[:, order[0]], theirs[:, order[1]])


@pytest.mark.slow
def test_fourier_features_approach_the_squared_exponential_kernel() -> None:
    """φᵀφ' over 2,000 waves: standard error of a mean of cosines below 1/√2000."""
    x, y = rows(n=6)
    method = {"features": "fourier", "count": 2000, "lengthscale": 0.8, "intercept": False}
    phi = fit((x, y), noise=0.5, prior_std=1.0, **method).features(x)
    kernel = (-0.5 * torch.cdist(x, x).square() / 0.8**2).exp()
    assert (phi @ phi.T - kernel).abs().max() < 5 / math.sqrt(2000)


def test_radial_features_sit_on_training_rows() -> None:
    x, y = rows(n=12)
    posterior = fit((x, y), features="rbf", count=5, lengthscale=0.5, intercept=False, noise=0.3)
    centres = posterior.feature_tensors["centres"][0]
    assert all((x == centre).all(1).any() for centre in centres)
    expected = (-0.5 * torch.cdist(x, centres).square() / 0.25).exp()
    assert torch.allclose(posterior.features(x), expected)


def test_a_networks_last_hidden_layer() -> None:
    """The features are what goes into the last layer at the weights the network came with."""
    x, y = rows()
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    before = [p.clone() for p in net.parameters()]
    posterior = doxa.fit(net, (x, y), doxa.BayesianLinear(noise=0.3, prior_std=1.0), init="given")
    phi = np.column_stack([net[:2](x).detach(), np.ones(len(x))])
    assert posterior.log_evidence == pytest.approx(marginal(phi, y, 0.3, 1.0), rel=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    same = fit((x, y), features=lambda rows: net[:2](rows), noise=0.3, prior_std=1.0)
    assert same.log_evidence == pytest.approx(posterior.log_evidence, rel=1e-12)


def test_row_weights_count_rows() -> None:
    x, y = rows(n=20)
    weight = torch.ones(20).double()
    weight[:5], weight[5:8] = 2.0, 0.0
    weighted = fit((x, y), noise=0.3, prior_std=1.0, sample_weight=weight)
    index = torch.cat([torch.arange(5), torch.arange(5), torch.arange(8, 20)])
    repeated = fit((x[index], y[index]), noise=0.3, prior_std=1.0)
    assert torch.allclose(weighted.predict(x).mean, repeated.predict(x).mean, rtol=1e-10)
    assert torch.allclose(weighted.predict(x).variance, repeated.predict(x).variance, rtol=1e-10)
    assert weighted.log_evidence is None


def test_draws_have_the_posteriors_moments() -> None:
    """4,000 draws: means within 4 standard errors, 9 of them (chance 6e-4)."""
    x, y = rows(outputs=3)
    posterior = fit((x, y), noise=0.3, prior_std=1.0)
    weight = posterior.draw(4000)["weight"]
    error = posterior.covariance.diagonal()[0].sqrt()[:, None] / math.sqrt(4000)
    assert ((weight.mean(0) - posterior.mean[0]).abs() < 4 * error).all()
    f = posterior.functions(x, 4000)
    assert f.shape == (4000, 30, 3)
    assert torch.allclose(f, posterior.features(x) @ weight, rtol=1e-9)
    assert torch.equal(f[:5], posterior.functions(x, 5))


@pytest.mark.parametrize("features", [None, "polynomial", "rbf", "fourier"])
def test_saved_and_loaded(tmp_path: Path, features: str | None) -> None:
    x, y = rows(outputs=2)
    posterior = fit((x, y), features=features, count=7, standardize=True)
    posterior.save(tmp_path / "run")
    loaded = doxa.load(tmp_path / "run")
    assert loaded.log_evidence == posterior.log_evidence
    assert torch.equal(loaded.predict(x).mean, posterior.predict(x).mean)
    assert torch.equal(loaded.functions(x, 3), posterior.functions(x, 3))
    assert loaded.condition(x, y).log_evidence == posterior.condition(x, y).log_evidence


def test_a_plain_function_cannot_be_saved(tmp_path: Path) -> None:
    x, y = rows()
    with pytest.raises(StoreError, match=r"method\.features"):
        fit((x, y), features=lambda rows: rows).save(tmp_path / "run")


def test_float32_data_is_computed_in_float64() -> None:
    """Columns 1, t, …, t⁵ with t near 20: their products do not fit float32."""
    t = torch.linspace(19, 21, 50)[:, None]
    y = (t - 20) ** 2
    posterior = fit((t, y), features="polynomial", degree=5, noise=0.1, prior_std=10.0)
    p = posterior.predict(t)
    assert p.mean.dtype == torch.float32
    assert (p.mean - y).abs().max() < 0.2


@pytest.mark.parametrize("n", [1, 2])
def test_hardly_any_rows(n: int) -> None:
    x, y = rows(n=n)
    p = fit((x, y)).predict(x)
    assert torch.isfinite(p.mean).all()
    assert (p.variance > 0).all()


def test_more_features_than_rows() -> None:
    x, y = rows(n=8, inputs=20)
    posterior = fit((x, y), noise=0.3, prior_std=1.0)
    phi = np.column_stack([x, np.ones(8)])
    assert posterior.log_evidence == pytest.approx(marginal(phi, y, 0.3, 1.0), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "spline"}, "polynomial"),
        ({"tune": "magic"}, "tune"),
        ({"noise": -1.0}, "noise must be positive"),
        ({"prior_std": 0.0}, "prior_std must be positive"),
        ({"features": "polynomial", "degree": 0, "intercept": False}, "no features"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        doxa.BayesianLinear(**settings)


def test_what_it_cannot_do() -> None:
    x, y = rows()
    with pytest.raises(MethodError, match="Gaussian"):
        doxa.fit(None, (x, y), "linear", likelihood="student-t")
    with pytest.raises(MethodError, match="give noise"):
        fit((x, y), tune=None)
    with pytest.raises(MethodError, match="both given"):
        doxa.fit(nn.Linear(2, 1).double(), (x, y), doxa.BayesianLinear("rbf"))
    with pytest.raises(MethodError, match="monomials"):
        fit(rows(inputs=40), features="polynomial", degree=6)
    with pytest.raises(MethodError, match=r"'count'.*a grid may vary.*'degree', 'lengthscale'"):
        fit((x, y), doxa.Runs(grid={"count": [3, 5]}), features="rbf")
    with pytest.raises(MethodError, match="different shapes"):
        fit((x, y), doxa.Runs(grid={"degree": [1, 2]}), features="rbf")
    with pytest.raises(MethodError, match="degree must be a whole number"):
        fit((x, y), doxa.Runs(grid={"degree": [1, 1.5]}), features="polynomial")
    with pytest.raises(DataError, match="row 3"):
        bad = x.clone()
        bad[3, 1] = math.nan
        fit((bad, y))
    posterior = fit((x, y))
    with pytest.raises(Unavailable):
        posterior.to_arviz()
    with pytest.raises(ShapeError):
        posterior.predict(torch.zeros(3, 5).double())


def networks(seed: int = 0, **options: Any) -> Any:
    """A fit on the last hidden layer of a network whose own weights differ from call to call."""
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = rows()
    method = doxa.BayesianLinear(noise=0.3, prior_std=1.0)
    posterior = doxa.fit(net, (x, y), method, seed=seed, progress=False, **options)
    return posterior, net


def test_a_networks_features_come_from_the_seed() -> None:
    x, _ = rows()
    means = [networks()[0].predict(x).mean for _ in range(3)]
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    assert not torch.allclose(means[0], networks(seed=1)[0].predict(x).mean)


def test_members_have_features_of_their_own() -> None:
    """Member 1 of two is the same as member 1 alone; from given weights both are the same."""
    x, _ = rows()
    both, alone = networks(members=2)[0], networks(members=[1])[0]
    assert both.theta.shape[0] == 2
    assert torch.allclose(both.mean[1], alone.mean[0], rtol=0, atol=1e-12)
    assert not torch.allclose(both.mean[0], both.mean[1])
    halves = torch.stack([networks(members=[m])[0].predict(x).mean for m in (0, 1)])
    assert torch.allclose(both.predict(x).mean, halves.mean(0), rtol=0, atol=1e-12)
    given, net = networks(members=2, init="given")
    assert torch.equal(given.mean[0], given.mean[1])
    assert torch.allclose(given.features(x)[:, :5], net[:2](x), rtol=0, atol=1e-12)
