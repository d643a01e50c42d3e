"""The bounds of latent neural processes against the likelihood itself, by quadrature over z."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from set_tasks import network, task
from torch import Tensor

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


def belief(x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A belief about z that moves with the points. It widens, so that weights are bounded."""
    count = mask.sum(-1, keepdim=True)
    total = (torch.cat([y, y - x], -1) * mask.unsqueeze(-1)).sum(-2)
    return total / count, (0.5 + 0.1 * count).expand_as(total)


@pytest.mark.parametrize("name", ["np", "anp"])
def test_bounds_are_in_order_and_meet_the_likelihood(name: str) -> None:
    """ELBO < bound of 4 draws < log p; of 20,000 draws it is log p: their error is below 0.01."""
    method, net = network(name, width=2, floor=0.3)
    given, y = task(points=6, seen=3)
    net.belief = belief
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
