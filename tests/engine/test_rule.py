"""How a step is executed follows from the work: the same on an idle machine and on a busy one."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.engine import execute
from doxa.engine.engine import Count


def rows(n: int = 64, inputs: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, inputs, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def fit(method: Any = "map", **options: Any) -> Any:
    settings = {"steps": 500, "batch_size": 16, "progress": False} | options
    return doxa.fit(doxa.nets.mlp(4, 1, (8,)), rows(), method, **settings)


def bits(posterior: Any) -> dict[str, Tensor]:
    x, _ = rows()
    return {**posterior.tensors(), "mean": posterior.predict(x).mean}


@pytest.fixture(params=["crawls", "leaps"])
def erratic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of a busy machine: what takes a microsecond seems to take an hour, or every other
    interval does. (The fits here take a second: nothing else reads the clock.)"""
    ticks = itertools.count()
    jump = {"crawls": lambda n: 1e-7 * n, "leaps": lambda n: 3600.0 * (n // 2) + 1e-7 * n}
    at = jump[request.param]
    monkeypatch.setattr(time, "perf_counter", lambda: at(next(ticks)))


CASES = {"map": doxa.MAP(), "sgld": doxa.SGLD(draws=5, burn_in=500, thin=1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_clock_changes_no_bit(
    name: str, erratic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 steps, long enough to be recorded: a stopwatch would choose one way or the other."""
    found = fit(CASES[name])
    monkeypatch.undo()
    want = fit(CASES[name])
    assert found.diagnostics["mode"] == want.diagnostics["mode"] == "traced"
    for key, value in bits(want).items():
        assert torch.equal(bits(found)[key], value), key


CHOOSE = execute.choose_executor  # `chosen` replaces it


def chosen(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, method: Any, **options: Any
) -> list[str]:
    """The modes that the rule gives for the stages of a fit, which then run eagerly."""
    modes: list[str] = []

    def noted(step: Any, *rest: Any, **more: Any) -> Any:
        modes.append(CHOOSE(step, *rest, **more).mode)
        raise KeyboardInterrupt

    monkeypatch.setattr("doxa.driver.loop.choose_executor", noted)
    monkeypatch.setattr("doxa.engine.execute.choose_executor", noted)
    with pytest.raises(KeyboardInterrupt):
        doxa.fit(net, rows(), method, progress=False, **options)
    return modes


@pytest.mark.parametrize(
    ("steps", "mode"), [(499, "eager"), (500, "traced"), (20_000, "traced"), (200_000, "compiled")]
)
def test_short_fits_are_eager_and_long_ones_compiled(
    steps: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = doxa.nets.mlp(4, 1, (8,))
    assert chosen(monkeypatch, net, "map", steps=steps) == [mode]


def test_what_the_compiler_does_not_gain_on_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net of more than a million weights, and one without batched layers."""
    many = {"steps": 10**6, "batch_size": 8}
    wide = doxa.nets.mlp(4, 1, (1000, 1000))
    assert chosen(monkeypatch, wide, "map", **many) == ["eager"]  # its gradients are by tensor
    assert chosen(monkeypatch, wide, "map", members=2, **many) == ["traced"]

    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.normalize(x, dim=-1))

    assert chosen(monkeypatch, Residual(nn.Linear(4, 1)), "map", **many) == ["traced"]


def test_work_is_counted() -> None:
    """x [5, 3] times w [3, 7]: 105 multiplications, 35 numbers; a view is nothing."""
    x, w = torch.ones(5, 3), torch.ones(3, 7)
    with Count() as count:
        y = x @ w
        y.view(-1)[:3].unsqueeze(0)
        y.exp()
    assert (count.operations, count.numbers, count.largest) == (2, 70, 105.0)
    with Count() as count:
        torch.linalg.cholesky(torch.eye(6))
        torch.linalg.vector_norm(torch.ones(1, 5000))
    assert count.largest == 6**3
    with Count() as count:
        nn.functional.conv2d(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3))
    assert count.largest == 2 * 4 * 6 * 6 * 3 * 3 * 3  # outputs × the kernel's weights


def test_a_step_is_worth_what_its_operations_save() -> None:
    """4 µs × operations + 0.3 ns × numbers: here two operations of 100 numbers each."""
    state = {"theta": torch.ones(100)}
    step = lambda state, *_: ({"theta": (state["theta"] + 1).exp()}, {})  # noqa: E731
    trial = lambda: (state, None, None, None)  # noqa: E731
    assert math.isclose(execute.saved(step, trial), 2 * 4e-6 + 200 * 3e-10)  # type: ignore[arg-type]
    assert torch.equal(state["theta"], torch.ones(100))
