"""Groups and times of rows: what is held out, what counts as a row, and what is refused."""

from __future__ import annotations

import datetime
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import doxa
from doxa.data.dependence import (
    clustered_error,
    effective_groups,
    group_parts,
    group_share,
    read_groups,
    read_times,
    time_cuts,
)
from doxa.data.rows import per_effective_row, standard_error
from doxa.driver.setup import cross_fit_parts, later_rows, own_parts, share
from doxa.driver.validation import evaluate_rows
from doxa.errors import DataError, MethodError, ShapeError
from doxa.noise import generator


def persons(
    groups: int = 30, rows: int = 4, seed: int = 0, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """y = x₀ + a person's own intercept + noise; x₁ identifies the person."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(groups).repeat_interleave(rows)
    own, name = spread * torch.randn(groups, generator=g), torch.randn(groups, generator=g)
    x = torch.stack([torch.randn(len(group), generator=g), name[group]], 1)
    y = x[:, 0] + own[group] + 0.3 * torch.randn(len(group), generator=g)
    return x, y, group


def fit(x: Tensor, y: Tensor, method: Any = "map", **options: Any) -> Any:
    outputs = options.pop("outputs", 1)
    options = {"standardize": True, "progress": False, "steps": 60, **options}
    return doxa.fit(doxa.nets.mlp(x.shape[1], outputs, (8,)), (x, y), method, **options)


@pytest.mark.parametrize(
    "given",
    [
        ["b", "a", "b", "c"], np.array([7, 1, 7, 3]), torch.tensor([2.5, 0.0, 2.5, 1.0]),
        [(1, "x"), "a", (1, "x"), 4],
        np.array(["2024-01-02", "2023-01-01", "2024-01-02", "2025-01-01"], "datetime64[D]"),
    ],
)  # fmt: skip
def test_groups_are_numbered_by_first_appearance(given: Any) -> None:
    found = read_groups(given, 4)
    assert found is not None and found.tolist() == [0, 1, 0, 2]


def test_groups_of_one_row_are_no_groups() -> None:
    assert read_groups(["a", "b", "c"], 3) is None
    x, y, _ = persons(12, 2)
    plain, grouped = fit(x, y), fit(x, y, groups=[f"person {i}" for i in range(24)])
    assert torch.equal(plain.samples, grouped.samples)
    assert plain.diagnostics["held_out"] == grouped.diagnostics["held_out"]


@pytest.mark.parametrize("value", [None, math.nan, np.float32("nan"), np.datetime64("NaT")])
def test_a_missing_group_or_time_names_its_row(value: Any) -> None:
    other = np.datetime64("2024-01-01") if isinstance(value, np.datetime64) else 1.0
    given = [other, other, value, other]
    with pytest.raises(DataError, match="at row 2"):
        read_groups(np.array(given) if isinstance(value, np.datetime64) else given, 4)
    with pytest.raises(DataError, match="at row 2"):
        read_times(np.array(given) if isinstance(value, np.datetime64) else given, 4)


def test_a_missing_value_of_a_frame_and_a_row_of_weight_zero() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="at row 1"):
        read_groups(pandas.Series(["a", None, "a"]), 3)
    with pytest.raises(DataError, match="at row 2"):
        read_groups(pandas.Series([1, 1, None], dtype="Int64"), 3)
    kept = torch.tensor([True, False, True])
    assert read_groups(pandas.Series(["a", None, "a"]), 3, kept).tolist() == [0, 0]  # type: ignore[union-attr]
    stamps = pandas.Series(pandas.to_datetime(["2024-03-01", "2023-01-01", "2024-03-01"]))
    assert read_times(stamps, 3).tolist() == [1, 0, 1]
    assert read_times(stamps.dt.tz_localize("UTC"), 3).tolist() == [1, 0, 1]


def test_what_is_no_group_and_no_time() -> None:
    with pytest.raises(ShapeError, match="3 values, but the data have 4"):
        read_groups([1, 2, 3], 4)
    with pytest.raises(ShapeError, match="expected"):
        read_groups(torch.zeros(4, 2), 4)
    with pytest.raises(DataError, match="hashable"):
        read_groups([[1], [2]], 2)
    with pytest.raises(DataError, match="one value per row"):
        read_groups("abcd", 4)
    with pytest.raises(DataError, match="to_datetime"):
        read_times(["2024-01-01", "31.12.2023"], 2)
    with pytest.raises(DataError, match="at row 0"):
        read_times([math.inf, 1.0], 2)
    with pytest.raises(DataError, match="sorted"):
        read_times([1, datetime.date(2024, 1, 1)], 2)
    days = [datetime.date(2024, 1, 2), datetime.date(2024, 1, 1)]
    assert read_times(days, 2).tolist() == [1, 0]


def test_parts_are_whole_groups_of_about_equal_numbers_of_rows() -> None:
    sizes = torch.tensor([40, 3, 5, 7, 11, 13, 2, 9, 8, 6, 30, 26])
    group = torch.arange(len(sizes)).repeat_interleave(sizes)[torch.randperm(160)]
    part = group_parts(group, 4, generator("validation", 0))
    assert all(len(part[group == g].unique()) == 1 for g in range(len(sizes)))
    rows = part.bincount(minlength=4)
    assert int(rows.max()) - int(rows.min()) <= 3 and int(rows.sum()) == 160


def test_held_out_parts_of_members_share_no_group_with_their_training_rows() -> None:
    _, _, group = persons(30, 8)
    rows = [torch.arange(240), torch.arange(100, 240)]
    splits = own_parts(rows, range(10), [0, 1], group=group)
    assert splits is not None and splits.held_out is not None
    for kept, held in zip(splits.rows, splits.held_out, strict=True):
        assert not set(group[kept].tolist()) & set(group[held].tolist())
    first = torch.cat(splits.held_out[:10]).sort().values
    assert torch.equal(first, rows[0]), "each row is in one part"
    one = share(rows, 0.25, [0, 1], group)
    assert one.held_out is not None
    for own, kept, held in zip(rows, one.rows, one.held_out, strict=True):
        assert not set(group[kept].tolist()) & set(group[held].tolist())
        assert abs(len(held) - 0.25 * len(own)) <= 4


def test_fewer_groups_than_parts_leave_one_group_out() -> None:
    group = torch.arange(300) % 3
    splits = own_parts([torch.arange(300)], range(6), [0], group=group)
    assert splits is not None and splits.held_out is not None
    assert len(splits.held_out) == 3 and list(splits.of) == [0, 1, 2, 0, 1, 2]
    assert all(len(group[held].unique()) == 1 for held in splits.held_out)
    assert cross_fit_parts([300], [3]) == 3 and cross_fit_parts([600]) == 0


def test_the_share_is_at_least_one_group_and_not_all() -> None:
    group = torch.tensor([0] * 90 + [1] * 10)
    for seed in range(5):
        held = group_share(group, 0.9, generator("validation", seed))
        assert 0 < int(held.sum()) < 100


def test_a_group_counts_as_one_row() -> None:
    """The standard error is that of the means of equally large groups; against Stata's formula."""
    g = torch.Generator().manual_seed(0)
    group = torch.arange(20).repeat_interleave(7)
    values = torch.randn(20, generator=g)[group] + 0.1 * torch.randn(140, generator=g)
    means = torch.stack([values[group == k].mean() for k in range(20)])
    want = float(means.double().std(correction=1)) / math.sqrt(20)
    assert clustered_error(values, None, group) == pytest.approx(want, rel=1e-5)
    assert standard_error(values, None, group=group) == clustered_error(values, None, group)
    assert clustered_error(values, None, torch.zeros(140)) == math.inf
    assert effective_groups(None, group) == pytest.approx(20)
    assert effective_groups(None, torch.tensor([0, 0, 0, 1])) == pytest.approx(16 / 10)
    scaled = per_effective_row(None, group)
    assert scaled is not None and float(scaled.sum()) == pytest.approx(20)


def test_the_clustered_error_is_right_for_unequal_groups() -> None:
    """500 tables of 60 groups of 1 to 8 rows with a common error: the mean of SE² is the variance
    of the mean (±25 %, four standard errors of a variance of 500 draws, 4 √(2/500))."""
    g = torch.Generator().manual_seed(1)
    sizes = torch.arange(60) % 8 + 1
    group = torch.arange(60).repeat_interleave(sizes)
    means, errors = [], []
    for _ in range(500):
        values = torch.randn(60, generator=g)[group] + torch.randn(len(group), generator=g)
        means.append(float(values.mean()))
        errors.append(clustered_error(values, None, group) ** 2)
    assert np.mean(errors) == pytest.approx(np.var(means), rel=0.25)


def test_the_noise_on_new_groups_is_found() -> None:
    """Without groups the part of a person is predicted from the person's other rows; with groups
    the noise holds the spread between persons, 1² + .3²."""
    x, y, group = persons(60, 6, seed=3)
    x_new, y_new, _ = persons(500, 2, seed=4)
    found = {}
    for name, groups in (("without", None), ("with", group)):
        p = fit(x, y, "deep-ensemble", groups=groups, steps=800).predict(x_new)
        low, high = p.interval(0.9)
        found[name] = float(((y_new >= low.flatten()) & (y_new <= high.flatten())).double().mean())
    assert found["without"] < 0.82 < 0.86 < found["with"] < 0.97


def test_status_needs_groups() -> None:
    x, y, group = persons(30, 8)
    few = fit(x, y, groups=group % 5, steps=500)
    assert few.status == "not-evaluated" and "240 held-out rows of 5 groups" in few.status.reason
    assert few.diagnostics["held_out"]["groups"] == 5
    assert few.diagnostics["held_out"]["cross_fit_parts"] == 5
    one = fit(*persons(30, 8, spread=0.0)[:2], groups=["only"] * 240, steps=500)
    assert one.status == "not-evaluated" and "one group" in one.status.reason
    many = fit(x, y, groups=group, validation=0.5)
    assert many.diagnostics["held_out"]["groups"] == 15
    linear = doxa.fit(None, (x, y), "linear", groups=group, standardize=True)
    assert linear.status == "not-evaluated" and "validation=0.2" in linear.status.reason
    assert doxa.fit(None, (x, y), "linear", standardize=True).status == "ok"


def test_a_run_uses_the_groups_of_its_own_rows() -> None:
    x, y, group = persons(20, 6)
    sweep = fit(x, y, groups=group, runs=doxa.Runs(rows=[range(60), range(60, 120)]))
    assert [one.diagnostics["held_out"]["groups"] for one in sweep] == [10, 10]
    pair = fit(x, y, groups=group, validation=(x[:30] + 1.0, y[:30]))
    assert pair.diagnostics["held_out"]["groups"] == 30
    weight = torch.ones(120)
    weight[:12] = 0.0
    held = fit(x, y, groups=group, sample_weight=weight).diagnostics["held_out"]
    assert (held["groups"], held["rows"]) == (18, 108)


def test_the_bootstrap_draws_a_weight_for_each_group() -> None:
    """With weights per row the means of a constant would have variance s²/n, and with groups of
    identical rows that of the groups, 1/G."""
    g = torch.Generator().manual_seed(1)
    values = torch.randn(20, generator=g, dtype=torch.float64)
    group = torch.arange(20).repeat_interleave(10)
    y = values[group][:, None]

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def reset_parameters(self) -> None:
            torch.nn.init.normal_(self.b)

        def forward(self, x: Tensor) -> Tensor:
            return self.b.expand(len(x), 1)

    posterior = doxa.fit(
        Constant(), (torch.zeros(200, 1, dtype=torch.float64), y), "bootstrap", members=1000,
        groups=group, steps=1, lr=1.0, optimizer=doxa.optim.SGD(0.0), batch_size=200,
        schedule="constant", validation=None, likelihood=doxa.Gaussian(noise=1.0),
        prior=doxa.Normal(1e6), init="given",
    )  # fmt: skip
    want = float(values.var(correction=0)) / 21  # Rubin (1981)
    assert float(posterior.samples[:, 0, 0].var()) == pytest.approx(want, rel=0.2)


def test_cuts_lie_between_times() -> None:
    time = torch.tensor([3, 1, 1, 2, 2, 2, 4, 4, 5, 5])
    trained, stops, last = time_cuts(time, 0.2, None, generator("validation", 0))
    assert int(time[trained].max()) < int(time[stops].min())
    assert int(time[stops].max()) < int(time[last].min())
    assert bool((trained | stops | last).all()) and last.nonzero().flatten().tolist() == [8, 9]
    with pytest.raises(DataError, match="2 different times"):
        time_cuts(torch.tensor([0, 0, 1]), 0.2, None, generator("validation", 0))


@pytest.mark.parametrize("entry", ["one after the other", "all the time"])
def test_with_groups_the_rows_that_evaluate_are_later_rows_of_other_groups(entry: str) -> None:
    group = torch.arange(40).repeat_interleave(10)
    time = torch.arange(400) if entry == "one after the other" else torch.arange(400) % 10
    masks = time_cuts(time, 0.2, group, generator("validation", 0))
    found = [set(group[mask].tolist()) for mask in masks]
    assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    for before, after in pairwise(masks):
        assert int(time[before].max()) < int(time[after].min())
    assert all(int(mask.sum()) >= 16 for mask in masks)


def test_without_stopping_all_rows_before_the_last_are_trained_on() -> None:
    time = torch.arange(100)
    splits = later_rows([time], None, [0], time, None, stops=False)
    assert splits.rows[0].tolist() == list(range(80))
    assert splits.evaluation is not None and splits.evaluation[0].tolist() == list(range(80, 100))


@pytest.mark.slow
def test_a_fit_in_order_of_time_evaluates_later_rows_and_fits_all() -> None:
    """The relation changes its sign for the last fifth of the rows: random rows do not show it."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, generator=g)
    time = torch.arange(300)
    y = torch.where(time[:, None] < 240, x, -x) + 0.1 * torch.randn(300, 1, generator=g)
    for members in (1, 3):
        random = fit(x, y, "deep-ensemble", members=members, steps=400)
        ordered = fit(x, y, "deep-ensemble", members=members, steps=400, time=time)
        assert random.diagnostics["held_out"]["gain"] > -0.1
        held = ordered.diagnostics["held_out"]
        assert (held["rows"], held["later_rows"]) == (60, True) and held["gain"] < -1.0
        assert ordered.status == "worse-than-constant"
        assert ordered.diagnostics["rows"] == 300 and ordered.members == members
        assert "later than the rows trained on" in str(ordered)


def test_the_order_of_the_rows_in_the_table_does_not_matter_for_time() -> None:
    """The same cut, whatever numbers stand for the times."""
    x, y, _ = persons(50, 2)
    rank = torch.arange(100)
    stamps = np.datetime64("2020-01-01") + np.arange(100) * np.timedelta64(3, "D")
    one, other = fit(x, y, time=rank), fit(x, y, time=stamps)
    assert torch.equal(one.samples, other.samples)


def test_refusals_of_time() -> None:
    x, y, group = persons(20, 5)
    rank = torch.arange(100)
    with pytest.raises(MethodError, match="pass one of them"):
        fit(x, y, time=rank, validation=(x[:20] + 1, y[:20]))
    with pytest.raises(DataError, match="must be below"):
        fit(x, y, time=rank, validation=0.6)
    with pytest.raises(MethodError, match="have seen"):
        fit(x, y, time=rank, init=fit(x, y))
    tasks = doxa.data.Tasks([(x[:10], y[:10]), (x[10:20], y[10:20])])
    with pytest.raises(DataError, match="tasks take no groups"):
        doxa.fit(None, tasks, "cnp", groups=[0, 1])
    assert fit(x[:7], y[:7], time=rank[:7]).status == "not-evaluated"
    assert fit(x, y, time=rank, validation=None).status == "ok"
    assert group is not None


def test_a_checkpoint_of_other_groups_is_refused(tmp_path: Any) -> None:
    x, y, group = persons(20, 5)

    def stop(step: int, info: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(x, y, "deep-ensemble", groups=group, checkpoint=tmp_path, callbacks=[stop])
    with pytest.raises(MethodError, match="another fit"):
        fit(x, y, "deep-ensemble", groups=group // 2, checkpoint=tmp_path)


def test_test_rows_of_few_groups_do_not_make_a_status_ok() -> None:
    x, y, group = persons(30, 8, spread=0.0)
    for one, status in ((["only"] * 120, "not-evaluated"), (group[120:], "ok")):
        posterior = fit(x[:120], y[:120], groups=["only"] * 120, steps=500)
        assert posterior.status == "not-evaluated"
        assert evaluate_rows(posterior, x[120:], y[120:], groups=one) == status
