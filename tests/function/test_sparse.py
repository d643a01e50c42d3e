"""SparseGP against the exact GP, Titsias's bound, and gpytorch's own variational GP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm
from scipy.stats import t as student
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern
from sparse_cases import NOISE, fixed, rows
from torch import Tensor
from torch.utils.data import Dataset

import doxa
from doxa.errors import DataError, MethodError, ModelError, Unavailable
from doxa.function import inducing as points
from doxa.function.inducing import features
from doxa.function.kernels import Composed
from doxa.function.variational import expected_log_prob

PEERS = {
    "rbf": 1.3 * RBF(0.9),
    "matern": 1.3 * Matern(0.9, nu=2.5),
    "linear": 1.3 * DotProduct(0.0, "fixed"),
}


def rbf(a: Tensor, b: Tensor) -> np.ndarray[Any, Any]:
    squares = np.square(a.numpy()[:, None] - b.numpy()[None]).sum(2)
    return np.asarray(1.3 * np.exp(-0.5 * squares / 0.9**2))


@pytest.mark.parametrize("kernel", PEERS)
def test_points_at_the_rows_are_the_exact_process(kernel: str) -> None:
    x, y = rows()
    x_new = torch.linspace(-3, 3, 20).double().reshape(10, 2)
    peer = GaussianProcessRegressor(PEERS[kernel], alpha=NOISE**2, optimizer=None)
    mean, covariance = peer.fit(x, y[:, 0]).predict(x_new.numpy(), return_cov=True)
    posterior = fixed((x, y), 30, kernel, batch_size=7)
    p = posterior.predict(x_new)
    assert np.allclose(p.mean[:, 0], mean, atol=1e-5)
    assert np.allclose(p.epistemic[:, 0], np.diag(covariance), atol=1e-5)
    assert posterior.elbo == pytest.approx(peer.log_marginal_likelihood_value_, abs=1e-4)


def test_the_bound_is_that_of_titsias() -> None:
    """log N(y; 0, Q + σ²I) − tr(K − Q)/2σ² with Q = K_XZ K_ZZ⁻¹ K_ZX, below the evidence; in
    units of y."""
    x, y = rows()
    posterior = fixed((x, y), 8)
    z = posterior.points[0]
    cross = rbf(x, z)
    q = cross @ np.linalg.solve(rbf(z, z), cross.T)
    density = multivariate_normal(np.zeros(30), q + NOISE**2 * np.eye(30))
    want = density.logpdf(y[:, 0]) - (30 * 1.3 - np.trace(q)) / (2 * NOISE**2)
    assert posterior.elbo == pytest.approx(want, abs=1e-4)
    exact = multivariate_normal(np.zeros(30), rbf(x, x) + NOISE**2 * np.eye(30))
    assert posterior.elbo < exact.logpdf(y[:, 0]) - 1
    scaled = doxa.fit(
        None, (x, 10 * y), doxa.SparseGP(inducing=8, learn_kernel=False), steps=1,
        likelihood=doxa.Gaussian(noise=2.0), standardize=True,
    )  # fmt: skip
    one = doxa.fit(
        None, (x, y), doxa.SparseGP(inducing=8, learn_kernel=False), steps=1,
        likelihood=doxa.Gaussian(noise=NOISE), standardize=True,
    )  # fmt: skip
    assert scaled.elbo == pytest.approx(one.elbo - 30 * math.log(10), abs=1e-6)


def test_rows_added_later_are_rows_of_the_fit() -> None:
    """The predictive of Titsias (2009) with all rows, at the points of the first ones."""
    x, y = rows(40)
    posterior = fixed((x[:25], y[:25]), 10)
    z = posterior.points[0]
    new = posterior.condition(x[25:33], y[25:33]).condition(x[33:], y[33:])
    at = torch.linspace(-2, 2, 12).double().reshape(6, 2)
    inner = np.linalg.inv(rbf(z, z) + rbf(z, x) @ rbf(x, z) / NOISE**2)
    mean = rbf(at, z) @ inner @ rbf(z, x) @ y.numpy() / NOISE**2
    less = np.linalg.inv(rbf(z, z)) - inner
    variance = 1.3 - np.einsum("ni,ij,nj->n", rbf(at, z), less, rbf(at, z))
    assert np.allclose(new.predict(at).mean, mean, atol=1e-5)
    assert np.allclose(new.predict(at).epistemic[:, 0], variance, atol=1e-5)
    assert not np.allclose(posterior.predict(at).mean, mean, atol=1e-2)


# gpytorch 1.14's ApproximateGP with the data and points of `classes`, an RBF kernel of variance 2
# and lengthscale 0.8: whitened, Cholesky q, its ELBO ascended by LBFGS in float64 with logits and
# 20 Gauss–Hermite nodes; of three classes IndependentMultitaskVariationalStrategy with
# SoftmaxLikelihood, by Adam with 400 draws (600 steps, rate .05 falling to 0).
AT = torch.tensor([-2.5, -1.0, 0.0, 0.5, 1.5]).double()[:, None]
YES = {
    "elbo": -23.741110,
    "mean": [1.018548, -1.938275, -0.153928, 1.302460, 1.028925],
    "variance": [1.242026, 0.481118, 0.339558, 0.438218, 0.576053],
}
THREE = {
    "elbo": -36.41,
    "mean": [[0.6701, 0.1547, -0.8244], [1.6458, -0.2817, -1.3642], [0.1140, 0.5441, -0.6578],
             [-0.5783, 0.8314, -0.2527], [-1.3283, -0.2117, 1.5398]],
    "variance": [[1.3186, 1.3643, 1.5908], [0.4740, 0.5354, 0.8286], [0.3542, 0.3249, 0.4714],
                 [0.5291, 0.3886, 0.4721], [0.9822, 0.6708, 0.6005]],
}  # fmt: skip


def classes() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = 4 * torch.rand(40, 1, generator=g, dtype=torch.float64) - 2
    u = torch.rand(40, generator=g, dtype=torch.float64)
    yes = (u < torch.sigmoid(3 * torch.sin(2 * x[:, 0]))).long()
    level = x[:, 0] + 0.8 * torch.randn(40, generator=g, dtype=torch.float64)
    return x, yes, (level > -0.7).long() + (level > 0.7).long()


@pytest.mark.parametrize(
    ("likelihood", "want", "steps", "near", "near_bound"),
    [("bernoulli", YES, 40, 2e-3, 1e-3), ("categorical", THREE, 100, 0.05, 0.5)],
)
def test_classification_is_that_of_gpytorch(
    likelihood: str, want: Any, steps: int, near: float, near_bound: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    x, yes, three = classes()
    chosen = torch.linspace(-2, 2, 8).double()[None, :, None]
    monkeypatch.setattr(points, "spread_out", lambda *_: chosen.clone())
    method = doxa.SparseGP(
        inducing=8, learn_kernel=False, learn_inducing=False, variance=2.0, lengthscale=0.8,
        natural=0.3, samples=64,
    )  # fmt: skip
    y = yes if likelihood == "bernoulli" else three
    posterior = doxa.fit(None, (x, y), method, likelihood=likelihood, steps=steps, batch_size=40)
    mean, variance = (part[0].numpy() for part in posterior.marginals(AT))
    assert np.abs(mean - np.reshape(want["mean"], mean.shape)).max() < near
    assert np.abs(variance - np.reshape(want["variance"], mean.shape)).max() < near
    assert posterior.elbo == pytest.approx(want["elbo"], abs=near_bound)


def test_expectations_are_those_of_the_integral() -> None:
    """Poisson: yμ − exp(μ + v/2) − log y!, with λ = exp(μ + v/2); Student-t by scipy's quad."""
    mean = torch.tensor([[[0.3], [-1.0]]]).double().requires_grad_()
    variance = torch.tensor([[[0.5], [0.2]]]).double().requires_grad_()
    y = torch.tensor([[2.0], [0.0]]).double()
    got, _ = expected_log_prob(doxa.Poisson(), mean, variance, y, {}, (1,), None)
    rate = (mean + variance / 2).exp()
    want = y * mean - rate - torch.lgamma(y + 1)
    assert torch.allclose(got, want[..., 0], atol=1e-10)
    (width,) = torch.autograd.grad(got.sum(), [variance])
    assert torch.allclose(-2 * width, rate, atol=1e-8)
    theta = {"log_scale": torch.tensor([-0.5]).double()}
    found, _ = expected_log_prob(doxa.StudentT(df=4.0), mean, variance, y, theta, (1,), None)
    scale = math.exp(-0.5)
    for i, (m, v) in enumerate(((0.3, 0.5), (-1.0, 0.2))):

        def integrand(f: float, i: int = i, m: float = m, v: float = v) -> float:
            value = student.logpdf(float(y[i]) - f, 4, 0, scale)
            return float(norm.pdf(f, m, math.sqrt(v)) * value)

        want = quad(integrand, -9, 9)[0]
        assert float(found[0, i].detach()) == pytest.approx(want, abs=1e-4)


