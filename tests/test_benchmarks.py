"""Benchmarks keep up with the library: each can be imported, and one that reaches inside is run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import mutants

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
MODULES = sorted(path for path in FOLDER.glob("*.py") if path.name[:2] != "__")
PEERS = sorted((FOLDER / "peers").glob("*.py"))  # scripts, which other interpreters run
OWN = {"doxa", *(path.stem for path in [*MODULES, *PEERS])}

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print("missing", name, error.name)
    except Exception as error:
        print("failed", name, type(error).__name__, error)
"""


@pytest.mark.slow
def test_every_benchmark_can_be_imported() -> None:
    """Except for a peer that is not installed here. In a process of its own: they set threads."""
    names = [*(f"benchmarks.{path.stem}" for path in MODULES), *(path.stem for path in PEERS)]
    assert len(names) > 40
    path = os.pathsep.join([str(ROOT / "src"), str(FOLDER / "peers")])
    out = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    lines = [line.split(maxsplit=3) for line in out.stdout.splitlines()]
    wrong = [
        " ".join(line)
        for line in lines
        if line[0] == "failed" or line[2].partition(".")[0] in {*OWN, "benchmarks"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_benchmark_states_what_it_measures_and_its_command(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first, _, rest = text.partition("\n")
    assert first.endswith((".", ":", "?"))
    assert re.search(r"python -m benchmarks\.\w+|python \w+\.py", rest), f"{path.name}: no command"


def test_every_command_that_a_page_or_a_docstring_gives_is_a_module() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    code = [
        path for part in ("src", "examples", "benchmarks") for path in ROOT.glob(f"{part}/**/*.py")
    ]
    named = {
        name
        for path in [*pages, *code]
        for name in re.findall(r"-m\s+benchmarks\.(\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert named - {path.stem for path in MODULES} == {"NAME"}


def test_a_leapfrog_step_is_timed() -> None:
    from benchmarks.gpu_leapfrog import doxa_steps

    found = doxa_steps("cpu", chains=2, steps=2, repeats=1, modes=("traced",))
    assert set(found["modes"]) == {"traced"} and found["modes"]["traced"]["best"] > 0


@pytest.mark.slow
def test_mutants_that_change_nothing_are_in_the_source() -> None:
    """Each is one site: a path or a line that has changed since would be drawn again."""
    found = Counter(site.key() for pool in mutants.sites().values() for site, _ in pool)
    assert {key: found[key] for key in mutants.EQUIVALENT} == dict.fromkeys(mutants.EQUIVALENT, 1)
