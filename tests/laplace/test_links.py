"""Class probabilities in closed form: against quadrature, Monte Carlo, laplace-torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet

import doxa
from doxa.errors import MethodError, Unavailable
from doxa.laplace.curvature import Jacobians
from doxa.laplace.posterior import against_others, binary_bridge, bridge, probit
from doxa.likelihoods import Bernoulli, Categorical
from doxa.posterior.saving import from_artefact, to_artefact
from doxa.predictive import Predictive
from doxa.predictive.classes import Dirichlets

DRAWS = 1_000_000


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def fitted(link: str, outputs: int, y: Tensor, likelihood: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = doxa.nets.mlp(2, outputs, (4,), activation="tanh").double()
    method = doxa.Laplace(link=link, train=False, mean_correction=False, **settings)
    return doxa.fit(net, (normal(len(y), 2), y), method, likelihood=likelihood, init="given",
                    seed=0)  # fmt: skip


def test_probit_of_one_logit_is_near_the_integral() -> None:
    """E σ(f) by quadrature, at means up to 6 and variances up to 25: never off by 0.019, where the
    weights alone are off by 0.243."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    m = torch.linspace(-6, 6, 61).double()[:, None]
    v = numbers(0.1, 1.0, 4.0, 9.0, 25.0)
    f = m[..., None] + v.sqrt()[:, None] * torch.tensor(nodes)
    exact = (torch.sigmoid(f) * torch.tensor(weights)).sum(-1) / np.sqrt(2 * np.pi)
    assert (torch.sigmoid(probit(m, v)) - exact).abs().max() < 0.019
    assert (torch.sigmoid(m) - exact).abs().max() > 0.24


def probs_against_others(f: Tensor, covariance: Tensor) -> Tensor:
    """The equation itself, with the whole covariance: [..., C] and [..., C, C]."""
    classes = f.shape[-1]
    d = (torch.eye(classes).double() * classes - 1.0) / (classes - 1)  # each less the others' mean
    variance = (d @ covariance @ d).diagonal(dim1=-2, dim2=-1)
    return ((1 - 1 / classes) * (f @ d) / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)


def test_probit_of_classes_is_near_the_average_over_a_million_draws() -> None:
    """Logits of unequal variance up to 4, and a shift of them all of variance 30 that no
    probability depends on: within 0.03 (the Monte Carlo error is below 5e-4), where each logit's
    own variance is off by 0.24 and the weights alone by 0.147."""
    m, v = numbers(2.0, 0.0, -1.0, -1.0), numbers(4.0, 1.0, 2.0, 0.5)
    exact = (m + v.sqrt() * normal(DRAWS, 4)).softmax(1).mean(0)
    root = torch.cat([v.sqrt().diag(), torch.full((4, 1), 30.0).double().sqrt()], 1)
    own = probit(m, root.square().sum(1)).softmax(0)
    variance = against_others(root, 4).square().sum(1)
    ours = probit(m - m.mean(), variance).softmax(0)
    assert (ours - exact).abs().max() < 0.03
    assert (own - exact).abs().max() > 0.24
    assert (m.softmax(0) - exact).abs().max() > 0.14


@pytest.mark.parametrize(
    "structure", ["full", "diagonal", "block-diagonal", "kronecker", "low-rank", "functional"]
)
def test_every_structure_has_the_probit(structure: str) -> None:
    """That of J Σ Jᵀ held whole, which no structure needs; of two classes, MacKay's of their
    difference."""
    x = normal(5, 2, seed=1)
    for classes in (2, 3):
        y = torch.arange(30) % classes
        posterior = fitted("probit", classes, y, "categorical", structure=structure)
        f, j = Jacobians(posterior.network, posterior.mean, posterior.network.subset_names)(x)
        whole = posterior.covariance.outer(j)[0]
        probs = posterior.predict(x).probs
        assert torch.allclose(probs, probs_against_others(f[0], whole), rtol=1e-8)
        if classes == 2:
            step = numbers(-1.0, 1.0)
            one = probit(f[0] @ step, torch.einsum("bij,i,j->b", whole, step, step))
            assert torch.allclose(probs[:, 1], torch.sigmoid(one), rtol=1e-8)


def test_a_posterior_keeps_the_link_it_was_saved_with() -> None:
    """An artefact from before logits stood against each other: its "probit" was by each logit's own
    variance."""
    x, y = normal(5, 2, seed=1), torch.arange(30) % 3
    for structure in ("full", "functional"):
        old = fitted("probit-marginal", 3, y, "categorical", structure=structure)
        tensors, meta = to_artefact(old)
        meta["method"]["link"] = "probit"
        new, before = from_artefact(tensors, meta, None), old.predict(x).probs
        del meta["extra"]["probit"]
        assert torch.equal(from_artefact(tensors, meta, None).predict(x).probs, before)
        assert (new.predict(x).probs - before).abs().max() > 1e-3


