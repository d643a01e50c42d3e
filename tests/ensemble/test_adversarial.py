"""Adversarial training of an ensemble against the fast gradient sign, written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import doxa
from doxa.errors import MethodError
from doxa.optim import SGD


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_a_step_fits_the_moved_rows_too(mode: str) -> None:
    """x′ = x + ε · range · sign ∇ₓ(−log p): two steps of plain SGD on all rows, by autograd."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1])
    y = x.sum(1, keepdim=True).sin()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    posterior = doxa.fit(
        net, (x, y), doxa.DeepEnsemble(adversarial=0.05), members=2, steps=2, lr=0.1,
        batch_size=10, optimizer=SGD(0.0), schedule="constant", init="given",
        likelihood=doxa.Gaussian(noise=0.5), engine=f"stack:{mode}", validation=None,
    )  # fmt: skip
    assert posterior.diagnostics["mode"] == mode
    step = 0.05 * (x.amax(0) - x.amin(0))
    weights = [p.detach().clone() for p in net.parameters()]

    def loss(leaves: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(at @ leaves[0].T + leaves[1]) @ leaves[2].T + leaves[3]
        return 0.5 * (y - h).square().sum() / 0.25

    for _ in range(2):
        leaves = [w.requires_grad_() for w in weights]
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(leaves, at), at)
        total = 0.5 * loss(leaves, x) + 0.5 * loss(leaves, x + step * slope.sign())
        total = total + 0.5 * sum(w.square().sum() for w in leaves)
        grads = torch.autograd.grad(total / len(x), leaves)
        weights = [(w - 0.1 * g).detach() for w, g in zip(leaves, grads, strict=True)]
    want = torch.cat([w.flatten() for w in weights])
    for m in range(2):
        assert torch.allclose(posterior.samples[m, 0], want, rtol=1e-9)


def test_a_grid_over_it_and_none_at_all() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=g)
    data = (x, x[:, 0].sin())
    sweep = doxa.fit(
        doxa.nets.mlp(2, 1, (4,)), data, "deep-ensemble", members=2, steps=10,
        runs=doxa.Runs(grid={"adversarial": [0.0, 0.1]}),
    )  # fmt: skip
    plain = doxa.fit(doxa.nets.mlp(2, 1, (4,)), data, "deep-ensemble", members=2, steps=10)
    assert torch.allclose(sweep[0].samples, plain.samples, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(sweep[1].samples, plain.samples, rtol=1e-3)


def test_whole_numbers_cannot_be_moved() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1))
    x = torch.randint(0, 5, (20, 2))
    with pytest.raises(MethodError, match="needs one float input"):
        doxa.fit(net, (x, x.float().sum(1)), doxa.DeepEnsemble(adversarial=0.1), steps=1)
