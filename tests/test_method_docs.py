"""Every method is in the README's table and on the page that its row names, and its settings are in
its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import doxa
from doxa.errors import MissingExtra
from doxa.registry import ROWS, MethodTable, Row

ROOT = Path(__file__).parent.parent
every = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def table() -> list[str]:
    """The README's table of methods: its lines from the head to the first that is no row."""
    head, *_ = MethodTable([]).markdown().splitlines()
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.count(head) == 1, f"README.md needs one table of methods, which begins {head}"
    rest = lines[lines.index(head) :]
    end = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return rest[:end]


@every
def test_the_readme_has_its_line(row: Row) -> None:
    wanted = MethodTable([row]).markdown().splitlines()[-1]
    assert wanted in table(), f"README.md, under 'Choosing a method', needs this line:\n{wanted}"


def test_the_readme_has_the_table_and_nothing_else() -> None:
    wanted = MethodTable(list(ROWS)).markdown().splitlines()
    assert table() == wanted, "README.md: paste what `doxa methods --markdown` prints"


@every
def test_its_page_describes_it(row: Row) -> None:
    where = f"the row of {row.name!r} in src/doxa/registry.py"
    assert row.gives, f"{where} says nothing of what the method gives: add gives='...'"
    assert row.docs, f"{where} names no page: add docs='methods.md', or another page under docs/"
    page = ROOT / "docs" / row.docs
    assert page.is_file(), f"{where} names docs/{row.docs}, which does not exist"
    text = page.read_text(encoding="utf-8")
    named = re.search(rf"`{re.escape(row.name)}`|`{row.class_name}\b", text)
    assert named, f"docs/{row.docs} says nothing of `{row.class_name}`: what is it, when to use it?"


@every
def test_its_docstring_describes_every_setting(row: Row) -> None:
    """As numpydoc entries ("draws, thin : int", or names alone with "As in `SGHMC`."), in its class
    or in a base class."""
    try:
        cls = doxa.get_method(row.name)
    except MissingExtra as error:
        pytest.skip(str(error))
    own = [vars(base).get("__doc__") or "" for base in cls.__mro__ if issubclass(base, doxa.Method)]
    text = "\n".join(inspect.cleandoc(doc) for doc in own)
    missing = [
        field.name for field in dataclasses.fields(cls)
        if not re.search(rf"^(\w+, )*{field.name}(, \w+)*( : .+)?$", text, re.MULTILINE)
    ]  # fmt: skip
    assert not missing, f"the docstring of {cls.__name__} needs entries 'name : type' for {missing}"
