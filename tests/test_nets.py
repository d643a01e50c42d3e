"""Builders against published parameter counts and layer shapes; rebuilding from JSON."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from doxa import nets
from doxa.errors import ModelError


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("net", "published"),
    [
        (nets.lenet5(), 61_706),  # LeCun et al. 1998 with dense second convolution, 28x28 padded
        (nets.resnet20(), 272_474),  # He et al. 2016, projection shortcuts
        (nets.mlp(784, 10, (400, 400)), 784 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10),
    ],
)
def test_parameter_counts_are_the_published_ones(net: nn.Module, published: int) -> None:
    assert count(net) == published


@pytest.mark.parametrize(
    ("name", "settings", "x", "out"),
    [
        (
            "mlp",
            {"inputs": 3, "outputs": 2, "hidden": [7, 5], "activation": "tanh"},
            (4, 3),
            (4, 2),
        ),
        ("mlp", {"inputs": 3, "outputs": 1, "hidden": [], "dropout": 0.0}, (4, 3), (4, 1)),
        ("mlp", {"inputs": 3, "outputs": 1, "hidden": [8], "dropout": 0.2}, (4, 3), (4, 1)),
        ("lenet5", {"inputs": 3, "outputs": 5, "size": 32}, (2, 3, 32, 32), (2, 5)),
        ("resnet20", {"inputs": 1, "outputs": 4, "width": 8, "groups": 4}, (2, 1, 16, 16), (2, 4)),
    ],
)
def test_rebuilding_from_json_gives_the_same_structure(name, settings, x, out) -> None:
    net = nets.build(name, settings)
    builder = nets.builder_of(copy.deepcopy(net))
    assert builder is not None
    again = nets.build(*json.loads(json.dumps(builder)))
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in net.state_dict().items()
    }
    again.load_state_dict(net.state_dict())
    batch = torch.randn(x, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.eval()(batch), net.eval()(batch))
    assert net(batch).shape == out


def test_a_residual_network_sees_each_row_alone() -> None:
    net = nets.resnet20(width=8, groups=4).train()
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(net(x)[:1], net(x[:1]), atol=1e-6)


def test_the_users_own_builder_is_rebuilt() -> None:
    @nets.register_net("test-own")
    def own(inputs: int, outputs: int = 2) -> nn.Module:
        return nn.Linear(inputs, outputs)

    assert nets.builder_of(own(3)) == ("test-own", {"inputs": 3, "outputs": 2})
    assert nets.build("test-own", {"inputs": 3}).weight.shape == (2, 3)
    assert nets.builder_of(nn.Linear(3, 2)) is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mpl", {}, "did you mean 'mlp'"),
        ("mlp", {"inputs": 3}, "does not take these settings"),
        ("mlp", {"inputs": 3, "outputs": 1, "activation": "rellu"}, "did you mean 'relu'"),
        ("mlp", {"inputs": 0, "outputs": 1}, "at least 1"),
        ("mlp", {"inputs": 3, "outputs": 1, "dropout": 1.0}, "dropout"),
        ("resnet20", {"width": 10, "groups": 4}, "must divide"),
        ("lenet5", {"size": 8}, "at least 12"),
    ],
)
def test_what_cannot_be_built_says_why(name, settings, message) -> None:
    with pytest.raises(ModelError, match=message):
        nets.build(name, settings)


def test_settings_that_json_cannot_hold_are_refused() -> None:
    @nets.register_net("test-not-json")
    def odd(inputs: object) -> nn.Module:
        return nn.Identity()

    with pytest.raises(ModelError, match="JSON-able"):
        odd(torch.zeros(2))


def test_two_builders_cannot_share_a_name() -> None:
    with pytest.raises(ModelError, match="registered already"):

        @nets.register_net("mlp")
        def other() -> nn.Module:
            return nn.Identity()
