"""The bounds of latent neural processes against the likelihood itself, by quadrature over z."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from set_tasks import network, task
from short import short
from torch import Tensor
from torch.nn.functional import softplus

import doxa
from doxa.data import Batch
from doxa.neural.blocks import mlp


def log_likelihood(net: object, given: dict[str, Tensor], y: Tensor, method: object) -> Tensor:
    """log ∫ p(y_T | z, C) q(z | C) dz of each task, with z of two dimensions."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    eps = torch.cartesian_prod(torch.tensor(nodes), torch.tensor(nodes))
    w = torch.tensor(weights / weights.sum()).log()
    logs = (w[:, None] + w[None, :]).flatten()
    f = net(given, eps.expand(2, -1, -1)).f  # type: ignore[operator]
    return torch.logsumexp(fits(method, f, given, y) + logs, 1)


def fits(method: object, f: Tensor, given: dict[str, Tensor], y: Tensor) -> Tensor:
    own = y.unsqueeze(1).expand(*f.shape[:-1], 1)
    each = method.likelihood.log_prob(f, own, {}, lead=2)  # type: ignore[attr-defined]
    return (each * given["targets"].unsqueeze(1)).sum(-1)


def moments_of(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A belief about z that moves with the points. It widens, so that weights are bounded."""
    count = mask.sum(-1, keepdim=True)
    total = (torch.cat([y, y - x], -1) * mask.unsqueeze(-1)).sum(-2)
    return total / count, (0.5 + 0.1 * count).expand_as(total)


@pytest.mark.parametrize("name", ["cnp", "convcnp", "tnp"])
def test_a_task_counts_by_the_point_whatever_its_length(name: str) -> None:
    """The objective is the mean over the points that count of log N(y; μ, σ²), by torch's own; of
    tasks that are padded to one length, too."""
    method, _ = network(name, min_std=0.2)
    given, y = task()
    f = torch.randn(1, 2, 9, 2, generator=torch.Generator().manual_seed(4)).double()
    points = given["targets"].clone()
    points[0, -2:] = 0.0  # the first task has two points less
    batch = Batch(given, y, torch.ones(1), None, True)
    normal = torch.distributions.Normal(f[0, ..., 0], 0.2 + softplus(f[0, ..., 1]))
    each = normal.log_prob(y[..., 0])
    want = torch.stack([each[0, 5:7].mean(), each[1, 5:].mean()])
    assert torch.allclose(method.per_point(f, batch, points)[0], want)


@pytest.mark.parametrize("name", ["cnp", "np", "anp", "convcnp", "tnp"])
def test_the_loss_is_that_of_a_point_whatever_the_longest_task(name: str) -> None:
    """Noise of 1,000 at least makes log N(y; μ, σ²) = −log(1,000 √2π) to a thousandth at every
    point; tasks of 6 points beside one of 60 change nothing of that."""
    x = torch.linspace(-1, 1, 60)[:, None]
    tasks = [(x, x.sin())] + [(x[::11], x[::11].cos())] * 7
    method = type(short(name))(**{**short(name).settings(), "min_std": 1000.0})
    posterior = doxa.fit(None, doxa.data.Tasks(tasks), method, steps=1, lr=1e-9, batch_size=8)
    loss = posterior.history["loss"][0][1][0]
    assert loss == pytest.approx(math.log(1000 * math.sqrt(2 * math.pi)), rel=0.1)


@pytest.mark.parametrize("name", ["cnp", "np", "anp"])
def test_reconstruction_counts_the_context_too(name: str) -> None:
    given, y = task()
    for reconstruct, want in ((True, torch.ones(2, 9)), (False, given["targets"])):
        method, _ = network(name, reconstruct=reconstruct)
        batch = replace(Batch(given, y, torch.ones(1), None, True), points=given["targets"])
        assert torch.equal(method.counted(batch), want.double())


@pytest.mark.parametrize("name", ["np", "anp"])
def test_bounds_are_in_order_and_meet_the_likelihood(name: str) -> None:
    """ELBO < bound of 4 draws < log p; of 20,000 draws it is log p: their error is below 0.01."""
    method, net = network(name, width=2, min_std=0.3)
    given, y = task(points=6, seen=3)
    net.latent_moments = moments_of
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        net.decoder = mlp(5, 32, 2, 2).double()
    with torch.no_grad():
        want = log_likelihood(net, given, y, method)
        eps = torch.randn(2, 20_000, 2, generator=torch.Generator().manual_seed(1)).double()
        drawn = net(given, eps, y)
        each = fits(method, drawn.f, given, y)
    ratio, kl = drawn.log_ratio, drawn.kl
    few = drawn._replace(log_ratio=ratio.reshape(2, -1, 4))
    many = method.bounded(each, drawn)
    four = method.bounded(each.reshape(2, -1, 4), few).mean(1)
    elbo = replace(method, bound="elbo").bounded(each, drawn)
    assert (kl > 0.01).all()
    assert torch.allclose(many, want, atol=0.01)
    assert torch.allclose(-ratio.mean(1), kl, atol=0.05)
    assert (elbo < four - 0.003).all()
    assert (four < want - 0.003).all()
