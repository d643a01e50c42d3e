"""NTK with the kernel of a finite network, against Jacobians by hand and its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import doxa
from doxa.errors import MethodError, ModelError
from doxa.function.wide import Architecture, finite_network, ntk
from doxa.laplace import curvature


def sines(rows: int, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=g).double()
    return x, (x[:, :1].sin() + noise * torch.randn(rows, 1, generator=g).double())


def normed(outputs: int = 1) -> nn.Sequential:
    """A network without an analytic kernel."""
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs)
    ).double()


def kernel_by_hand(net: nn.Module, weights: dict[str, Tensor], x: Tensor, other: Tensor) -> Tensor:
    """(1/O) Σ_o ∂f_o ∂f_oᵀ, a backward pass a row and output."""

    def slopes(rows: Tensor) -> Tensor:
        own = {k: v.clone().requires_grad_() for k, v in weights.items()}
        f = functional_call(net.eval(), own, (rows,))
        each = [torch.autograd.grad(v, list(own.values()), retain_graph=True) for v in f.flatten()]
        flat = torch.stack([torch.cat([g.flatten() for g in one]) for one in each])
        return flat.reshape(len(rows), -1)  # [N, O·P]

    outputs = functional_call(net.eval(), weights, (x[:1],)).numel()
    return slopes(x) @ slopes(other).mT / outputs


@pytest.mark.parametrize("time", [None, 3.0])
def test_members_are_trained_linear_networks(
    time: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each at its own start θ: mean Θ*Ay, covariance that of (I − Θ*A)f over f ~ GP(0, Θ). Four
    rows at a time, of which eight are held."""
    row = 8 * 2 * 2 * 50  # bytes: two members, two outputs, 50 weights
    monkeypatch.setitem(curvature._CHUNK_BYTES, "cpu", 4 * row)
    monkeypatch.setattr(ntk, "_HELD", 8 * row)
    x, y = sines(9)
    y = torch.cat([y, x[:, 1:2]], 1)
    new, net = sines(14)[0][9:], normed(2)
    settings: dict[str, Any] = {"noise": 0.3, "scale": 0.7, "learn_kernel": False, "time": time}
    method = doxa.NTK(kernel="empirical", **settings)
    posterior = doxa.fit(net, (x, y), method, members=2)
    mean, root = posterior.joints(posterior.prepared(new))
    f, variance = posterior.marginals(posterior.prepared(new))
    starts = posterior.model.layout.unflatten(posterior.hyper[:, 1:])
    assert not torch.equal(*starts["0.weight"])
    eye = torch.eye(9).double()
    for m in range(2):
        weights = {k: v[m] for k, v in starts.items() if not k.startswith("likelihood")}
        both = torch.cat([x, new])
        k = 0.7**2 * kernel_by_hand(net, weights, both, both)
        held = k[:9, :9] + 0.3**2 * eye[:9, :9]
        a = torch.linalg.inv(held)
        if time is not None:
            a = a @ (eye[:9, :9] - torch.linalg.matrix_exp(-time / 9 * held))
        lever = k[9:, :9] @ a
        rest = torch.cat([-lever, eye[:5, :5]], 1)
        want = rest @ k @ rest.mT
        assert float((mean[m] - lever @ y).abs().max()) < 1e-9
        assert float((root[m, 0] @ root[m, 0].mT - want).abs().max()) < 1e-9
        assert torch.allclose(f[m], mean[m], atol=1e-9)
        assert torch.allclose(variance[m].mT, want.diagonal(), atol=1e-9)


def test_the_scale_is_at_the_top_of_evidence_and_prior() -> None:
    """log N(y; 0, s²Θ̂ + σ²I) + log N(log s; log s₀, 1) + log N(log σ; 0, 1), with s₀²Θ̂ as large on
    average as y's variance: no slope there."""
    x, y = sines(30, 0.3)
    net = normed()
    posterior = doxa.fit(net, (x, y), doxa.NTK(kernel="empirical"), init="given")
    kernel = kernel_by_hand(net, dict(net.named_parameters()), x, x).detach()
    top = torch.stack([posterior.hyper[0, 0], posterior.log_noise.reshape(())]).requires_grad_()
    start = 0.5 * (y.var(correction=0) / kernel.diagonal().mean()).log()
    held = (2 * top[0]).exp() * kernel + (2 * top[1]).exp() * torch.eye(30).double()
    zero = torch.zeros(30).double()
    value = torch.distributions.MultivariateNormal(zero, held).log_prob(y[:, 0])
    value = value - 0.5 * ((top[0] - start) ** 2 + top[1] ** 2)
    assert float(torch.autograd.grad(value, top)[0].abs().max()) < 1e-3