def test_functions_have_the_marginals_and_covariances_of_the_posterior() -> None:
    """4,000 draws on both sides of two inducing points: variances within 5 standard errors (chance
    1e-5), covariances within 0.15 of them, what 1,024 features and the draws leave."""
    posterior = fixed(rows(), 4)
    z, aside = posterior.points[0], torch.tensor([0.6, 0.0]).double()
    at = torch.stack([z[0] - aside, z[0] + aside, z[1] - aside, z[1] + aside])
    f = posterior.functions(at, 4000)[..., 0].numpy()
    mean, root = posterior.joint(at, 0)
    covariance = (root[0] @ root[0].T).numpy()
    variance = np.diag(covariance)
    assert (np.abs(f.mean(0) - mean[:, 0].numpy()) < 5 * np.sqrt(variance / 4000)).all()
    assert (np.abs(np.var(f, 0) - variance) < 5 * variance * math.sqrt(2 / 4000)).all()
    size = np.sqrt(np.outer(variance, variance))
    assert (np.abs(np.cov(f.T) - covariance) < 0.15 * size).all()
    assert covariance[0, 1] < -0.5 * size[0, 1]


@pytest.mark.parametrize(
    "kernel", ["rbf", "matern12", "matern32", "matern52", "rq", "periodic", "cosine", "linear",
               "polynomial2", "constant", "relu2", "rbf * periodic + linear",
               "(rbf + linear) * cosine"],
)  # fmt: skip
def test_random_features_have_the_kernel_as_their_product(kernel: str) -> None:
    """1,024 of them: to 0.12 of the variances, 0.35 of polynomials and products."""
    found = Composed(kernel, 2)
    hyper = 0.3 * torch.sin(torch.arange(1.0, found.layout.size + 1)).double()[None]
    x = torch.tensor([[0.0, 0.3], [0.5, -0.2], [1.0, 1.0], [-0.8, 0.4]]).double()[None]
    want = found(hyper, x, x)[0]
    phi = features(found, hyper, x)[0]
    size = want.diagonal().sqrt()
    gap = ((phi @ phi.T - want) / (size[:, None] * size)).abs().max()
    assert float(gap) < (0.35 if "*" in kernel or "poly" in kernel else 0.12)


