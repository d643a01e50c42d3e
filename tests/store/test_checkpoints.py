"""At any instant the newest complete checkpoint can be read."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from doxa.errors import CorruptedArtefact, StoreError
from doxa.store import Checkpoints, read_artefact, write_artefact


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, {"w": torch.full((100,), float(step))}, {"step": step, "loss": math.inf})


def latest_step(path: Path) -> int:
    found = Checkpoints(path).latest()
    assert found is not None
    step, tensors, meta = found
    assert torch.equal(tensors["w"], torch.full((100,), float(step)))
    assert meta == {"step": step, "loss": math.inf}
    return step


def damage(path: Path) -> None:
    file = path / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def test_none_before_the_first_save(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "run").latest() is None
    assert not (tmp_path / "run").exists()
    assert Checkpoints(tmp_path).latest() is None


def test_the_newest_and_the_previous_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "run")
    for step in (10, 20, 30):
        save(checkpoints, step)
        assert latest_step(checkpoints.path) == step
    assert sorted(os.listdir(checkpoints.path)) == ["00000002-step-20", "00000003-step-30"]


def test_a_damaged_one_is_skipped_and_the_good_one_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Checkpoints(tmp_path)
    save(writer, 1)
    save(writer, 2)
    damage(tmp_path / "00000002-step-2")
    with caplog.at_level(logging.WARNING, logger="doxa"):
        assert latest_step(tmp_path) == 1
    assert "00000002-step-2" in caplog.text
    resumed = Checkpoints(tmp_path)
    resumed.latest()
    save(resumed, 2)  # the same step again, as a new file
    assert sorted(os.listdir(tmp_path)) == ["00000001-step-1", "00000003-step-2"]
    assert latest_step(tmp_path) == 2


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1)
    damage(tmp_path / "00000001-step-1")
    with pytest.raises(CorruptedArtefact, match="every checkpoint"):
        Checkpoints(tmp_path).latest()


def test_an_earlier_step_saved_later_is_the_latest(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 100)
    save(Checkpoints(tmp_path), 5)
    assert latest_step(tmp_path) == 5


def test_two_writers_do_not_lose_each_other(tmp_path: Path) -> None:
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    save(first, 1)
    save(second, 2)
    save(first, 3)  # its next number is taken
    assert latest_step(tmp_path) == 3


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for step in range(4):
        save(Checkpoints(tmp_path), step)
    assert (tmp_path / "notes.txt").exists()
    assert len(os.listdir(tmp_path)) == 3


def test_a_directory_removed_during_the_run_is_made_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    save(checkpoints, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    save(checkpoints, 2)
    assert latest_step(tmp_path / "run") == 2


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        save(Checkpoints(tmp_path / "run"), 1)
    with pytest.raises(StoreError, match="is a file"):
        Checkpoints(tmp_path / "run").latest()


@pytest.mark.parametrize("owner_and_name", [(os, "mkdir"), (os, "fsync"), (os, "rename")])
def test_a_full_disk_costs_only_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner_and_name: tuple[Any, str]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*owner_and_name, full)
        with pytest.raises(StoreError, match="disk is full"):
            save(checkpoints, 3)
    assert sorted(os.listdir(tmp_path)) == ["00000001-step-1", "00000002-step-2"]
    save(checkpoints, 3)
    assert latest_step(tmp_path) == 3


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="meta"):
        Checkpoints(tmp_path).save(1, {}, {"x": object()})
    assert os.listdir(tmp_path) == []


def test_saving_one_megabyte_is_cheap(tmp_path: Path) -> None:
    """About 5 ms on a virtual disk; the bound only catches a change of kind, not of machine."""
    checkpoints = Checkpoints(tmp_path)
    tensors = {f"w{i}": torch.zeros(26_215) for i in range(10)}  # 1 MiB
    times = []
    for step in range(15):
        start = time.perf_counter()
        checkpoints.save(step, tensors, {"loss": [0.1] * 1000})
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 0.25


WRITER = """
import sys, torch
from doxa.store import Checkpoints, write_artefact
checkpoints = Checkpoints(sys.argv[1] + "/checkpoints")
found = checkpoints.latest()
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    tensors = {str(i): torch.full((20_000,), float(step)) for i in range(4)}
    checkpoints.save(step, tensors, {"step": step})
    print("checkpoint", step, flush=True)
    write_artefact(sys.argv[1] + "/artefact", tensors, {"step": step})
    print("artefact", step, flush=True)
"""


@pytest.mark.slow
def test_kill_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """What a writer said it had written is there, whole, after any kill; or something newer."""
    moments = random.Random(0)
    source = str(Path(sys.modules["doxa.store"].__file__ or "").parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    said = {"checkpoint": 0, "artefact": 0}
    for _ in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        whole = rest.rpartition("\n")[0]  # a kill may cut the last line
        said |= {kind: int(step) for kind, step in map(str.split, whole.splitlines())}
        found = Checkpoints(tmp_path / "checkpoints").latest()
        stored = {"checkpoint": found[1:]} if found is not None else {}
        if said["artefact"] or (tmp_path / "artefact").exists():
            stored["artefact"] = read_artefact(tmp_path / "artefact")
        for kind, step in said.items():
            assert kind in stored or step == 0
        for kind, (tensors, meta) in stored.items():
            assert said[kind] <= meta["step"] <= stored["checkpoint"][1]["step"]
            assert all(bool((value == meta["step"]).all()) for value in tensors.values())
            said[kind] = meta["step"]
    assert min(said.values()) > 20
    Checkpoints(tmp_path / "checkpoints").save(said["checkpoint"] + 1, {}, {})
    write_artefact(tmp_path / "artefact", {}, {})
    assert len(os.listdir(tmp_path / "checkpoints")) == 2  # what killed writers left is gone
    assert sorted(os.listdir(tmp_path)) == ["artefact", "checkpoints"]
