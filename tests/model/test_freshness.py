"""A trained network that would be re-initialised is noticed, a fresh one is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.model.checks import trained_tensors


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3),
    )  # fmt: skip


class Text(nn.Module):
    """An embedding, a transformer layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.words(x)).mean(1))


def pictures(seed: int = 0) -> Tensor:
    return torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def words() -> Tensor:
    return torch.randint(20, (64, 7), generator=torch.Generator().manual_seed(0))


def columns() -> Tensor:
    return torch.randn(64, 5, generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: doxa.nets.mlp(5, 3), columns),
    "deep mlp": (lambda: doxa.nets.mlp(5, 3, (30, 30, 30)), columns),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 3)), columns),
    "cnn": (cnn, pictures),
    "text": (Text, words),
}  # fmt: skip


def found(net: nn.Module, x: Any, seed: int = 0) -> list[str]:
    model = doxa.Model(net, "categorical").build(x)
    return trained_tensors(model, model.fresh([(seed, 0)])[0])


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_network_is_not_called_trained(name: str) -> None:
    """Six standard deviations: by chance less than once in 1e6 tensors; here about 500."""
    make, x = CASES[name]
    for seed in range(20):
        torch.manual_seed(seed)
        assert found(make(), x(), seed) == []


@pytest.mark.parametrize("name", CASES)
def test_a_trained_network_is_noticed(name: str) -> None:
    make, rows = CASES[name]
    torch.manual_seed(0)
    net, x = make(), rows()
    y = torch.arange(64) % 3
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert found(net, x)


def test_batch_norm_that_has_counted_gives_it_away() -> None:
    net = cnn()
    net(pictures())
    assert found(net, pictures()) == ["1.num_batches_tracked"]


def test_fit_says_it_once_and_only_for_a_fresh_start(caplog: pytest.LogCaptureFixture) -> None:
    x, net = columns(), doxa.nets.mlp(5, 1)
    data = x, x[:, :1]
    said = lambda: caplog.text.count("weights look trained")  # noqa: E731
    with caplog.at_level(logging.WARNING, "doxa"):
        doxa.fit(net, data, "map", steps=2, members=3)
        assert said() == 0
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(4.0)
        doxa.fit(net, data, "map", steps=2, init="given")
        assert said() == 0
        doxa.fit(net, data, "map", steps=2, members=3)
    assert said() == 1
