"""Mean-field VI against its closed forms: the fixed point, the gradient, the bound.

A linear network with Gaussian noise σ and prior s has the exact precision A = XᵀX/σ² + I/s². The
best factorised Gaussian at temperature T has the exact mean, and the precisions A_jj / T. The ELBO
and its gradient are written out naively here, with densities from `torch.distributions`; a fit of
one plain SGD step gives ours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import laplace, multivariate_normal, norm
from torch import Tensor, nn
from torch.distributions import Laplace, Normal, StudentT

import doxa
from doxa.method import Clock
from doxa.optim import SGD

N, D = 30, 2
NOISE, STD = 1.5, 0.7  # so noisy that the prior counts
HALF_LOG_2PI_E = 0.5 * math.log(2 * math.pi * math.e)


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    x[:, 1] += 0.6 * x[:, 0]  # correlated, so that the family is too narrow
    y = x @ torch.tensor([0.8, -0.5]).double()
    return x, y + NOISE * torch.randn(N, generator=g, dtype=torch.float64)


def linear(prior: Any = None, inputs: int = D) -> doxa.Model:
    net = nn.Linear(inputs, 1, bias=False).double()
    return doxa.Model(net, doxa.Gaussian(NOISE), prior or doxa.Normal(STD))


def exact() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The posterior's mean and precision."""
    x, y = (t.numpy() for t in rows())
    precision = x.T @ x / NOISE**2 + np.eye(D) / STD**2
    return np.linalg.solve(precision, x.T @ y / NOISE**2), precision


FITTED: dict[str, Any] = {
    "members": 16, "batch_size": N, "steps": 2500, "lr": 0.02, "progress": False,
    "validation": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("by", "heats"),
    [pytest.param("a grid", [0.25, 1.0, 4.0], marks=pytest.mark.slow), ("a setting", [0.25])],
    ids=str,
)
def test_the_variance_is_proportional_to_the_temperature(by: str, heats: list[float]) -> None:
    """Var_j = T / A_jj, the mean as it was: 12 checks of the mean over 16 members, each at 4.5
    standard errors (t with 15 degrees of freedom: 0.0004 each, 0.005 in all)."""
    mean, precision = exact()
    if by == "a grid":
        runs = doxa.Runs(grid={"temperature": heats})
        fits = list(doxa.fit(linear(), rows(), doxa.MeanField(), runs=runs, **FITTED))
    else:
        fits = [doxa.fit(linear(), rows(), doxa.MeanField(temperature=t), **FITTED) for t in heats]
    for heat, q in zip(heats, fits, strict=True):
        log_variance = q.covariance.diagonal().log()
        wanted = torch.from_numpy(np.log(heat / np.diag(precision)))
        for values, truth in ((q.mean, torch.from_numpy(mean)), (log_variance, wanted)):
            error = values.std(0) / 4
            assert ((values.mean(0) - truth).abs() < 4.5 * error).all(), heat
        assert (log_variance.std(0) < 0.2).all()  # a factor of 4 in T cannot be missed
        assert (q.elbo is None) == (heat != 1.0)  # as the evidence of other methods


PRIORS = {
    "normal": doxa.Normal(STD),
    "laplace": doxa.LaplacePrior(0.4),
    "student-t": doxa.StudentTPrior(3.0, 0.5),
    "scale-mixture": doxa.ScaleMixture(0.3, 1.0, 0.1),
}


