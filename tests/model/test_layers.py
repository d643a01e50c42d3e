"""Layers that behave differently in training: BatchNorm and dropout."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path

import pytest
import torch
from model_cases import METHODS, QUICK, numbers, seeded
from torch import nn
from torch.distributions import Normal

import doxa
from doxa.errors import ModelError
from doxa.optim import SGD


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_batch_norm_trains_as_it_does_in_torch(engine: str) -> None:
    """The prior is so wide that the objective is the mean loss; every batch is all rows."""
    net = seeded(norm_net)
    x, y = numbers(16, 3).double() + 2, numbers(16, 1, seed=1).double()
    posterior = doxa.fit(
        net, (x, y), "map", likelihood=doxa.Gaussian(noise=1.0), prior=doxa.Normal(1e8),
        init="given", members=2, optimizer=SGD(0.0), lr=0.1, schedule="constant", steps=4,
        engine=engine, validation=None,
    )  # fmt: skip
    torch_net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (0.5 * (torch_net(x) - y).square().mean()).backward()
        optimizer.step()
    torch_net.eval()
    for k in range(2):
        assert posterior.buffers["1.num_batches_tracked"][k] == 4
        torch.testing.assert_close(
            posterior.buffers["1.running_mean"][k], torch_net[1].running_mean
        )
        torch.testing.assert_close(posterior.buffers["1.running_var"][k], torch_net[1].running_var)
    f = posterior.predict(x).samples
    torch.testing.assert_close(f[0], torch_net(x).detach())
    torch.testing.assert_close(f[1], torch_net(x).detach())


def test_each_member_has_its_own_batch_norm_buffers(tmp_path: Path) -> None:
    net = seeded(norm_net)
    x, y = numbers(32, 3).double(), numbers(32, 1, seed=1).double()
    options = {"batch_size": 8, "steps": 20, "validation": None}
    posterior = doxa.fit(net, (x, y), "map", members=3, **options)
    means = posterior.buffers["1.running_mean"]
    assert means.shape == (3, 5)
    assert not torch.equal(means[0], means[1])
    assert torch.equal(net[1].running_mean, torch.zeros(5).double())
    alone = doxa.fit(net, (x, y), "map", members=[2], **options)
    torch.testing.assert_close(alone.buffers["1.running_mean"][0], means[2])
    torch.testing.assert_close(alone.predict(x).mean, posterior.predict(x).samples[2])
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_predictions_do_not_depend_on_the_batch(method: str) -> None:
    x, y = numbers(32, 3).double(), numbers(32, 1, seed=1).double()
    posterior = doxa.fit(seeded(norm_net), (x, y), METHODS[method], members=2, **QUICK)
    whole, part = posterior.predict(x).mean, posterior.predict(x[3:4]).mean
    torch.testing.assert_close(part, whole[3:4], rtol=1e-9, atol=1e-12)


def test_frozen_batch_norm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "doxa")
    x, y = numbers(16, 3).double(), numbers(16, 1, seed=1).double()
    for method in ("hmc", "laplace"):
        caplog.clear()
        doxa.fit(seeded(norm_net), (x, y), METHODS[method], **QUICK)
        assert "BatchNorm" in caplog.text


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_chains_sample_the_density_that_predictions_come_from(subset: str) -> None:
    """The last draw's log joint by hand, with the buffers that the posterior keeps."""
    net = seeded(norm_net)
    x, y = numbers(16, 3).double() + 2, numbers(16, 1, seed=1).double()
    posterior = doxa.fit(
        net, (x, y), METHODS["hmc"], likelihood=doxa.Gaussian(noise=0.7), subset=subset, members=2,
        steps=20, batch_size=8,
    )  # fmt: skip
    reached = posterior.history["log_density"][-1][1]
    f = posterior.predict(x).samples[1::2]  # the second and last draw of each chain
    draws = {name: v[1::2] for name, v in posterior.draw().items()}
    for k in range(2):
        prior = sum(
            Normal(1.0 if name == "1.weight" else 0.0, 1.0).log_prob(v[k]).sum()
            for name, v in draws.items()
        )
        joint = prior + Normal(f[k], 0.7).log_prob(y).sum()
        assert float(joint) == pytest.approx(reached[k], rel=1e-9)


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 1, bias=False)
    )


