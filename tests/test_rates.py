"""The default learning rate follows the kind of a large network, and of no other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import doxa
from benchmarks.rates import NETWORKS, data, trained
from doxa.optim import rate_for


def wide(inside: int = 200, size: int = 600) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, size), nn.ReLU(), nn.Linear(size, 3))


KINDS = {
    "resnet-20": 0.1, "cnn": 0.1, "bottleneck resnet": 0.1, "transformer": 0.03, "gpt": 0.03,
    "mlp": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_rule_by_kind(name: str) -> None:
    torch.manual_seed(0)
    assert rate_for(NETWORKS[name]()) == (KINDS[name], "warmup-cosine")


def test_small_networks_keep_the_rate_of_the_method() -> None:
    below, above = wide(size=400), wide(size=500)
    for net, factor in ((below, 1.0), (above, 0.1)):
        assert (sum(p.numel() for p in net.parameters()) < 100_000) == (factor == 1.0)
        assert rate_for(net)[0] == factor
    frozen = wide(size=600)
    frozen[0].requires_grad_(False)
    assert rate_for(frozen) == (1.0, "cosine")  # what is trained counts


def points(net: nn.Module, method: Any = "map", **options: Any) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 200, generator=g), torch.randint(3, (64,), generator=g)
    asked = {"steps": 12, "validation": None, "progress": False, "likelihood": "categorical"}
    return doxa.fit(net, (x, y), method, **asked | options).point()


def test_a_fit_takes_it_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net = wide()
    with caplog.at_level(logging.INFO, "doxa"):
        default = points(net)
    assert "lr=0.001, schedule='warmup-cosine'" in caplog.text
    assert torch.equal(default, points(net, lr=0.001, schedule="warmup-cosine"))
    linear = points(net, schedule="linear")
    assert torch.equal(linear, points(net, lr=0.001, schedule="linear"))
    small = wide(size=20)
    assert torch.equal(points(small), points(small, lr=0.01, schedule="cosine"))


def test_a_schedule_that_is_written_out_is_used_as_it_is() -> None:
    net = wide()
    cosine = points(net, schedule="cosine")
    assert torch.equal(cosine, points(net, lr=0.001, schedule="cosine"))
    assert not torch.equal(cosine, points(net))  # which has a warm-up
    assert torch.equal(cosine, points(net, training=doxa.Training(schedule="cosine")))
    assert torch.equal(points(net, lr=0.001), cosine)  # the schedule of a given rate has none
    made = doxa.sklearn.BayesianClassifier("map", net=net)
    assert made.schedule is None


def test_a_flow_over_the_last_layer_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    narrow = nn.Sequential(
        nn.Linear(200, 550), nn.ReLU(), nn.Linear(550, 20), nn.ReLU(), nn.Linear(20, 3)
    )
    with caplog.at_level(logging.INFO, "doxa"):
        points(narrow, "flow-vi", steps=2)
    assert "lr=0.001, schedule='warmup-cosine'" in caplog.text


@pytest.mark.parametrize("options", [{"lr": 0.01}, {"optimizer": "sgd"}])
def test_what_is_given_stays(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "doxa"):
        points(wide(), **options)
    assert "the rule for a network" not in caplog.text


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["resnet-20", "bottleneck resnet", "cnn", "mlp"])
def test_no_kind_diverges(name: str) -> None:
    """The loss of ten classes after 60 steps is below that of a constant, ln 10, and below that at
    0.01. (Transformers learn little in 60 steps at either rate.)"""
    torch.manual_seed(0)
    net, (x, y) = NETWORKS[name](), data(512)
    assert trained(net, x, y, 60) < min(2.2, trained(net, x, y, 60, lr=0.01, schedule="cosine"))