def log_prior(name: str, theta: Tensor) -> Tensor:
    """Elementwise, from torch's own densities."""
    zero = torch.zeros((), dtype=torch.float64)  # else they are made of single precision
    if name == "normal":
        return Normal(zero, zero + STD).log_prob(theta)
    if name == "laplace":
        return Laplace(zero, zero + 0.4).log_prob(theta)
    if name == "student-t":
        return StudentT(zero + 3.0, zero, zero + 0.5).log_prob(theta)
    wide, narrow = (Normal(zero, zero + std).log_prob(theta) for std in (1.0, 0.1))
    return torch.logaddexp(math.log(0.3) + wide, math.log(0.7) + narrow)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def naive_elbo(
    name: str, free: Tensor, mean: Tensor, rho: Tensor, eps: Tensor, heat: float, data: Any
) -> Tensor:
    """E_q log p(y | θ) by the one draw μ + σε, E_q log p(θ) exactly under a Gaussian or a Laplace
    prior (the mean of a folded normal) and by the same draw elsewhere, T times the entropy; `free`
    marks the weights that are uncertain."""
    x, y = data
    std = rho.exp()
    theta = mean.clone()
    theta[free] = mean[free] + std * eps
    w1, b1, w2, b2 = theta.split([3 * D, 3, 3, 1])
    f = torch.tanh(x @ w1.reshape(3, D).T + b1) @ w2 + b2
    fit = Normal(f, NOISE).log_prob(y).sum()
    if name == "normal":
        belief = log_prior(name, mean).sum() - 0.5 * (std / STD).square().sum()
    elif name == "laplace":
        own, unit = mean[free], Normal(torch.zeros(()).double(), 1.0)
        flatten_particles = std * math.sqrt(2 / math.pi) * (-(own**2) / (2 * std**2)).exp()
        flatten_particles = flatten_particles + own * (1 - 2 * unit.cdf(-own / std))
        belief = (
            log_prior(name, mean[~free]).sum() - (flatten_particles / 0.4 + math.log(0.8)).sum()
        )
    else:
        belief = log_prior(name, theta).sum()
    return fit + belief + heat * (std.log() + HALF_LOG_2PI_E).sum()


RATE, START = 1e-3, 0.2
START_RHO = torch.tensor(START, dtype=torch.float64).log()


