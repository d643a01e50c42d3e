"""Comparisons, benchmark cells and sessions of active learning by several processes (`torchrun`):
the results of one process, in each of them, and files that are written once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import Ranks, ranks_of
from shell import doxa as shell

import doxa
from doxa import store
from doxa.app.bench import Store, Task, compute
from doxa.app.comparison import compare_arrays
from doxa.driver import processes
from doxa.errors import DataError, MethodError

pd = pytest.importorskip("pandas")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return ranks_of(monkeypatch)


@store.register("failing, of tests/app/test_several_processes.py")
@dataclass(frozen=True)
class Failing(doxa.MAP):
    """Fails in one block of the second run, which one process trains."""

    def init(self, run: Any) -> Any:
        if 1 in run.members and (1 in run.run_of or run.seeds[0] != 0):
            raise MethodError("the fuse has blown")
        return super().init(run)


def test_a_comparison_is_the_one_of_one_process(ranks: Ranks) -> None:
    """Scores, costs and reasons are the same in all; a method that fails in a block of one process
    is a row that failed in each, and the next method is fitted."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=g)
    y = x[:, 0] + 0.1 * torch.randn(80, generator=g)

    def compared(rank: int = 0) -> Any:
        return compare_arrays(
            x, y, {"map": doxa.MAP(), "fails": Failing(), "ensemble": doxa.DeepEnsemble()},
            splits=2, reference="none", steps=20, block_size=1, members=2, progress=False,
            validation=None, say=said[rank].append,
        )  # fmt: skip

    said: list[list[str]] = [[], []]
    alone = compared()
    for one in said:
        one.clear()
    found = ranks(compared)
    for one in found:
        assert not isinstance(one, BaseException), one
        assert [row.method for row in one.rows] == [row.method for row in alone.rows]
        for row, expected in zip(one.rows, alone.rows, strict=True):
            assert row.scores == expected.scores
            assert all(np.array_equal(a, b) for a, b in zip(row.each, expected.each, strict=True))
        assert one["fails"].status == "failed" and "fuse has blown" in one["fails"].reason
    first, second = found
    assert first["fails"].reason == second["fails"].reason
    assert first["ensemble"].cost == second["ensemble"].cost
    assert first["map"].cost == second["map"].cost and first.map_cost == second.map_cost


made: list[tuple[str, int]] = []
together = threading.Barrier(2)


def cell(name: str) -> dict[str, Any]:
    made.append((name, threading.get_ident()))
    if name in ("a", "f"):  # the first of each process: both are at work at once
        together.wait(20)
    if name == "a":  # it is the last to be done, and the other process waits for it
        end = time.monotonic() + 20
        while len(made) < 10 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
    if name == "refused":
        raise MethodError("not for this data")
    time.sleep(0.05)
    return {"name": name, "alone": processes.launched() is None}


def broken(name: str) -> dict[str, Any]:
    raise ZeroDivisionError(name)


def test_cells_are_divided_and_computed_once(ranks: Ranks, tmp_path: Path) -> None:
    made.clear()
    names = ["a", "b", "c", "refused", "e", "f", "g", "h", "i", "j"]
    tasks = [Task({"table": "t", "name": name}, cell, {"name": name}) for name in names]
    lines: list[list[str]] = [[], []]

    @processes.together
    def call(rank: int) -> list[Any]:
        results = Store(tmp_path / "t.jsonl")
        compute(tasks, results, report=lines[rank].append)
        return [results.get(task.key) for task in tasks]

    found = ranks(call)
    assert found[0] == found[1] and not isinstance(found[0], BaseException), found
    assert found[0][0] == {"name": "a", "alone": True}
    assert found[0][3] == {"refused": "not for this data"}
    assert sorted(name for name, _ in made) == sorted(names)
    assert len({thread for _, thread in made}) == 2
    assert all(len(own) == 1 + len(names) for own in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl"]


def test_a_cell_that_fails_is_an_error_in_every_process(ranks: Ranks, tmp_path: Path) -> None:
    tasks = [
        Task({"table": "t", "name": name}, make, {"name": name})
        for name, make in [("b", cell), ("bad", broken), ("c", cell)]
    ]

    @processes.together
    def call(rank: int) -> None:
        compute(tasks, Store(tmp_path / "t.jsonl"), report=str)

    for error in ranks(call):
        assert isinstance(error, DataError), error
        assert "1 cells failed, the first t bad: bad" in str(error)
    assert len(list(Store(tmp_path / "t.jsonl").cells())) == 2


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(40, 2)).round(3)
    kind = np.where(x[:, 0] > 0, "cat", "dog").astype(object)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "kind": kind})
    frame.loc[6:, "kind"] = None
    frame.to_csv(tmp_path / "pool.csv", index=False)
    return tmp_path / "pool.csv"


