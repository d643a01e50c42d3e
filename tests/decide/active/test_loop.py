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
    with pytest.raises(StoreError, match="holds another campaign: step was 4"):
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
    with pytest.raises(MethodError, match="hold 2 points"):
        doxa.fit(net, (x, y), "map", runs=runs, steps=1, init=first[0], **options)


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
    with pytest.raises(DataError, match=r"row \d+ is no number"):
        active.learn(net, x, lambda rows: torch.full((len(rows),), torch.nan), **SHORT)
    with pytest.raises(DataError, match="pool is empty"):
        active.learn(net, x[:0], y[:0], **SHORT)
