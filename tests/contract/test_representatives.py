"""Every method is tested by `.ci/run` under every contract, in at least one variant.

`.ci/run` leaves most variants of the contract tests to `make test-matrix`. These tests collect this
folder as pytest does, and select with the expressions of the Makefile.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fast import trains

import doxa

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MARKERS = ("slow", "data", "gpu", "matrix")

# Modules about a user's network: methods that bring their own functions have no place in them.
ABOUT_NETWORKS = {
    "test_batch_norm", "test_buffers", "test_engines", "test_networks", "test_prior",
    "test_subset", "test_validation",
}  # fmt: skip

COLLECT = """
import json, sys
import pytest

class Listing:
    def pytest_collection_finish(self, session):
        found = []
        for item in session.items:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            of = [(c.name, c.device) for c in params.values() if type(c).__name__ == "Case"]
            of += [(params["name"], "cpu")] if "name" in params else []
            marks = sorted({mark.name for mark in item.iter_markers()})
            found += [(item.path.stem, item.originalname, *each, marks) for each in of]
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)

options = ["--collect-only", "-qq", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, sys.argv[2]], plugins=[Listing()]))
"""


class Collected(NamedTuple):
    """A test of one method, as pytest collects it."""

    module: str
    test: str
    method: str
    device: str
    marks: list[str]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[Collected]:
    """All contract tests of methods on the CPU, whatever this run of pytest selects."""
    listing = tmp_path_factory.mktemp("collected") / "listing.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-c", COLLECT, str(listing), str(HERE)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    every = [Collected(*one) for one in json.loads(listing.read_text(encoding="utf-8"))]
    return [one for one in every if one.device == "cpu"]


def expression(target: str) -> str:
    """What a target of the Makefile selects with `-m`."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None, f"the Makefile has no target {target}"
    variable = re.search(r'pytest .*-m "\$\((\w+)\)"', recipe[1])
    assert variable is not None, f"{target} selects no tests"
    value = re.search(rf"^{variable[1]} := (.*)$", text, re.MULTILINE)
    assert value is not None
    return value[1]


def selects(target: str, marks: Any) -> bool:
    return bool(eval(expression(target), {}, {name: name in marks for name in MARKERS}))


def ci_targets() -> list[str]:
    """The targets of tests that `.ci/run` makes."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    return re.findall(r"^make (test\S*)$", text, re.MULTILINE)


def in_ci(collected: list[Collected]) -> list[Collected]:
    targets = ci_targets()
    return [one for one in collected if any(selects(t, one.marks) for t in targets)]


def test_every_method_has_a_representative_in_each_module(collected: list[Collected]) -> None:
    found = defaultdict(set)
    for one in in_ci(collected):
        found[one.module].add(one.method)
    modules = {path.stem for path in HERE.glob("test_*.py")} - {Path(__file__).stem}
    assert set(found) == modules
    for module in sorted(modules):
        rows = [row for row in doxa.methods() if trains(row) or module not in ABOUT_NETWORKS]
        missing = {row.name for row in rows} - found[module]
        assert not missing, f"{module}: `.ci/run` tests nothing of {sorted(missing)}"


def test_every_method_has_a_representative_under_each_test(collected: list[Collected]) -> None:
    """Of all methods that the whole matrix has under it."""
    every, kept = (
        {(one.module, one.test, one.method) for one in chosen}
        for chosen in (collected, in_ci(collected))
    )
    missing = sorted("::".join(one) for one in every - kept)
    assert not missing, f"`make test-matrix` alone has {missing[:10]}, {len(missing)} in all"


def test_the_matrix_is_not_in_ci(collected: list[Collected]) -> None:
    """Else the representatives would stand for nothing."""
    assert len(in_ci(collected)) < 0.75 * len(collected)


def test_a_method_that_is_quick_needs_no_other_representative(collected: list[Collected]) -> None:
    """Under each test the slow suite has only what the quick one has not."""
    quick, slow = (
        {(one.module, one.test, one.method) for one in collected if selects(target, one.marks)}
        for target in ("test", "test-slow")
    )
    assert not quick & slow


def test_each_test_is_in_one_suite() -> None:
    assert ci_targets() == ["test", "test-slow"]
    for count in range(len(MARKERS) + 1):
        for marks in itertools.combinations(MARKERS, count):
            suites = [t for t in ("test", "test-slow", "test-matrix") if selects(t, marks)]
            assert len(suites) == 1, f"{marks}: {suites}"
