"""Networks that cannot be used, or not as they are: errors and log lines that say so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import DoxaError, ModelError, ShapeError

N, D = 24, 3


def table(n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=g)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))


class Forward(nn.Module):
    """A layer and any function of its output."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 1)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(x))


def explode(_: Tensor) -> Tensor:
    raise KeyError("no such thing")


def train_only(h: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        raise RuntimeError("not differentiable")
    return h


NETS: dict[str, tuple[Any, str]] = {
    "other width": (lambda: doxa.nets.mlp(D + 1, 1), "fails on one row of x"),
    "raises anything": (lambda: Forward(explode), "no such thing"),
    "fails in training": (lambda: Forward(train_only), "fails in training"),
    "squeezes its rows away": (lambda: Forward(torch.squeeze), "squeeze"),
    "averages its rows": (lambda: Forward(lambda h: h.mean(0)), "the first axis must be the rows"),
    "gives a loss": (lambda: Forward(lambda h: h.sum()), "the first axis must be the rows"),
    "gives a dict": (lambda: Forward(lambda h: {"out": h, "more": h}), "output="),
    "gives nothing": (lambda: Forward(lambda h: None), "not NoneType"),
    "gives a number": (lambda: Forward(lambda h: 3.0), "not float"),
    "two outputs, one likelihood": (lambda: Forward(lambda h: (h, h)), "likelihood|head|outputs"),
    "frozen": (lambda: doxa.nets.mlp(D, 1).requires_grad_(False), "no trainable parameter"),
    "empty": (lambda: nn.Identity(), "no trainable parameter"),
    "mixed types": (
        lambda: nn.Sequential(nn.Linear(D, 2), nn.Linear(2, 1).double()),
        "mixed types",
    ),
}


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("noise", [None, 0.1])
def test_networks_that_cannot_be_fitted(kind: str, noise: float | None) -> None:
    build, message = NETS[kind]
    data = table()
    if kind == "empty":
        data = (data[0][:, :1], data[1])
    with pytest.raises(DoxaError, match=message):
        doxa.fit(build(), data, steps=3, likelihood=doxa.Gaussian(noise=noise))


def test_a_network_on_the_meta_device_is_an_error() -> None:
    with pytest.raises(DoxaError, match="meta"):
        doxa.fit(doxa.nets.mlp(D, 1).to("meta"), table(), steps=3)


def test_outputs_that_do_not_fit_the_likelihood() -> None:
    x, y = table()
    with pytest.raises(ModelError, match="two network outputs for each target"):
        doxa.fit(doxa.nets.mlp(D, 1), (x, y), likelihood="heteroscedastic")
    with pytest.raises(ModelError, match="one output for each class"):
        doxa.fit(doxa.nets.mlp(D, 1), (x, (y > 0).long()), likelihood="categorical")
    with pytest.raises(ShapeError):
        doxa.fit(doxa.nets.mlp(D, 2), (x, y))


METHODS: dict[str, Any] = {
    "map": "map", "deep-ensemble": "deep-ensemble", "mean-field": "mean-field",
    "mc-dropout": "mc-dropout", "hmc": doxa.HMC(draws=4, burn_in=4, leapfrog=2),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_is_never_silent(name: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y = table()
    net = with_batch_norm()
    running = net[1].running_mean.clone()
    with caplog.at_level(logging.INFO, "doxa"):
        posterior = doxa.fit(net, (x, y), METHODS[name], steps=20, members=2, batch_size=8)
    assert "BatchNorm" in caplog.text
    assert torch.equal(net[1].running_mean, running)  # the user's network is never changed
    frozen = [r for r in caplog.records if "frozen" in r.getMessage()]
    moved = not torch.equal(posterior.buffers["1.running_mean"], running.expand(2, -1))
    if name == "hmc":
        assert frozen and frozen[0].levelno == logging.WARNING and not moved
    else:
        assert not frozen and moved
        own = posterior.buffers["1.running_mean"]
        assert not torch.equal(own[0], own[1])  # each member keeps its own
    p = posterior.predict(x)
    one = posterior.predict(x[:1])
    torch.testing.assert_close(one.mean, p.mean[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["stack", "loop"])
def test_batch_norm_trains_as_torch_does(engine: str) -> None:
    """One full-batch step: the running statistics are torch's own."""
    x, y = table()
    net = with_batch_norm()
    posterior = doxa.fit(
        net, (x, y), steps=1, batch_size=N, init="given", members=2, engine=engine, lr=1e-3,
        validation=None,
    )  # fmt: skip
    net.train()(x)
    for member in range(2):
        torch.testing.assert_close(posterior.buffers["1.running_mean"][member], net[1].running_mean)
        torch.testing.assert_close(posterior.buffers["1.running_var"][member], net[1].running_var)


def test_batch_norm_does_not_count_padding() -> None:
    x, y = (v.double() for v in table())
    net = with_batch_norm().double()
    splits = [torch.arange(7), torch.arange(4, N)]
    settings: dict[str, Any] = {"steps": 5, "batch_size": 16, "init": "given"}
    sweep = doxa.fit(net, (x, y), runs=doxa.Runs(rows=splits), **settings)
    alone = doxa.fit(net, (x[:7], y[:7]), **settings)
    for name, value in alone.buffers.items():
        torch.testing.assert_close(sweep[0].buffers[name], value)


def test_batch_norm_needs_more_than_one_row() -> None:
    x, y = table()
    with pytest.raises(ModelError, match="more than 1 value"):
        doxa.fit(with_batch_norm(), (x[:1], y[:1]), steps=3)
    with pytest.raises(ModelError, match="more than 1 value"):
        doxa.fit(with_batch_norm(), (x, y), steps=3, batch_size=1)


def test_batch_norm_without_statistics_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Grid(nn.Module):  # one row has several values a channel
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1, track_running_stats=False)
            self.layer = nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x[:, None])[:, 0])

    doxa.fit(Grid(), table(), steps=3)
    assert "depends on the other rows of the call" in caplog.text


@pytest.mark.parametrize("optimizer, lr", [("sgd", 1e4), ("adam", 1e6), ("sgd", 1e30)])
@pytest.mark.parametrize("name", ["map", "deep-ensemble", "mean-field", "mc-dropout"])
@pytest.mark.parametrize(
    "n, validation", [(N, None), (N, "auto"), (60, "auto")], ids=["all rows", "parts", "held out"]
)
def test_a_diverging_rate_says_so_and_still_predicts(
    n: int, validation: str | None, name: str, optimizer: str, lr: float
) -> None:
    x, y = table(n)
    posterior = doxa.fit(
        doxa.nets.mlp(D, 1, hidden=(8,)), (x, y), name, steps=60, lr=lr, optimizer=optimizer,
        validation=validation,
    )  # fmt: skip
    assert posterior.status == "diverged"
    assert "learning rate" in posterior.status.reason
    p = posterior.predict(x)
    assert torch.isfinite(p.mean).all()


def test_one_diverging_run_does_not_touch_the_other() -> None:
    x, y = table()
    net = doxa.nets.mlp(D, 1, hidden=(8,)).double()
    settings: dict[str, Any] = {"steps": 40, "optimizer": "sgd", "members": 2, "validation": None}
    sweep = doxa.fit(net, (x, y), runs=doxa.Runs(grid={"lr": [1e-3, 1e30]}), **settings)
    assert [p.status for p in sweep] == ["ok", "diverged"]
    alone = doxa.fit(net, (x, y), lr=1e-3, **settings)
    torch.testing.assert_close(sweep[0].samples, alone.samples, rtol=1e-9, atol=1e-10)


def test_hopeless_chains_say_so() -> None:
    x, y = table()
    method = doxa.HMC(draws=10, burn_in=0, leapfrog=1)
    posterior = doxa.fit(doxa.nets.mlp(D, 1), (x, y * 1e4), method, members=2)
    assert posterior.status in ("not-converged", "diverged")
    assert posterior.status.reason
    assert torch.isfinite(posterior.predict(x).mean).all()


def test_an_exploding_network_is_reported_by_hmc() -> None:
    x, y = table()
    net = Forward(lambda h: (50 * h).exp())
    posterior = doxa.fit(net, (100 * x, y), doxa.HMC(draws=4, burn_in=4, leapfrog=2), members=2)
    assert posterior.status != "ok"
