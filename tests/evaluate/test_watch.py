"""Watching new rows: evidence by betting, against products, ranks and simulated streams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa
from benchmarks.watch import LEVEL, LOW, MISSES, alarm_of_means, false_alarms
from doxa.errors import DataError, StoreError, Unavailable
from doxa.evaluate import Watch, certify
from doxa.evaluate.betting import conformal_p, evidence, mean_bets, shape_bets


def rows(n: int, seed: int, noise: float = 1.0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=source, dtype=torch.float64)
    x[:, 1] += shift
    return x, 2 * x[:, 0] + noise * torch.randn(n, generator=source, dtype=torch.float64)


@pytest.fixture
def posterior() -> Any:
    """A linear fit with a certificate of 400 rows."""
    fitted = doxa.fit(None, rows(200, 0), "linear", standardize=True)
    certify(fitted, rows(400, 1))
    return fitted


def test_the_evidence_is_a_mean_of_products_over_bets_and_start_times() -> None:
    x, bound = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 1.0]), 0.2
    log_e = mean_bets(x, bound)
    found, e = evidence(log_e).log_m.exp(), log_e.exp()
    w = [1 / math.log(s + math.e - 1) - 1 / math.log(s + math.e) for s in range(1, 7)]
    for t in range(1, 7):
        products = [w[s - 1] * e[:, s - 1 : t].prod(1).mean() for s in range(1, t + 1)]
        assert float(found[t - 1]) == pytest.approx(float(sum(products)) + 1 - sum(w[:t]))
    first = evidence(log_e[:, :4])
    rest = evidence(log_e[:, 4:], first.log_s, first.rows)
    assert torch.allclose(torch.cat([first.log_m, rest.log_m]).exp(), found)


def test_bets_are_fair_at_the_boundary_and_lose_inside() -> None:
    """E[e] = 1 for X with mean b, binary or not; less for a smaller mean; ∫ e dp = 1."""
    for bound in (0.03, 0.2, 0.9):
        one, none, half = (mean_bets(torch.tensor([v]), bound).exp() for v in (1.0, 0.0, bound))
        assert torch.allclose(bound * one + (1 - bound) * none, torch.ones_like(one))
        assert torch.allclose(half, torch.ones_like(half))
        assert bool((0.5 * bound * one + (1 - 0.5 * bound) * none < 1).all())
        assert bool((none > 0).all())
    p = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    bets = shape_bets(p).exp()
    assert bool((bets > 0).all())
    assert torch.allclose(bets.mean(1), torch.ones(len(bets), dtype=torch.float64), atol=1e-6)


def test_p_values_are_ranks_among_all_earlier_values() -> None:
    source = torch.Generator().manual_seed(0)
    values = torch.randint(0, 6, (600, 2), generator=source).float()  # with ties
    earlier = torch.randint(0, 6, (50, 2), generator=source).float()
    ties = torch.rand(600, 2, generator=source, dtype=torch.float64)
    found = conformal_p(values, earlier, ties)
    for t, k in ((0, 0), (1, 1), (255, 0), (256, 0), (599, 1)):
        before = torch.cat([earlier[:, k], values[:t, k]])
        less, same = (int(c.sum()) for c in (before < values[t, k], before == values[t, k]))
        expected = (less + float(ties[t, k]) * (same + 1)) / (len(before) + 1)
        assert float(found[t, k]) == pytest.approx(expected)


def test_false_alarms_at_the_boundary() -> None:
    """100 streams of 2,000 rows at level 0.05. With a rate of 5 %, more than 14 alarms have a
    probability of 2e-4."""
    assert false_alarms(100, 2000, together=False) <= 14
    # the test has the power to find a bet on a row that is already known
    source = torch.Generator().manual_seed(1)
    x = (torch.rand(100, 2000, generator=source) < MISSES).double()
    log_e = mean_bets(x, MISSES)
    future = log_e.gather(-2, log_e.argmax(-2, keepdim=True))  # the bet that wins this row
    over = evidence(future).log_m.amax(-1) > math.log(1 / LEVEL)
    assert int(over.sum()) > 14


def test_a_late_change_is_found() -> None:
    """The share of low scores is .4 after 1,000 rows: the evidence grows by KL(.4, .07) = .5 nats
    per row, and 21 nats of prior weight and threshold are overcome within 100 rows, but for a
    probability below 1e-6."""
    source = torch.Generator().manual_seed(2)
    rate = torch.full((1200,), 0.05)
    rate[1000:] = 0.4
    x = (torch.rand(20, 1200, generator=source) < rate).double()
    at = alarm_of_means(x, LOW, LEVEL / 2)
    assert bool(((at >= 1000) & (at < 1100)).all())


def test_new_rows_like_the_certificate_raise_no_alarm(posterior: Any) -> None:
    watch = Watch(posterior)
    assert watch.update(*rows(600, 2)) == [] and watch.alarms == []
    tests = watch.tests
    assert [test.rows for test in tests.values()] == [600, 600, 600]
    x, y = rows(600, 2)
    p = posterior.predict(x)
    low, high = p.interval(0.9)
    misses = float(((y < low) | (y > high)).double().mean())
    assert tests["coverage"].mean == pytest.approx(misses)
    assert tests["coverage"].bound == pytest.approx(1 - posterior.certificate.coverage.low)
    share = float((p.log_prob(y) < posterior.certificate.low_score).double().mean())
    assert tests["scores"].mean == pytest.approx(share)
    assert tests["coverage"].level + tests["scores"].level == pytest.approx(watch.level)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("coverage", {"noise": 2.0}), ("scores", {"noise": 2.0}), ("inputs", {"shift": 1.0})],
)
def test_each_change_is_found_and_dated(posterior: Any, kind: str, options: dict[str, Any]) -> None:
    watch = Watch(posterior)
    watch.update(*rows(200, 3), date="2030-01-01")
    new = watch.update(*rows(300, 4, **options), name="late", date="2030-02-01")
    alarm = next(alarm for alarm in new if alarm.test == kind)
    assert 200 < alarm.row <= 400 and alarm.date == "2030-02-01"
    assert alarm.place == f"row {alarm.row - 201} of late"
    assert alarm.what == ("input 1" if kind == "inputs" else "")
    assert watch.update(*rows(200, 5)) == []  # it stays, and is not new
    assert alarm in watch.alarms
    assert {a.test for a in watch.alarms} <= ({"inputs"} if kind == "inputs" else set(watch.tests))


def test_parts_targets_that_come_later_and_saved_states_give_the_same(
    posterior: Any, tmp_path: Path
) -> None:
    x, y = rows(300, 6, noise=1.3)
    keys = [f"k{i}" for i in range(300)]
    whole = Watch(posterior)
    whole.update(x, y, keys=keys)
    parts = Watch(posterior)
    parts.update(x[:100], y[:100], keys=keys[:100], digest="a")
    parts.update(x[:100] + 9, y[:100], digest="a")  # the same file
    parts.update(x[:100], y[:100], keys=keys[:100], digest="b")  # the same rows in another one
    parts.save(tmp_path / "state")
    parts = Watch.load(tmp_path / "state", posterior)
    parts.update(x[100:], keys=keys[100:])
    assert parts.pending == 200 and parts.tests["coverage"].rows == 100
    assert parts.tests["inputs"].rows == 300
    parts.save(tmp_path / "state")
    parts = Watch.load(tmp_path / "state", posterior)
    assert parts.label([*keys[100:], "unknown"], torch.cat([y[100:], y[:1]])) == 200
    assert parts.label(keys[100:], y[100:]) == 0  # once
    assert parts.pending == 0
    for name in ("coverage", "scores"):
        assert parts.tests[name].rows == 300
        assert parts.tests[name].log_m == pytest.approx(whole.tests[name].log_m, abs=1e-9)


def test_rows_of_a_group_count_as_one(posterior: Any) -> None:
    x, y = rows(60, 7)
    groups = [k // 3 for k in range(60)]
    watch = Watch(posterior)
    watch.update(x, y, groups=groups)
    p = posterior.predict(x)
    low, high = p.interval(0.9)
    misses = ((y < low) | (y > high)).double().reshape(20, 3).mean(1)
    test = watch.tests["coverage"]
    assert (test.rows, watch.tests["inputs"].rows) == (20, 20)
    expected = evidence(mean_bets(misses, float(test.bound or 0.0))).log_m[-1]
    assert test.log_m == pytest.approx(float(expected))
    watch.update(x[:6], y[:6], groups=[0, 0, 0, 99, 99, 99])
    assert (test.rows, watch.tests["inputs"].rows) == (21, 21)


def test_classes_counts_and_conformal_sets(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(8)
    x = torch.randn(900, 2, generator=source)
    y = (torch.rand(900, generator=source) < (2 * x[:, 0]).sigmoid()).long()
    net = doxa.nets.mlp(2, 2, (8,))
    fitted = doxa.fit(net, (x[:300], y[:300]), "map", likelihood="categorical", steps=100)
    assert fitted.certificate.coverage is None
    watch = Watch(fitted, level=0.01)
    assert set(watch.tests) == {"scores", "inputs"} and watch.tests["scores"].level == 0.01
    watch.update(x[300:600], y[300:600])
    assert watch.alarms == []
    assert {alarm.test for alarm in watch.update(x[600:], 1 - y[600:])} == {"scores"}
    sets = doxa.evaluate.conformal(fitted, (x[300:600], y[300:600]), 0.9)
    own = Watch(sets)
    assert own.tests["coverage"].bound == pytest.approx(0.1)  # of the guarantee
    own.update(x[600:], y[600:])
    certify(fitted, (x[300:600], y[300:600]))
    again = Watch(doxa.evaluate.recalibrate(fitted, (x[300:600], y[300:600]), "temperature"))
    assert set(again.tests) == {"inputs"}  # the evaluation was of other probabilities
    assert again.update(x[600:], y[600:]) == [] and again.tests["inputs"].rows == 300
    held = sets.predict(x[600:]).prediction_set().gather(1, y[600:, None])
    assert own.tests["coverage"].mean == pytest.approx(1 - float(held.double().mean()))


def test_what_cannot_be_watched_is_refused(posterior: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="level must lie between"):
        Watch(posterior, level=1.0)
    image = torch.randn(20, 1, 4, 4)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    fitted = doxa.fit(net, (image, image.mean((1, 2, 3))), "map", steps=1, validation=None)
    with pytest.raises(Unavailable, match="there is nothing to watch"):
        Watch(fitted)
    watch = Watch(posterior)
    x, y = rows(3, 0)
    with pytest.raises(DataError, match="'a' stands at more than one row"):
        watch.update(x, y, keys=["a", "b", "a"])
    with pytest.raises(DataError, match="2 entries for 3 rows"):
        watch.update(x, y, groups=[1, 2])
    watch.save(tmp_path / "state")
    other = doxa.fit(None, rows(30, 9), "linear")
    with pytest.raises(StoreError, match="of another run"):
        Watch.load(tmp_path / "state", other)
    with pytest.raises(DataError, match="12 rows or more"):
        certify(other, rows(11, 0))


@pytest.mark.slow
def test_false_alarms_of_exchangeable_inputs() -> None:
    """60 streams at level 0.05: more than 10 alarms have a probability of 2e-4 at a rate of 5 %."""
    from benchmarks.watch import false_alarms_of_inputs

    assert false_alarms_of_inputs(60, 1000) <= 10
