"""The frozen trunk of a network is found by what each operation reads, and the rest of the network
computes the same from its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.engine import Engine
from doxa.model.trunk import remembered


class Shared(nn.Module):
    """One activation before and after the trained layer; a frozen layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(6, 5), nn.Tanh()
        self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 1)
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.last(self.act(self.middle(self.act(self.first(x)))))
        return h


class Skip(nn.Module):
    """Two frozen branches, of which both are read, a position table and a mask of x."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 4), nn.Tanh())
        self.places = nn.Embedding(4, 4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        for part in (self.left, self.right, self.places):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        table = self.places(torch.arange(4, device=x.device)).sum(0)
        h = self.left(x) * self.right(x) + table
        out: Tensor = self.head(h)
        return out * (x[:, :1] > 0)


class Twice(nn.Module):
    """The frozen layer runs twice before the trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(12, 1)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        once = self.body(x)
        out: Tensor = self.head(torch.cat([once, self.body(once.tanh())], 1))
        return out + once[:, :1]


class Inputs(nn.Module):
    """Two inputs, the trunk on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.body.requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(a) * b)
        return out


class Residual(nn.Module):
    """The trunk's output is overwritten by the trained part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(x)
        out: Tensor = self.head(h.clone()) + h.mul_(2.0)[:, :1]
        return out


def sequence() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 1))
    net[0].requires_grad_(False)
    return net


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Any]] = {
    "sequence": (sequence, ("0", "1"), ("chain", False)),
    "shared activation": (Shared, ("first",), ("stand-ins", False)),
    "branches": (Skip, ("left", "right"), ("stand-ins", True)),
    "called twice": (Twice, ("body",), ("stand-ins", False)),
    "two inputs": (Inputs, ("body",), ("tail", True)),
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", FORMS)
def test_the_rest_of_the_network_computes_the_same(name: str) -> None:
    """With other weights than those of the comparison, on other rows, and for several members."""
    make, layers, (form, reads_x) = FORMS[name]
    torch.default_generator.manual_seed(0)
    x: Any = numbers(9, 6)
    if name == "two inputs":
        x = (x, numbers(9, 6) + 1)
    model = doxa.Model(make().double()).build(x)
    assert model.trunk is not None and model.at_rest == layers
    assert model.trunk.reads_x == reads_x
    split = model.split(x)
    assert split is not None
    kinds = {type(m).__name__ for m in split.head.net.modules()}
    found = "stand-ins" if "_StandIn" in kinds else "tail" if split.tail else "chain"
    assert found == form
    rows: Any = tuple(3 * t for t in x) if isinstance(x, tuple) else 3 * x
    theta = model.layout.unflatten(numbers(3, model.layout.size))
    for kind in ("stack", "loop"):
        whole = Engine(kind).apply(model, theta, rows).f
        short = Engine(kind).apply(split.head, theta, split.features(rows)).f
        torch.testing.assert_close(short, whole, rtol=1e-12, atol=1e-12)


def test_a_network_that_overwrites_the_trunk_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    x = numbers(9, 6)
    model = doxa.Model(Residual().double()).build(x)
    with caplog.at_level("INFO", "doxa"):
        assert model.split(x) is None
    assert "overwrites the outputs" in caplog.text
    posterior = doxa.fit(Residual().double(), (x, x[:, 0]), "map", steps=3, validation=None)
    assert posterior.diagnostics["trunk"] == "in every pass"


def test_what_is_no_trunk() -> None:
    """Nothing frozen; frozen after trained; little work in front of adapters."""
    x = numbers(9, 6)
    last = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    assert doxa.Model(last).build(x).trunk is None
    last[2].requires_grad_(False)
    assert doxa.Model(last).build(x).trunk is None
    little = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 50), nn.Linear(50, 1)).double()
    little[0].requires_grad_(False)
    assert doxa.Model(little).build(x).trunk is None
    assert doxa.Model(little, trunk="0").build(x).trunk is not None


def test_a_statistic_without_weights_is_learned() -> None:
    """BatchNorm without weights, in front of the trained layer, is not frozen."""
    net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 1)).double()
    net[0].requires_grad_(False)
    model = doxa.Model(net).build(numbers(9, 6))
    assert model.at_rest == ("0",)
    assert "1.running_mean" in model.tracked


def test_dropout_of_a_frozen_layer_is_off_and_of_a_trained_one_on() -> None:
    body = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5))
    net = nn.Sequential(body, nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 1)).double()
    body.requires_grad_(False)
    model = doxa.Model(net).build(numbers(9, 6))
    assert set(model.sites) == {"2.uniform"} and model.masked == {"2": "3"}


def test_remembered_outputs_are_those_of_the_rows() -> None:
    x = numbers(9, 6)
    model = doxa.Model(sequence().double()).build(x)
    split = model.split(x)
    assert split is not None
    with remembered():
        first = split.features(x)
        assert split.features(x.clone()) is first
        moved = x.clone()
        moved[3, 2] += 1
        assert split.features(moved) is not first
        torch.testing.assert_close(split.features(moved)[:3], first[:3])
    assert split.features(x) is not first


def test_gpt2_of_transformers() -> None:
    """The head of a language model reads the trunk's output and the padding of x; a block that is
    trained reads what the blocks before it return."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=8, n_layer=3, n_head=2, pad_token_id=0, num_labels=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = transformers.GPT2ForSequenceClassification(config).requires_grad_(False)
    x = torch.randint(1, 50, (24, 9), generator=torch.Generator().manual_seed(0))
    x[:10, 5:] = 0
    data = {"input_ids": x, "attention_mask": (x != 0).long()}
    y = torch.arange(24) % 2
    for trained in (net.score, net.transformer.h[2]):
        trained.requires_grad_(True)
        found = [
            doxa.fit(
                net, (data, y), "deep-ensemble", members=2, steps=5, batch_size=8, init="given",
                likelihood="categorical", dtype=torch.float64, trunk_outputs=keep,
            )
            for keep in (True, False)
        ]  # fmt: skip
        assert [one.diagnostics["trunk"] for one in found] == ["once", "in every pass"]
        torch.testing.assert_close(found[0].samples, found[1].samples, rtol=1e-10, atol=1e-12)
        ours, theirs = (one.predict(data).probs for one in found)
        torch.testing.assert_close(ours, theirs)


def test_layers_after_trained_ones_are_no_trunk(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    for trunk, words in (("2", "'2' is frozen, but is no trunk"), ("0", "")):
        caplog.clear()
        doxa.fit(net, (x, x[:, 0]), "map", trunk=trunk, steps=2, validation=None, progress=False)
        said = [r.getMessage() for r in caplog.records if "is no trunk" in r.getMessage()]
        assert bool(said) == bool(words) and all(words in one for one in said)
