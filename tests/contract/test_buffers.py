"""Buffers besides BatchNorm's that training changes: each member has its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import assert_same, interrupted
from torch import Tensor, nn

import doxa

Check = Callable[..., None]
STEPS = 10


class Centred(nn.Module):
    """Features minus their moving average, which is written by assignment or in place. It counts
    its training passes, and has a buffer that nothing writes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(2, 6), nn.Linear(6, 1)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * torch.tanh(self.first(x))
        if self.training and self.how == "assigned":
            self.average = 0.9 * self.average + 0.1 * h.mean(0)
            self.count = self.count + 1
        elif self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.count += 1
        return self.last(h - self.average)


def network(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        if kind != "spectral norm":
            return Centred(kind)
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 6))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 1))


def fit(case: Any, kind: str, **options: Any) -> Any:
    chosen = {"steps": STEPS, "dtype": torch.float64, "init": "given", **options}
    return case.fit(net=network(kind), **chosen)


def own_buffers(posterior: Any, member: int) -> dict[str, Tensor]:
    return {name: value[member] for name, value in posterior.buffers.items()}


KINDS = pytest.mark.parametrize("kind", ["spectral norm", "assigned", "in place"])


@KINDS
@pytest.mark.by_family
def test_a_member_is_the_same_alone_and_with_others(
    trained_regression: Any, assert_close: Check, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its buffers, which changed unless the method says that it leaves them, and its functions."""
    x, _ = trained_regression.data()
    caplog.set_level(logging.WARNING, "doxa")
    together = fit(trained_regression, kind, members=3)
    frozen = "buffers keep the values of the given network" in caplog.text
    alone = fit(trained_regression, kind, members=[1])
    rounding = trained_regression.fast.rounding
    mine = own_buffers(together, 1)
    assert_close(own_buffers(alone, 0), mine, rounding)
    given = dict(network(kind).named_buffers())
    assert "scale" not in mine, "no training pass changes it: it is shared"
    for name, value in mine.items():
        assert torch.equal(value.to(given[name]), given[name]) == frozen, name
        own = together.buffers[name]
        assert torch.equal(own[0], own[1]) == (frozen or name == "count"), name
    count = min(3, len(alone.predict(x).weights)) if alone.kind == "sample" else 3
    f = together.functions(x, 3 * count)
    assert_close({"f": alone.functions(x, count)}, {"f": f[count : 2 * count]}, rounding)


@pytest.mark.by_family
def test_they_are_saved_and_no_prediction_changes_them(
    trained_regression: Any, answers: Any, tmp_path: Path, kind: str = "in place"
) -> None:
    x, y = trained_regression.data()
    posterior = fit(trained_regression, kind, members=2)
    kept = {name: value.clone() for name, value in posterior.buffers.items()}
    want = answers(posterior.predict(x), y)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=network(kind), device=posterior.device)
    got = answers(again.predict(x), y)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for one in (posterior, again):
        assert all(torch.equal(one.buffers[name], value) for name, value in kept.items())


@pytest.mark.by_family
def test_a_fit_is_resumed_to_the_bit(trained_regression: Any, answers: Any, tmp_path: Path) -> None:
    options = {"net": network("assigned"), "steps": 30, "members": 2}
    want = trained_regression.fit(**options)
    got = interrupted(trained_regression, tmp_path / "run", KeyboardInterrupt, 12, **options)
    assert_same(got, want, answers, trained_regression.data())
