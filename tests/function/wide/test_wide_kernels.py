"""Kernels of infinitely wide networks: neural-tangents' numbers, Monte Carlo, integrals, finite
networks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from examples import load
from torch import Tensor, nn
from wide_cases import BIAS_STD, PEER, WEIGHT_STD, peer_data

from doxa.errors import ModelError, ShapeError
from doxa.function.wide import Erf, Skip, empirical_ntk, read
from doxa.function.wide import architecture as blocks_of
from doxa.function.wide.layers import SMOOTH, Kernels, smooth


def connected(activation: nn.Module, depth: int = 3) -> nn.Module:
    hidden = [part for _ in range(depth) for part in (nn.Linear(7, 7), activation)]
    return nn.Sequential(*hidden, nn.Linear(7, 1))


def conv(size: Any = 3, **kw: Any) -> nn.Module:
    return nn.Conv2d(2, 2, size, **{"padding": 1, **kw})


def nets() -> dict[str, nn.Module]:
    relu, gelu, dense = nn.ReLU(), nn.GELU(), nn.Linear(7, 7)
    circular = {"padding_mode": "circular"}
    norm = nn.GroupNorm(1, 2)
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return {
        "relu": connected(relu),
        "erf": connected(Erf()),
        "gelu": connected(gelu),
        "leaky": connected(nn.LeakyReLU(0.2), 2),
        "layer norm": nn.Sequential(
            dense, nn.LayerNorm(7), relu, dense, nn.LayerNorm(7), Erf(), dense
        ),
        "residual": nn.Sequential(
            dense, Skip(nn.Sequential(relu, dense, Erf(), dense)), relu, dense
        ),
        "conv, flattened": nn.Sequential(
            conv(), relu, conv(**circular), relu, nn.Flatten(), nn.Linear(40, 1)
        ),
        "conv, strided": nn.Sequential(
            conv((3, 2), stride=(2, 1), padding=0), gelu, nn.Flatten(), dense, relu, dense
        ),
        "conv, pooled": nn.Sequential(conv(), relu, conv(padding="same"), relu, pool, dense),
        "conv, pooled twice": nn.Sequential(
            conv(**circular), Erf(), nn.AvgPool2d(2), conv(2, padding=0), relu, pool, dense, relu,
            dense,
        ),
        "conv, residual": nn.Sequential(
            conv(), Skip(nn.Sequential(relu, conv(), gelu, conv())), relu, pool, dense
        ),
        "conv, layer norm": nn.Sequential(
            conv(), norm, relu, conv(), nn.LayerNorm(2), relu, pool, dense
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(nets()))
def test_equals_neural_tangents(name: str) -> None:
    """The peer's scales are float32, hence 1e-6 and not 1e-14."""
    given, architecture = peer_data(), read(nets()[name])
    pair = ("image", "other_image") if architecture.space else ("x", "other")
    for kind in ("nngp", "ntk"):
        found = architecture.matrix(*(given[p] for p in pair), WEIGHT_STD, BIAS_STD, kind)
        want = torch.tensor(PEER[name][kind], dtype=torch.float64)
        assert float((found - want).abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["gelu", "tanh", "silu"])
@pytest.mark.parametrize("rho", [-0.9, 0.3, 1.0])
def test_any_activation_is_its_integral(name: str, rho: float) -> None:
    """E[φφ] and E[φ'φ'] on a fine grid of two normals."""
    v, w, function = 1.7, 0.9, SMOOTH[name]
    c = rho * math.sqrt(v * w)
    one = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
    found = smooth(Kernels(one([[c]]), one([[1.0]]), one([v]), one([w])), function)
    z = torch.linspace(-8, 8, 801, dtype=torch.float64)
    p = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    a = (math.sqrt(v) * z)[:, None].expand(-1, len(z)).clone().requires_grad_()
    b = math.sqrt(w) * (rho * z[:, None] + math.sqrt(1 - rho * rho) * z)
    b = b.clone().requires_grad_()
    slopes = [torch.autograd.grad(function(t).sum(), t)[0] for t in (a, b)]
    weight = p[:, None] * p
    values = (weight * function(a) * function(b)).sum().detach()
    assert float(found.nngp) == pytest.approx(float(values), abs=1e-8)
    assert found.ntk is not None
    assert float(found.ntk) == pytest.approx(
        float((weight * slopes[0] * slopes[1]).sum()), abs=1e-6
    )


