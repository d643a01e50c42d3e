"""Tables on terminals of any width: every cell of numbers is there whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Column, Table

from doxa.app.options import print_table

NUMBERS = [f"-{k}.4375 ± 0.0{k}28" for k in range(8)]


def printed(width: int) -> str:
    heads = [f"a long header {k}" for k in range(8)]
    table = Table(
        "method", *heads, Column("status", overflow="fold"), title="scores", caption="end"
    )
    table.add_row("deep-ensemble", *NUMBERS, "diverged: the loss rose; try a smaller learning rate")
    table.add_row("map", *NUMBERS[::-1], "ok", style="bold")
    file = io.StringIO()
    print_table(Console(file=file, width=width), table)
    return file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 250])
def test_no_number_is_cut_or_wrapped(width) -> None:
    text = printed(width)
    assert "…" not in text
    for number in NUMBERS:
        assert text.count(number) == 2
    if width >= 40:  # else the widest pair of columns is wider than that
        assert max(map(len, text.splitlines())) <= width
    assert text.count("scores") == 1 and text.count("end") == 1


def test_one_table_where_there_is_room_and_the_first_column_in_every_part() -> None:
    assert printed(250).count("map") == 1
    narrow = printed(60)
    assert narrow.count("deep-ensemble") == narrow.count("┏") > 1
    words = " ".join(narrow.replace("│", " ").split())
    assert all(word in words for word in ("diverged:", "smaller", "learning"))
