"""A fit that was stopped and taken up again is bit by bit the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import MethodError


class Killed(BaseException):
    """Ends a fit as abruptly as a test can: nothing is saved on the way out."""


def stop_at(step: int, error: type[BaseException]) -> Callable[[int, dict[str, Any]], None]:
    def callback(done: int, info: dict[str, Any]) -> None:
        if done >= step:
            raise error

    return callback


def interrupted(case: Any, path: Path, error: type[BaseException], step: int, **options: Any) -> Any:
    """Fit until stopped, then fit again from the checkpoint."""
    try:
        case.fit(checkpoint=path, callbacks=[stop_at(step, error)], **options)
    except error:
        pass
    else:
        assert not case.needs_network, "the fit was not stopped, so that nothing was tested"
    steps: list[int] = []
    posterior = case.fit(
        checkpoint=path, callbacks=[lambda done, info: steps.append(done)], **options
    )
    if case.needs_network:
        assert steps[0] > step - 20, "the fit began anew"
    return posterior


def assert_same(got: Any, want: Any, answers: Any, data: Any) -> None:
    for name, value in want.tensors().items():
        assert torch.equal(got.tensors()[name], value), name
    x, y = data
    one, two = answers(got.predict(x), y), answers(want.predict(x), y)
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert got.status == want.status
    assert got.elbo == want.elbo
    assert got.log_evidence == want.log_evidence
    assert got.history == want.history


@pytest.mark.parametrize("step", [11, 30])
def test_ctrl_c(case_place: Any, step: int, answers: Any, tmp_path: Path) -> None:
    want = case_place.fit()
    got = interrupted(place, tmp_path / "run", KeyboardInterrupt, step)
    assert_same(got, want, answers, case_place.data())


def test_killed_after_a_checkpoint(case_place: Any, answers: Any, tmp_path: Path) -> None:
    want = case_place.fit()
    got = interrupted(place, tmp_path / "run", Killed, 30, checkpoint_every=0)
    assert_same(got, want, answers, case_place.data())


@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
def test_with_early_stopping(case: Any, error: Any, answers: Any, tmp_path: Path) -> None:
    """An epoch is 3 steps, so that three validations without gain come after step 10."""
    options = {
        "validation": 0.3, "patience": 3, "batch_size": 8, "lr": 0.05, "checkpoint_every": 0,
    }  # fmt: skip
    want = case.fit(**options)
    got = interrupted(case, tmp_path / "run", error, 10, **options)
    assert_same(got, want, answers, case.data())


def test_runs_and_members(case: Any, answers: Any, tmp_path: Path) -> None:
    runs = doxa.Runs(rows=[torch.arange(25), torch.arange(40)], grid=case.fast.grid)
    want = case.fit(runs=runs)
    got = interrupted(case, tmp_path / "run", KeyboardInterrupt, 30, runs=runs)
    for one, two in zip(got, want, strict=True):
        assert_same(one, two, answers, case.data())


def test_a_traced_fit(case: Any, answers: Any, tmp_path: Path) -> None:
    if not case.needs_network:
        pytest.skip("nothing is traced")
    settings = case.fast.many_steps
    options = {"engine": "stack:traced", "members": 2, "settings": settings}
    want = case.fit(**options)
    got = interrupted(case, tmp_path / "run", KeyboardInterrupt, 10, **options)
    assert_same(got, want, answers, case.data())


def test_a_finished_fit_is_not_changed_by_fitting_again(
    case: Any, answers: Any, tmp_path: Path
) -> None:
    want = case.fit(checkpoint=tmp_path / "run", checkpoint_every=0)
    got = case.fit(checkpoint=tmp_path / "run", checkpoint_every=0)
    assert_same(got, want, answers, case.data())


CHANGES = {
    "seed": {"seed": 1},
    "members": {"members": [7]},
    "rate": {"lr": 0.5},
    "steps": {"steps": 70},
    "start": {"init": "given"},
    "validation": {"validation": 0.25},
    "likelihood": {"likelihood": "student-t"},
    "prior": {"prior": "laplace-prior"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_fits_checkpoint_is_refused(case: Any, change: str, tmp_path: Path) -> None:
    if case.name != "map" or not case.regression:
        pytest.skip("the driver's check, the same for every method")
    with pytest.raises(KeyboardInterrupt):
        case.fit(checkpoint=tmp_path / "run", callbacks=[stop_at(20, KeyboardInterrupt)])
    with pytest.raises(MethodError, match="another fit"):
        case.fit(checkpoint=tmp_path / "run", **CHANGES[change])
