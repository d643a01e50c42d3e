"""Rank-1 networks: explicit networks without variance, a bound on the evidence with it."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import rank_one_cases
import torch
from rank_one_cases import images, lenet
from torch import Tensor, nn
from torch.distributions import Cauchy, Normal, kl_divergence

import doxa
from doxa.engine import Engine
from doxa.errors import ModelError
from doxa.model import Model
from doxa.model.rank_one import with_rank_one
from doxa.optim import SGD
from doxa.vi import kl
from doxa.vi.rank1 import cauchy_divergence

NOISE = 0.5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def explicit(posterior: Any, net: nn.Module, m: int, k: int) -> nn.Module:
    return rank_one_cases.explicit(posterior, posterior.theta[m], net, m, k)


def silenced(posterior: Any) -> Any:
    """With factors of no variance: softplus(−1000) is 0."""
    own = posterior.network.layers
    for name in own.names:
        if name.endswith("_rho"):
            posterior.layers[:, :, own.slices[name]] = -1000.0
    return posterior


def test_without_variance_it_is_a_batch_ensemble() -> None:
    """Of explicit networks W ∘ (r sᵀ), convolutions and BatchNorm among them; draws are dealt out
    to components in turn."""
    x, y = images()
    posterior = doxa.fit(lenet(), (x, y), "rank1", members=2, steps=8, batch_size=8)
    loud = posterior.functions(x, 16)
    f = silenced(posterior).functions(x, 16).reshape(2, 2, 4, len(x), 2)
    assert not torch.allclose(loud.reshape(f.shape), f, rtol=1e-2)
    for m in range(2):
        for k in range(4):
            wanted = explicit(posterior, lenet(), m, k)(x)
            assert torch.allclose(f[m, 0, k], wanted, rtol=1e-9)
            assert torch.equal(f[m, 0, k], f[m, 1, k])
    assert not torch.allclose(f[0, 0, 0], f[0, 0, 1])
    deep = explicit(posterior, lenet(), 0, 0)[:6](x), explicit(posterior, lenet(), 1, 0)[:6](x)
    assert torch.allclose(posterior.features(x), (deep[0] + deep[1]) / 2, rtol=1e-9)


def test_it_has_little_more_than_one_network() -> None:
    """P + 2K Σ_layers (inputs + outputs): a mean and a standard deviation each."""
    posterior = doxa.fit(lenet(), images(), doxa.Rank1(components=3), steps=2, batch_size=6)
    own = 2 * (2 + 3 + 12 + 5 + 5 + 2)
    assert posterior.layers.shape == (1, 3, own)
    assert posterior.theta.shape == (1, sum(p.numel() for p in lenet().parameters()))


def test_only_layers_of_the_subset_have_factors() -> None:
    model = doxa.Model(lenet(), "categorical", subset=lambda name: name.startswith("4."))
    posterior = doxa.fit(model, images(), "rank1", steps=5, batch_size=8)
    assert posterior.network.layers.names == ("4.r_rho", "4.s_rho", "4.r", "4.s")
    assert set(posterior.network.sites) == {"4.eps"}


def test_a_draw_is_one_function() -> None:
    """f(x) − b is linear in x, since all rows have one draw of the factors."""
    x = torch.cat([torch.zeros(1, 3).double(), e := torch.eye(3).double(), e.sum(0, keepdim=True)])
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    method = doxa.Rank1(initial_std=0.5)
    posterior = doxa.fit(net, (randn(8, 3), randn(8, 1, seed=1)), method, steps=2, batch_size=8)
    f = posterior.functions(x, 20)[..., 0]
    assert torch.allclose((f[:, 1:4] - f[:, :1]).sum(1), f[:, 4] - f[:, 0], rtol=1e-9)
    assert f[:, 4].unique().numel() == 20


@pytest.mark.parametrize("layer", [nn.Conv1d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.Linear(2, 3)])
def test_noise_is_the_same_at_all_places_of_a_row(layer: nn.Module) -> None:
    """A row that is the same at all places stays so, and equal rows part."""
    space = {nn.Conv1d: (5,), nn.Conv2d: (4, 5), nn.Linear: ()}[type(layer)]
    x = torch.ones(6, 7, 2) if not space else torch.ones(6, 2, *space)
    new = with_rank_one("0", layer, 0.1, 0.5)
    new.reset_parameters()
    for seed, (name, (kind, shape)) in enumerate(new.noise(x).items()):
        assert kind == "normal" and shape[0] == 6 and math.prod(shape[1:]) == 5
        setattr(new, name, randn(*shape, seed=seed).float())
    out = new(x).movedim(-1, 1).flatten(2) if not space else new(x).flatten(2)  # [6, 3, places]
    assert torch.allclose(out, out[..., :1].expand_as(out), atol=1e-6)
    assert len(out[:, 0, 0].unique()) == 6


@pytest.mark.parametrize(
    "engine", [Engine("stack"), Engine("stack", native=False), Engine("loop")], ids=str
)
@pytest.mark.parametrize("stacked", [True, False])
def test_all_forms_agree(engine: Engine, stacked: bool) -> None:
    """((x ∘ s) Wᵀ) ∘ r + b with r and s of each row, on sequences; weights of each member, or
    shared, as in a prediction."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    rule = lambda name, layer: (  # noqa: E731
        with_rank_one(name, layer, 0.1, 0.1) if isinstance(layer, nn.Linear) else None
    )
    x = randn(5, 3, 4, seed=1)
    built = Model(net).rewrite(rule).to("cpu", torch.float64).build(x)
    own = built.layers.unflatten(randn(3, built.layers.size, seed=2))
    flat = randn(3, built.layout.size, seed=3)
    weights = built.layout.unflatten(flat if stacked else flat[0])
    noise = {k: randn(3, *site.drawn(5), seed=9) for k, site in built.sites.items()}
    constant = frozenset() if stacked else frozenset(weights)
    got = engine.apply(built, {**weights, **own}, x, buffers=noise, constant=constant).f
    for m in range(3):
        h = x
        for i in ("0", "2"):
            w, b = (weights[f"{i}.{leaf}"] for leaf in ("weight", "bias"))
            w, b = (w[m], b[m]) if stacked else (w, b)
            eps = noise[f"{i}.eps"][m].split([len(w), w.shape[1]], -1)
            r, s = (
                own[f"{i}.{v}"][m] + own[f"{i}.{v}_rho"][m].exp().log1p() * e
                for v, e in zip("rs", eps, strict=True)
            )
            h = ((h * s) @ w.T) * r + b
            h = torch.tanh(h) if i == "0" else h
        assert torch.allclose(got[m], h, rtol=1e-10)