def one_step(monkeypatch: Any, eps: Tensor, model: doxa.Model, data: Any, **options: Any) -> Any:
    """A fit of one plain SGD step under given noise: (mean, ρ, loss) after it."""
    heat = options.pop("temperature", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "alternating", lambda self, *shape: eps.expand(1, *shape))
        method = doxa.MeanField(initial_std=START, temperature=heat, average=0.0, elbo_samples=1)
        options = {"batch_size": len(data[1]), **options}
        q = doxa.fit(
            model, data, method, init="given", steps=1, lr=RATE, optimizer=SGD(momentum=0.0),
            schedule="constant", engine="loop:eager", progress=False, **options,
        )  # fmt: skip
    rho = 0.5 * q.covariance.diagonal()[0].log()
    return q.mean[0], rho, q.history["loss"][0][1][0]


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("heat", [1.0, 0.3])
@pytest.mark.parametrize("name", PRIORS)
def test_a_step_is_the_gradient_of_the_elbo(
    monkeypatch: Any, name: str, heat: float, subset: str
) -> None:
    net = network()
    start = flat(net)
    free = torch.ones(len(start), dtype=torch.bool)
    if subset == "last_layer":
        free[: 3 * D + 3] = False
    eps = torch.linspace(-1.5, 1.2, int(free.sum()), dtype=torch.float64)
    mean = start.clone().requires_grad_()
    rho = START_RHO.expand(len(eps)).clone().requires_grad_()
    value = naive_elbo(name, free, mean, rho, eps, heat, rows())
    by_mean, by_rho = torch.autograd.grad(value, [mean, rho])
    model = doxa.Model(net, doxa.Gaussian(NOISE), PRIORS[name], subset=subset)
    got = one_step(monkeypatch, eps, model, rows(), temperature=heat)
    torch.testing.assert_close((got[0] - start) / RATE, by_mean / N, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close((got[1] - rho.detach()) / RATE, by_rho / N, rtol=1e-8, atol=1e-9)
    assert got[2] == pytest.approx(-float(value.detach()) / N, rel=1e-12)


@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_mini_batch_stands_for_the_data_set(monkeypatch: Any, weight: float | None) -> None:
    """Of rows that are all alike a batch of 5 says as much as all 30; with weights n is their
    sum. The prior and the entropy are counted once."""
    x, y = (t[:1].expand(N, *t.shape[1:]) for t in rows())
    eps = torch.linspace(-1.0, 1.0, 13, dtype=torch.float64)
    given = {} if weight is None else {"sample_weight": torch.full((N,), weight)}
    model = doxa.Model(network(), doxa.Gaussian(NOISE), doxa.Normal(STD))
    few, all_rows = (
        one_step(monkeypatch, eps, model, (x, y), batch_size=size, **given) for size in (5, N)
    )
    for one, two in zip(few, all_rows, strict=True):
        assert torch.allclose(torch.as_tensor(one), torch.as_tensor(two), rtol=1e-12)
    start, rho = flat(network()), START_RHO.expand(13)
    times = int(weight or 1)
    everything = torch.ones(13, dtype=torch.bool)
    data = x.repeat(times, 1), y.repeat(times)
    value = naive_elbo("normal", everything, start, rho, eps, 1.0, data)
    assert few[2] == pytest.approx(-float(value) / (times * N), rel=1e-12)


def test_the_last_iterates_are_averaged() -> None:
    """Of 6 steps at a constant rate the last 3, μ and ρ alike."""
    torch.manual_seed(0)
    model = linear()

    def of(steps: int, average: float) -> tuple[Tensor, Tensor]:
        q = doxa.fit(
            model, rows(), doxa.MeanField(average=average), init="given", steps=steps, lr=0.05,
            schedule="constant", engine="loop:eager", progress=False,
        )  # fmt: skip
        return q.mean[0], 0.5 * q.covariance.diagonal()[0].log()

    iterates = [of(steps, 0.0) for steps in (4, 5, 6)]
    for got, values in zip(of(6, 0.5), zip(*iterates, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(values).mean(0), rtol=1e-10, atol=1e-12)
        assert not torch.allclose(got, values[-1], rtol=1e-4)


SAMPLES = 600
ONE: dict[str, Any] = {"batch_size": N, "steps": 500, "lr": 0.02, "progress": False}


def one_weight() -> tuple[Tensor, Tensor]:
    x, y = rows()
    return x[:6, :1], y[:6]


def evidence_by_quadrature(density: Any, feature: Any = None) -> float:
    """log ∫ p(y | w) p(w) dw of one weight, on x or a feature of it [6, 1]."""
    x, y = (t.numpy() for t in one_weight())
    x = x if feature is None else feature
    w = np.linspace(-8, 8, 400_001)
    log_joint = norm(0, NOISE).logpdf(y[:, None] - x * w).sum(0) + density.logpdf(w)
    return float(np.logaddexp.reduce(log_joint) + math.log(w[1] - w[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prior", "density"),
    [(doxa.Normal(STD), norm(0, STD)), (doxa.LaplacePrior(0.4), laplace(0, 0.4))],
    ids=["normal", "laplace"],
)
def test_the_elbo_of_one_weight_is_almost_the_evidence(prior: Any, density: Any) -> None:
    """A family that holds the posterior bounds the evidence by itself, up to the Monte Carlo error
    of 4 × 600 draws: log p(y | θ) has a standard deviation below 1 under q, so that 4 errors are
    0.082 (1 in 16,000). Under the Laplace prior the posterior is bent at 0, far from its mass."""
    data = one_weight()
    q = doxa.fit(
        linear(prior, 1), data, doxa.MeanField(elbo_samples=SAMPLES), members=4, batch_size=6,
        steps=1000, lr=0.02, progress=False,
    )  # fmt: skip
    evidence = evidence_by_quadrature(density)
    assert q.elbo < evidence + 0.082
    assert q.elbo > evidence - 0.12


def two_layers() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(D, 2, bias=False), nn.Linear(2, 1, bias=False)).double()


def bound(posterior: Any, h: np.ndarray[Any, Any], noise: float) -> float:
    """log N(y; 0, σ²I + s²HHᵀ) − KL(q ‖ p), of weights on features H of which q is given."""
    y = rows()[1].numpy()
    size = h.shape[1]
    marginal = noise**2 * np.eye(N) + STD**2 * h @ h.T
    precision = h.T @ h / noise**2 + np.eye(size) / STD**2
    names = posterior.model.subset_names
    mean = posterior.layout.select(names).flatten(posterior.layout.unflatten(posterior.mean))
    away = mean[0].numpy() - np.linalg.solve(precision, h.T @ y / noise**2)
    variance = posterior.covariance.diagonal()[0].numpy()
    log_det = np.linalg.slogdet(precision)[1] + np.log(variance).sum()
    divergence = 0.5 * (np.diag(precision) @ variance + away @ precision @ away - log_det - size)
    return float(multivariate_normal(np.zeros(N), marginal).logpdf(y) - divergence)


ERROR = 4 * 2 / math.sqrt(SAMPLES)  # log p(y | θ) has a standard deviation below 2 under q


@pytest.mark.slow
def test_the_bound_does_not_count_a_trunk() -> None:
    """Points enter neither the evidence nor the bound: with a linear trunk it is that of the last
    layer on its features."""
    model = doxa.Model(two_layers(), doxa.Gaussian(NOISE), doxa.Normal(STD), subset="last_layer")
    method = doxa.MeanField(elbo_samples=SAMPLES)
    q = doxa.fit(model, rows(), method, init="given", **ONE)
    assert q.elbo == pytest.approx(bound(q, q.features(rows()[0]).numpy(), NOISE), abs=ERROR)


@pytest.mark.slow
def test_the_bound_does_not_count_learned_noise() -> None:
    net = nn.Linear(D, 1, bias=False).double()
    method = doxa.MeanField(elbo_samples=SAMPLES)
    q = doxa.fit(net, rows(), method, prior=doxa.Normal(STD), **ONE)
    x = rows()[0]
    noise = math.sqrt(float(q.predict(x[:1]).aleatoric))
    assert q.elbo == pytest.approx(bound(q, x.numpy(), noise), abs=ERROR)


@pytest.mark.slow
def test_the_bound_of_a_last_layer_under_any_prior_is_that_on_its_features() -> None:
    """Of one weight under a Laplace prior, on the feature that a trunk of one weight gives: at most
    the evidence by quadrature given that trunk, and close to it. Four errors: 1 in 16,000."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    model = doxa.Model(net, doxa.Gaussian(NOISE), doxa.LaplacePrior(0.4), subset="last_layer")
    data = one_weight()
    q = doxa.fit(
        model, data, doxa.MeanField(elbo_samples=SAMPLES), init="given", batch_size=6, steps=300,
        lr=0.05, progress=False,
    )  # fmt: skip
    evidence = evidence_by_quadrature(laplace(0, 0.4), q.features(data[0]).numpy())
    error = 4 * 1 / math.sqrt(SAMPLES)  # log p(y | θ) has a standard deviation below 1 under q
    assert evidence - 0.1 - error < q.elbo < evidence + error


def test_a_weighted_likelihood_has_no_bound() -> None:
    """By rows (in the contract) or by classes: it is no density."""
    x, y = rows()
    fast = {**ONE, "steps": 2}
    for weight in (None, (1.0, 3.0)):
        likelihood = doxa.Categorical(class_weight=weight)
        net = nn.Linear(D, 2).double()
        q = doxa.fit(net, (x, (y > 0).long()), "mean-field", likelihood=likelihood, **fast)
        assert (q.elbo is None) == (weight is not None)


@pytest.mark.slow
def test_the_bound_of_all_weights_is_the_evidence_less_the_divergence() -> None:
    """The same by the same formula where nothing is a point."""
    q = doxa.fit(linear(), rows(), doxa.MeanField(elbo_samples=SAMPLES), **ONE)
    assert q.elbo == pytest.approx(bound(q, rows()[0].numpy(), NOISE), abs=ERROR)
