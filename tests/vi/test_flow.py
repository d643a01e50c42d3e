"""Flows over weights: log q is a density, the Gaussian posterior is inside, bent ones are held
better than by a Gaussian."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import doxa
from doxa.errors import MemoryBudgetError

pytest.importorskip("zuko")

NOISE = 0.5


def line() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)
    x = torch.randn(30, 2, generator=g, dtype=torch.float64) @ mixing
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + 0.3
    return x, y + NOISE * torch.randn(30, 1, generator=g, dtype=torch.float64)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and covariance of (w, b) under N(0, 1) and noise 0.5, and the log evidence."""
    phi = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    covariance = (phi.T @ phi / NOISE**2 + torch.eye(3, dtype=x.dtype)).inverse()
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros_like(y[:, 0]), phi @ phi.T + NOISE**2 * torch.eye(len(x), dtype=x.dtype)
    )
    mean = covariance @ phi.T @ y[:, 0] / NOISE**2
    return mean, covariance, float(marginal.log_prob(y[:, 0]))


def fit(method: doxa.FlowVI, **options: Any) -> Any:
    """On the line, where the posterior is known."""
    given = {
        "likelihood": doxa.Gaussian(noise=NOISE), "prior": doxa.Normal(1.0), "validation": None,
        "batch_size": 30,
    }  # fmt: skip
    return doxa.fit(nn.Linear(2, 1).double(), line(), method, **given, **options)


def log_ratio(posterior: Any, n: int) -> Tensor:
    """log p(y, θ) − log q(θ) at draws of q, by torch's own densities."""
    x, y = line()
    draws, log_q = posterior.draw(n, seed=1), posterior.log_q(n, seed=1)
    weights = torch.cat([draws["weight"][:, 0], draws["bias"]], 1)
    f = torch.cat([x, torch.ones_like(x[:, :1])], 1) @ weights.T
    fits = Normal(f, NOISE).log_prob(y).sum(0)
    return fits + Normal(0.0, 1.0).log_prob(weights).sum(1) - log_q


@pytest.mark.parametrize("flow", ["spline", "affine"])
def test_log_q_is_the_density_of_the_draws(flow: str) -> None:
    """log q = log N(z) − log |det ∂θ/∂z| with the Jacobian by autograd, for two members that are
    far from a Gaussian; the bound is the mean of log p(y, θ) − log q, here within 4 standard errors
    of its 40 draws a member."""
    method = doxa.FlowVI(flow=flow, flow_width=8, initial_std=0.2, samples=2, elbo_samples=40)
    posterior = fit(method, steps=20, lr=0.1, members=2)
    index = posterior.layout.index(["weight", "bias"])
    draws = posterior.layout.flatten(posterior.draw(6, seed=3))[:, index]
    for k in range(2):
        z = posterior.normals([f"{k}/{j}" for j in range(3)], 3, k)
        away = lambda z, k=k: posterior.push(z[None, None], k)[0][0, 0]  # noqa: E731
        for j in range(3):
            det = torch.autograd.functional.jacobian(away, z[0, j]).det()
            want = Normal(0.0, 1.0).log_prob(z[0, j]).sum() - det.log()
            assert float(posterior.log_q(6, seed=3)[3 * k + j] - want) == pytest.approx(0, abs=1e-9)
            assert torch.allclose(draws[3 * k + j], posterior.mean[k, index] + away(z[0, j]))
    log_ratios = log_ratio(posterior, 2000)
    error = float(log_ratios.std()) / math.sqrt(80)
    assert posterior.elbo == pytest.approx(float(log_ratios.mean()), abs=4 * error)


