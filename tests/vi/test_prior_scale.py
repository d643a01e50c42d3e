"""The prior's scale at the maximum of the ELBO, and expected log priors, against other routes.

On a linear network with noise s and prior N(0, a²) the best factorised q has the mean A⁻¹Xᵀy/s² and
the variances 1/A_jj, A = XᵀX/s² + I/a²; the best a² given q is the mean of μ² + σ². Where columns
of X are orthogonal, q is the posterior, and that fixed point is the maximum of the evidence, which
is known: with XᵀX = c²I, a² = (mean z² − s²)/c², z = Xᵀy/c.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import laplace, multivariate_normal, norm, t
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.linalg.layout import Entry, Layout
from doxa.priors import bind
from doxa.vi import kl

NOISE, N, D = 0.5, 40, 6
MEMBERS = 6


def rows(orthogonal: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    x = torch.linalg.qr(x).Q * 3.0 if orthogonal else x
    w = torch.linspace(-1.5, 1.5, D, dtype=torch.float64)
    y = x @ w + 2.0 * (not orthogonal)
    return x, (y + NOISE * torch.randn(N, generator=g, dtype=torch.float64)).unsqueeze(1)


def fitted(kind: str, data: Any, bias: bool) -> Any:
    torch.manual_seed(0)
    return doxa.fit(
        nn.Linear(D, 1, bias=bias).double(), data,
        doxa.MeanField(samples=4, prior_scale=kind, initial_std=0.1, elbo_samples=200),
        likelihood=doxa.Gaussian(NOISE), prior=doxa.Normal(3.0), members=MEMBERS, batch_size=N,
        steps=1200, lr=0.02, validation=None, progress=False,
    )  # fmt: skip


@pytest.mark.slow
def test_one_scale_is_type_two_maximum_likelihood() -> None:
    """And the bound is the evidence there. Four errors of 6 × 200 draws of log p(y | θ), whose
    variance under q is at most D/2; the scale to 1 %, half a per cent of noise was seen."""
    x, y = rows(orthogonal=True)
    z = (x.T @ y[:, 0]) / 3.0
    best = math.sqrt((float(z.square().mean()) - NOISE**2) / 9.0)
    q = fitted("shared", (x, y), bias=False)
    assert [p.std for p in q.priors] == pytest.approx([best] * MEMBERS, rel=0.01)
    marginal = NOISE**2 * np.eye(N) + best**2 * (x @ x.T).numpy()
    evidence = multivariate_normal(np.zeros(N), marginal).logpdf(y[:, 0].numpy())
    assert q.elbo == pytest.approx(evidence, abs=4 * math.sqrt(D / 2 / (200 * MEMBERS)) + 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "layer"])
def test_scales_are_the_fixed_point_of_the_elbo(kind: str) -> None:
    """Correlated columns and a bias, whose scale is its own or not: to 2 %."""
    x, y = (value.numpy() for value in rows(orthogonal=False))
    phi = np.concatenate([x, np.ones((N, 1))], 1)
    groups = np.zeros(D + 1, int)
    groups[D] = kind == "layer"
    squares = np.ones(D + 1)
    for _ in range(500):
        precision = phi.T @ phi / NOISE**2 + np.diag(1 / squares)
        mean = np.linalg.solve(precision, phi.T @ y[:, 0] / NOISE**2)
        each = mean**2 + 1 / np.diag(precision)
        squares = np.array([each[groups == g].mean() for g in groups])
    q = fitted(kind, rows(orthogonal=False), bias=True)
    for prior in q.priors:
        own = [prior["weight"].std, prior["bias"].std] if kind == "layer" else [prior.std] * 2
        assert own == pytest.approx(np.sqrt(squares[[0, D]]), rel=0.02)


def test_only_a_gaussian_prior_has_its_scale_learned() -> None:
    with pytest.raises(MethodError, match="prior_scale learns the scale of a Gaussian prior"):
        doxa.fit(
            nn.Linear(D, 1).double(), rows(False), doxa.MeanField(prior_scale="shared"), steps=1,
            prior=doxa.LaplacePrior(1.0), progress=False,
        )  # fmt: skip


MEAN = torch.tensor([-1.3, -0.2, 0.0, 0.05, 0.9], dtype=torch.float64)
STD = torch.tensor([0.1, 0.4, 0.3, 2.0, 0.01], dtype=torch.float64)
PRIORS: dict[str, tuple[Any, Any]] = {
    "normal": (doxa.Normal(0.7), norm(0, 0.7).logpdf),
    "laplace": (doxa.LaplacePrior(0.4), laplace(0, 0.4).logpdf),
    "student-t": (doxa.StudentTPrior(3.0, 0.5), t(3.0, 0, 0.5).logpdf),
    "scale-mixture": (
        doxa.ScaleMixture(0.3, 1.0, 0.1),
        lambda w: np.log(0.3 * norm(0, 1.0).pdf(w) + 0.7 * norm(0, 0.1).pdf(w)),
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_the_divergence_of_a_normal_from_every_prior_is_that_of_a_quadrature(name: str) -> None:
    """Exact for the normal and the Laplace prior, with gradients; else by 100,000 draws, at 4.5
    standard errors."""
    given, density = PRIORS[name]
    prior = bind(given, Layout((Entry("w", (5,)),))).to("cpu", torch.float64)
    eps = np.linspace(-12, 12, 400_001)
    weights = norm.pdf(eps) * (eps[1] - eps[0])
    wanted = sum(
        float((weights * density(m + s * eps)).sum())
        for m, s in zip(MEAN.tolist(), STD.tolist(), strict=True)
    )
    assert prior.widens == (name in ("normal", "laplace"))
    if prior.widens:
        mean, std = MEAN.clone().requires_grad_(), STD.clone().requires_grad_()
        value = prior.log_prob(mean) + prior.widening(mean, std)
        assert float(value.detach()) == pytest.approx(wanted, abs=2e-7)
        wider = torch.autograd.grad(prior.widening(mean, std), [mean, std], materialize_grads=True)
        by_mean, by_std = prior.widening_score(MEAN, STD)
        torch.testing.assert_close(by_std, wider[1])
        torch.testing.assert_close(torch.zeros_like(MEAN) if by_mean is None else by_mean, wider[0])
        return
    q = torch.distributions.Normal(MEAN, STD)
    torch.manual_seed(0)
    found = kl.monte_carlo(q.sample((100_000,)), lambda w: q.log_prob(w).sum(-1), prior.log_prob)
    divergence = -float(q.entropy().sum()) - wanted
    assert abs(float(found.value) - divergence) < 4.5 * float(found.error)
