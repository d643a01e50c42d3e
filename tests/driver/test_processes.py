"""Several processes make one fit: the same bits, errors that reach all, kills, and pauses.

Quick tests have threads in place of processes, with a store of their own. The slow ones start
`torchrun` and kill what they start; every wait has an end.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import finished, stop
from launched import started as started_script
from rank_threads import Ranks, ranks_of
from several_processes import CASES, divided, facts, fitted

import doxa
from doxa import store
from doxa.driver import loop, processes
from doxa.errors import MethodError, ProcessError, StoreError
from doxa.method import Stage

log = logging.getLogger(__name__)
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "several_processes.py"
started = partial(started_script, SCRIPT)


# -- threads in place of processes


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return ranks_of(monkeypatch)


def test_every_process_has_the_same_posterior(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    ranks: Ranks, what: str, more: Callable[[int], dict[str, Any]]
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


def test_an_error_in_a_block_reaches_every_process(ranks: Ranks) -> None:
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


@store.register("slow in a block, of tests/driver/test_processes.py")
@dataclass(frozen=True)
class Slow(doxa.MAP):
    """Its step with member 0 takes a while; that with member 3 is an error of doxa."""

    def stages(self, run: Any) -> Any:
        def step(run: Any, state: Any, batch: Any, clock: Any) -> Any:
            if 3 in run.members:
                assert busy.wait(20)
                raise MethodError("the fuse has blown")
            busy.set()
            slow_steps.append(1)
            time.sleep(0.01)
            return state, {"loss": state["theta"].sum(1) * 0}

        yield Stage("slow", step, 2500)


slow_steps: list[int] = []
busy = threading.Event()


def test_an_error_in_a_block_reaches_a_process_that_trains(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the end of its own block: within a second, of the twenty-five that this takes. It is
    of the same type, and what the block has done is in a checkpoint."""
    monkeypatch.setattr(loop, "LOOK", 0.05)
    x, y = torch.randn(80, 2), torch.randn(80)
    net = doxa.nets.mlp(2, 1, (8,))
    found = ranks(lambda rank: doxa.fit(
        net, (x, y), Slow(), members=4, block_size=2, engine="stack:eager", validation=None,
        checkpoint=tmp_path / "run",
    ))  # fmt: skip
    assert len(slow_steps) < 2000
    assert all(isinstance(error, MethodError) for error in found), found
    assert [isinstance(error, ProcessError) for error in found] == [False, False]
    first, second = map(str, found)
    assert second == "the fuse has blown"
    assert "process 1 of 2 failed in block 00002-00004: MethodError: the fuse has blown" in first
    assert "This is process 0" in first
    begun = list((tmp_path / "run" / "blocks" / "00000-00002").glob("free-*/*-step-*"))
    assert begun
    logs = [(tmp_path / "run" / f"process-{rank}.log").read_text() for rank in range(2)]
    assert "block 00000-00002 begins" in logs[0] and "ends with MethodError" in logs[0]
    assert "block 00002-00004 begins" in logs[1] and "raise MethodError" in logs[1]
    assert "has ended" not in "".join(logs)