@pytest.mark.parametrize("labelled", [True, False], ids=["by the posterior", "at random"])
def test_a_session_goes_on_alike_in_all_processes(
    ranks: Ranks, pool: Path, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    """The same rows are chosen, the state and the sheet are written by process 0."""
    from doxa.app.active import session

    if not labelled:
        frame = pd.read_csv(pool)
        frame.loc[2:, "kind"] = None
        frame.to_csv(pool, index=False)
    folder = pool.parent / "session"
    shell("active", "start", pool, "--target", "kind", "--classes", "cat,dog", "--out", folder,
          "--method", "deep-ensemble", "--members", 4, "--steps", 20, "--hidden", 4,
          "--count", 3)  # fmt: skip
    copy = pool.parent / "copy"
    shell("active", "start", pool, "--target", "kind", "--classes", "cat,dog", "--out", copy,
          "--method", "deep-ensemble", "--members", 4, "--steps", 20, "--hidden", 4,
          "--count", 3)  # fmt: skip
    alone = session.go_on(copy, None)
    how = alone.ask(None)
    writers: list[int] = []
    write = session.write_table

    def counted(*given: Any) -> None:
        writers.append(threading.get_ident())
        write(*given)

    monkeypatch.setattr(session, "write_table", counted)

    @processes.together
    def call(rank: int) -> Any:
        found = session.go_on(folder, None)
        return found.ask(None), found.book.asked, found.book.rounds

    found = ranks(call)
    assert found[0] == found[1] == (how, alone.book.asked, alone.book.rounds), found
    assert len(writers) == 1
    assert (folder / "to_label.csv").read_bytes() == (copy / "to_label.csv").read_bytes()
    assert (folder / "run" / "meta.json").exists() == labelled


@pytest.mark.parametrize(
    "words, message",
    [
        (("predict", "run", "new.csv"), "doxa predict runs in one process"),
        (("bench", "uci", "--jobs", "2"), "--jobs starts processes of its own"),
        (("bench", "uci", "--jobs=2"), "--jobs starts processes of its own"),
    ],
)
def test_commands_of_one_process_say_so(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message in " ".join(shell(*words, code=2).split())


def launched(*words: Any, **more: str) -> tuple[int, str]:
    """A command by two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "-m", "doxa", *map(str, words)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DOXA_PROCESS_TIMEOUT": "60", **more}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    return done.returncode, done.stdout + done.stderr


def counted(text: str) -> Callable[[str], int]:
    return lambda words: " ".join(text.split()).count(words)


@pytest.mark.slow
def test_commands_print_and_write_once(pool: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=120) for name in "ab"})
    frame["y"] = frame["a"] + 0.1 * rng.normal(size=120)
    frame.to_csv(tmp_path / "t.csv", index=False)
    words = ("compare", tmp_path / "t.csv", "--target", "y", "--methods", "map,laplace",
             "--splits", 2, "--epochs", 3, "--reference", "none", "--table")  # fmt: skip
    kept = ("--keep", "best", "--out", tmp_path / "run", "--allow-status")
    logs = tmp_path / "logs"
    code, text = launched(*words, tmp_path / "two.csv", *kept, DOXA_PROCESS_LOGS=str(logs))
    assert code == 0, text
    assert counted(text)("table written to") == counted(text)("saved to") == 1
    shell(*words, tmp_path / "one.csv")
    one, two = (
        pd.read_csv(tmp_path / f"{name}.csv").set_index("method") for name in ("one", "two")
    )
    measured = [name for name in one.columns if "seconds" in name or name == "time_x_map"]
    pd.testing.assert_frame_equal(
        one.drop(columns=measured).loc[two.index], two.drop(columns=measured), rtol=1e-6
    )
    assert sorted(path.name for path in logs.iterdir()) == ["process-0.log", "process-1.log"]
    assert all("has ended" in path.read_text() for path in logs.iterdir())

    folder = tmp_path / "session"
    shared = ("--steps", 20, "--hidden", 4, "--method", "map", "--by", "max_entropy")
    code, text = launched("active", "start", pool, "-t", "kind", "-o", folder, *shared)
    assert code == 0 and counted(text)("6 with a label") == 1, text
    code, text = launched("active", "next", folder, "--count", 2)
    assert code == 0 and counted(text)("2 rows to label") == 1, text
    code, text = launched("active", "label", folder)
    assert code != 0 and counted(text)("error:") == 1, text

    data = tmp_path / "data"
    (data / "uci").mkdir(parents=True)
    x = rng.normal(size=(60, 2))
    index = np.stack([rng.permutation(60) for _ in range(2)])
    np.savez(data / "uci" / "yacht.npz", X=x, y=x[:, :1], train_index=index[:, :50],
             test_index=index[:, 50:])  # fmt: skip
    code, text = launched("bench", "uci", "--data", data, "--sets", "yacht", "--methods",
                          "linear,map", "--out", tmp_path / "results")  # fmt: skip
    assert code == 0 and counted(text)("written to") == 1, text
    lines = (tmp_path / "results" / "uci.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"]["method"] for line in lines] == ["linear", "map"]
