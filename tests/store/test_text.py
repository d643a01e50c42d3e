"""A text file is replaced whole, and a failure leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from doxa.errors import StoreError
from doxa.store import write_text


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.md"
    assert write_text(path, "one ½\n") == path
    assert write_text(path, "two\n").read_text(encoding="utf-8") == "two\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.md"]


def test_a_failure_says_why_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_text(tmp_path / "a.md", "kept")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StoreError, match="the disk is full"):
        write_text(path, "lost")
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["a.md"]
    with pytest.raises(StoreError, match="is a file"):
        write_text(path / "below" / "b.md", "x")
