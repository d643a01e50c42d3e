"""`doxa active next` and `label`, killed: nothing is lost, and no row is asked about twice."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from shell import doxa

from doxa.decide.active import LabelState
from doxa.decide.active.labels import load

pd = pytest.importorskip("pandas")

CLASSES = ("cat", "dog")


def truth(line: str) -> str:
    return CLASSES[int(line) % 2]


def killed(words: tuple[object, ...], folder: Path, chance: random.Random, seconds: float) -> bool:
    """A command in a process that is killed: after a while, or as it touches one of the campaign's
    files for the k-th time. False where it had ended before."""
    by_file = chance.random() < 0.8
    touches = chance.randint(9, 60)  # eight times to read; `next` ends at the 40th, `label` before
    delay = chance.uniform(0, seconds)
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, args: tuple[object, ...]) -> None:
            nonlocal count
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                count += str(folder) in str(args[0])
                if count >= touches:
                    os.kill(os.getpid(), signal.SIGKILL)

        if by_file:
            sys.addaudithook(hook)
        code = 1
        try:
            doxa(*words)
            code = 0
        finally:
            os._exit(code)
    if not by_file:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"{words} fails"
    return os.WIFSIGNALED(status)


def book_of(folder: Path) -> LabelState:
    found = load(folder)
    assert found is not None
    return found[0][0]


def filled(sheet: Path, rows: list[int]) -> bool:
    """A person fills in the sheet, if it is of these rows."""
    if not sheet.exists():
        return False
    frame = pd.read_csv(sheet, dtype=str)
    if frame["line"].tolist() != [str(row + 2) for row in rows]:
        return False
    frame.assign(kind=frame["line"].map(truth)).to_csv(sheet, index=False)
    return True


def campaign(folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """A person's campaign with so many kills; how many rows were asked about and answered."""
    chance = random.Random(seed)
    x = np.random.default_rng(seed).normal(size=(60 + 3 * kills, 2)).round(3)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": None})
    frame.loc[:5, "kind"] = [truth(str(row + 2)) for row in range(6)]
    pool = folder.with_suffix(".csv")
    frame.to_csv(pool, index=False)
    quick = ("--method", "map", "--by", "max_entropy", "--steps", 2, "--hidden", 4, "--count", 3)
    doxa("active", "start", pool, "--target", "kind", "--out", folder, *quick)
    began = time.perf_counter()
    doxa("active", "next", folder)
    seconds, done = time.perf_counter() - began, 0
    ever = set(book_of(folder).asked)
    while done < kills:
        before = book_of(folder)
        told = filled(folder / "to_label.csv", before.asked)
        command = "label" if before.asked and told else "next"
        done += killed(("active", command, folder), folder, chance, seconds)
        after = book_of(folder)
        assert before.answers.items() <= after.answers.items()  # nothing is lost
        new = after.answers.keys() - before.answers.keys()
        assert all(after.answers[row] == truth(str(row + 2)) for row in new)
        if before.asked:  # all answers are taken, or none
            assert after.asked in ([], before.asked)
            assert new == (set() if after.asked else set(before.asked))
        else:
            assert not new
            assert not ever & set(after.asked)  # nothing is asked twice
            ever |= set(after.asked)
    assert f"{len(after.answers)} of {len(x)} rows" in doxa("active", "status", folder)
    return len(ever), len(after.answers) - 6


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked")
def test_commands_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    asked, answered = campaign(tmp_path / "campaign", kills=12, seed=0)
    assert answered >= 6  # it went on all the same
    assert asked - answered in (0, 3)
