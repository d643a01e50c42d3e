"""A fit that was stopped and taken up again is bit by bit the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Killed, assert_same, interrupted

import doxa
from doxa.errors import MethodError


def test_ctrl_c(case: Any, answers: Any, tmp_path: Path) -> None:
    got = interrupted(case, tmp_path / "run", KeyboardInterrupt, 10)
    assert_same(got, case.posterior(), answers, case.data())


@pytest.mark.by_family
def test_killed_after_a_checkpoint(case: Any, answers: Any, tmp_path: Path) -> None:
    """In HMC's burn-in, too."""
    options = {"steps": 30}
    want = case.fit(**options)
    got = interrupted(case, tmp_path / "run", Killed, 7, checkpoint_every=0, **options)
    assert_same(got, want, answers, case.data())


@pytest.mark.slow
@pytest.mark.by_family
@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
def test_with_early_stopping(trained: Any, error: Any, answers: Any, tmp_path: Path) -> None:
    """An epoch is 3 steps, so that three validations without gain come after step 10."""
    high = 5 * trained.cls.default_rate
    options = {"validation": 0.3, "patience": 3, "batch_size": 8, "lr": high}
    want = trained.fit(**options)
    every = 0 if error is Killed else 30
    got = interrupted(trained, tmp_path / "run", error, 10, checkpoint_every=every, **options)
    assert_same(got, want, answers, trained.data())


@pytest.mark.by_family
def test_runs_and_members(case: Any, answers: Any, tmp_path: Path) -> None:
    runs = doxa.Runs(rows=[torch.arange(25), torch.arange(40)], grid=case.fast.grid)
    options = {"runs": runs, "steps": 30}
    want = case.fit(**options)
    got = interrupted(case, tmp_path / "run", KeyboardInterrupt, 20, **options)
    for one, two in zip(got, want, strict=True):
        assert_same(one, two, answers, case.data())


@pytest.mark.slow
@pytest.mark.by_family
def test_a_traced_fit(trained_regression: Any, answers: Any, tmp_path: Path) -> None:
    case = trained_regression
    options = {"engine": "stack:traced", "members": 2, "settings": case.fast.many_steps}
    want = case.fit(**options)
    got = interrupted(case, tmp_path / "run", KeyboardInterrupt, 10, **options)
    assert_same(got, want, answers, case.data())


@pytest.mark.by_family
def test_a_finished_fit_is_not_changed_by_fitting_again(
    case: Any, answers: Any, tmp_path: Path
) -> None:
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 0, "steps": 8}
    want = case.fit(**options)
    assert_same(case.fit(**options), want, answers, case.data())


CHANGES = {
    "seed": {"seed": 1},
    "members": {"members": [7]},
    "steps": {"steps": 70},
    "validation": {"validation": 0.25},
    "data": {"sample_weight": torch.linspace(0.5, 1, 40)},
    "noise": {"likelihood": doxa.Gaussian(noise=1.0)},
}
CHANGES_OF_TRAINING = {
    "rate": {"lr": 0.5},
    "prior": {"prior": "laplace-prior"},
    "schedule": {"schedule": "linear"},
    "optimizer": {"optimizer": "sgd"},
}


def refuses(case: Any, path: Path, changes: dict[str, dict[str, Any]]) -> None:
    """One checkpoint, which every refusal leaves as it was."""
    short = {"settings": case.fast.one_step, "steps": 2}
    case.fit(checkpoint=path, checkpoint_every=0, **short)
    for name, options in changes.items():
        with pytest.raises(MethodError, match="another fit"):
            case.fit(checkpoint=path, **{**short, **options})
            pytest.fail(f"a fit with another {name} took up the checkpoint")


@pytest.mark.by_family
def test_another_fits_checkpoint_is_refused(regression: Any, tmp_path: Path) -> None:
    refuses(regression, tmp_path / "run", CHANGES)


@pytest.mark.by_family
def test_a_checkpoint_of_other_training_is_refused(trained_regression: Any, tmp_path: Path) -> None:
    given = {} if trained_regression.cls.own_weights else {"start": {"init": "given"}}
    refuses(trained_regression, tmp_path / "run", CHANGES_OF_TRAINING | given)
