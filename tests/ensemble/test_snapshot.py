"""Snapshot ensembles against the paper's schedule, written out."""

from __future__ import annotations

import math

import pytest
import torch
from straight import one_column_of_eleven
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.optim import SGD


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(24, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    return x, y + 0.1 * torch.randn(24, 1, generator=g, dtype=torch.float64)


def test_it_is_one_run_whose_rate_starts_anew() -> None:
    """α(t) = α₀/2 (cos(π (t mod c)/c) + 1); the points at the ends of the last three cycles."""
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    posterior = doxa.fit(
        net, (x, y), doxa.SnapshotEnsemble(snapshots=4, skip=1), steps=42, lr=0.3, batch_size=24,
        optimizer=SGD(0.0), init="given", likelihood=doxa.Gaussian(noise=1.0),
    )  # fmt: skip
    weights = [p.detach().clone() for p in net.parameters()]
    kept = []
    for t in range(40):
        leaves = [w.requires_grad_() for w in weights]
        h = torch.tanh(x @ leaves[0].T + leaves[1]) @ leaves[2].T + leaves[3]
        loss = 0.5 * (y - h).square().sum() + 0.5 * sum(w.square().sum() for w in leaves)
        grads = torch.autograd.grad(loss / len(x), leaves)
        rate = 0.15 * (math.cos(math.pi * (t % 10) / 10) + 1)
        weights = [(w - rate * g).detach() for w, g in zip(leaves, grads, strict=True)]
        if (t + 1) % 10 == 0:
            kept.append(torch.cat([w.flatten() for w in weights]))
    assert torch.allclose(posterior.samples[0], torch.stack(kept[1:]), rtol=1e-9)
    assert not posterior.chain


def test_snapshots_keep_their_own_batch_norm() -> None:
    """Each predicts as the network did when it was taken: a run that ends there."""
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    fit = lambda size, steps: doxa.fit(  # noqa: E731
        net, (x, y), doxa.SnapshotEnsemble(snapshots=size), steps=steps, batch_size=8, init="given",
        likelihood=doxa.Gaussian(0.3),
    )  # fmt: skip
    f = fit(3, 60).functions(x, 3)
    assert torch.allclose(f[0], fit(1, 20).functions(x, 1)[0], rtol=1e-8)
    assert torch.allclose(f[1], fit(2, 40).functions(x, 2)[1], rtol=1e-8)
    assert not torch.allclose(f[1], f[2], rtol=1e-3)


def test_a_stopped_run_has_no_untrained_snapshots() -> None:
    """Stopped in the second cycle: the first snapshot, and where it stood in the other places, but
    for the one step of Adam, a hundredth at most, that each cycle left takes."""
    x, y = data()
    net = doxa.nets.mlp(3, 1, (4,)).double()
    posterior = doxa.fit(
        net,
        (x, y),
        doxa.SnapshotEnsemble(snapshots=4),
        steps=80,
        callbacks=[lambda step, _: step >= 30],
    )
    first, *others = posterior.samples[0]
    assert posterior.status == "stopped"
    assert (first - others[0]).abs().max() > 0.05
    assert (others[0] - torch.stack(others)).abs().max() < 0.0201


def test_a_small_table_is_not_learned_by_heart() -> None:
    """150 rows, of ten columns that do nothing and one that is y but for noise of 1. Predicted by
    what is true a row costs ½ log 2πe = 1.42 nats, by a constant 1.77. Snapshots at the ends of
    their cycles, 200 steps of overfitting each, gave 1.79."""
    x, y, x_new, y_new = one_column_of_eleven()
    posterior = doxa.fit(doxa.nets.mlp(11, 1, (50,)), (x, y), "snapshot", steps=1000, seed=0)
    assert posterior.predict(x_new).log_prob(y_new).mean() > -1.62
    assert len({float(f[0, 0]) for f in posterior.functions(x[:1], 5)}) == 5


def test_settings_that_leave_nothing() -> None:
    with pytest.raises(MethodError, match="skip=5 of snapshots=5 leaves none"):
        doxa.SnapshotEnsemble(skip=5)
    with pytest.raises(MethodError, match="5 snapshots need as many steps, not 3"):
        doxa.fit(doxa.nets.mlp(3, 1, (4,)).double(), data(), "snapshot", steps=3)
