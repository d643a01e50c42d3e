"""Splits, grids and seeds in one stacked fit: each run is the fit it would be alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import MethodError, Unavailable

Check = Callable[..., None]
ROWS = [torch.arange(0, 30), torch.arange(39, 4, -1), torch.arange(40)]  # 30, 35 and 40 rows


def alone(case: Any, spec: Any, **options: Any) -> Any:
    """The same run by itself, on its own rows as the whole data set."""
    x, y = case.data()
    hyper = dict(spec.hyper)
    if "lr" in hyper:
        options["lr"] = hyper.pop("lr")
    data = x[spec.rows], y[spec.rows]
    if "validation" in options:  # rows are held out by the fit's seed, for all runs
        return case.fit(data, settings=hyper, runs=doxa.Runs(seeds=[spec.seed]), **options)[0]
    return case.fit(data, settings=hyper, seed=spec.seed, **options)


def compare(case: Any, sweep: Any, answers: Any, assert_close: Check, **options: Any) -> None:
    """Some of a sweep's runs with the fits they would be alone."""
    x, y = case.data()
    for r in (1, len(sweep) // 2, len(sweep) - 1):
        spec = sweep.specs[r]
        single = alone(case, spec, **options)
        assert_close(sweep[r].tensors(), single.tensors(), case.fast.rounding)
        got, want = (answers(post.predict(x), y) for post in (sweep[r], single))
        assert_close(got, want, case.fast.rounding)
        assert sweep[r].diagnostics["rows"] == len(spec.rows)


@pytest.mark.by_family
def test_a_run_is_the_fit_it_would_be_alone(case: Any, answers: Any, assert_close: Check) -> None:
    options = {"dtype": torch.float64, "steps": 30, "members": 2}
    sweep = case.fit(runs=doxa.Runs(rows=ROWS, grid=case.fast.grid, seeds=[0, 1]), **options)
    points = len(next(iter(case.fast.grid.values()), [None]))
    assert len(sweep) == len(ROWS) * points * 2
    compare(case, sweep, answers, assert_close, **options)


@pytest.mark.by_family
def test_also_where_a_batch_holds_all_rows(trained: Any, answers: Any, assert_close: Check) -> None:
    """Batches of 128 would be 30, 35 and 40 rows alone: short runs are padded with weight 0."""
    options = {"dtype": torch.float64, "steps": 20, "batch_size": 128}
    sweep = trained.fit(runs=doxa.Runs(rows=ROWS), **options)
    if getattr(sweep[0], "buffers", None):
        pytest.skip("its layers learn from batches, which are then as small as the smallest run")
    compare(trained, sweep, answers, assert_close, **options)


@pytest.mark.by_family
def test_runs_differ(case: Any) -> None:
    """Else the comparison with single fits would say nothing."""
    x, _ = case.data()
    sweep = case.fit(runs=doxa.Runs(rows=ROWS, grid=case.fast.grid, seeds=[0, 1]), steps=5)
    answers = [posterior.predict(x) for posterior in sweep]
    seen = {(*p.mean.flatten().tolist(), *p.variance.flatten().tolist()) for p in answers}
    points = len(next(iter(case.fast.grid.values()), [None]))
    assert len(seen) >= len(ROWS) * (2 * points if case.trains else 1)


@pytest.mark.by_family
def test_the_order_is_splits_then_grid_then_seeds(case: Any) -> None:
    sweep = case.fit(runs=doxa.Runs(rows=ROWS[:2], grid=case.fast.grid, seeds=[5, 6]), steps=2)
    assert [spec.seed for spec in sweep.specs] == [5, 6] * (len(sweep) // 2)
    half = len(sweep) // 2
    assert [spec.split for spec in sweep.specs] == [0] * half + [1] * half
    for name, values in case.fast.grid.items():
        assert [h[name] for h in sweep.hyper] == [v for v in values for _ in range(2)] * 2


@pytest.mark.by_family
def test_selection_is_by_the_held_out_rows(case: Any) -> None:
    """The mean log predictive density in units of y, less at most 1/m for each number that the m
    rows have chosen; and the best run by it."""
    x, y = case.data()
    train, held = (x[:28], y[:28]), (x[28:], y[28:])
    sweep = case.fit(
        train, runs=doxa.Runs(grid=case.fast.grid, seeds=[0, 1]), validation=held, steps=20
    )
    for post in sweep:
        score = float(post.predict(held[0]).log_prob(held[1]).mean())
        most = post.diagnostics["held_out"]["corrected_for"] / len(held[1])
        assert -1e-4 <= score - post.validation <= most + 1e-4
    scores = [post.validation for post in sweep]
    assert sweep.select(by="validation") is sweep[scores.index(max(scores))]


@pytest.mark.by_family
def test_a_share_is_held_out_of_every_split(case: Any) -> None:
    sweep = case.fit(runs=doxa.Runs(rows=ROWS), validation=0.25, steps=5)
    assert [post.diagnostics["rows"] for post in sweep] == [22, 26, 30]
    assert len({post.validation for post in sweep}) == 3


@pytest.mark.by_family
def test_with_splits_the_best_of_each_is_selected(case: Any) -> None:
    runs = doxa.Runs(rows=ROWS, grid=case.fast.grid)
    sweep = case.fit(runs=runs, validation=0.2, steps=20)
    best = sweep.select()
    assert len(best) == len(ROWS)
    for split, chosen in enumerate(best):
        rivals = [p for p, spec in zip(sweep, sweep.specs, strict=True) if spec.split == split]
        assert chosen.validation == max(p.validation for p in rivals)


@pytest.mark.by_family
def test_nothing_to_select_by(case: Any) -> None:
    sweep = case.fit(runs=doxa.Runs(seeds=[0, 1]), steps=2)
    with pytest.raises(Unavailable, match=r"validation=0\.2"):
        sweep.select()
    with pytest.raises(MethodError, match="select by"):
        sweep.select(by="luck")


@pytest.mark.by_family
def test_early_stopping_is_each_runs_own(trained: Any, assert_close: Check) -> None:
    options = {
        "dtype": torch.float64, "validation": 0.3, "patience": 1, "batch_size": 8,
        "lr": 10 * trained.cls.default_rate,
    }  # fmt: skip
    sweep = trained.fit(runs=doxa.Runs(rows=ROWS), **options)
    for posterior, spec in zip(sweep, sweep.specs, strict=True):
        single = alone(trained, spec, **options)
        assert_close(posterior.tensors(), single.tensors(), trained.fast.rounding)


@pytest.mark.by_family
def test_a_grid_over_priors(trained: Any, assert_close: Check) -> None:
    options = {"dtype": torch.float64, "steps": 10}
    scales = [0.1, 2.0]
    sweep = trained.fit(runs=doxa.Runs(grid={"prior": [doxa.Normal(s) for s in scales]}), **options)
    for posterior, scale in zip(sweep, scales, strict=True):
        single = trained.fit(prior=doxa.Normal(scale), **options)
        assert_close(posterior.tensors(), single.tensors(), trained.fast.rounding)


def test_the_methods_own_checks_hold_in_a_grid(case: Any) -> None:
    numbers = {
        f.name
        for f in dataclasses.fields(case.cls)
        if f.name in ("temperature", "p", "initial_std", "target_accept")
    }
    for name in numbers:
        with pytest.raises(MethodError):
            case.fit(runs=doxa.Runs(grid={name: [0.5, -1.0]}))


def rate_of(case: Any) -> dict[str, Any] | None:
    """The settings under which a method's steps are those of `fit`'s `lr`; None where no setting
    makes them so. Methods that optimise use it as it is, and samplers on mini-batches where their
    own `step_size` is not given; samplers with an acceptance test find theirs in burn-in."""
    settings = case.cls().settings()
    if case.row.family != "mcmc":
        return {} if case.cls.needs_network or case.cls.uses_rate else None
    return {"step_size": None} if "step_size" in settings else None


@pytest.mark.by_family
def test_a_grid_over_rates(regression: Any, answers: Any, assert_close: Check) -> None:
    """GP's is that of its hyper-parameters, without the refinement that brings all to one end."""
    case = regression
    settings = rate_of(case)
    if settings is None:
        pytest.skip("its steps have no rate")
    settings |= {"refine": 0} if case.name == "gp" else {}
    x, y = case.data()
    options = {"dtype": torch.float64, "steps": 10, "settings": settings}
    rates = [0.02 * case.cls.default_rate, 0.1 * case.cls.default_rate]
    sweep = case.fit(runs=doxa.Runs(grid={"lr": rates}), **options)
    got = [answers(posterior.predict(x), y) for posterior in sweep]
    assert not torch.allclose(got[0]["log_prob"], got[1]["log_prob"], rtol=1e-6)
    for rate, answer in zip(rates, got, strict=True):
        alone = case.fit(lr=rate, **options)
        assert_close(answer, answers(alone.predict(x), y), case.fast.rounding)


def test_a_grid_over_rates_that_nothing_uses_is_refused(regression: Any) -> None:
    """Else all runs of the grid are one run, and whoever asked for it is not told."""
    case = regression
    if rate_of(case) is not None:
        pytest.skip("its steps have a rate")
    with pytest.raises(MethodError, match="lr"):
        case.fit(runs=doxa.Runs(grid={"lr": [0.1, 0.2]}), steps=2, settings=case.fast.one_step)
