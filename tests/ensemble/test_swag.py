"""SWAG against equations 5 and 6 on a trajectory that is written out."""

from __future__ import annotations

import pytest
import torch
from straight import one_column_of_eleven
from torch import Tensor, nn

import doxa
from doxa import linalg
from doxa.errors import MethodError
from doxa.optim import SGD


def data(n: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    return x, y + 0.1 * torch.randn(n, 1, generator=g, dtype=torch.float64)


def points(net: nn.Module, steps: int, first: int, rate: float, cycle: int) -> Tensor:
    """Gradient descent on all rows, by hand: every cycle-th point after the first steps."""
    x, y = data()
    weights = [p.detach().clone() for p in net.parameters()]
    found = []
    for i in range(steps):
        leaves = [w.requires_grad_() for w in weights]
        h = torch.tanh(x @ leaves[0].T + leaves[1]) @ leaves[2].T + leaves[3]
        loss = 0.5 * (y - h).square().sum() + 0.5 * sum(w.square().sum() for w in leaves)
        grads = torch.autograd.grad(loss / len(x), leaves)
        by = 0.1 if i < first else rate
        weights = [(w - by * g).detach() for w, g in zip(leaves, grads, strict=True)]
        if i >= first and (i - first + 1) % cycle == 0:
            found.append(torch.cat([w.flatten() for w in weights]))
    return torch.stack(found)


@pytest.mark.parametrize("deviations", ["final", "running"])
@pytest.mark.parametrize("rank", [0, 3])
def test_it_is_equations_5_and_6(deviations: str, rank: int) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    method = doxa.SWAG(average=0.5, cycle=3, swa_lr=0.2, rank=rank, deviations=deviations)
    posterior = doxa.fit(
        net, data(), method, steps=40, lr=0.1, schedule="constant", optimizer=SGD(0.0),
        batch_size=24, init="given", likelihood=doxa.Gaussian(noise=1.0), validation=None,
    )  # fmt: skip
    theta = points(net, 40, 22, 0.2, 3)
    count = len(theta)
    assert count == 6
    mean = sum(theta) / count
    variance = sum(t**2 for t in theta) / count - mean**2
    want = torch.diag(variance)
    if rank:
        centres = [mean if deviations == "final" else theta[: i + 1].mean(0) for i in range(count)]
        columns = torch.stack([theta[i] - centres[i] for i in range(count - rank, count)], 1)
        want = 0.5 * torch.diag(variance) + columns @ columns.T / (2 * (rank - 1))
    assert torch.allclose(posterior.mean[0], mean, rtol=1e-10, atol=1e-12)
    got = posterior.covariance.matmul(torch.eye(len(mean), dtype=torch.float64).unsqueeze(1))
    assert torch.allclose(got[:, 0], want, rtol=1e-8, atol=1e-13)


def test_draws_have_its_covariance() -> None:
    """20,000 draws: entries of the sample covariance within five of their standard errors."""
    net = doxa.nets.mlp(3, 1, (3,)).double()
    posterior = doxa.fit(net, data(), doxa.SWAG(cycle=2, rank=4), steps=80, batch_size=8)
    assert isinstance(posterior.covariance, linalg.LowRankPlusDiagonal)
    draws = posterior.draw(20_000)
    names = posterior.network.subset_names
    flat = posterior.layout.select(names).flatten({k: draws[k] for k in names})
    got = torch.cov(flat.T)
    size = flat.shape[1]
    want = posterior.covariance.matmul(torch.eye(size, dtype=torch.float64).unsqueeze(1))[:, 0]
    error = ((want**2 + torch.outer(want.diag(), want.diag())) / len(flat)).sqrt()
    assert ((got - want).abs() <= 5 * error + 1e-15).all()
    assert (draws["likelihood.log_noise"] == draws["likelihood.log_noise"][0]).all()


def test_a_weight_that_never_moved_is_a_point() -> None:
    """The weights of an input that is always zero, without a prior's pull to speak of: where they
    began, at random, they stay, and can be drawn from."""
    x, y = data()
    x = x.clone()
    x[:, 0] = 0.0
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    posterior = doxa.fit(
        net, (x, y), doxa.SWAG(cycle=2, rank=3), steps=80, prior=doxa.Normal(1e150),
        optimizer=SGD(0.0), lr=0.01,
    )  # fmt: skip
    drawn = posterior.draw(50)["0.weight"]
    assert (drawn[:, :, 0] == drawn[0, :, 0]).all() and (drawn[1:, :, 1] != drawn[0, :, 1]).all()


def test_statistics_are_recomputed_for_every_draw() -> None:
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    method = doxa.SWAG(cycle=2, rank=2, samples=3)
    options = {"steps": 60, "batch_size": 8, "members": 2, "validation": None}
    posterior = doxa.fit(net, (x, y), method, **options)
    assert posterior.samples.shape[:2] == (2, 3) and not posterior.chain
    for m in range(2):
        for s in range(3):
            own = posterior.layout.unflatten(posterior.samples[m, s])
            with torch.no_grad():
                for name, p in net.named_parameters():
                    p.copy_(own[name])
            torch.optim.swa_utils.update_bn(x.split(8), net)
            for name in ("running_mean", "running_var"):
                got = posterior.buffers[f"1.{name}"][m, s]
                assert torch.allclose(got, getattr(net[1], name), rtol=1e-9), name


def test_the_trajectory_ends_where_rows_held_out_say() -> None:
    """150 rows of eleven columns, one of which is y but for noise of 1: 1.42 nats a row at best,
    1.77 by a constant. 250 steps more know them by heart, at 1.72. Of the k ≤ K points before, each
    variance of D̂ D̂ᵀ / (2 (k − 1)) is k / (k − 1) times that of ½ Σ_diag."""
    x, y, x_new, y_new = one_column_of_eleven()
    posterior = doxa.fit(doxa.nets.mlp(11, 1, (50,)), (x, y), "swag", steps=1000, seed=0)
    assert posterior.predict(x_new).log_prob(y_new).mean() > -1.62
    (k,) = posterior.diagnostics["points"]
    assert 2 <= k < 20
    spread = posterior.covariance
    want = spread.variance * k / (k - 1)
    assert torch.allclose(spread.factor.square().sum(2), want, rtol=1e-3, atol=1e-9)


def test_too_few_points_are_said() -> None:
    net = doxa.nets.mlp(3, 1, (3,)).double()
    with pytest.raises(MethodError, match=r"as many points.*has 2 .*lower rank or cycle"):
        doxa.fit(net, data(), "swag", steps=80)
