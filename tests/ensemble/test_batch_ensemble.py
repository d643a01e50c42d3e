"""Batch ensembles are explicit networks W ∘ (r sᵀ), trained on parts of a batch."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import rank_one_cases
import torch
from rank_one_cases import images, lenet
from torch import Tensor, nn

import doxa
from doxa.errors import ModelError
from doxa.optim import SGD


def explicit(posterior: doxa.Posterior, net: nn.Module, m: int, k: int) -> nn.Module:
    return rank_one_cases.explicit(posterior, posterior.samples[m, k], net, m, k)


def test_components_are_explicit_networks() -> None:
    x, y = images()
    posterior = doxa.fit(lenet(), (x, y), "batch-ensemble", members=2, steps=20, batch_size=8)
    f = posterior.predict(x).samples.reshape(2, 4, len(x), 2)
    for m in range(2):
        for k in range(4):
            assert torch.allclose(f[m, k], explicit(posterior, lenet(), m, k)(x), rtol=1e-9)
    assert not torch.allclose(f[0, 0], f[0, 1])
    last = [explicit(posterior, lenet(), m, 3)[:6](x) for m in range(2)]  # a member's point
    assert torch.allclose(posterior.features(x), (last[0] + last[1]) / 2, rtol=1e-9)
    drawn, one = posterior.draw(8), explicit(posterior, lenet(), 1, 2)  # weights multiplied out
    for name, p in one.named_parameters():
        assert torch.allclose(drawn[name][6], p, rtol=1e-12), name


def test_it_has_little_more_than_one_network() -> None:
    """P + K Σ_layers (inputs + outputs)."""
    posterior = doxa.fit(lenet(), images(), doxa.BatchEnsemble(components=3), steps=2, batch_size=6)
    own = 2 + 3 + 12 + 5 + 5 + 2
    assert posterior.layers.shape == (1, 3, own)
    assert posterior.layout.size == sum(p.numel() for p in lenet().parameters())
    assert (posterior.samples[:, 0] == posterior.samples[:, 1]).all()


def test_a_step_is_the_gradient_of_explicit_networks_on_parts_of_the_batch() -> None:
    """One step of plain SGD on all rows, against autograd through W ∘ (r sᵀ): component k sees the
    k-th part, and the losses are averaged."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    before, after = (
        doxa.fit(
            net, (x, y), doxa.BatchEnsemble(components=2, initial_factor_std=0.3), steps=1,
            batch_size=8, lr=lr, optimizer=SGD(0.0), schedule="constant",
            likelihood=doxa.Gaussian(1.0),
        )
        for lr in (1e-12, 0.1)
    )  # fmt: skip
    theta = before.samples[0, 0].clone().requires_grad_()
    layers = before.layers[0].clone().requires_grad_()
    w = before.layout.unflatten(theta)

    def loss(rows: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k in range(2):
            own = before.network.layers.unflatten(layers[k])
            h = x[rows[k]]
            for i in (0, 2):
                outer = torch.outer(own[f"{i}.r"], own[f"{i}.s"])
                h = h @ (w[f"{i}.weight"] * outer).T + w[f"{i}.bias"]
                h = torch.tanh(h) if i == 0 else h
            total = total + 0.5 * (h - y[rows[k]]).square().mean() / 2
        return total + 0.5 * theta.square().sum() / len(x)

    found = []
    for some in combinations(range(8), 4):  # which four rows the first component saw
        rows = [torch.tensor(some), torch.tensor([i for i in range(8) if i not in some])]
        grads = torch.autograd.grad(loss(rows), [theta, layers])
        found.append(
            torch.allclose(after.samples[0, 0], theta - 0.1 * grads[0], rtol=1e-8, atol=1e-10)
            and torch.allclose(after.layers[0], layers - 0.1 * grads[1], rtol=1e-8, atol=1e-10)
        )
    assert sum(found) == 1


def test_few_rows_and_networks_that_it_cannot_use() -> None:
    x, y = images()
    few = doxa.fit(lenet(), (x, y), "batch-ensemble", steps=5, batch_size=3)  # one has no row
    assert torch.isfinite(few.predict(x).probs).all()
    pooled = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(72), nn.Unflatten(1, (2, 36))).double()
    net = nn.Sequential(pooled, nn.AdaptiveAvgPool1d(1), nn.Flatten())
    with pytest.raises(ModelError, match="no linear or convolutional layer"):
        doxa.fit(net, (x, y), "batch-ensemble", steps=1)


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, stride=2), nn.ReLU(), nn.Conv2d(5, 3, 2), nn.Flatten(), nn.Linear(3, 2)
    ).double()  # fmt: skip


class Same(nn.Module):
    """A network and, beside it, a BatchNorm whose output counts nothing."""

    def __init__(self, net: nn.Module, outputs: int) -> None:
        super().__init__()
        self.net, self.norm = net, nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        f = self.net(x)
        return f + 0.0 * self.norm(f)


class Turned(nn.Module):
    """A linear layer whose input has the rows second."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("method", ["batch-ensemble", "rank1"])
def test_one_product_with_w_is_a_pass_for_each_component(method: str) -> None:
    """BatchNorm beside a network, or rows that are not first, ask for a pass of each component;
    otherwise all share one. With seven rows a step, of four components; images have few channels,
    so that components are groups of the first convolution. Rank-1 factors have no noise here."""
    x, y = images()
    how = doxa.BatchEnsemble(initial_factor_std=0.3)
    options: dict[str, Any] = {"optimizer": SGD(0.0), "steps": 5, "batch_size": 7, "lr": 0.01}
    if method == "rank1":
        how = doxa.Rank1(initial_std=1e-9)
    apart, together = (
        doxa.fit(net, (x, y), how, members=2, **options)
        for net in (Same(plain(), 2).double(), plain())
    )
    torch.testing.assert_close(
        apart.predict(x, 8).probs, together.predict(x, 8).probs, rtol=1e-6, atol=1e-7
    )
    if method == "rank1":  # noise a row: it refuses what does not see rows first
        return
    tokens = x.flatten(2)  # [N, 2, places]
    rows = nn.Sequential(nn.Linear(36, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    turned = nn.Sequential(Turned(36, 3), *rows[1:])
    found = [
        doxa.fit(net.double(), (tokens, y), how, **options).predict(tokens).samples
        for net in (rows, turned)
    ]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