def test_all_raise_the_type_of_the_first_error(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what catches it goes on alike in every process, and the next call works."""
    turn = threading.Event()
    fail = processes.World._fail

    def told(self: processes.World, error: BaseException) -> Any:
        found = fail(self, error)
        turn.set()
        return found

    @processes.together
    def failing(rank: int) -> None:
        if rank == 0:
            raise MethodError("one")
        assert turn.wait(20)
        raise StoreError("another")

    def call(rank: int) -> Any:
        with pytest.raises(MethodError) as caught:
            failing(rank)
        return str(caught.value), fitted("ensemble", runs=None).diagnostics.processes["count"]

    monkeypatch.setattr(processes.World, "_fail", told)
    found = ranks(call)
    assert found[0] == ("one", 2), found
    assert "process 0 of 2 failed: MethodError: one. This is process 1" in found[1][0]


def test_results_that_differ_are_an_error_that_names_the_process(ranks: Ranks) -> None:
    """What follows the blocks is computed by each process: here with a constant of its own."""
    own = threading.local()

    @store.register("of two minds, of tests/driver/test_processes.py")
    @dataclass(frozen=True)
    class Different(doxa.MAP):
        def finish(self, run: Any, state: Any, kept: Any) -> Any:
            state = {**state, "theta": state["theta"] + own.rank}
            return super().finish(run, state, kept)

    x, y = torch.randn(80, 2), torch.randn(80)
    net = doxa.nets.mlp(2, 1, (8,))

    def call(rank: int) -> Any:
        own.rank = 1e-6 * (rank == 2)
        return doxa.fit(
            net, (x, y), Different(), members=3, steps=3, block_size=1, validation=None
        )  # fmt: skip

    for error in ranks(call, 3):
        assert isinstance(error, ProcessError), error
        assert "the posterior differs" in str(error) and "process 2 from process 0" in str(error)
        assert "versions of torch" in str(error)


def test_a_callback_may_fit_and_save(ranks: Ranks, tmp_path: Path) -> None:
    """A block is trained by one process, so that what its callbacks do is of that process only:
    they wait for nobody."""
    made: list[str] = []

    def look(step: int, info: Any) -> None:
        if step == 1:
            inner = fitted("ensemble", runs=None, steps=2, validation=None)
            assert inner.diagnostics.processes is None
            inner.save(tmp_path / f"inner-{info.block}")
            made.append(f"block {info.block} of {info.blocks}: {info.members}")

    def call(rank: int) -> Any:
        fitted("ensemble", runs=None, steps=2, validation=None)  # from here on, process 0 saves
        return facts(fitted("ensemble", runs=None, callbacks=[look], validation=None))

    found = ranks(call)
    assert found[0] == found[1] and found[0]["blocks"] == 3, found
    assert sorted(made) == [
        f"block {i} of 3: [(0, {2 * i}), (0, {2 * i + 1})]" for i in range(3)
    ]  # fmt: skip
    assert len(list(tmp_path.glob("inner-*/meta.json"))) == 3


def test_snapshots_are_shown_by_the_process_that_trains(ranks: Ranks) -> None:
    """One block has all members; every process is shown the result."""
    shown: list[tuple[int, int, bool, int]] = []

    def call(rank: int) -> Any:
        see = doxa.Snapshots(
            lambda s: shown.append((rank, s.step, s.last, s.posterior.members)), steps=[10]
        )
        return facts(fitted("ensemble", runs=None, callbacks=[see], block_size=1, validation=None))

    found = ranks(call)
    assert found[0] == found[1] and found[0]["blocks"] == 1, found
    assert [(step, members) for _, step, last, members in shown if not last] == [(10, 6)]
    assert sorted((rank, members) for rank, _, last, members in shown if last) == [(0, 6), (1, 6)]


@pytest.mark.parametrize("function, calls", [("fsync", 3), ("mkdir", 5), ("rename", 2)])
def test_a_full_disk_is_an_error_in_every_process(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, calls: int
) -> None:
    """From some call on process 1 can write nothing. Both raise a `StoreError`, no result is
    published in part, and the same call goes on when there is space again."""
    alone = facts(fitted("ensemble", runs=None, validation=None))
    own = threading.local()

    def call(rank: int) -> Any:
        own.rank = rank
        return facts(fitted("ensemble", runs=None, validation=None, checkpoint=tmp_path / "run",
                            checkpoint_every=0))  # fmt: skip

    real, left = getattr(os, function), itertools.count()

    def refuse(*args: Any, **more: Any) -> Any:
        if getattr(own, "rank", 0) == 1 and next(left) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, function, refuse)
        found = ranks(call)
    assert next(left) > calls
    for error in found:
        assert isinstance(error, StoreError), found
        assert "disk is full" in str(error)
    assert "process 1 of 2 failed" in str(found[0])
    for result in tmp_path.glob("run/blocks/*/result"):
        store.read_artefact(result)  # complete: its checksums are right
    assert not list(tmp_path.glob("run/blocks/*/lease"))
    assert [one["hash"] for one in ranks(call)] == [alone["hash"]] * 2


def test_an_error_before_the_fit_reaches_every_process(ranks: Ranks) -> None:
    found = ranks(lambda rank: fitted("ensemble", seed=-1 if rank else 0, runs=None, lr=None))
    assert all(isinstance(error, doxa.errors.DoxaError) for error in found), found
    assert isinstance(found[0], ProcessError | MethodError)


def test_a_process_that_does_not_call_is_named(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "TIMEOUT", 0.3)
    found = ranks(lambda rank: fitted("ensemble", runs=None) if rank == 0 else None)
    assert isinstance(found[0], ProcessError)
    assert "no answer from process 1" in str(found[0])


def test_several_machines_need_a_folder(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    names = itertools.cycle(["one", "two"])
    monkeypatch.setattr(processes.socket, "gethostname", lambda: next(names))  # type: ignore[attr-defined]
    for error in ranks(lambda rank: fitted("ensemble", runs=None)):
        assert isinstance(error, ProcessError)
        assert "pass checkpoint=" in str(error)


def test_calls_may_be_of_each_process_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert all(one["there"] for one in found)
    _check_cases(alone, found)
    for one in found:
        assert "the settings differs" in one["errors"][0]
        assert one["errors"][1]
        assert one["seconds"] < 50


def _check_cases(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Equal hashes; and a method that shares its members was trained by several processes."""
    for case, own in alone.items():
        by = found[0][case]["by"]
        for one in found:
            assert one[case]["hash"] == own["hash"], case
            assert one[case]["by"] == by
        assert own["blocks"] == len(by) == (6 if divided(case) else 1), case
        log.info("%s: blocks of each process: %s", case, Counter(by))
        assert len(set(by)) > 1 or not divided(case), f"{case}: one process trained all blocks"


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 3])
def test_all_methods_by_any_number_of_processes(tmp_path: Path, count: int) -> None:
    alone = {}
    for row in doxa.methods():
        try:
            alone[row.name] = facts(fitted(row.name))
        except doxa.errors.MissingExtra as error:
            log.info("%s is not compared: %s", row.name, error)
    assert len(alone) > 20
    finished(started(tmp_path, ",".join(alone), count), tmp_path, 1200)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    _check_cases(alone, found)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process(tmp_path: Path) -> None:
    """Of two processes, the disk is full for one. Both end with a `StoreError`, and the same
    command goes on later, to the result of one process."""
    process = started(tmp_path, "full", 2, FULL="12")
    finished(process, tmp_path, 120)
    errors = [json.loads((tmp_path / f"{rank}.json").read_text())["error"] for rank in range(2)]
    assert all(error.startswith("StoreError") and "disk is full" in error for error in errors)
    assert "process 1 of 2 failed in block" in errors[0]
    for result in tmp_path.glob("run/blocks/*/result"):
        store.read_artefact(result)
    finished(started(tmp_path, "full", 2), tmp_path, 120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    plain = facts(fitted("ensemble", runs=None, validation=None))
    assert [one["hash"] for one in found] == [plain["hash"]] * 2


@pytest.mark.parametrize(
    "kills",
    [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.matrix)],
)
def test_kills_cost_nothing_but_time(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments, and the same command again. The results are those of a fit that
    nobody killed."""
    draw, interrupted = random.Random(0), 0
    for kill in range(kills):
        process = started(tmp_path, "killed", 0, STEPS="8000")
        claimed = partial(_has_a_lease, tmp_path, process.pid)
        assert _waited(lambda c=claimed, p=process: c() or p.poll() is not None, 80)
        time.sleep(7.5 / kills * draw.random())
        alive = process.poll() is None
        stop(process)
        done, begun = (
            sorted(path.name for path in tmp_path.glob(f"run/blocks/{what}"))
            for what in ("*/result", "*/*/*-step-*")
        )
        log.info("kill %d: %d results, checkpoints %s", kill, len(done), begun)
        interrupted += alive and bool(begun)
    assert interrupted >= 2 * kills / 5
    finished(started(tmp_path, "killed", 0, STEPS="8000"), tmp_path, 600)
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
