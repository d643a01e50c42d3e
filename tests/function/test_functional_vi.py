"""Functional variational inference against the Gaussian process whose posterior it should find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import DataError, MethodError, ModelError
from doxa.priors.functions import FunctionPrior, GPPrior, ImplicitPrior


def gp(prior: GPPrior, x: Tensor, y: Tensor, noise: float, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the exact posterior, [N] each."""
    k = prior.covariance(x, x) + noise**2 * torch.eye(len(x)).double()
    across = prior.covariance(at, x)
    mean = across @ torch.linalg.solve(k, y)
    cov = prior.covariance(at, at) - across @ torch.linalg.solve(k, across.mT)
    return mean[:, 0], cov.diagonal().clamp_min(0).sqrt()


def wasserstein(posterior: Any, at: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """W2 between the marginals at each point, both taken as normal, [N]."""
    f = posterior.functions(at, 2000)[..., 0]
    return ((f.mean(0) - mean).square() + (f.std(0) - std).square()).sqrt()


def line_data() -> tuple[Tensor, Tensor]:
    noise = torch.randn(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 12).double()[:, None]
    return x, 0.8 * x + 0.5 * noise


def lines(x: Tensor, z: Tensor) -> Tensor:
    return z[0] * x[:, 0]


def fit_line(kind: FunctionPrior | str, **options: Any) -> Any:
    net = nn.Linear(1, 1, bias=False).double()
    method = doxa.FunctionalVI(function_prior=kind, samples=24, measured_rows=6, extra_points=4)
    return doxa.fit(
        net, line_data(), method, likelihood=doxa.Gaussian(noise=0.5), validation=None,
        progress=False, steps=150, lr=0.05, schedule="cosine", **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "prior",
    [
        GPPrior("linear"),
        pytest.param(ImplicitPrior(lines, 1), marks=pytest.mark.slow),
        pytest.param("weights", marks=pytest.mark.slow),
    ],
    ids=["gp", "implicit", "own"],
)
def test_a_line_has_the_posterior_of_the_linear_kernel(prior: FunctionPrior | str) -> None:
    """f = wx, w ~ N(0, 1), as a kernel, as a sampler and as the network's own prior: one posterior,
    which q can hold. The Stein estimate and the noise added to functions leave W2 below 0.03 at
    every point, of a standard deviation up to 0.22: what is missing without a KL."""
    x, y = line_data()
    mean, std = gp(GPPrior("linear"), x, y, 0.5, x)
    away = wasserstein(fit_line(prior), x, mean, std)
    assert away.max() < 0.03


@pytest.mark.slow
def test_a_network_resembles_the_posterior_of_an_rbf_kernel() -> None:
    """Where rows lie and as far beyond them: W2 below 0.1 a point on average (0.05 was seen, where
    mean-field under N(0, 1) on its weights is 0.64 away). A mean-field q cannot hold doubt between
    groups of rows, so there are none."""
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(20, 1, generator=g).double() - 1
    y = (2 * x).sin() + 0.1 * torch.randn(20, 1, generator=g).double()
    at = torch.linspace(-2, 2, 41).double()[:, None]
    prior = GPPrior("rbf", lengthscale=0.7)
    found = {}
    for method in (doxa.FunctionalVI(function_prior=prior, samples=32), doxa.MeanField()):
        net = doxa.nets.mlp(1, 1, hidden=(50,)).double()
        posterior = doxa.fit(
            net, (x, y), method, likelihood=doxa.Gaussian(noise=0.1), validation=None,
            progress=False, steps=1000, lr=0.02, schedule="cosine",
        )  # fmt: skip
        found[method.name] = float(wasserstein(posterior, at, *gp(prior, x, y, 0.1, at)).mean())
    assert found["fbnn"] < 0.1
    assert found["fbnn"] < 0.5 * found["mean-field"]


def test_a_named_kernel_is_fitted_by_its_marginal_likelihood() -> None:
    """Targets from a GP of lengthscale 0.3 and variance 4, noise 0.1: within a factor of 2 after
    300 steps, from a start that is four times as long."""
    x = torch.linspace(0, 3, 60).double()[:, None]
    y = GPPrior("rbf", lengthscale=0.3, variance=4.0).sample(x, 1, seed=1)[0]
    y = y + 0.1 * GPPrior("rbf", lengthscale=1e-3).sample(x, 1, seed=2)[0]
    posterior = doxa.fit(
        doxa.nets.mlp(1, 1, hidden=(5,)).double(), (x, y),
        doxa.FunctionalVI(samples=4, measured_rows=2, extra_points=2, prior_steps=300), steps=2,
        progress=False, validation=None,
    )  # fmt: skip
    scale, variance, _ = posterior.kernel[0].exp().tolist()
    assert 0.15 < scale < 0.6 and 1.0 < variance < 16.0
    f = posterior.prior_functions(x, 400)
    assert abs(float(f.var()) / variance - 1) < 0.3
    assert posterior.elbo is None


def test_outputs_that_repeat_each_other_have_the_kernel_of_one() -> None:
    """The evidence of y twice is twice that of y, and its maximum is at the same kernel and
    noise."""
    x = torch.linspace(0, 3, 40).double()[:, None]
    y = GPPrior("rbf", lengthscale=0.5, variance=2.0).sample(x, 1, seed=1)[0]
    kernels = []
    for outputs in (1, 3):
        posterior = doxa.fit(
            doxa.nets.mlp(1, outputs, hidden=(5,)).double(), (x, y.repeat(1, outputs)),
            doxa.FunctionalVI(samples=4, measured_rows=2, extra_points=2, prior_steps=150), steps=2,
            progress=False, validation=None, batch_size=40,
        )  # fmt: skip
        kernels.append(posterior.kernel[0, :2])
    assert torch.allclose(kernels[0], kernels[1], atol=0.02)


@pytest.mark.parametrize(
    "prior", [GPPrior("linear"), "linear", "weights"], ids=["gp", "named", "own"]
)
def test_under_much_smoothing_no_prior_can_be_told_from_q(prior: FunctionPrior | str) -> None:
    """The noise that is added to the functions of both drowns them: what is left is the likelihood,
    whose best slope is that of least squares, known for sure."""
    x, y = line_data()
    net = nn.Linear(1, 1, bias=False).double()
    method = doxa.FunctionalVI(
        function_prior=prior, samples=24, measured_rows=6, extra_points=4, smoothing=100.0,
        initial_std=0.3, prior_steps=0,
    )  # fmt: skip
    posterior = doxa.fit(
        net, (x, y), method, likelihood=doxa.Gaussian(noise=0.5), validation=None, progress=False,
        steps=150, lr=0.05, schedule="cosine",
    )  # fmt: skip
    squares = float((x * y).sum() / x.square().sum())
    width = 0.5 / float(x.square().sum()) ** 0.5  # of the likelihood
    assert float(posterior.mean[0, 0]) == pytest.approx(squares, abs=0.2 * width)
    assert float(posterior.covariance.diagonal()[0, 0].sqrt()) < 0.3 * width


def test_a_narrow_prior_is_smoothed_as_its_kernel_is() -> None:
    """f = 0.1 wx, as a kernel and as the network's own prior, under noise three times as wide as f:
    draws that are not smoothed would leave the slope at that of least squares, 0.76."""
    x, y = line_data()
    slopes = []
    for prior in (GPPrior("linear", variance=0.01), "weights"):
        method = doxa.FunctionalVI(
            function_prior=prior,
            samples=24,
            measured_rows=6,
            extra_points=4,
            smoothing=0.3,
            initial_std=0.1,
        )
        posterior = doxa.fit(
            nn.Linear(1, 1, bias=False).double(), (x, y), method, validation=None, steps=150,
            likelihood=doxa.Gaussian(noise=0.5), prior=doxa.Normal(0.1), progress=False, lr=0.05,
            schedule="cosine",
        )  # fmt: skip
        slopes.append(float(posterior.mean[0, 0]))
    assert slopes[1] == pytest.approx(slopes[0], abs=0.1)
    assert max(slopes) < 0.4


def test_weights_outside_the_subset_keep_their_prior() -> None:
    """They are points under N(0, 0.01²), of which twelve rows know too little to resist."""
    net = doxa.nets.mlp(1, 1, hidden=(3,), activation="tanh").double()
    prior = {"0.*": doxa.Normal(0.01), "*": doxa.Normal(1.0)}
    method = doxa.FunctionalVI(
        function_prior=GPPrior("linear"), samples=8, measured_rows=4, extra_points=2
    )
    posterior = doxa.fit(
        net, line_data(), method, likelihood=doxa.Gaussian(noise=3.0), validation=None, lr=0.05,
        progress=False, steps=100, subset="last_layer", prior=prior,
    )  # fmt: skip
    weights = posterior.layout.unflatten(posterior.mean[0])
    assert float(weights["0.weight"].abs().max()) < 0.05
    assert float(weights["0.bias"].abs().max()) < 0.05


def test_logits_have_a_prior_of_their_own_size() -> None:
    """Functions of the prior for classes have variance 8, not that of standardised numbers."""
    x = torch.linspace(-2, 2, 60)[:, None]
    posterior = doxa.fit(
        doxa.nets.mlp(1, 2, hidden=(5,)), (x, (x[:, 0] > 0).long()), likelihood="categorical",
        method=doxa.FunctionalVI(samples=4, measured_rows=2, extra_points=2), steps=2,
        progress=False, validation=None,
    )  # fmt: skip
    assert abs(float(posterior.prior_functions(x, 400).square().mean()) / 8 - 1) < 0.2


def test_the_noise_of_the_evidence() -> None:
    """A line with noise 0.3, 200 rows: three steps of q know nothing of it, and the marginal
    likelihood finds it within five standard errors, 0.3/√400 each."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=g).double()
    y = 0.8 * x + 0.3 * torch.randn(200, 1, generator=g).double()
    method = doxa.FunctionalVI(
        function_prior="linear",
        noise_from="evidence",
        samples=6,
        measured_rows=5,
        extra_points=3,
        prior_steps=200,
    )
    posterior = doxa.fit(
        nn.Linear(1, 1).double(), (x, y), method, likelihood="gaussian", steps=3, batch_size=200,
        validation=None, progress=False,
    )  # fmt: skip
    found = float(posterior.predict(x[:1]).aleatoric.sqrt())
    assert abs(found - 0.3) < 5 * 0.3 / 20
    with pytest.raises(MethodError, match="leave it out"):
        doxa.fit(nn.Linear(1, 1), (x, y), doxa.FunctionalVI(function_prior="weights",
                 noise_from="evidence"), likelihood="gaussian", steps=1,
                 progress=False)  # fmt: skip


def test_what_it_cannot_take() -> None:
    x, y = line_data()
    net = nn.Sequential(nn.Embedding(3, 1), nn.Flatten()).double()
    with pytest.raises(DataError, match="one array of real numbers"):
        doxa.fit(net, ((x > 0).long(), y), "fbnn", progress=False)
    with pytest.raises(ModelError, match="Gaussian prior alone"):
        fit_line("weights", prior=doxa.LaplacePrior(1.0))