def test_blocks_members_and_gradients_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = peer_data()
    architecture = read(nets()["conv, pooled"])
    x, other = given["image"], given["other_image"]
    whole = architecture.matrix(x, other, WEIGHT_STD, BIAS_STD, "ntk")
    own = architecture.matrix(x, x.clone(), WEIGHT_STD, BIAS_STD)
    monkeypatch.setitem(blocks_of._BLOCK_BYTES, "cpu", 8 * 3200)
    scales = torch.tensor([WEIGHT_STD, 2.0], dtype=torch.float64, requires_grad=True)
    bias = torch.full_like(scales, BIAS_STD)
    blocks = architecture.matrix(x, other, scales, bias, "ntk")
    assert torch.allclose(blocks[0], whole, rtol=1e-12)
    assert not torch.allclose(blocks[1], whole, rtol=1e-2)
    (slope,) = torch.autograd.grad(blocks[0].sum(), scales)
    step = 1e-6
    near = [architecture.matrix(x, other, WEIGHT_STD + s, BIAS_STD, "ntk") for s in (step, -step)]
    assert float(slope[0]) == pytest.approx(float((near[0] - near[1]).sum()) / (2 * step), rel=1e-6)
    assert torch.allclose(architecture.matrix(x, None, WEIGHT_STD, BIAS_STD), own, rtol=1e-12)
    assert torch.allclose(
        architecture.diagonal(x, WEIGHT_STD, BIAS_STD), own.diagonal(), rtol=1e-12
    )


@pytest.mark.slow  # its first forward-mode pass alone takes seconds
def test_empirical_ntk_is_the_product_of_jacobians() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, other = peer_data()["train"][:4, :3], peer_data()["other"].reshape(-1, 7)[:, :3]

    def jacobian(rows: Tensor) -> Tensor:  # [N, O, P], one backward pass each
        grads = [
            [torch.autograd.grad(net(r)[o], list(net.parameters())) for o in range(2)] for r in rows
        ]
        return torch.stack(
            [torch.stack([torch.cat([g.flatten() for g in o]) for o in r]) for r in grads]
        )

    want = torch.einsum("nop,mqp->nmoq", jacobian(x), jacobian(other))
    assert torch.allclose(empirical_ntk(net, x, other, outputs="all"), want, rtol=1e-12)
    mean = want.diagonal(dim1=2, dim2=3).mean(-1)
    twice = {k: torch.stack([0 * v, v]) for k, v in net.named_parameters()}
    found = empirical_ntk(net, x, other, twice, members=True, chunk=4)
    assert torch.allclose(found[1], mean, rtol=1e-12)


@pytest.mark.slow
def test_finite_networks_approach_their_limit() -> None:
    """Squared distances of K̂ and Θ̂ fall as 1/width: the slope between widths 32 and 256, of 40
    networks each, is −1 within 0.3 (its standard error is about 0.1)."""
    example, widths = load("infinite_width"), (32, 256)
    for squares in example.distances(widths, (40, 40)).values():
        assert example.slope(widths, squares) == pytest.approx(-1.0, abs=0.3)


def test_a_layer_without_a_limit_is_named() -> None:
    odd = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(3)), nn.Linear(3, 1)
    )
    with pytest.raises(ModelError, match=r"layer 2\.0, BatchNorm1d.*NTK\(kernel"):
        read(odd)
    with pytest.raises(ModelError, match=r"layer 1, Conv2d.*groups"):
        read(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2)))
    with pytest.raises(ModelError, match="not Gaussian"):
        read(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Tanh(), nn.Linear(3, 1)))
    with pytest.raises(ModelError, match="ends in a dense layer"):
        read(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    with pytest.raises(ModelError, match="independent of the shortcut"):
        read(nn.Sequential(nn.Linear(2, 2), Skip(nn.ReLU()), nn.Linear(2, 1)))
    with pytest.raises(ShapeError, match="channels, height, width"):
        read(nets()["conv, flattened"]).matrix(torch.zeros(3, 40))
