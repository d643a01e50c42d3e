"""Books of labels: nothing is lost, nothing asked twice, and bad answers change nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from doxa import store
from doxa.decide.active import LabelState, answer
from doxa.decide.active.labels import load, save
from doxa.errors import DataError, StoreError


def work(folder: Path, told: int) -> None:
    """A person's session, for ever: ask for three rows, answer them one by one or together; what
    is on disk is told afterwards, a line each."""
    while True:
        found = load(folder)
        assert found is not None
        books, facts = found
        book = books[0]
        if book.asked:
            some = book.asked[: 1 + len(book.answers) % 3]
            answer(folder, {row: row % 7 for row in some}, partial=True)
            os.write(told, b"".join(b"answered %d\n" % row for row in some))
        else:
            rows = book.free[:3].tolist()
            book.ask(rows)
            save(folder, books, facts)
            os.write(told, b"".join(b"asked %d\n" % row for row in rows))


def killed_sessions(folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    save(folder, [LabelState(rows=100_000)], {"what": "a test"})
    asked: list[int] = []
    answered: set[int] = set()
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            work(folder, writing)
        os.close(writing)
        with os.fdopen(reading) as lines:
            said = [lines.readline() for _ in range(chance.randint(1, 9))]
            time.sleep(chance.uniform(0.0, 0.02))  # at any point of what comes next
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said += lines.readlines()
        for what, row in map(str.split, said):
            if what == "asked":
                asked.append(int(row))
            else:
                answered.add(int(row))
        found = load(folder)
        assert found is not None
        book = found[0][0]
        assert answered <= set(book.answers), "an answer that was entered is lost"
        assert all(label == row % 7 for row, label in book.answers.items())
        assert not set(book.asked) & set(book.answers)
        assert found[1] == {"what": "a test"}
    assert len(asked) == len(set(asked)), "a row was asked about twice"
    assert answered, "nothing was tested"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes of its own")
def test_two_killed_sessions_lose_nothing(tmp_path: Path) -> None:
    killed_sessions(tmp_path / "campaign", 2, seed=3)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes of its own")
def test_fifty_killed_sessions_lose_nothing(tmp_path: Path) -> None:
    killed_sessions(tmp_path / "campaign", 50, seed=0)


def test_bad_answers_are_refused_and_change_nothing() -> None:
    book = LabelState(rows=5)
    book.ask([1, 3])
    for answers, words in (
        ({1: 0, 2: 0}, "row 2 is not open"),
        ({1: 0}, "1 answers for 2 rows: row 3 has none"),
        ({1: 0, 3: float("nan")}, "row 3 is nan"),
        ({1: None, 3: 0}, "row 1 is None"),
    ):
        with pytest.raises(DataError, match=words):
            book.answer(answers)
        assert (book.answers, book.asked) == ({}, [1, 3])
    with pytest.raises(DataError, match="row 1 has no label yet"):
        book.ask([2])
    book.answer({3: 1, 1: 0})
    with pytest.raises(DataError, match="row 3 has an answer already, 1"):
        book.answer({3: 0})
    with pytest.raises(DataError, match="row 3 was already chosen"):
        book.ask([3])
    with pytest.raises(DataError, match="row 5 is not in the pool"):
        book.ask([5])


def test_a_state_that_was_tampered_with_is_one_error(tmp_path: Path) -> None:
    """With checksums made anew, as by someone who sends the folder."""
    page = {"rows": 5, "answers": [[1, 0]], "asked": [2], "rounds": [{"labels": 1}], "stopped": ""}
    where = tmp_path / "state"
    store.write_artefact(where, {}, {"books": [page], "facts": {}})
    assert load(tmp_path) is not None
    for bad in (
        {"rows": -1}, {"rows": "5"}, {"rows": True}, {"answers": [[9, 0]]}, {"answers": [[1]]},
        {"answers": [[1, 0], [1, 1]]}, {"answers": 3}, {"answers": [["1", 0]]}, {"asked": [1]},
        {"asked": [2, 2]}, {"asked": [-1]}, {"asked": [2.5]}, {"asked": None}, {"rounds": [1]},
        {"rounds": [{"labels": "x"}]}, {"rounds": {}}, {"stopped": None}, {"unknown": 1},
    ):  # fmt: skip
        store.write_artefact(where, {}, {"books": [page | bad], "facts": {}})
        with pytest.raises(StoreError, match="the labels of a session"):
            load(tmp_path)
    for meta in ({"books": 3, "facts": {}}, {"books": [page]}, {"books": [page], "facts": 3}):
        store.write_artefact(where, {}, meta)
        with pytest.raises(StoreError):
            load(tmp_path)
    for labels in (3, {}, {"likelihood": 1, "output": None}, {"likelihood": None, "output": [-1]}):
        store.write_artefact(where, {}, {"books": [page], "facts": {"labels": labels}})
        with pytest.raises(StoreError):
            answer(tmp_path, {2: 0})
