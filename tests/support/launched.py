"""Scripts started by `torchrun`, as groups of processes that a test can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def started(
    script: Path, out: Path, words: str, count: int, **more: str
) -> subprocess.Popen[bytes]:
    """`torchrun` with this number of processes, or one process without it; a group of its own."""
    command = [sys.executable, str(script), str(out), words]
    if count:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command[1:1] = launch
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "DOXA_PROCESS_TIMEOUT": "50", **more,
    }  # fmt: skip
    log = (out / f"log{time.monotonic_ns()}.txt").open("wb")
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True
    )


def finished(process: subprocess.Popen[bytes], out: Path, seconds: float = 60) -> None:
    """Wait for the end of a launch, which must be without an error."""
    try:
        code = process.wait(seconds)
    finally:
        stop(process)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(out.glob("log*.txt")))
    assert code == 0, logs[-4000:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launch, with all of its processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
