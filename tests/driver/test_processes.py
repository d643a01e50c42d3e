"""Several processes make one fit: the same bits, errors that reach all, kills, and pauses.

Quick tests have threads in place of processes, with a store of their own. The slow ones start
`torchrun` and kill what they start; every wait has an end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import finished, stop
from launched import started as started_script
from several_processes import CASES, facts, fitted
from torch import distributed

import doxa
from doxa import store
from doxa.driver import processes
from doxa.errors import MethodError, ProcessError

log = logging.getLogger(__name__)
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "several_processes.py"
started = partial(started_script, SCRIPT)


# -- threads in place of processes


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function of the rank in several threads, each as if it were a process."""
    own = threading.local()
    kept = distributed.HashStore()
    monkeypatch.setattr(processes, "_store", lambda: kept)
    monkeypatch.setattr(processes, "TIMEOUT", 20.0)
    monkeypatch.setattr(processes, "launched", lambda: getattr(own, "rank", None))
    monkeypatch.setattr(processes, "_calls", _OfThread(own))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def called(function: Callable[[int], Any], size: int = 2) -> list[Any]:
        found: list[Any] = [None] * size

        def call(rank: int) -> None:
            own.rank, own.count = (rank, size), itertools.count()
            try:
                found[rank] = function(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
            assert not thread.is_alive()
        return found

    return called


class _OfThread:
    def __init__(self, own: threading.local) -> None:
        self.own = own

    def __next__(self) -> int:
        number: int = next(self.own.count)
        return number


def test_every_process_has_the_same_posterior(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    alone = facts(fitted("ensemble", runs=None))

    def call(rank: int) -> dict[str, Any]:
        posterior = fitted("ensemble", runs=None)
        posterior.save(tmp_path / "saved")
        assert (tmp_path / "saved" / "meta.json").exists()  # process 0 has written it
        return facts(posterior)

    found = ranks(call)
    assert [one["hash"] for one in found] == [alone["hash"]] * 2
    assert found[0]["by"] == found[1]["by"] and len(found[0]["by"]) == 3
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    "what, more",
    [
        ("the data", lambda rank: {"sample_weight": torch.arange(1.0, 81.0) + rank}),
        ("the network", lambda rank: {"init": "given"}),
        ("the settings", lambda rank: {"lr": 0.01 + 0.01 * rank}),
    ],
)
def test_what_differs_is_named(
    ranks: Callable[..., list[Any]], what: str, more: Callable[[int], dict[str, Any]]
) -> None:
    nets = [doxa.nets.mlp(2, 1, (8,)) for _ in range(2)]
    x, y = torch.randn(80, 2), torch.randn(80)

    def call(rank: int) -> Any:
        return doxa.fit(
            nets[rank], (x, y), "map", members=2, steps=3, block_size=1, **more(rank)
        )  # fmt: skip

    for error in ranks(call):
        assert isinstance(error, ProcessError), error
        assert f"{what} differs" in str(error)
        assert "process 1 from process 0" in str(error)


@store.register("failing in a block, of tests/driver/test_processes.py")
@dataclass(frozen=True)
class Failing(doxa.MAP):
    """Fails in the block of member 3."""

    def init(self, run: Any) -> Any:
        if 3 in run.members:
            raise RuntimeError("the fuse has blown")
        return super().init(run)


def test_an_error_in_a_block_reaches_every_process(ranks: Callable[..., list[Any]]) -> None:
    x, y = torch.randn(80, 2), torch.randn(80)
    net = doxa.nets.mlp(2, 1, (8,))
    found = ranks(
        lambda rank: doxa.fit(net, (x, y), Failing(), members=4, steps=3, block_size=1)
    )  # fmt: skip
    own = [error for error in found if not isinstance(error, ProcessError)]
    others = [error for error in found if isinstance(error, ProcessError)]
    assert len(own) == 1 and "fuse" in str(own[0])
    assert len(others) == 1
    assert "failed in block 00003-00004: RuntimeError: the fuse has blown" in str(others[0])
    assert f"process {found.index(own[0])} of 2" in str(others[0])


def test_an_error_before_the_fit_reaches_every_process(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(lambda rank: fitted("ensemble", seed=-1 if rank else 0, runs=None, lr=None))
    assert all(isinstance(error, doxa.errors.DoxaError) for error in found), found
    assert isinstance(found[0], ProcessError | MethodError)


def test_a_process_that_does_not_call_is_named(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TIMEOUT", 0.3)
    found = ranks(lambda rank: fitted("ensemble", runs=None) if rank == 0 else None)
    assert isinstance(found[0], ProcessError)
    assert "no answer from process 1" in str(found[0])


def test_several_machines_need_a_folder(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = itertools.cycle(["one", "two"])
    monkeypatch.setattr(processes.socket, "gethostname", lambda: next(names))  # type: ignore[attr-defined]
    for error in ranks(lambda rank: fitted("ensemble", runs=None)):
        assert isinstance(error, ProcessError)
        assert "pass checkpoint=" in str(error)


def test_calls_may_be_of_each_process_alone(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.launched() == (1, 2)
    with processes.alone():
        assert processes.launched() is None
    monkeypatch.setenv("DOXA_PROCESSES", "alone")
    assert processes.launched() is None
    assert fitted("ensemble", runs=None).diagnostics.processes is None


# -- processes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_processes_gives_the_same_bits(tmp_path: Path, count: int) -> None:
    """All cases at one start, and errors of different settings after them."""
    process = started(tmp_path, ",".join(CASES), count, errors="1")
    alone = {case: facts(fitted(case)) for case in CASES}
    finished(process, tmp_path, 170)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    for case in CASES:
        for one in found:
            assert one[case]["hash"] == alone[case]["hash"], case
            assert one[case]["by"] == found[0][case]["by"]
            assert one["there"]
        divided = case != "process"
        assert alone[case]["blocks"] == (6 if divided else 1)
        assert len(found[0][case]["by"]) == alone[case]["blocks"]
    by = {case: len(set(found[0][case]["by"])) for case in CASES}
    log.info("processes that trained a block: %s", by)
    assert all(number > 1 for case, number in by.items() if case != "process"), by
    for one in found:
        assert "the settings differs" in one["errors"][0]
        assert one["errors"][1]
        assert one["seconds"] < 50


@pytest.mark.slow
def test_five_kills_cost_nothing_but_time(tmp_path: Path) -> None:
    """SIGKILL at random moments, and the same command again. The results are those of a fit that
    nobody killed."""
    draw, interrupted = random.Random(0), 0
    for kill in range(5):
        process = started(tmp_path, "killed", 0, STEPS="8000")
        claimed = partial(_has_a_lease, tmp_path, process.pid)
        assert _waited(lambda c=claimed, p=process: c() or p.poll() is not None, 80)
        time.sleep(1.5 * draw.random())
        alive = process.poll() is None
        stop(process)
        done, begun = (
            sorted(path.name for path in tmp_path.glob(f"run/blocks/{what}"))
            for what in ("*/result", "*/*/*-step-*")
        )
        log.info("kill %d: %d results, checkpoints %s", kill, len(done), begun)
        interrupted += alive and bool(begun)
    assert interrupted >= 2
    finished(started(tmp_path, "killed", 0, STEPS="8000"), tmp_path, 120)
    found = json.loads((tmp_path / "done.json").read_text())
    plain = fitted("ensemble", runs=None, steps=8000, validation=None, engine="stack:eager")
    assert found["hash"] == facts(plain)["hash"]


@pytest.mark.slow
def test_a_process_that_pauses_past_its_lease_does_no_harm(tmp_path: Path) -> None:
    """Stopped for longer than its lease lasts, its block is trained by another; then it goes on,
    finds the result there, and returns the same posterior."""
    first = started(tmp_path, "killed", 0, STEPS="1500", EXPIRES="2", NAME="first")
    second = None
    try:
        assert _waited(lambda: bool(list(tmp_path.glob("run/blocks/*/lease"))), 50)
        time.sleep(0.5)
        os.killpg(first.pid, signal.SIGSTOP)
        held = list(tmp_path.glob("run/blocks/*/lease"))
        second = started(tmp_path, "killed", 0, STEPS="1500", EXPIRES="2", NAME="second")
        assert _waited((tmp_path / "second.json").exists, 58)
        os.killpg(first.pid, signal.SIGCONT)
        finished(first, tmp_path, 58)
        finished(second, tmp_path, 20)
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                stop(process)
    assert held
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("first", "second"))
    assert one["hash"] == two["hash"]
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("log*.txt"))
    assert "Traceback" not in logs


def _has_a_lease(out: Path, pid: int) -> bool:
    leases = "".join(path.read_text() for path in out.glob("run/blocks/*/lease"))
    return f'"pid": {pid},' in leases


def _waited(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False
