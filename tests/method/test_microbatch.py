"""A gradient that is accumulated over pieces of a batch is that of the whole batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import doxa
from doxa.optim import SGD

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, 0].sin() + 0.1 * X[:, 1]


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), *more, nn.Linear(9, 1))
    return net.double()


def weights(net: nn.Module, method: Any, **options: Any) -> torch.Tensor:
    """The points of a fit of 20 steps of SGD, whose moves are proportional to the gradient."""
    asked = {
        "steps": 20, "batch_size": 20, "seed": 3, "progress": False, "members": 2, "lr": 0.05,
        "optimizer": SGD(), "validation": 0.2,
    } | options  # fmt: skip
    return doxa.fit(net, (X, Y), method, **asked).point()


CASES = {
    "map": doxa.MAP(),
    "mean-field": doxa.MeanField(average=0.0),
    "mc-dropout": doxa.MCDropout(p=0.3),
    "svgd": doxa.SVGD(particles=3),
}


@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("name", ["map", "mean-field", "mc-dropout"])
def test_pieces_add_up_to_the_batch(name: str, engine: str) -> None:
    """Pieces of 7, 7 and 6 of 20 rows; the masks and draws of the noise are those of the batch."""
    whole = weights(network(), CASES[name], engine=engine)
    pieces = weights(network(), CASES[name], engine=engine, microbatch=7)
    assert float((whole - pieces).abs().max()) < 1e-10
    assert not torch.equal(whole, weights(network(), CASES[name], engine=engine, seed=4))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["stack", "loop"])
@pytest.mark.parametrize("method", ["map", doxa.BatchEnsemble(), doxa.Rank1()])
def test_a_hundred_steps_are_those_of_the_batch(method: Any, engine: str) -> None:
    """Components divide the rows of a batch of 20; pieces of at most 7 rows have 4 then."""
    options = {"steps": 100, "members": 1, "engine": engine}
    whole = weights(network(), method, **options)
    pieces = weights(network(), method, microbatch=7, **options)
    assert float((whole - pieces).abs().max()) < 1e-9


def test_rows_with_weights_add_up() -> None:
    weight = torch.linspace(0.5, 2.0, 60)
    whole = weights(network(), "map", sample_weight=weight)
    pieces = weights(network(), "map", sample_weight=weight, microbatch=8)
    assert float((whole - pieces).abs().max()) < 1e-10


def test_a_large_network_adds_up_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of networks of a million weights, with two members."""
    monkeypatch.setattr("doxa.method.run.LARGE", 1)
    net, options = network(nn.Linear(9, 9)), {"engine": "loop:eager", "optimizer": "adam"}
    whole = weights(net, "map", **options)
    pieces = weights(net, "map", microbatch=6, **options)
    assert float((whole - pieces).abs().max()) < 1e-10


def test_pieces_do_all_rows_of_a_chain() -> None:
    """HMC takes all rows at every step: its energy, and so its decisions, are those of all rows."""
    method = doxa.HMC(draws=5, burn_in=5)
    options = {"members": 1, "seed": 0, "progress": False}
    whole = doxa.fit(network(), (X, Y), method, **options)
    pieces = doxa.fit(network(), (X, Y), method, microbatch=13, **options)
    assert float((whole.samples - pieces.samples).abs().max()) < 1e-8


def test_a_step_holds_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = doxa.Model.apply

    def apply(self: doxa.Model, params: Any, x: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and more.get("training"):
            seen.append(len(x))
        return real(self, params, x, **more)

    monkeypatch.setattr(doxa.Model, "apply", apply)
    weights(
        network(), "map", members=1, engine="loop:eager", microbatch=8, steps=3, validation=None
    )
    assert set(seen) == {8, 4}


def test_batch_norm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "doxa"):
        weights(network(nn.BatchNorm1d(9)), "map", microbatch=8)
    assert "BatchNorm normalises each piece" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "doxa"):
        weights(network(nn.BatchNorm1d(9)), "map", microbatch=20)
    assert "each piece" not in caplog.text


def test_the_group_of_training_takes_it() -> None:
    net = network()
    flat = weights(net, "map", microbatch=7)
    grouped = weights(net, "map", training=doxa.Training(microbatch=7))
    assert torch.equal(flat, grouped)
