"""Benchmark cells are computed once, kept with their circumstances, and survive damaged lines."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doxa.app.bench import Store, Task, compute
from doxa.app.bench.cells import plain
from doxa.errors import DataError, MethodError

KEY = {"table": "t", "set": "a b/c", "method": "map", "seed": 0}
CALLS = 0


def make(value: float = 1.0) -> dict[str, Any]:
    global CALLS
    CALLS += 1
    return {"value": value}


def refuse() -> dict[str, Any]:
    raise MethodError("not for this data")


def fail() -> dict[str, Any]:
    raise ZeroDivisionError("a fault")


@pytest.fixture(autouse=True)
def _count() -> None:
    global CALLS
    CALLS = 0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "t.jsonl")


def test_a_cell_is_computed_once_and_records_how(store: Store) -> None:
    assert store.get(KEY) is None
    first = store.cell(KEY, make)
    assert store.cell(KEY, make) == first == {"value": 1.0}
    assert CALLS == 1
    (cell,) = store.cells(table="t")
    assert cell["key"] == KEY
    assert cell["versions"]["torch"] == torch.__version__
    assert cell["machine"]["threads"] == torch.get_num_threads()
    assert cell["seconds"] >= 0
    assert not list(store.cells(table="other"))


@pytest.mark.parametrize(
    "text", ["", "{", '{"key": {}, "result": 1}', '{"key": [1], "result": 1}', "[]", "<<<<<<< ours"]
)
def test_a_damaged_line_is_computed_again_and_the_others_are_kept(store: Store, text: str) -> None:
    store.cell(KEY, make)
    store.put(KEY | {"method": "other"}, {"value": 5.0}, 0.0)
    first, second = store.path.read_text().splitlines()
    assert '"map"' in first
    store.path.write_text(f"{text}\n{second}\n")
    assert store.get(KEY) is None
    assert store.cell(KEY, make) == {"value": 1.0}
    assert CALLS == 2
    assert store.get(KEY | {"method": "other"}) == {"value": 5.0}
    assert len(store.path.read_text().splitlines()) == 2
    damaged = store.path.with_name("t.jsonl.damaged")  # nothing that was there is lost
    assert damaged.exists() == bool(text)
    assert not text or damaged.read_text() == f"{text}\n{second}\n"


def test_a_file_of_bytes_that_are_no_text_is_refused_and_left(store: Store) -> None:
    store.path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"t\.jsonl cannot be read"):
        store.put(KEY, {"value": 1.0}, 0.0)
    assert store.path.read_bytes() == b"\xff\xfe"


def test_keys_that_differ_anywhere_are_different_cells(store: Store) -> None:
    """One line each, in the order of names; the first three parts of a key are in its name."""
    for seed in (3, 1, 2):
        for method in ("b", "a"):
            store.put(KEY | {"seed": seed, "method": method}, {"value": seed}, 0.0)
    store.put(KEY | {"seed": 1, "method": "a"}, {"value": 10}, 0.0)  # replaces
    lines = [json.loads(line) for line in store.path.read_text().splitlines()]
    assert [line["key"]["method"] for line in lines] == ["a"] * 3 + ["b"] * 3
    found = {(c["key"]["method"], c["key"]["seed"]): c["result"]["value"] for c in lines}
    assert found == {
        ("a", 1): 10, ("a", 2): 2, ("a", 3): 3, ("b", 1): 1, ("b", 2): 2, ("b", 3): 3,
    }  # fmt: skip
    assert Store(store.path).get(KEY | {"seed": 1, "method": "a"}) == {"value": 10}


def put_many(path: str, writer: int) -> None:
    for seed in range(25):
        Store(path).put(KEY | {"method": f"m{writer}", "seed": seed}, {"value": seed}, 0.0)


def test_processes_that_write_at_once_lose_no_cell(store: Store) -> None:
    """A reader that has the file already sees what others add, and every line is whole."""
    assert store.get(KEY) is None
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=put_many, args=(str(store.path), i)) for i in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if store.path.exists():
            for line in store.path.read_text().splitlines():
                json.loads(line)
        store.put(KEY, {"value": 1.0}, 0.0)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(list(store.cells(table="t"))) == 3 * 25 + 1
    assert [path.name for path in store.path.parent.iterdir()] == ["t.jsonl"]


def test_results_are_plain_json(store: Store) -> None:
    store.cell(KEY, lambda: {"a": torch.ones(2), "b": np.float32(2), "c": float("nan"), "d": (1,)})
    assert json.loads(store.path.read_text())["result"] == {
        "a": [1.0, 1.0], "b": 2.0, "c": None, "d": [1],
    }  # fmt: skip
    assert plain({1: float("inf")}) == {"1": None}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_known_is_left_and_nothing_finished_is_lost(store: Store, jobs: int) -> None:
    store.put(KEY, {"value": -1.0}, 0.0)
    tasks = [
        Task(KEY, fail),
        Task(KEY | {"method": "b"}, fail),
        Task(KEY | {"method": "c"}, make, {"value": 2.0}),
        Task(KEY | {"method": "d"}, refuse),
    ]
    lines: list[str] = []
    with pytest.raises(DataError, match=r"1 cells failed, the first t a b/c b 0: a fault"):
        compute(tasks, store, jobs, lines.append)
    assert lines[0] == "1 of 4 cells are known, 3 to go"
    assert store.get(KEY) == {"value": -1.0}
    assert store.get(KEY | {"method": "b"}) is None
    assert store.get(KEY | {"method": "c"}) == {"value": 2.0}
    assert store.get(KEY | {"method": "d"}) == {"refused": "not for this data"}


def linger(file: str) -> dict[str, Any]:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)
    return {}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    """Killed, the command cannot tell its workers: they notice."""
    mark = tmp_path / "worker"
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_cells import KEY, linger\n"
        "from doxa.app.bench import Store, Task, compute\n"
        "if __name__ == '__main__':\n"
        f"    task = Task(KEY, linger, {{'file': {str(mark)!r}}})\n"
        f"    compute([task], Store({str(tmp_path / 't.jsonl')!r}), jobs=2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = subprocess.Popen([sys.executable, str(script)])
    until(lambda: mark.exists() and mark.read_text() != "")
    worker = int(mark.read_text())
    command.kill()
    command.wait()
    until(lambda: not Path(f"/proc/{worker}").exists())


def until(holds: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)
