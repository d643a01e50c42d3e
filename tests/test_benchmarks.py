"""Benchmarks keep up with the library: each can be imported, and one that reaches inside is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
OWN = {"doxa", "benchmarks", *(path.stem for path in FOLDER.rglob("*.py"))}

IMPORT_ALL = """
import importlib.util, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        print("missing", path.name, error.name)
    except Exception as error:
        print("failed", path.name, type(error).__name__, error)
    sys.path.pop(0)
"""


def test_every_benchmark_can_be_imported() -> None:
    """Except for a peer that is not installed here. In a process of its own: they set threads."""
    paths = [str(path) for path in sorted(FOLDER.rglob("*.py")) if path.name != "__main__.py"]
    assert len(paths) > 40
    out = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *paths], capture_output=True, text=True, cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(FOLDER / "peers")},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    lines = [line.split(maxsplit=3) for line in out.stdout.splitlines()]
    wrong = [" ".join(line) for line in lines if line[0] == "failed" or line[2] in OWN]
    assert not wrong, "\n".join(wrong)


def test_a_leapfrog_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from gpu_leapfrog import doxa_steps

    found = doxa_steps("cpu", chains=2, steps=2, repeats=1, modes=("traced",))
    assert set(found["modes"]) == {"traced"} and found["modes"]["traced"]["best"] > 0
