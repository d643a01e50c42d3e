"""Columns by which rows belong together: found where inputs identify groups, and not elsewhere."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from doxa.driver import leakage
from doxa.driver.leakage import MOST_COLUMNS, Column, _by_group, _by_time, find_leaks, threshold
from doxa.driver.yardsticks import MOST_ROWS
from doxa.likelihoods import Categorical, Gaussian
from doxa.noise import generator


def persons(seed: int, spread: float, identified: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """60 persons with six rows each; one input is a number of the person's own."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(60).repeat_interleave(6)
    own, name = spread * torch.randn(60, generator=g), torch.randn(60, generator=g)
    x = torch.randn(360, 2, generator=g)
    if identified:
        x[:, 1] = name[group]
    y = x[:, 0] + own[group] + 0.3 * torch.randn(360, generator=g)
    return x, y, group


def column(group: Tensor, inputs: int = 2, ordered: bool = False, name: str = "a") -> Column:
    return Column(name, group, ordered, torch.arange(inputs))


def test_a_column_leaks_if_groups_differ_and_can_be_recognised() -> None:
    x, y, group = persons(0, 1.0)
    (leak,) = find_leaks(x, y, Gaussian(), [column(group)])
    assert leak.name == "a" and leak.loss > 0.2 and 0.0 < leak.error < 0.1
    again = find_leaks(x, y, Gaussian(), [column(group)])
    assert again == [leak], "the same rows and parts each time"
    for seed, spread, identified in ((1, 0.0, True), (2, 1.0, False)):
        x, y, group = persons(seed, spread, identified)
        assert find_leaks(x, y, Gaussian(), [column(group)]) == []
    x, y, group = persons(1, 3.0)
    assert len(find_leaks(x, (y > 0).long(), Categorical(), [column(group)])) == 1


def test_a_trend_leaks_by_time() -> None:
    g = torch.Generator().manual_seed(0)
    time = torch.arange(300)
    x = torch.stack([torch.randn(300, generator=g), time.float()], 1)
    walk = torch.randn(300, generator=g).cumsum(0) / 8
    noise = 0.3 * torch.randn(300, generator=g)
    (leak,) = find_leaks(x, x[:, 0] + walk + noise, Gaussian(), [column(time, ordered=True)])
    assert leak.ordered and leak.values == 300
    assert find_leaks(x, x[:, 0] + noise, Gaussian(), [column(time, ordered=True)]) == []


def test_what_is_not_tested() -> None:
    x, y, group = persons(0, 1.0)
    assert find_leaks(x, y, Gaussian(), [column(group // 10)]) == [], "six groups"
    assert find_leaks(x, y, Gaussian(), [column(group, 0)]) == [], "no inputs"
    assert find_leaks(x[:, :, None], y, Gaussian(), [column(group)]) == [], "no table"


def test_the_first_columns_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, group = persons(0, 1.0)
    monkeypatch.setattr(leakage, "_leak", lambda *given: (given[3].name, given[4]))
    many = [column(group // 10), *(column(group, name=f"c{k}") for k in range(MOST_COLUMNS + 1))]
    found = find_leaks(x, y, Gaussian(), many)
    assert found == [(f"c{k}", MOST_COLUMNS) for k in range(MOST_COLUMNS)]


@pytest.mark.parametrize("columns", [1, 3, 6])
@pytest.mark.parametrize("clusters", [8, 25, 1000])
def test_the_threshold_is_students_with_bonferroni(columns: int, clusters: int) -> None:
    want = stats.t.isf(stats.norm.sf(2.0) / columns, clusters - 1)
    assert threshold(columns, clusters) == pytest.approx(want, rel=0.03)


def test_rows_are_whole_groups_or_shares_of_large_ones() -> None:
    small, _ = torch.arange(500).repeat_interleave(4).sort()
    rows, parts, code = _by_group(small, generator("test", 0))
    assert len(rows) == MOST_ROWS and (small[rows].bincount(minlength=500)[small[rows]] == 4).all()
    assert all(len(parts[code == k].unique()) == 1 for k in code.unique())
    large = torch.arange(20).repeat_interleave(1000)
    rows, parts, code = _by_group(large, generator("test", 0))
    assert large[rows].bincount().tolist() == [MOST_ROWS // 20] * 20
    assert parts.bincount().tolist() == [MOST_ROWS // 5] * 5


def test_rows_of_the_same_time_are_together() -> None:
    time = torch.arange(90).repeat_interleave(10)[torch.randperm(900)]
    rows, parts, clusters = _by_time(time)
    assert len(rows) == MOST_ROWS and len(parts.unique()) == 5 and len(clusters.unique()) == 25
    for each in (parts, clusters):
        assert all(len(each[time[rows] == t].unique()) == 1 for t in range(90))
        order = time[rows].argsort(stable=True)
        assert (each[order].diff() >= 0).all(), "consecutive"
