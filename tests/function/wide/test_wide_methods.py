"""NNGP and NTK: neural-tangents' posteriors, wide ensembles trained in fact, classes, images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wide_cases import BIAS_STD, NOISE, PEER, WEIGHT_STD, peer_data

import doxa
from doxa.errors import MethodError, ModelError
from doxa.function.wide import Architecture, finite_network

FIXED: dict[str, Any] = {
    "depth": 2, "activation": "erf", "weight_std": WEIGHT_STD, "bias_std": BIAS_STD,
    "noise": NOISE, "learn_kernel": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("posterior", doxa.NNGP(**FIXED)),
        ("at the end", doxa.NTK(**FIXED)),
        ("after 0.7", doxa.NTK(**FIXED, time=0.7)),
        ("after 20", doxa.NTK(**FIXED, time=20.0)),
    ],
)
def test_posteriors_equal_neural_tangents(name: str, method: Any) -> None:
    given = peer_data()
    posterior = doxa.fit(None, (given["train"], given["y"]), method)
    mean, root = posterior.joint(posterior.prepared(given["x"]), 0)
    want = {key: torch.tensor(value).double() for key, value in PEER[name].items()}
    assert float((mean - want["mean"]).abs().max()) < 1e-6
    assert float((root[0] @ root[0].mT - want["covariance"]).abs().max()) < 1e-6
    p = posterior.predict(given["x"])
    assert torch.allclose(p.epistemic[:, 0], want["covariance"].diagonal(), atol=1e-6)


def test_weights_are_repeated_rows_at_any_time() -> None:
    given = peer_data()
    weight = torch.tensor([1, 2, 1, 3, 1, 1])
    again = torch.repeat_interleave(torch.arange(6), weight)
    x, y = given["train"], given["y"]
    for method in (doxa.NNGP(**FIXED), doxa.NTK(**FIXED), doxa.NTK(**FIXED, time=5.0)):
        one = doxa.fit(None, (x, y), method, sample_weight=weight).predict(given["x"])
        two = doxa.fit(None, (x[again], y[again]), method).predict(given["x"])
        assert torch.allclose(one.mean, two.mean, rtol=1e-9)
        assert torch.allclose(one.variance, two.variance, rtol=1e-9)


def three_classes(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=g).double()
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 0] > 1).long()
    other = torch.randint(0, 3, (rows,), generator=g)
    return x, torch.where(torch.rand(rows, generator=g) < 0.1, other, y)


@pytest.mark.parametrize("name", ["nngp", "ntk"])
def test_classes_are_calibrated_without_held_out_rows(name: str) -> None:
    """A tenth of the labels is random. The expected calibration error of 1,000 rows has a standard
    error of about 0.015 under perfect calibration."""
    x, y = three_classes(1200)
    method = doxa.get_method(name)(depth=1, learn_kernel=False, noise=0.3)
    posterior = doxa.fit(None, (x[:200], y[:200]), method, likelihood="categorical")
    p = posterior.predict(x[200:])
    assert float((p.probs.argmax(1) == y[200:]).double().mean()) > 0.8  # at most 0.93
    assert doxa.evaluate.ece(p, y[200:]) < 0.08
    assert posterior.log_evidence is None
    more = posterior.condition(x[200:300], y[200:300]).predict(x[300:])
    assert float(more.log_prob(y[300:]).mean()) > float(p.log_prob(y[200:])[100:].mean())


def test_the_temperature_is_that_of_rows_left_out_in_fact() -> None:
    """Every row predicted by a fit to the others; E[softmax] by MacKay's formula. Every sixth label
    is another one, so that T is above the least that is tried."""
    x, y = three_classes(12)
    y = torch.where(torch.arange(12) % 6 == 0, (y + 1) % 3, y)
    method = doxa.NNGP(depth=1, learn_kernel=False, noise=0.2)
    posterior = doxa.fit(None, (x, y), method, likelihood="categorical")
    means, variances = [], []
    for i in range(12):
        keep = torch.arange(12) != i
        rest = doxa.fit(None, (x[keep], y[keep]), method, likelihood="categorical")
        f, v = rest.marginals(rest.prepared(x[i : i + 1]))
        means.append(f[0, 0] * rest.temperature)
        variances.append(v[0, 0] * rest.temperature**2)
    m, v = torch.stack(means), torch.stack(variances)

    def score(t: float) -> float:
        logits = m / (t * t + torch.pi / 8 * v).sqrt()
        return float(logits.log_softmax(-1).gather(1, y[:, None]).sum())

    own = float(posterior.temperature)
    least = 0.2 * 3**0.5 / torch.pi
    tried = [least * 1.01**k for k in range(700)]
    best = max(tried, key=score)
    assert own >= least * (1 - 1e-9)
    assert score(own) > score(best) - 0.02
    assert math.log(own / best) == pytest.approx(0.0, abs=0.12)  # the grid is 12 % apart


def test_scales_are_at_the_top_of_evidence_and_prior() -> None:
    """Of log N(y; 0, K + σ²I) + Σ log N(·; centre, 1), written out; no small step gains."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(25, 2, generator=g).double()
    y = x[:, 0].sin() + 0.3 * torch.randn(25, generator=g).double()
    posterior = doxa.fit(None, (x, y), doxa.NTK(depth=1))
    architecture = Architecture.fully_connected(1)
    centre = torch.tensor([1.5, 0.3, 1.0]).double().log()

    def value(theta: torch.Tensor) -> float:
        k = architecture.matrix(x, None, float(theta[0].exp()), float(theta[1].exp()), "ntk")
        k = k + (2 * theta[2]).exp() * torch.eye(25)
        evidence = torch.distributions.MultivariateNormal(torch.zeros(25).double(), k).log_prob(y)
        return float(evidence - 0.5 * (theta - centre).square().sum())

    top = torch.cat([posterior.hyper[0], posterior.log_noise.reshape(1)])
    for axis in torch.eye(3).double():
        slope = (value(top + 1e-4 * axis) - value(top - 1e-4 * axis)) / 2e-4
        assert abs(slope) < 1e-3
        assert value(top + 0.1 * axis) < value(top) > value(top - 0.1 * axis)


