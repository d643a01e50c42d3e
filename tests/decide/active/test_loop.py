"""The loop: what it asks, when it stops, and that it goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import Killed
from torch import Tensor, nn

import doxa
from doxa.decide import active
from doxa.decide.active.labels import _median, load
from doxa.errors import DataError, MethodError, StoreError


def problem(rows: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=source)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    return net, x, (x[:, 0] > 0.3).long()


SHORT: dict[str, Any] = {
    "method": "map", "by": "max_entropy", "likelihood": "categorical", "steps": 2,
    "validation": None, "start": 6, "step": 4,
}  # fmt: skip


def outcome(found: active.Learned) -> list[Any]:
    """Everything but the time it took."""
    return [
        (run["by"], run["seed"], run["rows"], run["stopped"],
         [{k: v for k, v in r.items() if k != "seconds"} for r in run["curve"]])
        for run in found.to_json()["runs"]
    ]  # fmt: skip


def test_every_row_is_asked_once_until_the_pool_is_empty() -> None:
    """Whoever of four learners asks: what one has asked, the others know."""
    net, x, y = problem(17)
    asked: list[int] = []

    def oracle(rows: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return y[rows]

    several = SHORT | {"by": ["max_entropy", "random"], "seeds": [0, 1]}
    found = active.learn(net, x, oracle, **several)
    assert sorted(asked) == list(range(17))
    for one in found.learners:
        assert [r["labels"] for r in one.curve] == [6, 10, 14, 17]
        assert one.book.answers == {row: int(y[row]) for row in one.book.answers}
        assert one.book.stopped.startswith("the pool is empty")
    assert list(found[0].book.answers)[:6] == list(found[2].book.answers)[:6]  # the same seed


def test_every_round_has_a_seed_of_its_own() -> None:
    """Also where the same seed begins two campaigns, which then are the same."""
    net, x, y = problem()
    seen: list[int] = []

    def look(found: active.Learned) -> None:
        if found[0].curve and found[0].posterior is not None:
            seen.append(found[0].posterior.record.seed)

    options = SHORT | {"by": "random", "budget": 14}
    one = active.learn(net, x, y, callback=look, **options)
    assert len(set(seen)) == len(one[0].curve) == 3
    assert outcome(one) == outcome(active.learn(net, x, y, **options))


def test_the_rules_stop_it() -> None:
    net, x, y = problem()
    short = SHORT | {"test": (x, y)}
    told: list[int] = []
    spent = active.learn(
        net, x, y, budget=13, callback=lambda found: told.append(found[0].curve[-1]["labels"])
        if found[0].curve else None, **short,
    )  # fmt: skip
    assert told[-1] == 13  # of the last round too
    assert [r["labels"] for r in spent[0].curve] == [6, 10, 13]
    assert "budget of 13" in spent[0].book.stopped
    good = active.learn(net, x, y, target=0.0, **short)
    assert len(good[0].curve) == 1
    assert good.labels_to("accuracy", 0.0) == {"max_entropy": [6]}
    bored = active.learn(net, x, y, target=1.1, patience=2, metric="accuracy", **short)
    values = [r["accuracy"] for r in bored[0].curve]
    if "no better" in bored[0].book.stopped:
        assert max(values[-2:]) <= max(values[:-2])
    with pytest.raises(MethodError, match="pass test="):
        active.learn(net, x, y, target=0.9, **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
def test_a_campaign_that_was_killed_goes_on_as_if_it_had_not(tmp_path: Path, warm: bool) -> None:
    net, x, y = problem()
    short = SHORT | {"budget": 18, "seeds": [0, 1], "test": (x, y), "warm": warm}
    want = active.learn(net, x, y, **short)
    calls = 0

    def dies(found: active.Learned) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 5):
            raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            active.learn(net, x, y, folder=tmp_path / "a", callback=dies, **short)
    got = active.learn(net, x, y, folder=tmp_path / "a", **short)
    assert outcome(got) == outcome(want)
    with pytest.raises(StoreError, match="holds another session: step was 4"):
        active.learn(net, x, y, folder=tmp_path / "a", **(short | {"step": 5}))


def test_a_warm_fit_starts_where_the_last_one_ended() -> None:
    """With a rate of nothing it stays there, in every run and member."""
    net, x, y = problem()
    runs = doxa.Runs(rows=[range(20), range(20, 40)])
    options: dict[str, Any] = {"likelihood": "categorical", "members": 2, "validation": None}
    first = doxa.fit(net, (x, y), "map", runs=runs, steps=5, **options)
    again = doxa.fit(net, (x, y), "map", runs=runs, steps=1, lr=1e-30, init=first, **options)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.point(), two.point())
    with pytest.raises(MethodError, match="have 2 points"):
        doxa.fit(net, (x, y), "map", runs=runs, steps=1, init=first[0], **options)


def test_first_labels_of_one_class_do_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    """At one row in twenty of the other class the first 20 labels of 4 in 10 seeds are alike
    (0.95^20 = 0.36). Rows are then drawn at random, within the budget, and nothing is fitted."""
    source = torch.Generator().manual_seed(1)
    net, x = problem(200)[0], torch.randn(200, 2, generator=source)
    y = torch.zeros(200, dtype=torch.long)
    y[torch.randperm(200, generator=source)[:10]] = 1
    seeds = list(range(10))
    short = SHORT | {"start": 20, "step": 10, "seeds": seeds, "budget": 40, "test": (x, y)}
    found = active.learn(net, x, y, **short)
    late = 0
    for one in found.learners:
        kinds = [int(y[row]) for row in one.book.answers]
        assert len(kinds) == len(set(one.book.answers)) == 40
        first = next((n for n in (20, 30, 40) if len(set(kinds[:n])) == 2), None)
        fitted = [] if first is None else list(range(first, 41, 10))
        assert [r["labels"] for r in one.curve] == fitted
        assert (one.posterior is None) == (first is None)
        assert ("one class" in one.book.stopped) == (first is None)
        late += first != 20
    assert late >= 3
    assert "of one class: the next rows are drawn at random" in caplog.text
    shared = set.intersection(*({r["labels"] for r in one.curve} for one in found.learners))
    assert [k for k, _, _ in found.mean_curve("max_entropy", "accuracy")] == sorted(shared)


def test_a_learner_of_one_class_does_not_hold_up_or_join_the_others() -> None:
    """Also where all labels together are of two classes; without a likelihood as with one."""
    net, x, y = problem()
    order = y.argsort(stable=True)  # first those of class 0
    starts = [order[:6].tolist(), torch.cat([order[:3], order[-3:]]).tolist()]
    short = SHORT | {"seeds": [0, 1], "start": starts, "budget": 10}
    for likelihood in ("categorical", None):
        found = active.learn(net, x, y, **(short | {"likelihood": likelihood}))
        assert [r["labels"] for r in found[1].curve] == [6, 10]
        assert 6 not in [r["labels"] for r in found[0].curve]


def test_a_label_that_cannot_be_fitted_to_is_refused_and_one_is_corrected(tmp_path: Path) -> None:
    """Before anything is written: the folder has the same bytes afterwards."""
    net, x, y = problem()
    folder = tmp_path / "p"
    asked = active.learn(net, x, None, folder=folder, **SHORT)[0].book.asked
    right = {row: int(y[row]) for row in asked}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for bad in (5, -1, "cat", 0.5, float("inf"), [0, 1], None):
        with pytest.raises(DataError, match=f"row {asked[2]}"):
            active.answer(folder, right | {asked[2]: bad})
    with pytest.raises(MethodError, match="runs 0 … 0"):
        active.answer(folder, right, run=1)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    active.answer(folder, right | {asked[0]: 1 - right[asked[0]]})
    with pytest.raises(DataError, match="correct=True"):
        active.answer(folder, {asked[0]: right[asked[0]]})
    assert active.answer(folder, {asked[0]: right[asked[0]]}, correct=True) == 0
    found = active.learn(net, x, None, folder=folder, **SHORT)
    assert found[0].book.answers == right
    more = found[0].book.asked  # a correction takes no answer for those that are open
    assert active.answer(folder, {asked[1]: 1 - right[asked[1]]}, correct=True) == len(more)
    assert active.learn(net, x, None, folder=folder, **SHORT)[0].book.asked == more


def test_a_number_is_kept_to_its_last_digit(tmp_path: Path) -> None:
    net, x, _ = problem()
    short = SHORT | {"likelihood": "gaussian", "by": "predictive_variance"}
    head = nn.Sequential(net, nn.Linear(2, 1))
    asked = active.learn(head, x, None, folder=tmp_path / "n", **short)[0].book.asked
    given = {row: 0.1 + row / 7 for row in asked} | {asked[0]: 1e300}
    active.answer(tmp_path / "n", given)
    found = load(tmp_path / "n")
    assert found is not None
    assert found[0][0].answers == given


def test_an_oracle_of_unknown_classes_writes_nothing(tmp_path: Path) -> None:
    net, x, y = problem()
    with pytest.raises(DataError, match="classes 0 … 1"):
        active.learn(net, x, lambda rows: y[rows] + 5, folder=tmp_path / "a", **SHORT)
    found = active.learn(net, x, y, folder=tmp_path / "a", budget=10, **SHORT)
    assert set(found[0].book.answers.values()) <= {0, 1}


def test_another_pool_is_refused_by_its_numbers(tmp_path: Path) -> None:
    """Of the same shape, and one number in one row is another."""
    net, x, y = problem()
    active.learn(net, x, y, folder=tmp_path / "a", budget=6, **SHORT)
    other = x.clone()
    other[17, 1] = torch.nextafter(other[17, 1], torch.tensor(9.0))
    with pytest.raises(StoreError, match="another pool"):
        active.learn(net, other, y, folder=tmp_path / "a", budget=10, **SHORT)
    found = active.learn(net, x.numpy(), y, folder=tmp_path / "a", budget=10, **SHORT)
    assert [r["labels"] for r in found[0].curve] == [6, 10]


def test_a_person_is_waited_for(tmp_path: Path) -> None:
    net, x, y = problem()
    begun = active.learn(net, x, None, folder=tmp_path / "p", **SHORT)
    asked = begun[0].book.asked
    assert begun.waiting
    assert len(asked) == 6
    again = active.learn(net, x, None, folder=tmp_path / "p", **SHORT)
    assert again[0].book.asked == asked
    left = active.answer(tmp_path / "p", {asked[0]: 1}, partial=True)
    assert left == 5
    active.answer(tmp_path / "p", {row: int(y[row]) for row in asked[1:]})
    third = active.learn(net, x, None, folder=tmp_path / "p", **SHORT)
    assert third.waiting
    assert not set(third[0].book.asked) & set(asked)


def test_bad_oracles_are_named() -> None:
    net, x, y = problem()
    with pytest.raises(DataError, match="gave 2 labels for 6 rows"):
        active.learn(net, x, lambda rows: [0, 1], **SHORT)
    with pytest.raises(DataError, match="table has shape \\[3\\], the pool 40 rows"):
        active.learn(net, x, y[:3], **SHORT)
    with pytest.raises(DataError, match=r"row \d+ is not a finite number"):
        active.learn(net, x, lambda rows: torch.full((len(rows),), torch.nan), **SHORT)
    with pytest.raises(DataError, match="pool is empty"):
        active.learn(net, x[:0], y[:0], **SHORT)


def test_a_table_says_how_many_runs_got_there() -> None:
    """The median over those that did; the count where some did not."""
    assert _median([30, None, 10, 50]) == "30 (3 of 4 runs)"
    assert _median([30, 10]) == "20" and _median([None]) == "–"
