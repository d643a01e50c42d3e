"""New values of parameters that no `reset_parameters` sets."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.model.inspection import copied_into, fresh_rows, untouched


class Conv1D(nn.Module):
    """As in GPT-2: the weight is transposed, and nothing re-initialises it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Scaled(nn.Module):
    """A normalisation of its own, with a scale of ones and a vector that is not constant."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x - x.mean(-1, keepdim=True)) + self.shift


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(300, 40), nn.ReLU(), *more, nn.Linear(300, 3))


def starts(net: nn.Module, seed: int = 0) -> tuple[dict[str, Tensor], doxa.Model]:
    model = doxa.Model(net, "categorical").build(torch.randn(2, 40))
    return model.layout.unflatten(model.fresh([(seed, 0), (seed, 1)])), model


def test_a_weight_is_drawn_at_its_own_scale() -> None:
    """Two members differ, and both have the 0.02 of the initialiser, within 3 %: the standard
    error of 12,000 draws is 0.6 %."""
    net = network()
    values, _ = starts(net)
    one, two = values["0.weight"]
    assert not torch.equal(one, net[0].weight) and not torch.equal(one, two)
    assert abs(float((one * two).mean())) / 0.02**2 < 4 / 12_000**0.5  # four standard errors
    for each in (one, two):
        assert abs(float(each.std()) / 0.02 - 1.0) < 0.03
    assert torch.equal(values["0.bias"], torch.zeros(2, 300))
    again, _ = starts(net)
    assert torch.equal(again["0.weight"], values["0.weight"])
    assert not torch.equal(starts(net, 1)[0]["0.weight"], values["0.weight"])


def test_what_every_new_network_has_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "doxa"):
        values, _ = starts(network(Scaled(300)))
    assert torch.equal(values["2.scale"], torch.ones(2, 300))
    assert torch.equal(values["2.shift"][0], values["2.shift"][1])
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("cannot re-initialise 2.shift:" in message for message in warned)
    assert any("no reset_parameters sets 0.weight:" in r.getMessage() for r in caplog.records)


def test_other_layers_start_as_before() -> None:
    """The draws of a bare weight come after those of all layers."""
    values, _ = starts(network())
    plain, _ = starts(nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 3)))
    alone, _ = starts(network(nn.Linear(300, 300)))
    assert values["2.weight"].shape == plain["2.weight"].shape
    assert float(values["2.weight"].abs().max()) <= 300**-0.5
    assert not torch.equal(alone["2.weight"][0], alone["2.weight"][1])
    posterior = doxa.fit(
        network(), (torch.randn(64, 40), torch.arange(64) % 3), "deep-ensemble", members=2, steps=2,
        validation=None, progress=False,
    )  # fmt: skip
    drawn = posterior.draw(2)["0.weight"]
    assert float((drawn[0] - drawn[1]).abs().mean()) > 0.01


class Counted(nn.Linear):
    """Counts its initialisations."""

    calls = 0

    def reset_parameters(self) -> None:
        Counted.calls += 1
        super().reset_parameters()


def test_frozen_layers_are_neither_initialised_nor_copied_and_stay_as_they_are() -> None:
    """Of a large frozen trunk, each member would initialise all weights for nothing."""
    net = nn.Sequential(Counted(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    before, Counted.calls = net[0].weight.clone(), 0
    layout = doxa.Model(net, doxa.Gaussian(1.0)).build(torch.zeros(1, 3)).layout
    own = copied_into(net, layout, torch.empty(layout.size), untouched(net, layout))
    assert own[0].weight.shape == (4, 3)
    assert own[0].weight.untyped_storage().nbytes() == 4  # one number
    Counted.calls = 0
    rows = fresh_rows(net, layout, [(0, 0), (0, 1)])
    assert Counted.calls == 0 and not torch.equal(rows[0], rows[1])
    assert torch.equal(net[0].weight, before)


def test_a_frozen_weight_of_a_layer_that_initialises_all_its_own_is_left_alone() -> None:
    """It is copied, so that the network keeps it; a shared weight has one name."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    layout = doxa.Model(net, doxa.Gaussian(1.0)).build(torch.zeros(1, 3)).layout
    assert set(layout.names) == {"0.bias", "2.bias"} and not untouched(net, layout)
    rows = fresh_rows(net, layout, [(0, 0)])
    assert torch.equal(net[2].weight, before) and rows.isfinite().all()
