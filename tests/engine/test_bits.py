"""Same seed, same bits: every method in fresh processes, idle and beside two busy loops."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bits.py"


@pytest.mark.slow
def test_every_method_gives_the_same_bits_in_every_process() -> None:
    """Two processes idle, two under load: one hash a case, of eager, recorded and compiled fits."""
    command = [sys.executable, str(SCRIPT), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^.{28} \w+ +[0-9a-f]{16}$", done.stdout, re.MULTILINE)) >= 25
    for mode in ("eager", "traced", "compiled"):
        assert f" {mode} " in done.stdout
