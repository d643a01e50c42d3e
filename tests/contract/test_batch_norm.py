"""BatchNorm: statistics of each member's own, which a prediction does not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import assert_same, interrupted
from torch import nn

import doxa

Check = Callable[..., None]


def network(case: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        outputs = 1 if case.regression else 3
        return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, outputs))


def fit(case: Any, **options: Any) -> Any:
    return case.fit(net=network(case), **{"steps": 20, "dtype": torch.float64, **options})


@cache
def fitted(case: Any) -> Any:
    """Two members, which tests share."""
    return fit(case, members=2)


@pytest.mark.by_family
def test_a_prediction_does_not_depend_on_how_rows_are_cut(
    trained: Any, answers: Any, assert_close: Check
) -> None:
    x, y = trained.data()
    posterior = fitted(trained)
    whole = answers(posterior.predict(x), y)
    parts = [answers(posterior.predict(x[r]), y[r]) for r in torch.arange(len(x)).split(17)]
    for name, value in whole.items():
        rows = 1 if name == "samples" else 0
        together = torch.cat([part[name] for part in parts], rows)
        assert torch.isfinite(value).all()
        assert_close({name: together}, {name: value}, 1e-9)


def test_each_member_has_statistics_of_its_own(
    trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the method says that it leaves them as the network came."""
    caplog.set_level("INFO", "doxa")
    posterior = fit(trained, members=2, steps=5)
    assert "BatchNorm" in caplog.text
    frozen = "BatchNorm is frozen" in caplog.text
    own = network(trained).state_dict()
    for name in ("1.running_mean", "1.running_var"):
        value = posterior.buffers[name].cpu()
        assert value.shape[0] == 2
        assert torch.allclose(value, own[name].double()) == frozen
        assert torch.equal(value[0], value[1]) == frozen


@pytest.mark.by_family
def test_a_members_functions_use_its_own_statistics(
    trained_regression: Any, assert_close: Check
) -> None:
    """Those of the second of two members are the ones that it draws alone."""
    x, _ = trained_regression.data()
    together, alone = fitted(trained_regression), fit(trained_regression, members=[1])
    count = min(3, len(alone.predict(x).weights)) if alone.kind == "sample" else 3
    f = together.functions(x, 2 * count)
    relative = trained_regression.fast.rounding
    assert_close({"f": alone.functions(x, count)}, {"f": f[count:]}, relative)


@pytest.mark.by_family
def test_it_is_saved_with_its_statistics(trained: Any, answers: Any, tmp_path: Path) -> None:
    x, y = trained.data()
    posterior = fitted(trained)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=network(trained), device=trained.device)
    got, want = (answers(p.predict(x), y) for p in (again, posterior))
    assert all(torch.equal(got[name], want[name]) for name in want)
    for name, value in posterior.buffers.items():
        assert torch.equal(again.buffers[name], value), name


@pytest.mark.by_family
def test_it_is_resumed_to_the_bit(trained: Any, answers: Any, tmp_path: Path) -> None:
    options = {"net": network(trained), "steps": 30, "members": 2}
    want = trained.fit(**options)
    got = interrupted(trained, tmp_path / "run", KeyboardInterrupt, 12, **options)
    assert_same(got, want, answers, trained.data())