def test_divergences_are_those_of_torch_and_of_quadrature() -> None:
    """Normal: closed form. Cauchy: the mean over 200,000 draws, within five standard errors of
    ∫ q log(q/p) on a grid."""
    mean, std = 1 + 0.5 * randn(2, 3, 4), 0.1 + randn(2, 3, 4, seed=1).abs()
    scale = torch.tensor([0.1, 0.7], dtype=torch.float64).reshape(2, 1, 1)
    want = kl_divergence(Normal(mean, std), Normal(1.0, scale)).sum(-1)
    assert torch.allclose(kl.gaussian(mean, std, 1.0, scale), want, rtol=1e-12)

    one, sigma, gamma = mean[0, 0], std[0, 0], scale[0, 0]
    z = torch.linspace(-12, 12, 20_001, dtype=torch.float64).unsqueeze(1)
    q, p = Normal(one, sigma), Cauchy(torch.tensor(1.0).double(), gamma)
    at = one + sigma * z
    exact = torch.trapezoid(q.log_prob(at).exp() * (q.log_prob(at) - p.log_prob(at)), at, dim=0)
    draws = cauchy_divergence(one, sigma, gamma, randn(200_000, 4, seed=2))
    error = float(draws.std()) / math.sqrt(len(draws))
    assert abs(float(draws.mean() - exact.sum())) < 5 * error


