"""Hierarchical priors against closed forms, quadrature and automatic differentiation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.func import grad, hessian, vmap

import doxa
from doxa.errors import ModelError, Unavailable
from doxa.linalg.layout import Entry, Layout
from doxa.priors import Hierarchical, bind, stack_bound

LAYOUT = Layout(
    (
        Entry("first.weight", (3, 4), fan_in=4),
        Entry("norm.weight", (3,), centre=1.0),
        Entry("last.bias", (1,)),
        Entry("likelihood.log_noise", ()),
    )
)
KINDS = {
    "half-cauchy": Hierarchical(scale=0.7),
    "inverse-gamma": Hierarchical("inverse-gamma", scale=0.7, shape=1.5),
    "log-normal": Hierarchical("log-normal", scale=0.7, shape=0.6),
}
every = pytest.mark.parametrize("kind", KINDS)


def flat(*lead: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*lead, LAYOUT.size), generator=generator, dtype=torch.float64)


def hyper(kind: str) -> object:
    """The density of σ, by scipy."""
    if kind == "half-cauchy":
        return stats.halfcauchy(0, 0.7).pdf
    if kind == "log-normal":
        return stats.lognorm(0.6, 0, 0.7).pdf
    variance = stats.invgamma(1.5, scale=1.5 * 0.49)
    return lambda s: variance.pdf(s**2) * 2 * s


def by_quadrature(kind: str, square: float, n: int) -> float:
    """∫ N(w; 0, σ²) p(σ) dσ over log σ, of n weights with Σ w² = square."""
    density = hyper(kind)

    def integrand(u: float) -> float:
        sigma = math.exp(u)
        normal = -n * (u + 0.5 * math.log(2 * math.pi)) - 0.5 * square / sigma**2
        return math.exp(normal) * density(sigma) * sigma  # type: ignore[operator]

    middle = 0.5 * math.log(square / n)
    ends = [(middle - 6, middle), (middle, middle + 1), (middle + 1, middle + 12)]
    return sum(integrate.quad(integrand, *e, epsabs=0, epsrel=1e-11, limit=300)[0] for e in ends)


@every
def test_the_scale_is_integrated_out(kind: str) -> None:
    """log p of each tensor is log ∫ N(w | σ) p(σ) dσ, to the 1e-7 of the table; learned noise is
    under its own prior."""
    w = flat(seed=1)
    found = bind(KINDS[kind], LAYOUT).log_prob(w)
    parts = {name: v.flatten().numpy() for name, v in LAYOUT.unflatten(w).items()}
    wanted = stats.norm.logpdf(parts["likelihood.log_noise"]).sum()
    for name, centre in (("first.weight", 0.0), ("norm.weight", 1.0), ("last.bias", 0.0)):
        square = float(((parts[name] - centre) ** 2).sum())
        wanted += math.log(by_quadrature(kind, square, len(parts[name])))
    assert float(found) == pytest.approx(wanted, abs=3e-7)


def test_inverse_gamma_is_a_student_t() -> None:
    """Of one weight, and of a tensor, against scipy."""
    layout = Layout((Entry("w", (5,)),))
    prior = Hierarchical("inverse-gamma", scale=0.4, shape=2.0)
    w = flat(7)[:, :5]
    wanted = stats.multivariate_t(np.zeros(5), 0.16 * np.eye(5), df=4).logpdf(w.numpy())
    np.testing.assert_allclose(prior.bind(layout).log_prob(w), wanted, rtol=1e-12)
    one = prior.bind(Layout((Entry("w", ()),))).log_prob(w[:, :1])
    np.testing.assert_allclose(one, stats.t(4, 0, 0.4).logpdf(w[:, 0].numpy()), rtol=1e-12)


@every
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_score_and_curvature_are_derivatives(kind: str, size: float) -> None:
    bound, w = bind(KINDS[kind], LAYOUT), size * flat(3, seed=1)
    torch.testing.assert_close(bound.score(w), vmap(grad(bound.log_prob))(w), rtol=1e-9, atol=1e-9)
    curved = -vmap(hessian(bound.log_prob))(w).diagonal(dim1=-2, dim2=-1)
    scale = float(curved.abs().max())
    torch.testing.assert_close(bound.curvature(w), curved, rtol=1e-9, atol=1e-9 * scale)
    torch.testing.assert_close(vmap(bound.score)(w), bound.score(w))


@every
def test_draws_follow_the_density(kind: str) -> None:
    """σ drawn with the weights and σ drawn given the weights have one distribution: two-sample
    Kolmogorov–Smirnov for the norm and for σ, at 1e-4."""
    bound = bind(KINDS[kind], LAYOUT)
    family = bound.parts[0].family
    rng = torch.Generator().manual_seed(0)
    before = family.sample_scales(4000, rng)  # type: ignore[attr-defined]
    w = bound.sample(4000, rng)[:, :-1]
    w = w - LAYOUT.per_element([0.0, 1.0, 0.0, 0.0])[:-1]
    after = family.scales(w, rng)  # type: ignore[attr-defined]
    assert after.shape == (4000, 3)
    for g in range(3):
        assert stats.ks_2samp(before[:, g], after[:, g]).pvalue > 1e-4
    share = [stats.kstest(before[:, 0], lambda s: _cdf(kind, s)).pvalue]
    assert min(share) > 1e-4


def _cdf(kind: str, at: np.ndarray) -> np.ndarray:
    grid = np.exp(np.linspace(-14, 14, 40001))
    grown = integrate.cumulative_trapezoid(hyper(kind)(grid), grid, initial=0)  # type: ignore[operator]
    return np.interp(at, grid, grown)


@every
def test_parts_and_stacks(kind: str) -> None:
    """Whole tensors are independent; some elements of one have the marginal; runs stay apart."""
    bound, w = bind(KINDS[kind], LAYOUT), flat(2, 2)
    index = LAYOUT.index(["norm.weight", "likelihood.log_noise"])
    others = LAYOUT.index(["first.weight", "last.bias"])
    some, rest = (bound.of(where) for where in (index, others))
    total = some.log_prob(w[..., index]) + rest.log_prob(w[..., others])
    torch.testing.assert_close(total, bound.log_prob(w), rtol=1e-12, atol=1e-12)
    half = bound.of(torch.arange(6)).log_prob(w[..., :6])
    six = bind(KINDS[kind], Layout((Entry("w", (6,)),))).log_prob(w[..., :6])
    torch.testing.assert_close(half, six)
    wide = bind(Hierarchical(KINDS[kind].hyper, 2.0, 1.1, fan_in=True), LAYOUT)
    stacked = stack_bound([bound, wide])
    for name in ("log_prob", "score", "curvature"):
        apart = [getattr(one, name)(w[:, r]) for r, one in enumerate((bound, wide))]
        torch.testing.assert_close(getattr(stacked, name)(w), torch.stack(apart, 1))
    assert stacked.sample(5, torch.Generator().manual_seed(0)).shape == (5, 2, LAYOUT.size)
    lost = w.clone()
    lost[0, 0, 0] = math.nan  # a chain that broke down is not an error of indices
    assert bound.score(lost).isnan()[0, 0, :12].all()
    single = bound.to("cpu", torch.float32)
    torch.testing.assert_close(
        single.score(w.float()).double(), bound.score(w), rtol=2e-5, atol=1e-6
    )


def test_unusable_settings() -> None:
    for wrong in ({"hyper": "gamma"}, {"scale": 0.0}, {"shape": -1.0}, {"fan_in": 1}):
        with pytest.raises(ModelError, match="Hierarchical"):
            Hierarchical(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
@every
def test_chains_sample_weights_and_scales(kind: str) -> None:
    """A line through the origin: the posterior of its slope and of the prior's scale, by quadrature
    over both; of 4 × 500 draws. Bounds are five standard errors, if 4 draws are worth one."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(-1, 1)
    y = 2.0 * x
    model = doxa.Model(nn.Linear(1, 1, bias=False).double(), doxa.Gaussian(1.0), KINDS[kind])
    posterior = doxa.fit(model, (x, y), doxa.HMC(draws=500, burn_in=200, leapfrog=6), members=4)
    w, u = np.linspace(-6, 6, 1201)[:, None], np.linspace(-9, 9, 1801)
    sigma = np.exp(u)
    joint = stats.norm.pdf(w, 0, sigma) * hyper(kind)(sigma) * sigma  # type: ignore[operator]
    joint *= np.exp(-0.5 * ((y.numpy() - x.numpy() * w.T) ** 2).sum(0))[:, None]
    joint /= joint.sum()
    drawn = {
        "weight": posterior.draw()["weight"].flatten().numpy(),
        "log sigma": doxa.prior_scales(posterior)["weight"].log().numpy(),
    }
    for name, values in (("weight", w), ("log sigma", u)):
        mean = (joint * values).sum()
        std = math.sqrt((joint * (values - mean) ** 2).sum())
        assert drawn[name].mean() == pytest.approx(mean, abs=5 * std / math.sqrt(500))
        assert drawn[name].std() == pytest.approx(std, rel=0.2)


