"""Files around the code that repeat what other files say: they agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import doxa

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def job(name: str) -> str:
    """One job of the workflow, as text: no YAML reader is among the dependencies."""
    found = re.search(rf"^  {name}:\n((?:    .*\n|\n)+)", text(".github/workflows/ci.yml"), re.M)
    assert found is not None, f"the workflow has no job {name}"
    return found[1]


def commands(name: str) -> list[str]:
    return re.findall(r"^ +- run: (.*)$", job(name), re.M)


def test_the_workflow_runs_the_parts_of_the_ci_script() -> None:
    parts = re.findall(r"^make .*$", text(".ci/run"), re.M)
    assert len(parts) >= 4
    assert commands("checks") == parts
    assert commands("matrix") == ["make venv", "make test-matrix"]


def test_every_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.M))
    pages = ("README.md", "CONTRIBUTING.md", "docs/versions.md", ".ci/run", "pyproject.toml",
             ".github/workflows/ci.yml", ".github/pull_request_template.md")  # fmt: skip
    for page in pages:
        named = set(re.findall(r"(?:`|^|- run: )make ([a-z][\w-]*)", text(page), re.M))
        assert named <= targets, page


def test_the_hooks_are_the_checks_of_make_lint() -> None:
    hooks = re.findall(r"^ +entry: \.venv/bin/(.*)$", text(".pre-commit-config.yaml"), re.M)
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", text("Makefile"), re.M)
    assert recipe is not None
    checks = re.findall(r"^\t\$\(BIN\)/(\w+(?: (?:check|format))?)", recipe[1], re.M)
    assert hooks == checks == ["ruff check", "ruff format", "mypy"]


def test_there_is_one_version() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    assert doxa.__version__ == version
    assert re.findall(r"^version: (.*)$", text("CITATION.cff"), re.M) == [version]
    sections = re.findall(r"^## \[?([\w.]+)", text("CHANGELOG.md"), re.M)
    assert sections[:2] == ["Unreleased", version]