def test_what_is_wrong_is_said() -> None:
    x, y = rows(12)
    with pytest.raises(DataError, match="inducing=13 points are more than the 12 rows"):
        doxa.fit(None, (x, y), doxa.SparseGP(inducing=13), steps=1)
    with pytest.raises(ModelError, match="pass None"):
        doxa.fit(doxa.nets.mlp(2, 1), (x, y), "sparse-gp", steps=1)
    with pytest.raises(MethodError, match="sparse-gp takes any likelihood"):
        doxa.fit(None, (x, (y > 0).long()), "gp", likelihood="bernoulli")
    posterior = doxa.fit(
        None, (x, (y > 0).long()), doxa.SparseGP(inducing=4), likelihood="bernoulli", steps=2
    )
    with pytest.raises(Unavailable, match="Gaussian noise only"):
        posterior.condition(x, y > 0)


class Stream(Dataset[Any]):
    """Rows that are made when they are read, and are too many to keep."""

    def __init__(self, count: int, columns: int, target: Any) -> None:
        self.count, self.columns, self.target = count, columns, target
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        self.read += 1
        x = torch.sin(torch.arange(1.0, self.columns + 1) * (i + 1))
        return x, self.target(x)


def test_a_stream_does_not_say_how_many_classes_there_are() -> None:
    rows = Stream(10**8, 40, lambda x: int(x[0] > 0))
    with pytest.raises(DataError, match="number of classes"):
        doxa.fit(None, rows, doxa.SparseGP(inducing=4), likelihood="categorical", steps=2)
    assert rows.read < 100


def test_targets_without_deviation_are_fitted_at_their_size() -> None:
    """A constant y scaled by c has the bound of y less n log c. (A noise that starts at 1 beside
    targets of 10⁶ gave a bound of −4·10⁵, and "ok".)"""
    x = torch.linspace(-2, 2, 40).double()[:, None]
    bounds = [
        doxa.fit(None, (x, torch.full((40,), c).double()), doxa.SparseGP(inducing=8),
                 likelihood="gaussian", steps=60).elbo + 40 * math.log(c)
        for c in (1.0, 3e-2, 1e6)
    ]  # fmt: skip
    assert bounds == pytest.approx([bounds[0]] * 3, abs=1e-3)
    assert bounds[0] > -40 * 2  # a constant with a noise of its own size: 40 (log 1 + 1.4)


def test_a_bound_that_rounding_has_spoiled_is_not_ok() -> None:
    """A noise of 0.1 on 10⁶: the kernel's matrix can only be inverted to a variance of 10⁴."""
    g = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, 60).double()[:, None]
    y = 1e6 + 0.1 * torch.randn(60, generator=g).double()
    spoiled = doxa.fit(None, (x, y), doxa.SparseGP(inducing=8), steps=60)
    assert spoiled.status == "degenerate" and "standardize" in spoiled.status.reason
    scaled = doxa.fit(None, (x, y), doxa.SparseGP(inducing=8), steps=60, standardize=True)
    assert scaled.status == "ok"