def dirichlet_in_logits(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mode and inverse curvature of a Dirichlet's density over logits that sum to zero, from its
    Hessian: −∂² Σ α_c log softmax(f)_c = α₀ (diag(p) − ppᵀ), inverted on that plane."""
    p, total = alpha / alpha.sum(), alpha.sum()
    f = alpha.log() - alpha.log().mean()
    return f, torch.linalg.pinv(total * (torch.diag(p) - p[:, None] * p))


def test_the_bridge_finds_the_dirichlet_back() -> None:
    """From its mode and curvature, also where a constant is added to all logits that is unknown,
    on which no probability depends."""
    alpha = numbers(20.0, 7.0, 3.0, 0.8, 0.1)
    f, covariance = dirichlet_in_logits(alpha)
    assert torch.allclose(bridge(f, covariance), alpha, rtol=1e-10)
    assert torch.allclose(bridge(f + 0.7, covariance + 2.0), alpha, rtol=1e-10)


def test_the_bridge_is_exact_where_beliefs_are_narrow() -> None:
    """Large α: the probabilities of a million Gaussian logits have the moments and the
    entropy of the Dirichlet, to the O(1/α) of a Laplace approximation."""
    alpha = numbers(900.0, 600.0, 400.0)
    f, covariance = dirichlet_in_logits(alpha)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0.0).sqrt()
    probs = (f + normal(DRAWS, 3) @ root.T).softmax(1)
    p = Predictive.of(Dirichlets(Categorical(), bridge(f, covariance)[None, None]))
    entropy = torch.special.entr(probs).sum(1).mean()
    assert torch.allclose(p.probs[0], probs.mean(0), atol=1e-3)
    assert torch.allclose(p.epistemic[0], probs.var(0), rtol=1e-2)
    assert float(p.expected_entropy) == pytest.approx(float(entropy), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "least", "most"), [(3, 0.15, 0.21), (10, 0.06, 0.08)])
def test_how_rough_the_links_are(classes: int, least: float, most: float) -> None:
    """The mean error of a probability over forty random Gaussians, with variances about 1 that
    differ: what the docs say. The bridge is off by more than the weights alone, the probit by
    less."""
    f = 1.5 * normal(40, classes, seed=1) + normal(40, 1, seed=2)
    half = normal(40, classes, classes + 2, seed=3) / (classes + 2) ** 0.5
    root = torch.linalg.cholesky(half @ half.mT)
    draws = normal(20_000, 40, classes, seed=4)
    exact = (f + torch.einsum("bij,sbj->sbi", root, draws)).softmax(-1).mean(0)
    alpha = bridge(f, half @ half.mT)
    ours = probs_against_others(f, half @ half.mT)
    error = lambda probs: float((probs - exact).abs().mean())  # noqa: E731
    assert error(ours) < error(f.softmax(-1)) < 0.05
    assert least < error(alpha / alpha.sum(-1, keepdim=True)) < most


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_bridge_of_logits_that_are_sure_is_sure(outputs: int) -> None:
    """α of e^180 is beyond single precision: probabilities are those of double precision, and no
    number is missing."""
    net = nn.Linear(1, outputs, bias=False)
    x = torch.linspace(-3, 3, 13)[:, None]
    y = (x > 0).float() if outputs == 1 else (x[:, 0] > 0).long()
    kind = "bernoulli" if outputs == 1 else "categorical"
    with torch.no_grad():
        net.weight.copy_(60.0 * torch.arange(1.0, outputs + 1)[:, None])
    method = doxa.Laplace(link="bridge", train=False, tune=None)
    both = [
        doxa.fit(doxa.Model(net, kind, doxa.Normal(100.0)), (x.to(dtype), y), method, init="given",
                 dtype=dtype, validation=None).predict(x.to(dtype))
        for dtype in (torch.float32, torch.float64)
    ]  # fmt: skip
    for p in both:
        parts = (p.mean, p.entropy, p.mutual_information, p.log_prob(y))
        assert all(part.isfinite().all() for part in parts)
    assert torch.allclose(both[0].mean.double(), both[1].mean, atol=1e-5)


def test_the_bridge_of_one_logit_is_that_of_a_pair() -> None:
    """And keeps the probability of its mean."""
    f, v = numbers(-3.0, 0.2, 5.0), numbers(0.3, 2.0, 9.0)
    sign = numbers(-0.5, 0.5)
    pair = bridge(f[:, None] * sign, v[:, None, None] * sign[:, None] * sign)
    ours = binary_bridge(f, v)
    assert torch.allclose(ours, pair, rtol=1e-10)
    assert torch.allclose(ours[:, 1] / ours.sum(1), torch.sigmoid(f), rtol=1e-10)


@pytest.mark.parametrize("binary", [False, True])
def test_two_dirichlets_split_their_uncertainty(binary: bool) -> None:
    """As 200,000 draws of each do, to 3 standard errors and more (of the mean, 5e-4)."""
    alpha = torch.stack([numbers(2.0, 0.7), numbers(1.0, 6.0)]) if binary else torch.stack(
        [numbers(2.0, 0.5, 0.3), numbers(1.0, 6.0, 3.0)]
    )  # fmt: skip
    likelihood: Any = Bernoulli() if binary else Categorical()
    p = Predictive.of(Dirichlets(likelihood, alpha[:, None]))
    torch.manual_seed(0)
    probs = Dirichlet(alpha).sample((200_000,)).flatten(0, 1)  # [draws, C]
    entropy = float(torch.special.entr(probs).sum(1).mean())
    yes = probs[:, 1:] if binary else probs
    assert torch.allclose(p.mean.flatten(), yes.mean(0), atol=2e-3)
    assert torch.allclose(p.epistemic.flatten(), yes.var(0), atol=1e-3)
    assert torch.allclose(p.aleatoric.flatten(), (yes * (1 - yes)).mean(0), atol=1e-3)
    assert float(p.expected_entropy) == pytest.approx(entropy, abs=2e-3)
    assert torch.allclose(p.variance, p.mean * (1 - p.mean))
    assert float(p.log_prob([1])) == pytest.approx(float(probs[:, 1].mean().log()), abs=5e-3)


def test_a_probit_says_what_it_does_not_know() -> None:
    p = fitted("probit", 3, torch.arange(30) % 3, "categorical").predict(normal(5, 2))
    for name in ("mutual_information", "expected_entropy", "epistemic", "aleatoric", "samples"):
        with pytest.raises(Unavailable, match=f"no {name}: its probabilities are averaged"):
            getattr(p, name)
    assert torch.allclose(p.variance, p.probs * (1 - p.probs))
    assert torch.allclose(p.entropy, torch.special.entr(p.probs).sum(1))
    assert "mutual_information" not in repr(p)
    assert "mutual_information" not in repr(Predictive.mix([p, p]))


@pytest.mark.parametrize("link", ["bridge", "probit"])
def test_pixels_are_linked_one_by_one(link: str) -> None:
    """Three classes at two places: the link of each place, from its own block of J Σ Jᵀ."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).unflatten(1, (3, 2))

    x, y = normal(20, 2), torch.arange(40).reshape(20, 2) % 3
    options: dict[str, Any] = {"likelihood": "categorical", "members": 2, "seed": 0, "steps": 20}
    method = doxa.Laplace(link=link, mean_correction=False)
    posterior = doxa.fit(Places().double(), (x, y), method, **options)
    f, j = posterior.jacobians()(x)
    covariance = posterior.covariance.outer(j)
    places = [(f[..., i::2], covariance[..., i::2, i::2]) for i in range(2)]  # [K, N, C], and C, C
    if link == "bridge":
        each = [alpha / alpha.sum(-1, keepdim=True) for alpha in (bridge(*at) for at in places)]
    else:
        each = [probs_against_others(*at) for at in places]
    expected = torch.stack(each, -1).mean(0)
    assert torch.allclose(posterior.predict(x).probs, expected, rtol=1e-8)


def test_heads_members_and_files(tmp_path: Path) -> None:
    """A head with Gaussian noise keeps its closed form; a mixture of members; saved and loaded."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    x, y = normal(30, 2), torch.arange(30) % 3
    model = doxa.Model(Two().double(), ("gaussian", "categorical"))
    method = doxa.Laplace(link="probit")
    posterior = doxa.fit(model, (x, (x[:, :1], y)), method, members=2, steps=30, seed=0)
    posterior.save(tmp_path / "run")
    numbers_, classes = posterior.predict(x).heads
    f, j = posterior.jacobians()(x)
    covariance = posterior.covariance.outer(j)
    assert torch.allclose(numbers_.mean, f[..., :1].mean(0))
    expected = probs_against_others(f[..., 1:], covariance[..., 1:, 1:]).mean(0)
    assert torch.allclose(classes.probs, expected)
    assert torch.equal(
        doxa.load(tmp_path / "run", net=Two().double()).predict(x).heads[1].probs, classes.probs
    )


def test_links_need_classes_and_gaussian_logits() -> None:
    with pytest.raises(MethodError, match="predictive='linearised'"):
        doxa.Laplace(link="probit", predictive="sampled")
    with pytest.raises(MethodError, match="a gaussian likelihood has none"):
        fitted("bridge", 1, normal(30, 1), "gaussian")
