"""kill -9 at fifty random moments: every checkpoint readable, every result bit-identical.

Each of four methods runs in processes that are killed, again and again, somewhere between their
start and their end; about half of a run's time goes into writing checkpoints, so many kills fall
into one. A process that comes to its end is compared with a run that was left alone, and the next
one starts over.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from doxa.store import Checkpoints, read_artefact

WORKER = Path(__file__).with_name("worker.py")
KILLS = 50
METHODS = ("map", "deep-ensemble", "mean-field", "hmc")


@dataclass
class Victim:
    """One method's runs, killed and resumed."""

    name: str
    folder: Path
    kills: int
    steps: list[int] = field(default_factory=list)  # where the checkpoint stood after each kill
    finished: int = 0
    abandoned: int = 0  # temporary folders that a kill left behind

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, checkpoints: Path, out: Path) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, str(WORKER), self.name, str(checkpoints), str(out)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def run(self) -> Victim:
        process = self.start(self.folder / "alone", self.folder / "expected")
        began = time.monotonic()
        assert process.wait() == 0
        length = time.monotonic() - began
        moments = random.Random(self.name)
        while len(self.steps) < self.kills:
            process = self.start(self.checkpoints, self.folder / "out")
            if moments.random() < 0.8:  # most kills fall among the steps, the rest anywhere
                assert process.stdout is not None
                process.stdout.readline()
            try:  # about six kills a run, and now and then one that comes too late
                process.wait(moments.uniform(0.0, length / 3))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.inspect()
            else:
                self.finish(process)
        process = self.start(self.checkpoints, self.folder / "out")
        process.wait()
        self.finish(process)
        return self

    def inspect(self) -> None:
        """After a kill: everything that carries a checkpoint's name is whole."""
        latest = Checkpoints(self.checkpoints).latest()
        self.steps.append(0 if latest is None else latest.step)
        if not self.checkpoints.exists():
            return
        for path in self.checkpoints.iterdir():
            if path.name.startswith("."):
                self.abandoned += 1
            elif path.name != "draws":  # theirs is read by the run that goes on with it
                read_artefact(path)

    def finish(self, process: subprocess.Popen[str]) -> None:
        assert process.returncode == 0
        expected, found = (read_artefact(self.folder / n)[0] for n in ("expected", "out"))
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert value.numpy().tobytes() == found[key].numpy().tobytes(), (self.name, key)
        shutil.rmtree(self.checkpoints)
        shutil.rmtree(self.folder / "out")
        self.finished += 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="kill -9 is POSIX's")
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    shares = [KILLS // len(METHODS) + (i < KILLS % len(METHODS)) for i in range(len(METHODS))]
    victims = [Victim(n, tmp_path / n, k) for n, k in zip(METHODS, shares, strict=True)]
    for victim in victims:
        victim.folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(Victim.run, victims))
    assert sum(len(victim.steps) for victim in done) == KILLS
    assert all(victim.finished > 0 for victim in done)
    assert sum(step > 0 for victim in done for step in victim.steps) > KILLS // 3
