"""What is public is what docs/versions.md lists, and a public module shows nothing else."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import doxa

PAGE = Path(__file__).resolve().parents[1] / "docs" / "versions.md"


def listed() -> list[str]:
    """The modules that the page names as public; `doxa.fit` is a function, whose module hides."""
    part = (
        PAGE.read_text(encoding="utf-8").partition("## What is public\n")[2].partition("\n## ")[0]
    )
    names = set(re.findall(r"`(doxa\.[a-z._]+)`", part)) - {"doxa.__all__", "doxa.store.register"}
    return sorted({*names, "doxa.fit"})


def module(name: str) -> ModuleType:
    if name == "doxa.transforms":
        return doxa.transforms
    importlib.import_module(name)
    return sys.modules[name]


def test_the_page_lists_modules() -> None:
    assert {"doxa.evaluate", "doxa.decide.design", "doxa.selection", "doxa.method"} <= {*listed()}
    assert len(listed()) >= 20


@pytest.mark.parametrize("name", listed())
def test_a_public_module_shows_its_names_and_nothing_else(name: str) -> None:
    found = module(name)
    public: list[str] = found.__all__
    assert dir(found) == sorted(set(public))
    assert not [each for each in public if each.startswith("_") or not hasattr(found, each)]
    star: dict[str, Any] = {}
    exec(f"from {found.__name__} import *", star)
    assert star.keys() - {"__builtins__"} == set(public)


def test_the_front_page_shows_its_names() -> None:
    assert set(doxa.__all__) <= set(dir(doxa))
    assert not [name for name in doxa.__all__ if not hasattr(doxa, name)]


def test_every_name_is_there_after_a_bare_import() -> None:
    """`import doxa` imports nothing by itself: names and modules come when they are used."""
    script = "import doxa\nfor name in [*dir(doxa), 'optim', 'posterior']: getattr(doxa, name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