def test_dropout_is_on_in_training_and_off_in_prediction() -> None:
    """With the first layer frozen the net is linear in the masked features, so that one SGD step
    shows the masks: a weight whose feature was dropped in every row has no gradient."""
    net = seeded(dropout_net)
    net[0].requires_grad_(False)
    x, y = numbers(1, 3), numbers(1, 1, seed=1) + 3
    start = net[3].weight.detach().clone()
    options = {
        "likelihood": doxa.Gaussian(noise=1.0), "prior": doxa.Normal(1e8), "init": "given",
        "optimizer": SGD(0.0), "lr": 0.1, "schedule": "constant", "steps": 1,
    }  # fmt: skip
    posterior = doxa.fit(net, (x, y), "map", **options)
    moved = (posterior.draw(1)["3.weight"][0] - start)[0]
    h = torch.relu(net[0](x))[0].detach()
    alive = h > 0
    dropped = (moved == 0) & alive
    assert 0 < int(dropped.sum()) < int(alive.sum())
    kept = alive & ~dropped
    ratio = moved[kept] / h[kept]  # lr × residual / (1 − p), the same for every kept feature
    assert torch.allclose(ratio, ratio[:1], rtol=1e-4)
    masked = torch.where(dropped, 0.0, h / 0.75)
    residual = (y - masked @ start[0])[0, 0]
    assert float(ratio[0]) == pytest.approx(0.1 * float(residual) / 0.75, rel=1e-4)
    f = posterior.predict(x).samples[0]
    torch.testing.assert_close(f, (h @ posterior.draw(1)["3.weight"][0].T)[None])


def test_monte_carlo_dropout_drops_as_often_as_the_layer_says() -> None:
    """The variance over masks of Σ w_j h_j z_j / (1 − p) is Σ (w_j h_j)² p / (1 − p)."""
    net = seeded(dropout_net)
    x, y = numbers(4, 3), numbers(4, 1, seed=1)
    posterior = doxa.fit(net, (x, y), "mc-dropout", init="given", lr=1e-12, **QUICK)
    assert set(posterior.values) == {"2.p"}
    assert float(posterior.values["2.p"][0]) == 0.25
    f = posterior.functions(x, 4000)[..., 0].double()
    terms = (torch.relu(net[0](x)) * net[3].weight).detach().double()  # [N, 64]
    spread = (terms.square() * (0.25 / 0.75)).sum(1)
    # five standard errors of a mean and of a variance over 4000 nearly normal draws
    assert ((f.mean(0) - terms.sum(1)).abs() < 5 * (spread / 4000).sqrt()).all()
    assert ((f.var(0) / spread - 1).abs() < 5 * math.sqrt(2 / 4000)).all()


def test_dropout_is_inserted_where_there_is_none() -> None:
    net = seeded(lambda: doxa.nets.mlp(3, 1, hidden=(4, 4)))
    x, y = numbers(12, 3), numbers(12, seed=1)
    sites = {
        insert: set(doxa.fit(net, (x, y), doxa.MCDropout(p=0.3, insert=insert), **QUICK).values)
        for insert in ("hidden", "all")
    }
    assert sites == {
        "hidden": {"2.dropout.p", "4.dropout.p"},
        "all": {"0.dropout.p", "2.dropout.p", "4.dropout.p"},
    }
    with pytest.raises(ModelError, match="dropout"):
        doxa.fit(net, (x, y), doxa.MCDropout(insert="never"), **QUICK)
    assert type(net[0]) is nn.Linear


def test_channel_dropout_drops_whole_channels() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(1, 6, 1), nn.Dropout2d(0.5), nn.Conv2d(6, 6, 1)))
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[2].bias)
    net[2].weight.data = torch.eye(6)[:, :, None, None]
    x = torch.ones(4, 1, 3, 3)
    posterior = doxa.fit(
        net, (x, numbers(4, 6, 3, 3)), "mc-dropout", init="given", lr=1e-12, **QUICK
    )
    f = posterior.functions(x, 50)  # [S, N, channel, 3, 3]
    assert torch.allclose(f, f[:, :1, :, :1, :1].expand_as(f))
    share = float((f[:, 0, :, 0, 0].abs() < 1e-6).double().mean())
    assert abs(share - 0.5) < 5 * math.sqrt(0.25 / 300)
