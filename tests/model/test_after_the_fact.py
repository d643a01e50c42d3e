"""A network that is trained already, made Bayesian: Laplace on its last layer, SWAG from its
checkpoint, an ensemble of heads on its features; residual networks and an encoder too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapters import sentences, trained
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError

NOISE, STD = 0.3, 0.8
HEADS = doxa.DeepEnsemble(features="frozen")


def curve(n: int = 40) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(n, 1, generator=g, dtype=torch.float64) * 4 - 2
    return x, torch.sin(2 * x) + NOISE * torch.randn(n, 1, generator=g, dtype=torch.float64)


def regressor() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return doxa.nets.mlp(1, 1, (6,), activation="tanh").double()


def with_one(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)


def test_heads_on_frozen_features_each_find_the_ridge_solution(tmp_path: Path) -> None:
    """Given features φ, a Gaussian head has one maximum, (φᵀφ/σ² + I/s²)⁻¹ φᵀy/σ²: every member
    finds it to 1e-3 from a start of its own. The features are no weights, and stay."""
    net, (x, y) = regressor(), curve()
    common: dict[str, Any] = {
        "likelihood": doxa.Gaussian(noise=NOISE), "prior": doxa.Normal(0.2), "init": "given",
        "members": 3, "validation": None, "batch_size": 40,
    }  # fmt: skip
    start = doxa.fit(net, (x, y), HEADS, steps=1, lr=1e-12, **common).samples[:, 0]
    assert start.shape == (3, 7)
    apart = torch.cdist(start, torch.cat([start, net[2].weight.detach().new_zeros(1, 7)]))  # type: ignore[index]
    assert float(apart[apart > 0].min()) > 0.1
    found = doxa.fit(net, (x, y), HEADS, steps=1000, lr=0.05, **common)
    phi = with_one(net[:2](x).detach())  # type: ignore[index]
    precision = phi.T @ phi / NOISE**2 + torch.eye(7, dtype=torch.float64) / 0.2**2
    exact = torch.linalg.solve(precision, phi.T @ y / NOISE**2)[:, 0]
    torch.testing.assert_close(found.samples[:, 0], exact.expand(3, 7), atol=1e-3, rtol=0)
    found.save(str(tmp_path / "run"))
    p = doxa.load(str(tmp_path / "run"), net=regressor()).predict(x)
    torch.testing.assert_close(p.mean, found.predict(x).mean)


def test_frozen_features_ask_for_a_trained_network() -> None:
    with pytest.raises(MethodError, match="init='given'"):
        doxa.fit(regressor(), curve(), HEADS, steps=1)
    with pytest.raises(MethodError, match="adversarial"):
        doxa.DeepEnsemble(features="frozen", adversarial=0.01)


def images(n: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (n,), generator=g)
    return torch.randn(n, 3, 8, 8, generator=g) + y[:, None, None, None] * 0.7, y


def residual(norm: str) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        torch.default_generator.manual_seed(0)
        net = doxa.nets.resnet20(3, 2, width=4, groups=2, norm=norm)
        x, y = images()
        optimiser = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(12):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        return net.eval(), x, y

    return make


def encoder() -> tuple[nn.Module, Tensor, Tensor]:
    x, _ = sentences(40)
    return trained(steps=60).eval(), x, (x == 3).any(1).long()


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "GroupNorm": residual("group"), "FRN": residual("frn"), "BatchNorm": residual("batch"),
    "transformer": encoder,
}  # fmt: skip


def head_inputs(net: nn.Module, x: Tensor) -> Tensor:
    """What the user's own network gives to its last linear layer."""
    last = [m for m in net.modules() if isinstance(m, nn.Linear) and m.out_features == 2][-1]
    seen: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    net(x)
    hook.remove()
    return seen[0].detach()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_people_have_after_the_fact(name: str) -> None:
    """Laplace on the last layer: the precision is Σ (diag p − p pᵀ) ⊗ φφᵀ + I/s², from the network
    as it was given, BatchNorm's running statistics among them; its weights are the mean. SWAG
    starts at the checkpoint: at a rate of nothing it stays there. Heads on frozen features learn,
    and give every member the given features. The network itself is never changed."""
    net, x, y = NETWORKS[name]()
    before = copy.deepcopy(net.state_dict())
    common: dict[str, Any] = {"init": "given", "likelihood": "categorical", "progress": False}

    laplace = doxa.fit(
        net, (x, y), doxa.Laplace(train=False, mean_correction=False), subset="last_layer",
        prior=doxa.Normal(STD), **common,
    )  # fmt: skip
    phi = with_one(head_inputs(net, x)).double()
    p = net(x).softmax(-1).detach().double()
    inner = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    size = phi.shape[1]
    h = torch.einsum("nij,na,nb->iajb", inner, phi, phi).reshape(2 * size, 2 * size)
    h = h + torch.eye(2 * size, dtype=torch.float64) / STD**2
    order = [i * size + j for i in range(2) for j in range(size - 1)]  # weights, then biases
    order += [size - 1, 2 * size - 1]
    exact = torch.linalg.inv(h)[order][:, order]
    torch.testing.assert_close(laplace.covariance.dense()[0].double(), exact, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(laplace.predict(x, n=1).probs.shape, p.shape)

    swag = doxa.fit(
        net, (x, y), doxa.SWAG(average=1.0, cycle=1, rank=0, samples=3), steps=3, lr=1e-12,
        optimizer="sgd", **common,
    )  # fmt: skip
    given = torch.cat([w.detach().flatten() for w in net.parameters()])
    theta = swag.samples[0, 0] if swag.kind == "sample" else swag.mean[0]
    torch.testing.assert_close(theta[: len(given)], given, atol=1e-4, rtol=0)

    heads = doxa.fit(net, (x, y), HEADS, members=3, steps=150, lr=0.02, validation=None, **common)
    assert heads.layout.size == 2 * size
    each = heads.predict(x).samples  # [3, N, 2]
    own = torch.einsum("na,moa->mno", with_one(head_inputs(net, x)), _rows(heads))
    torch.testing.assert_close(each, own, atol=1e-4, rtol=1e-4)
    assert (heads.predict(x).probs.argmax(1) == y).double().mean() > 0.7
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)


def _rows(heads: Any) -> Tensor:
    """Each member's weights and biases, [M, outputs, features + 1]."""
    own = heads.layout.unflatten(heads.samples[:, 0])
    weight, bias = (next(v for k, v in own.items() if k.endswith(e)) for e in ("weight", "bias"))
    return torch.cat([weight, bias.unsqueeze(2)], 2)