def test_a_fit_keeps_it(tmp_path: object) -> None:
    """MAP under an inverse-gamma scale is the maximum over weights and log σ together: there
    σ² = (b + r²/2)/(a + n/2), and ∇ log p(y | w) = w/σ². The prior is saved by value."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float64)
    net = nn.Linear(3, 1, bias=False).double()
    model = doxa.Model(net, doxa.Gaussian(noise=1.0), KINDS["inverse-gamma"])
    fitted = doxa.fit(model, (x, y), doxa.MAP(), validation=None, steps=600, lr=0.05, batch_size=30)
    w = fitted.draw()["weight"].reshape(3, 1)
    variance = (1.5 * 0.49 + 0.5 * w.square().sum()) / (1.5 + 1.5)
    torch.testing.assert_close(x.T @ (y - x @ w), w / variance, rtol=1e-4, atol=1e-4)
    fitted.save(tmp_path / "run")  # type: ignore[operator]
    again = doxa.load(tmp_path / "run", net=net)  # type: ignore[operator]
    assert again.model.prior == KINDS["inverse-gamma"]
    torch.testing.assert_close(
        doxa.prior_scales(again)["weight"], doxa.prior_scales(fitted)["weight"]
    )
    plain = doxa.fit(net, (x, y), "map", steps=2)
    with pytest.raises(Unavailable, match="Hierarchical"):
        doxa.prior_scales(plain)
