"""Benchmark cells are computed once, kept with their circumstances, and survive bad files."""

from __future__ import annotations

import json
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


def test_a_cell_is_computed_once_and_says_how(tmp_path: Path) -> None:
    store = Store(tmp_path)
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


@pytest.mark.parametrize("text", ["", "{", '{"key": {}, "result": 1}', "[]"])
def test_a_spoiled_file_is_computed_again(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.cell(KEY, make)
    store.path(KEY).write_text(text)
    assert store.get(KEY) is None
    assert store.cell(KEY, make) == {"value": 1.0}
    assert CALLS == 2


def test_keys_that_differ_anywhere_have_their_own_files(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = {store.path(KEY | {"seed": seed}) for seed in range(100)}
    assert len(paths) == 100
    assert all(path.parent == tmp_path for path in paths)  # no name escapes the folder


def test_results_are_plain_json(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.cell(KEY, lambda: {"a": torch.ones(2), "b": np.float32(2), "c": float("nan"), "d": (1,)})
    assert json.loads(store.path(KEY).read_text())["result"] == {
        "a": [1.0, 1.0], "b": 2.0, "c": None, "d": [1],
    }  # fmt: skip
    assert plain({1: float("inf")}) == {"1": None}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_known_is_left_and_nothing_finished_is_lost(tmp_path: Path, jobs: int) -> None:
    store = Store(tmp_path)
    store.put(KEY, {"value": -1.0}, 0.0)
    tasks = [
        Task(KEY, fail),
        Task(KEY | {"method": "b"}, fail),
        Task(KEY | {"method": "c"}, make, {"value": 2.0}),
        Task(KEY | {"method": "d"}, refuse),
    ]
    said: list[str] = []
    with pytest.raises(DataError, match=r"1 cells failed, the first t a b/c b 0: a fault"):
        compute(tasks, store, jobs, said.append)
    assert said[0] == "1 of 4 cells are known, 3 to go"
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
        f"    compute([task], Store({str(tmp_path)!r}), jobs=2)\n"
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