def test_a_colder_posterior_is_narrower() -> None:
    """One weight and a Gaussian q: at temperature T the optimum has the variance T/(100 + Σx²/σ²)
    under the prior N(0, 0.1²), which weighs about as much as the rows."""
    x, y = line()
    found = []
    for temperature in (1.0, 0.1):
        method = doxa.FlowVI(flow_length=0, samples=8, temperature=temperature, average=0.0)
        posterior = doxa.fit(
            nn.Linear(1, 1, bias=False).double(), (x[:, :1], y), method, steps=400, lr=0.05,
            schedule="cosine", likelihood=doxa.Gaussian(noise=NOISE), prior=doxa.Normal(0.1),
            validation=None, batch_size=30,
        )  # fmt: skip
        found.append(float(posterior.draw(500, seed=0)["weight"].var()))
        assert (posterior.elbo is None) == (temperature != 1.0)
    want = 1 / (100 + float(x[:, 0].square().sum()) / NOISE**2)
    assert found == pytest.approx([want, 0.1 * want], rel=0.3)  # 500 draws: 6 % a standard error


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"flow_length": 0}, {"flow": "affine"}, {"flow": "spline"}])
def test_the_gaussian_posterior_is_found(settings: dict[str, Any]) -> None:
    """KL(q ‖ posterior), the gap between the mean of the log ratio and the evidence, is below 0.02
    (its estimate is less than 0.005 off), where the best factorised Gaussian's is 0.36; with the
    shear alone it is below 0.002, and q a Gaussian, whose mean and covariance are right to 1 % of
    a standard deviation and of a variance."""
    method = doxa.FlowVI(**settings, samples=16, elbo_samples=100, average=0.6)
    posterior = fit(method, steps=2000)
    mean, covariance, evidence = exact(*line())
    ratios = log_ratio(posterior, 20_000)
    weights = (ratios - evidence).exp()  # E_q[p(y, θ)/q(θ)] = p(y), whatever q is
    assert abs(float(weights.mean()) - 1) < 4 * float(weights.std()) / math.sqrt(20_000)
    assert 4 * float(ratios.std()) / math.sqrt(20_000) < 0.005
    kl = evidence - float(ratios.mean())
    assert -0.005 < kl < 0.02
    assert abs(posterior.elbo - evidence) < kl + 4 * float(ratios.std()) / 10
    if settings.get("flow_length") == 0:
        assert kl < 0.002
        eye = torch.eye(3, dtype=torch.float64).unsqueeze(0)
        root = (posterior.push(eye)[0] - posterior.push(torch.zeros_like(eye))[0])[0]  # Rᵀ
        assert torch.allclose(root.T @ root, covariance, atol=0.01 * float(covariance.max()))
        assert torch.allclose(
            posterior.point()[0], mean, atol=0.01 * float(covariance.diag().min().sqrt())
        )


def hyperbola() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    g = torch.Generator().manual_seed(2)
    return x, x + 0.5 * torch.randn(20, 1, generator=g, dtype=torch.float64)


@pytest.mark.slow
def test_a_branch_of_a_bent_posterior_is_held_whole() -> None:
    """y = w₁ w₂ x: the posterior lies along both branches of a hyperbola. The evidence from a grid
    over the two weights; KL(q ‖ posterior) from the bounds. From a narrow start q ends in one
    branch, log 2 lost at best: the flow is within 0.1 of that, mean-field more than 0.5 away."""
    x, y = hyperbola()
    grid = torch.linspace(-6, 6, 801, dtype=torch.float64)
    slope = grid.unsqueeze(1) * grid
    quadratic = slope.square() * x.square().sum() - 2 * slope * (x * y).sum() + y.square().sum()
    fits = -0.5 * quadratic / 0.25 - 20 * math.log(0.5 * math.sqrt(2 * math.pi))
    prior = Normal(0.0, 1.0).log_prob(grid)
    joint = fits + prior.unsqueeze(1) + prior
    evidence = float(torch.logsumexp(joint.flatten(), 0) + 2 * math.log(12 / 800))

    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    options = {
        "steps": 2000, "likelihood": doxa.Gaussian(noise=0.5), "prior": doxa.Normal(1.0),
        "validation": None, "subset": ("0.weight", "1.weight"), "schedule": "cosine",
    }  # fmt: skip
    gap = {}
    for method in (doxa.MeanField(elbo_samples=500), doxa.FlowVI(samples=8, elbo_samples=200)):
        gap[method.name] = evidence - doxa.fit(net, (x, y), method, **options).elbo
    assert 0 < gap["flow-vi"] < math.log(2) + 0.1
    assert gap["mean-field"] > math.log(2) + 0.5


def test_it_is_the_last_layer_unless_told_and_not_thousands_of_weights() -> None:
    x = torch.randn(8, 3)
    net = doxa.nets.mlp(3, 1, (50, 50))
    posterior = doxa.fit(net, (x, x[:, :1]), "flow-vi", steps=1)
    assert posterior.model.subset_names == ("4.weight", "4.bias")
    every = tuple(name for name, _ in net.named_parameters())
    with pytest.raises(MemoryBudgetError, match=r"2801 weights .*low-rank-vi"):
        doxa.fit(net, (x, x[:, :1]), "flow-vi", steps=1, subset=every)


@pytest.mark.slow
def test_distributions_of_others_still_check_their_arguments() -> None:
    """zuko, imported, switches that off for the whole process."""
    code = (
        "import doxa.vi.couplings; from torch.distributions import Normal\n"
        "try: Normal(0.0, -1.0)\n"
        "except ValueError: print('checked')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "checked\n"
