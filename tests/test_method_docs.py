"""Every method is in the README's table and on the page that its row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
