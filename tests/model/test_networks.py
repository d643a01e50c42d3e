"""Any network: several inputs and heads, shared weights, buffers, convolutions, LSTM, maps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import METHODS, QUICK, Bare, Tied, numbers, seeded
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import cross_entropy

import doxa
from doxa import Engine


class TwoInputs(nn.Module):
    """f(a, b): one input is an integer that picks an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.out(torch.tanh(self.left(a)) * self.table(b))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 6)
        self.value = nn.Linear(6, 1)
        self.kind = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.value(h), self.kind(h)


class Scaled(nn.Module):
    """A buffer that the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 10.0, 100.0]))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x / self.scale)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


ARCHITECTURES: dict[str, tuple[Any, str, Any, Any]] = {
    "two inputs": (
        TwoInputs, "gaussian",
        (numbers(12, 3), torch.arange(12) % 5), numbers(12, 1, seed=1),
    ),
    "two inputs by name": (
        TwoInputs, "gaussian",
        {"b": torch.arange(12) % 5, "a": numbers(12, 3)}, numbers(12, 1, seed=1),
    ),
    "tied": (Tied, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "buffer": (Scaled, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "bare parameter": (Bare, "gaussian", numbers(12, 3), numbers(12, 1, seed=1)),
    "lstm": (Recurrent, "gaussian", numbers(12, 5, 2), numbers(12, 1, seed=1)),
    "convolutions": (classifier, "categorical", numbers(12, 1, 6, 6), torch.arange(12) % 3),
    "segmentation": (
        segmenter, "categorical", numbers(6, 1, 5, 4), torch.arange(120).reshape(6, 5, 4) % 3,
    ),
    "a map of numbers": (
        lambda: nn.Conv1d(2, 3, 3, padding=1), "gaussian",
        numbers(8, 2, 7), numbers(8, 3, 7, seed=1),
    ),
}  # fmt: skip


def call(net: nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return net(**x)
    return net(*x) if isinstance(x, tuple) else net(x)


def by_hand(net: nn.Module, draws: dict[str, Tensor], x: Any, s: int) -> Any:
    """The user's own network with one draw's weights."""
    copied = copy.deepcopy(net).eval()
    named = dict(copied.named_parameters())
    with torch.no_grad():
        for name, value in draws.items():
            if name in named:
                named[name].copy_(value[s])
        return call(copied, x)


@pytest.mark.parametrize("method", ["map", "mean-field", "hmc"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sample_is_the_network_at_a_draw(name: str, method: str) -> None:
    build, likelihood, x, y = ARCHITECTURES[name]
    net = seeded(build)
    posterior = doxa.fit(net, (x, y), METHODS[method], likelihood=likelihood, members=2, **QUICK)
    draws, p = posterior.draw(2), posterior.predict(x, n=2)
    for s in range(2):
        torch.testing.assert_close(p.samples[s], by_hand(net, draws, x, s), rtol=1e-4, atol=1e-5)
    shape = y.shape if likelihood == "gaussian" else (y.shape[0], 3, *y.shape[1:])
    assert p.mean.shape == shape
    assert p.log_prob(y).shape == y.shape[:1]
    assert not torch.equal(p.samples[0], p.samples[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kind_of_method_takes_it_stacked_or_in_a_loop(name: str, method: str) -> None:
    build, likelihood, x, y = ARCHITECTURES[name]
    net = seeded(build)
    if method == "mc-dropout" and name == "lstm":
        pytest.skip("masks go before linear and convolutional layers; see the dropout tests")
    fits = [
        doxa.fit(net, (x, y), METHODS[method], likelihood=likelihood, members=2, engine=engine,
                 dtype=torch.float64, **QUICK | {"steps": 2})
        for engine in ("auto", Engine("loop"))
    ]  # fmt: skip
    for a, b in zip(*(post.tensors().items() for post in fits), strict=True):
        torch.testing.assert_close(a[1], b[1], rtol=1e-8, atol=1e-10, msg=a[0])
    x_mean = [post.predict(x, keep="moments").mean for post in fits]
    torch.testing.assert_close(*x_mean, rtol=1e-8, atol=1e-8)


def test_several_heads() -> None:
    net = seeded(TwoHeads)
    x, y = numbers(20, 2), (numbers(20, 1, seed=1), torch.arange(20) % 3)
    likelihood = (doxa.Gaussian(noise=0.5), "categorical")
    model = doxa.Model(net, likelihood).build(x)
    params = {name: p.detach() for name, p in net.named_parameters()}
    value, kind = net(x)
    each = Normal(value, 0.5).log_prob(y[0]).sum(1) - cross_entropy(kind, y[1], reduction="none")
    torch.testing.assert_close(model.log_likelihood(params, x, y), each)


@pytest.mark.parametrize("method", METHODS)
def test_heads_predict_each_for_itself(method: str, tmp_path: Path) -> None:
    net = seeded(TwoHeads)
    x, y = numbers(20, 2), (numbers(20, 1, seed=1), torch.arange(20) % 3)
    posterior = doxa.fit(
        net, (x, y), METHODS[method], likelihood=("gaussian", "categorical"), members=2,
        validation=0.2, **QUICK,
    )  # fmt: skip
    p = posterior.predict(x)
    assert len(p.heads) == 2
    assert p.heads[0].mean.shape == (20, 1)
    assert p.heads[1].probs.shape == (20, 3)
    with pytest.raises(doxa.errors.Unavailable, match="heads"):
        _ = p.mean
    score = p.heads[0].log_prob(y[0]) + p.heads[1].log_prob(y[1])
    assert posterior.validation is not None
    assert abs(posterior.validation - float(score.mean())) < 1.0  # of a few of the same rows
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net).predict(x)
    assert torch.equal(again.heads[1].probs, p.heads[1].probs)
