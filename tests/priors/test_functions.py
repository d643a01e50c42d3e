"""Priors over functions against scikit-learn's kernels and the definition of a score."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import kernels
from torch import Tensor

from doxa import store
from doxa.errors import DataError, ModelError, ShapeError
from doxa.priors.functions import KERNELS, FunctionPrior, GPPrior, HierarchicalGP, ImplicitPrior

PEERS = {
    "rbf": kernels.RBF([0.7, 1.3]),
    "matern": kernels.Matern([0.7, 1.3], nu=2.5),
}


def inputs(n: int = 12, d: int = 2) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(PEERS))
def test_kernels_are_scikit_learns(name: str) -> None:
    a, b = inputs(), inputs(5) + 3.0
    own = GPPrior(name, lengthscale=(0.7, 1.3), variance=2.5).covariance(a, b)
    assert torch.allclose(own, torch.from_numpy(2.5 * PEERS[name](a.numpy(), b.numpy())), atol=1e-9)


def test_periodic_and_linear_kernels() -> None:
    """Periodic in one column is scikit-learn's; in two it is the product of both columns'."""
    a, b = inputs(), inputs(5) + 3.0
    own = GPPrior("periodic", lengthscale=(0.7, 1.3), variance=2.5, period=1.7)
    columns = [
        kernels.ExpSineSquared(scale, 1.7)(a[:, [i]].numpy(), b[:, [i]].numpy())
        for i, scale in enumerate((0.7, 1.3))
    ]
    wanted = torch.from_numpy(2.5 * columns[0] * columns[1])
    assert torch.allclose(own.covariance(a, b), wanted, atol=1e-9)
    line = GPPrior("linear", lengthscale=2.0, variance=3.0)
    assert torch.allclose(line.covariance(a, b), 3.0 * a @ b.T / 4.0, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_draws_have_the_kernels_covariance(name: str) -> None:
    """20,000 draws: a covariance has a standard error of v√(2/20,000) at most, with v the largest
    variance; five of them. Outputs are independent."""
    x = inputs(4, 1)
    prior = GPPrior(name, lengthscale=0.8, variance=1.5)
    f = prior.sample(x, 20_000, outputs=2)
    wanted = prior.covariance(x, x)
    found = torch.einsum("sno,smp->opnm", f, f) / len(f)
    most = 5 * float(wanted.max()) * math.sqrt(2 / len(f))
    both = torch.stack([torch.stack([wanted, 0 * wanted]), torch.stack([0 * wanted, wanted])])
    assert (found - both).abs().max() < most
    assert torch.equal(prior.sample(x, 3), prior.sample(x, 5)[:3])


def test_score_is_the_gradient_of_the_log_density() -> None:
    x, prior = inputs(), GPPrior("matern", lengthscale=1.1, variance=2.0)
    f = prior.sample(x, 3, outputs=2).requires_grad_()
    noise = 0.2
    covariance = prior.covariance(x, x) + noise**2 * torch.eye(len(x), dtype=x.dtype)
    density = torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), covariance)
    (wanted,) = torch.autograd.grad(density.log_prob(f.transpose(1, 2)).sum(), f)
    own = prior.score(x[None], f.detach()[None], noise)
    assert own is not None
    assert torch.allclose(own[0], wanted, rtol=1e-3, atol=1e-3)


def line(x: Tensor, z: Tensor) -> Tensor:
    return z[0] + 2 * z[1] * x[:, 0]


def test_an_implicit_process_is_what_its_function_makes() -> None:
    """f = a + 2bx has variance 1 + 4x²: 20,000 draws, tolerance five standard errors."""
    x = torch.linspace(-1, 1, 5).double()
    f = ImplicitPrior(line, 2).sample(x, 20_000)[..., 0]
    wanted = 1 + 4 * x.square()
    assert ((f.var(0) / wanted - 1).abs() < 5 * math.sqrt(2 / 20_000)).all()
    assert ((f[:, 0] + f[:, 4]) / 2 - f[:, 2]).abs().max() < 1e-12  # straight


def test_a_gp_prior_is_stored() -> None:
    prior = GPPrior("periodic", lengthscale=(1.0, 2.0), period=3.0)
    assert store.decode(store.encode(prior)) == prior


def test_bad_priors_say_so() -> None:
    with pytest.raises(ModelError, match="did you mean 'matern'"):
        GPPrior("mattern")
    with pytest.raises(ModelError, match="lengthscale must be positive"):
        GPPrior(lengthscale=(1.0, 0.0))
    with pytest.raises(ShapeError, match="3 lengthscales, but x has 2 columns"):
        GPPrior(lengthscale=(1.0, 1.0, 1.0)).sample(inputs(), 2)
    with pytest.raises(ShapeError, match=r"values of shape \[4, 1\] for 12 rows; \[12, 1\]"):
        ImplicitPrior(lambda x, z: z, 4).sample(inputs(), 2)
    with pytest.raises(DataError, match="there are none"):
        GPPrior().sample(torch.zeros(0, 1), 2)
    assert issubclass(GPPrior, FunctionPrior)


def test_processes_of_unknown_numbers_by_quadrature() -> None:
    """E f(x)f(x') = E v Π_d E exp(−d²/2ℓ_d²) and E f² = E v with log-normal v, and log f² has the
    variance of log v and of log χ², π²/2: 40,000 draws, four standard errors. One lengthscale for
    two columns is drawn once for both."""
    x = torch.tensor([[0.0, 0.0], [0.8, 1.5]]).double()
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def correlation(square: float, length: float) -> float:
        return float(weights @ np.exp(-0.5 * square / (length * np.exp(0.8 * nodes)) ** 2))

    power = 2.0 * math.exp(0.8**2 / 2)
    apart = HierarchicalGP("rbf", lengthscale=(0.7, 1.3), variance=2.0, spread=0.8)
    wanted = power * correlation(0.8**2, 0.7) * correlation(1.5**2, 1.3)
    both = HierarchicalGP("rbf", lengthscale=1.0, variance=2.0, spread=0.8)
    for prior, cross in ((apart, wanted), (both, power * correlation(0.8**2 + 1.5**2, 1.0))):
        f = prior.sample(x, 40_000)[..., 0]
        logs = f[:, 0].square().log()
        for each, mean in ((f.prod(1), cross), (f[:, 1] ** 2, power),
                           ((logs - logs.mean()) ** 2, 0.8**2 + math.pi**2 / 2)):  # fmt: skip
            assert abs(float(each.mean()) - mean) < 4 * float(each.std()) / 200
    assert apart.score(x[None], f[:3, :, None][None], 0.1) is None
    assert store.decode(store.encode(apart)) == apart
    with pytest.raises(ModelError, match="spread"):
        HierarchicalGP(spread=0.0)
