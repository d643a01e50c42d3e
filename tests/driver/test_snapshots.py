"""`doxa.Snapshots`: posteriors of a fit while it runs, which change no bit of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.posterior import SamplePosterior


def table(n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1) + 0.1 * torch.sin(9 * x[:, 0])


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "map": ("map", {"steps": 40, "validation": None}),
    "held out": ("map", {"steps": 40, "validation": 0.25}),
    "defaults": (doxa.MAP(), {"steps": 40}),
    "deep-ensemble": ("deep-ensemble", {"steps": 40, "members": 3}),
    "mean-field": ("mean-field", {"steps": 40, "validation": None}),
    "sgld": (doxa.SGLD(draws=20, burn_in=20, thin=1), {"members": 2}),
    "hmc": (doxa.HMC(draws=20, burn_in=20, leapfrog=2), {"members": 2}),
    "svgd": (doxa.get_method("svgd")(particles=3), {"steps": 40}),
    "swag": (doxa.SWAG(rank=3, cycle=2), {"steps": 40, "validation": None}),
    "recorded": ("map", {"steps": 40, "validation": None, "engine": "stack:traced"}),
}


def plain(posterior: Any) -> Tensor:
    """What a posterior is made of, as one row."""
    if isinstance(posterior, SamplePosterior):
        return posterior.samples.flatten()
    return posterior.draw(5)["0.weight"].flatten()


@pytest.mark.parametrize("name", CASES)
def test_snapshots_change_no_bit_and_end_with_the_result(name: str) -> None:
    method, options = CASES[name]
    network = net() if name != "hmc" else doxa.nets.mlp(2, 1, hidden=(6,))
    x, y = table()
    seen: list[doxa.Snapshot] = []
    watching = doxa.Snapshots(seen.append, steps=[35], every=10)
    alone = doxa.fit(network, (x, y), method, **options)
    watched = doxa.fit(network, (x, y), method, callbacks=[watching], **options)
    assert torch.equal(plain(watched), plain(alone))
    assert torch.equal(watched.predict(x).mean, alone.predict(x).mean)
    assert watched.status == alone.status and watched.history == alone.history
    steps = [snapshot.step for snapshot in seen if not snapshot.last]
    assert {10, 20, 30, 35, 40} <= set(steps)
    assert [snapshot.last for snapshot in seen] == [False] * len(steps) + [True]
    assert seen[-1].posterior is watched and seen[-1].step == watched.diagnostics["steps"]
    for snapshot in seen[:-1]:
        posterior = snapshot.posterior
        assert snapshot.posterior is posterior
        assert posterior.status == "unfinished" and str(snapshot.step) in posterior.status.reason
        assert posterior.predict(x).mean.shape == y.shape
        assert torch.isfinite(posterior.predict(x).mean).all()
    if name in ("map", "mean-field", "recorded"):  # no held-out row has changed the result
        last = next(one for one in seen if one.step == 40)
        assert torch.equal(plain(last.posterior), plain(watched))
        assert not torch.equal(plain(seen[0].posterior), plain(watched))


def test_a_snapshot_is_the_fit_that_ends_there() -> None:
    """With a constant rate, the state after 20 of 60 steps is the end of a fit of 20."""
    options: dict[str, Any] = {"validation": None, "schedule": "constant"}
    seen: list[doxa.Snapshot] = []
    doxa.fit(
        net(), table(), "map", steps=60, callbacks=[doxa.Snapshots(seen.append, steps=[20])],
        **options,
    )  # fmt: skip
    short = doxa.fit(net(), table(), "map", steps=20, **options)
    assert torch.equal(plain(seen[0].posterior), plain(short))
    x = table()[0]
    assert torch.equal(seen[0].posterior.predict(x).mean, short.predict(x).mean)


def test_a_network_with_a_frozen_trunk() -> None:
    """What is trained is the part after the trunk; a snapshot takes inputs of the whole network."""
    seen: list[doxa.Snapshot] = []
    for method in ("map", "laplace"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
        posterior = doxa.fit(
            network, table(), method, steps=20, trunk="0", validation=None,
            callbacks=[doxa.Snapshots(seen.append, steps=[10])],
        )  # fmt: skip
        assert posterior.diagnostics["trunk"] == "once"
        x, y = table()
        for snapshot in seen:
            assert snapshot.posterior.predict(x).mean.shape == y.shape
    assert len(seen) == 4


def test_draws_so_far() -> None:
    method = doxa.HMC(draws=20, burn_in=20, leapfrog=2)
    counts = {}

    def show(snapshot: doxa.Snapshot) -> None:
        posterior = snapshot.posterior
        assert isinstance(posterior, SamplePosterior)
        counts[snapshot.step] = posterior.samples.shape[1]

    network = doxa.nets.mlp(2, 1, hidden=(3,))
    doxa.fit(network, table(), method, members=2, callbacks=[doxa.Snapshots(show, every=10)])
    assert counts == {10: 1, 20: 1, 30: 10, 40: 20}


def test_several_runs_have_one_posterior_each() -> None:
    seen: list[doxa.Snapshot] = []
    sweep = doxa.fit(
        net(), table(), "map", steps=20, runs=doxa.Runs(grid={"lr": [1e-3, 1e-2]}),
        callbacks=[doxa.Snapshots(seen.append, steps=[10])], validation=None,
    )  # fmt: skip
    assert [len(snapshot.posteriors) for snapshot in seen] == [2, 2]
    assert list(seen[-1].posteriors) == list(sweep)
    first, second = seen[0].posteriors
    assert not torch.equal(plain(first), plain(second))


@pytest.mark.parametrize("method", ["laplace", "swag"])
def test_before_the_stage_that_makes_the_posterior_it_is_a_point(method: str) -> None:
    seen: list[doxa.Snapshot] = []
    settings = {"rank": 3, "cycle": 2} if method == "swag" else {}
    doxa.fit(
        net(), table(), doxa.get_method(method)(**settings), steps=40, validation=None,
        callbacks=[doxa.Snapshots(seen.append, steps=[10])],
    )  # fmt: skip
    early = seen[0].posterior
    assert isinstance(early, SamplePosterior) and early.samples.shape[:2] == (1, 1)
    assert early.status == "unfinished" and "as a point" in early.status.reason
    assert torch.isfinite(early.predict(table()[0]).mean).all()
    assert seen[-1].posterior.status != "unfinished"


def test_a_method_without_weights_says_that_it_has_no_posterior_yet() -> None:
    seen: list[doxa.Snapshot] = []
    x, y = table()
    doxa.fit(None, (x, y), "gp", callbacks=[doxa.Snapshots(seen.append, every=1)])
    assert seen[-1].last and torch.isfinite(seen[-1].posterior.predict(x).mean).all()
    for snapshot in seen[:-1]:
        try:
            assert snapshot.posterior.status == "unfinished"
        except MethodError as error:
            assert "a later stage makes it" in str(error)


def test_a_snapshot_may_stop_the_fit() -> None:
    watching = doxa.Snapshots(lambda snapshot: snapshot.step >= 200, every=100)
    posterior = doxa.fit(net(), table(), "map", steps=1000, validation=None, callbacks=[watching])
    assert posterior.status == "stopped" and 200 <= posterior.diagnostics["steps"] < 300
    again = doxa.fit(net(), table(), "map", steps=50, validation=None, callbacks=[watching])
    assert again.status != "stopped"


def test_settings_are_checked() -> None:
    for bad in ({"every": 0}, {"every": 1.5}):
        with pytest.raises(MethodError, match="every"):
            doxa.Snapshots(print, **bad)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="show"):
        doxa.Snapshots([10])  # type: ignore[arg-type]