def test_wide_networks_approach_the_limit() -> None:
    """Predictions of 16 networks: their mean squared distance falls as 1/width, from 32 to 512 by
    16; asked is 6."""
    x, y = sines(12)
    new, limit = sines(30)[0][12:], Architecture.fully_connected(1, "erf")
    fixed: dict[str, Any] = {"noise": 0.3, "learn_kernel": False}
    wide = doxa.NTK(net=limit, weight_std=1.5, bias_std=0.3, **fixed)
    want = doxa.fit(None, (x, y), wide).predict(new).mean
    away = []
    for width in (32, 512):
        net = finite_network(limit, 3, 1, width, 1.5, 0.3).double()
        method = doxa.NTK(kernel="empirical", scale=1.0, **fixed)
        posterior = doxa.fit(net, (x, y), method, members=16)
        found, _ = posterior.marginals(posterior.prepared(new))
        away.append(float((found - want).square().mean()))
    assert away[1] < away[0] / 6
    assert away[1] ** 0.5 < 0.05


def test_the_way_out_of_an_error_leads_somewhere(tmp_path: Path) -> None:
    x, y = sines(60)
    net = normed()
    with pytest.raises(ModelError, match=r"layer 1, BatchNorm1d.*NTK\(kernel='empirical'\)"):
        doxa.fit(net, (x, y), "ntk")
    method = doxa.NTK(kernel="empirical")
    posterior = doxa.fit(net, (x, y), method, members=3)
    new, target = (part[60:] for part in sines(260))
    p = posterior.predict(new)
    assert float((p.mean - target).square().mean()) < 0.3 * float(target.var())
    low, high = p.interval(0.9)
    assert 0.8 < float(((target > low) & (target < high)).double().mean()) <= 0.98
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert torch.allclose(again.predict(new).variance, p.variance, rtol=1e-9)
    more = posterior.condition(new[:50], target[:50])
    fixed = doxa.NTK(kernel="empirical", noise=0.3, scale=0.5, learn_kernel=False)
    one = doxa.fit(net, (x[:40], y[:40]), fixed).condition(x[40:], y[40:]).predict(new)
    two = doxa.fit(net, (x, y), fixed).predict(new)
    assert torch.allclose(one.mean, two.mean, rtol=1e-8)
    assert more.predict(new[50:]).log_prob(target[50:]).mean() > p.log_prob(target)[50:].mean()


def test_runs_are_those_alone_and_members_their_own() -> None:
    x, y = sines(40)
    splits = [torch.arange(25), torch.arange(10, 40)]
    method, net = doxa.NTK(kernel="empirical"), normed()
    sweep = doxa.fit(net, (x, y), method, runs=doxa.Runs(rows=splits), members=2)
    for i, found in enumerate(sweep):
        rows = splits[i]
        alone = doxa.fit(net, (x[rows], y[rows]), method, members=2, seed=i)
        assert torch.allclose(found.predict(x).mean, alone.predict(x).mean, rtol=1e-5)
        assert torch.allclose(found.predict(x).std, alone.predict(x).std, rtol=1e-5)


class Words(nn.Module):
    """Numbers and a word, which is an index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.out = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, numbers: Tensor, word: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([numbers, self.table(word)], 1))
        return found


def test_any_inputs_and_classes() -> None:
    g = torch.Generator().manual_seed(0)
    word = torch.randint(0, 4, (300,), generator=g)
    numbers = torch.randn(300, 2, generator=g)
    y = (word + (numbers[:, 0] > 0)) % 3
    x = {"numbers": numbers, "word": word}
    some = {k: v[:100] for k, v in x.items()}
    posterior = doxa.fit(Words(), (some, y[:100]), doxa.NTK(kernel="empirical"), members=2)
    p = posterior.predict({k: v[100:] for k, v in reversed(x.items())})
    assert p.probs.shape == (200, 3)
    assert float((p.probs.argmax(1) == y[100:]).double().mean()) > 0.8


def test_settings_of_the_limit_are_refused() -> None:
    with pytest.raises(MethodError, match="depth= is not allowed"):
        doxa.NTK(kernel="empirical", depth=3)
    with pytest.raises(MethodError, match="pass the network to fit"):
        doxa.NTK(kernel="empirical", net=normed())
    with pytest.raises(MethodError, match="empirical"):
        doxa.NTK(scale=1.0)
    with pytest.raises(ModelError, match="ntk needs a network"):
        doxa.fit(None, sines(5), doxa.NTK(kernel="empirical"))
