"""Stochastic weight averaging against Algorithm 1 and torch's own refresh of BatchNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.optim import SGD


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(24, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    return x, y + 0.1 * torch.randn(24, 1, generator=g, dtype=torch.float64)


@pytest.mark.parametrize(("schedule", "cycle"), [("constant", 1), ("constant", 4), ("cyclic", 5)])
def test_it_is_algorithm_1(schedule: str, cycle: int) -> None:
    """Written out: ordinary steps, then cycles whose last points are averaged. Plain gradient
    descent on all rows, so that nothing is left to chance."""
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    steps, share, rate, lowest = 40, 0.5, 0.2, 0.1
    method = doxa.SWA(average=share, cycle=cycle, schedule=schedule, swa_lr=rate, lowest=lowest)
    posterior = doxa.fit(
        net, (x, y), method, steps=steps, lr=0.1, schedule="constant", optimizer=SGD(0.0),
        batch_size=24, init="given", likelihood=doxa.Gaussian(noise=1.0),
    )  # fmt: skip
    weights = [p.detach().clone() for p in net.parameters()]

    def descend(by: float) -> None:
        leaves = [w.requires_grad_() for w in weights]
        h = torch.tanh(x @ leaves[0].T + leaves[1]) @ leaves[2].T + leaves[3]
        loss = 0.5 * (y - h).square().sum() + 0.5 * sum(w.square().sum() for w in leaves)
        grads = torch.autograd.grad(loss / len(x), leaves)
        weights[:] = [(w - by * g).detach() for w, g in zip(leaves, grads, strict=True)]

    for _ in range(20):
        descend(0.1)
    mean, models = [torch.zeros_like(w) for w in weights], 0
    for i in range(1, 21):
        t = ((i - 1) % cycle + 1) / cycle
        descend(rate if schedule == "constant" else (1 - t) * rate + t * lowest * rate)
        if i % cycle == 0:
            mean = [(m * models + w) / (models + 1) for m, w in zip(mean, weights, strict=True)]
            models += 1
    want = torch.cat([m.flatten() for m in mean])
    assert torch.allclose(posterior.samples[0, 0], want, rtol=1e-9)


def test_batch_norm_is_recomputed_as_torch_does() -> None:
    """update_bn over the same batches, at the averaged weights."""
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    options = {"steps": 60, "batch_size": 8, "members": 2, "validation": None}
    posterior = doxa.fit(net, (x, y), doxa.SWA(), **options)
    for m in range(2):
        own = posterior.layout.unflatten(posterior.samples[m, 0])
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_(own[name])
        torch.optim.swa_utils.update_bn(x.split(8), net)
        for name in ("running_mean", "running_var"):
            got = posterior.buffers[f"1.{name}"][m]
            assert torch.allclose(got, getattr(net[1], name), rtol=1e-9), name
        f = posterior.functions(x, 2)[m]
        with torch.no_grad():
            assert torch.allclose(f, net.eval()(x), rtol=1e-9)


def test_the_mean_is_not_the_last_point() -> None:
    x, y = data()
    net = doxa.nets.mlp(3, 1, (5,)).double()
    swa = doxa.fit(net, (x, y), doxa.SWA(swa_lr=0.05), steps=200, batch_size=8)
    last = doxa.fit(net, (x, y), "map", steps=200, batch_size=8)
    assert not torch.allclose(swa.samples, last.samples, rtol=1e-2)


def test_a_rate_grid_is_one_stacked_fit() -> None:
    net = doxa.nets.mlp(3, 1, (5,)).double()
    runs = doxa.Runs(grid={"swa_lr": [0.01, 0.2]})
    sweep = doxa.fit(net, data(), doxa.SWA(), steps=40, runs=runs)
    for posterior, rate in zip(sweep, (0.01, 0.2), strict=True):
        alone = doxa.fit(net, data(), doxa.SWA(swa_lr=rate), steps=40)
        assert torch.allclose(posterior.samples, alone.samples, rtol=1e-8)


@pytest.mark.slow
def test_an_average_ends_where_held_out_rows_say() -> None:
    """Where y is noise alone, N(0, 1) is the best prediction, of -1.42 nats a row: an average over
    rows learned by heart is far below it, with noise found on held-out rows too (-1.83)."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(1100, 8, generator=g), torch.randn(1100, 1, generator=g)
    posterior = doxa.fit(doxa.nets.mlp(8, 1, (50,)), (x[:100], y[:100]), "swa", seed=0)
    score = float(posterior.predict(x[100:]).log_prob(y[100:]).mean())
    assert -1.65 < score < -1.40
