"""What the pages name exists: files and folders, modules and names of doxa, imports in examples."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "doxa"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
CODE = [
    p for part in ("src", "tests", "examples", "benchmarks") for p in (ROOT / part).rglob("*.py")
]
WRITTEN = {"run/"}  # by commands that the pages show

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def spans(text: str) -> Iterator[str]:
    """What stands in backticks, outside blocks."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


FILE = r"\.?\w[\w.*-]*(/[\w.*-]+)*(/|\.(py|md|json|toml|txt|png))"
FOLDER = r"(tests|src|docs|examples|benchmarks)(/[\w.*-]+)+"


def paths(text: str) -> Iterator[str]:
    """Files and folders in backticks, also as words of a command."""
    for span in spans(text):
        yield from (word for word in span.split() if re.fullmatch(f"{FILE}|{FOLDER}", word))


def exists(path: str, *bases: Path) -> bool:
    """Under one of some folders; a word in capitals stands for any name."""
    pattern = "/".join("*" if part.isupper() else part for part in path.strip("/").split("/"))
    return any(next(base.glob(pattern), None) is not None for base in bases)


def resolves(dotted: str) -> bool:
    """Whether a name such as doxa.evaluate.shifts.SEVERITIES can be reached by importing."""
    found: Any = importlib.import_module("doxa")
    where = "doxa"
    for name in dotted.split(".")[1:]:
        where = f"{where}.{name}"
        try:
            found = importlib.import_module(where)
        except ImportError:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
    return True


@each_page
def test_every_path_in_backticks_exists(page: Path) -> None:
    named = set(paths(page.read_text(encoding="utf-8"))) - WRITTEN
    assert {path for path in named if not exists(path, ROOT, SOURCE)} == set()


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    own = [link for link in links if not link.startswith(("http", "mailto"))]
    assert [link for link in own if not (page.parent / link).exists()] == []


def test_every_name_of_doxa_in_backticks_exists() -> None:
    """On the pages, and in docstrings and comments."""
    where: dict[str, str] = {}
    for path in [*PAGES, *CODE]:
        for span in spans(path.read_text(encoding="utf-8")):
            for name in re.findall(r"^doxa(?:\.\w+)+", span):
                where[name] = str(path.relative_to(ROOT))
    assert len(where) > 20
    assert {name: path for name, path in where.items() if not resolves(name)} == {}


@each_page
def test_every_import_in_an_example_works(page: Path) -> None:
    lines = re.findall(
        r"^from (doxa[\w.]*) import ([\w, ]+)$", page.read_text("utf-8"), re.MULTILINE
    )
    named = {f"{module}.{name.strip()}" for module, names in lines for name in names.split(",")}
    assert {name for name in named if not resolves(name)} == set()


def test_the_check_sees_what_it_should() -> None:
    text = "`mcmc/sgld.py`, `python benchmarks/walk.py --list`, `tests/mcmc`, `store/` and `x/y`"
    assert list(paths(text)) == ["mcmc/sgld.py", "benchmarks/walk.py", "tests/mcmc", "store/"]
    assert exists("tests/evaluate/test_ood*.py", ROOT) and not exists("point/map.py", ROOT, SOURCE)
    assert resolves("doxa.evaluate.shifts.SEVERITIES") and not resolves("doxa.bench.Store")


def test_the_tour_names_every_part() -> None:
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    parts = {p.name + "/" * p.is_dir() for p in SOURCE.iterdir() if p.name != "__pycache__"}
    assert set(re.findall(r"^\| `([^`/]+/?)` \| [^`]", text, re.MULTILINE)) >= parts