def test_a_network_is_read_off_and_saved(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 6, 6, generator=g)
    y = x[:, 0, 2, 3] + 0.1 * x.mean((1, 2, 3))
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    by_fit = doxa.fit(net, (x, y), doxa.NNGP(noise=0.1, refine=3))
    by_field = doxa.fit(None, (x, y), doxa.NNGP(net=net, noise=0.1, refine=3))
    assert torch.equal(by_fit.predict(x).mean, by_field.predict(x).mean)
    by_field.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert torch.equal(again.predict(x).variance, by_field.predict(x).variance)
    with pytest.raises(MethodError, match="two networks"):
        doxa.fit(net, (x, y), doxa.NNGP(net=net))


@pytest.mark.slow
def test_a_trained_ensemble_is_the_limits() -> None:
    """120 networks of width 512, in the limit's parametrisation and trained by full gradient steps
    of 0.1 for 300: means within 4 standard errors and 0.03 of a finite width, spreads within 20 %
    (of 120 networks: 6.5 % standard error)."""
    from torch.func import functional_call, grad, vmap

    g = torch.Generator().manual_seed(0)
    x, new = torch.randn(8, 2, generator=g), torch.randn(5, 2, generator=g)
    y = (x[:, :1] * x[:, 1:]).clone()
    fixed: dict[str, Any] = {"depth": 1, "activation": "erf", "weight_std": 1.5, "bias_std": 0.3}
    method = doxa.NTK(**fixed, noise=1e-3, time=30.0, learn_kernel=False)
    limit = doxa.fit(None, (x.double(), y.double()), method).predict(new.double())
    architecture = Architecture.fully_connected(1, "erf")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        drawn = [finite_network(architecture, 2, 1, 512, 1.5, 0.3) for _ in range(120)]
    theta = {
        k: torch.stack([dict(one.named_parameters())[k].detach() for one in drawn])
        for k, _ in drawn[0].named_parameters()
    }

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.5 * (functional_call(drawn[0], weights, (x,)) - y).square().mean()

    slopes = vmap(grad(loss))
    for _ in range(300):
        theta = {
            k: v - 0.1 * s for (k, v), s in zip(theta.items(), slopes(theta).values(), strict=True)
        }
    f = vmap(lambda weights: functional_call(drawn[0], weights, (new,)))(theta)[..., 0]
    error = f.std(0) / 120**0.5
    assert bool(((f.mean(0) - limit.mean[:, 0]).abs() < 4 * error + 0.03).all())
    assert torch.allclose(f.std(0).double(), limit.epistemic[:, 0].sqrt(), rtol=0.2)


def test_as_a_gpytorch_kernel() -> None:
    from doxa.function.wide.gpytorch_kernel import wide_kernel

    given = peer_data()
    kernel = wide_kernel(2, "erf", "nngp", WEIGHT_STD, BIAS_STD)
    settings = {"noise": NOISE, "learn_kernel": False}
    found = doxa.fit(None, (given["train"], given["y"]), doxa.GP(kernel=kernel, **settings))
    want = torch.tensor(PEER["posterior"]["mean"]).double()
    assert float((found.predict(given["x"]).mean - want).abs().max()) < 1e-6
    tangent = wide_kernel(2, "erf", "ntk").double()
    x = given["x"]
    assert torch.allclose(tangent(x, diag=True), tangent(x).to_dense().diagonal(), rtol=1e-12)


def test_a_softplus_is_read_off_where_its_beta_is_one() -> None:
    x = torch.linspace(-1, 1, 8).double()[:, None]
    for beta in (1, 2):
        net = nn.Sequential(nn.Linear(1, 4), nn.Softplus(beta=beta), nn.Linear(4, 1)).double()
        if beta == 1:
            assert doxa.fit(net, (x, x[:, 0]), doxa.NNGP(noise=0.1, refine=1)).members == 1
        else:
            with pytest.raises(ModelError, match="its beta is 2"):
                doxa.fit(net, (x, x[:, 0]), doxa.NNGP(noise=0.1, refine=1))