@pytest.mark.slow
@pytest.mark.parametrize("prior, temperature", [("normal", 1.0), ("normal", 0.5), ("cauchy", 1.0)])
def test_a_step_is_the_gradient_of_the_bound(prior: str, temperature: float) -> None:
    """One step of plain SGD on all rows, against autograd through torch's own distributions: log
    p(W) + Σ log p(y) + E log p(r, s) + T·H[q]. Factors are so narrow that nothing is random, and
    that the expectation of a Cauchy's log density is the one at the mean."""
    x, y = randn(8, 3), randn(8, 1, seed=1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    method = doxa.Rank1(
        components=1,
        initial_std=1e-9,
        factor_prior=prior,
        prior_std=0.3,
        initial_factor_std=0.2,
        temperature=temperature,
    )
    before, after = (
        doxa.fit(
            net, (x, y), method, steps=1, batch_size=8, lr=lr, optimizer=SGD(0.0),
            schedule="constant", likelihood=doxa.Gaussian(NOISE), validation=None,
        )
        for lr in (1e-14, 0.01)
    )  # fmt: skip
    theta = before.theta[0].clone().requires_grad_()
    layers = before.layers[0, 0].clone().requires_grad_()
    w, own = before.layout.unflatten(theta), before.network.layers.unflatten(layers)
    h = x
    for i in (0, 2):
        h = h @ (w[f"{i}.weight"] * torch.outer(own[f"{i}.r"], own[f"{i}.s"])).T + w[f"{i}.bias"]
        h = torch.tanh(h) if i == 0 else h
    value = Normal(h, NOISE).log_prob(y).sum() + Normal(0.0, 1.0).log_prob(theta).sum()
    for name in own:
        if not name.endswith("_rho"):
            q = Normal(own[name], own[f"{name}_rho"].exp().log1p())
            density = {"normal": Normal, "cauchy": Cauchy}[prior](1.0, 0.3)
            value = value + (density.log_prob(q.mean) + temperature * q.entropy()).sum()
    grads = torch.autograd.grad(value / len(x), [theta, layers])
    assert torch.allclose(after.theta[0], theta + 0.01 * grads[0], rtol=1e-6, atol=1e-8)
    assert torch.allclose(after.layers[0, 0], layers + 0.01 * grads[1], rtol=1e-6, atol=1e-8)


@cache
def linear_gaussian() -> tuple[Any, Tensor, Tensor]:
    """One linear layer on 20 rows: f = r Σ_j w_j s_j x_j + b."""
    x = randn(20, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + NOISE * randn(20, 1, seed=1)
    net = nn.Sequential(nn.Linear(2, 1)).double()
    method = doxa.Rank1(components=2, prior_std=0.3, elbo_samples=200)
    posterior = doxa.fit(
        net, (x, y), method, steps=300, batch_size=20, lr=0.05, validation=None,
        likelihood=doxa.Gaussian(NOISE),
    )  # fmt: skip
    return posterior, x, y


@pytest.mark.slow
def test_the_bound_on_a_linear_gaussian_network() -> None:
    """Given W, y is normal for each r: the evidence is an integral over r alone, and E_q of a
    squared error is made of the moments of r and s. The ELBO is that closed form within four
    standard errors, below the evidence, and within a nat of it after fitting."""
    posterior, x, y = linear_gaussian()
    w = posterior.layout.unflatten(posterior.theta[0])
    weight, bias = w["0.weight"][0], w["0.bias"]
    own = posterior.network.layers.unflatten(posterior.layers[0])  # [2, ...]
    target = (y - bias)[:, 0]

    r = torch.linspace(-2, 4, 2001, dtype=torch.float64)
    gram = (x * weight.square() * 0.3**2) @ x.T
    covariance = NOISE**2 * torch.eye(20).double() + r.square().reshape(-1, 1, 1) * gram
    given = torch.distributions.MultivariateNormal(r.unsqueeze(1) * (x @ weight), covariance)
    each = given.log_prob(target) + Normal(1.0, 0.3).log_prob(r)
    evidence = float(torch.logsumexp(each, 0) + math.log(6 / 2000))

    bounds, variances = [], []
    for k in range(2):
        q = {v: Normal(own[f"0.{v}"][k], own[f"0.{v}_rho"][k].exp().log1p()) for v in "rs"}
        inner, spread = x @ (weight * q["s"].mean), (x * weight).square() @ q["s"].variance
        square = (q["r"].mean.square() + q["r"].variance) * (inner.square() + spread)
        error = target.square() - 2 * target * q["r"].mean * inner + square
        fit = (-0.5 * error / NOISE**2).sum() - 20 * math.log(NOISE * math.sqrt(2 * math.pi))
        away = sum(kl_divergence(one, Normal(1.0, 0.3)).sum() for one in q.values())
        bounds.append(float(fit - away))
        g = torch.Generator().manual_seed(k)
        r_, s_ = (
            q[v].mean + q[v].stddev * torch.randn(2000, 20, n, generator=g).double()
            for v, n in (("r", 1), ("s", 2))
        )
        f = r_[..., 0] * (x * s_ * weight).sum(-1)
        variances.append(float((-0.5 * (target - f).square() / NOISE**2).var(0).sum()))
    error = math.sqrt(sum(variances) / 4 / 200)
    assert abs(posterior.elbo - sum(bounds) / 2) < 4 * error
    assert evidence - 1.0 < sum(bounds) / 2 < evidence
    assert posterior.elbo < evidence + 4 * error


def test_function_draws_have_the_moments_of_the_factors() -> None:
    """Of one linear layer: E f = r̄ Σ w s̄ x + b, and the variance of a product. 4,000 draws, five
    standard errors."""
    posterior, x, _ = linear_gaussian()
    w = posterior.layout.unflatten(posterior.theta[0])
    own = posterior.network.layers.unflatten(posterior.layers[0])
    drawn = posterior.functions(x, 4000)[:, 0, 0]
    for k in range(2):
        r, s = own["0.r"][k], own["0.s"][k]
        r_var, s_var = (own[f"0.{v}_rho"][k].exp().log1p().square() for v in "rs")
        inner, spread = ((x[0] * w["0.weight"][0]) ** p @ v for p, v in ((1, s), (2, s_var)))
        variance = (r.square() + r_var) * (inner.square() + spread) - (r * inner).square()
        mine = drawn[k::2]
        assert abs(mine.mean() - (r * inner + w["0.bias"])) < 5 * (variance / 2000).sqrt()
        assert abs(mine.var() / variance - 1) < 5 * math.sqrt(2 / 2000) * 1.2


class Tokens(nn.Module):
    """The mean over tokens of a linear layer, called in one way or another."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(2, 1, bias=False), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


CALLS: dict[str, Any] = {
    "tokens": lambda f, x: f(x).mean(1),
    "places as rows": lambda f, x: f(x.flatten(0, 1)).reshape(len(x), -1).mean(1, keepdim=True),
    "places first": lambda f, x: f(x.transpose(0, 1)).mean(0),
    "twice": lambda f, x: (f(x[:, :3]).sum(1) + f(x[:, 3])) / 4,
}


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("call", CALLS)
def test_the_bound_is_of_one_draw_for_all_places_of_a_row(call: str, engine: str) -> None:
    """f = r Σ s_i w_i x̄_i has a known mean and variance; the bound under Gaussian noise has a
    closed form. Two members of 300 passes each, to 4 standard errors of draws for all rows."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x = draw(16, 1, 2) + 0.1 * draw(16, 4, 2)
    y = x.mean(1).sum(1, keepdim=True) + 0.5 * draw(16, 1)
    torch.manual_seed(0)
    method = doxa.Rank1(components=2, initial_std=0.5, prior_std=0.7, elbo_samples=300)
    posterior: Any = doxa.fit(
        Tokens(CALLS[call]).double(), (x, y), method, steps=1, lr=1e-14, init="given", members=2,
        likelihood=doxa.Gaussian(noise=0.5), validation=None, engine=engine,
    )  # fmt: skip
    w = posterior.layout.unflatten(posterior.theta)["layer.weight"][0, 0]
    own = posterior.network.layers.unflatten(posterior.layers)  # [members, components, ...]
    inner, normal = w * x.mean(1), torch.distributions.Normal
    bounds, errors = [], []
    for m in range(2):
        for k in range(2):
            r, s = (own[f"layer.{v}"][m, k] for v in "rs")
            mean, spread = inner @ s, 0.25 * inner.square().sum(1)
            variance = (r.square() + 0.25) * (mean.square() + spread) - (r * mean).square()
            fit = normal(r * mean, 0.5).log_prob(y[:, 0]).sum() - variance.sum() / 0.5
            away = [torch.distributions.kl_divergence(normal(v, 0.5), normal(1.0, 0.7)).sum()
                    for v in (r, s)]  # fmt: skip
            bounds.append(fit - sum(away))
            f = (r + 0.5 * draw(4000, 1)) * ((s + 0.5 * draw(4000, 2)) @ inner.T)
            errors.append(normal(f, 0.5).log_prob(y[:, 0]).sum(1).var() / 300)
    error = float(torch.stack(errors).sum().sqrt()) / 4
    assert abs(posterior.elbo - float(torch.stack(bounds).mean())) < 4 * error


def test_networks_that_it_cannot_use() -> None:
    x, _ = images()
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72)).double()
    with pytest.raises(ModelError, match="no linear or convolutional layer"):
        doxa.fit(net, (x, x.flatten(1)), "rank1", steps=1)
