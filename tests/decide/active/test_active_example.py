"""The example, with few of everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import load

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_the_example_draws_its_curves(tmp_path: Path) -> None:
    example = load("active_learning")
    found = example.campaign(seeds=1, budget=30, steps=5, rows=60, progress=False)
    assert {one.by for one in found.learners} == set(example.WAYS)
    assert all([r["labels"] for r in one.curve] == [20, 30] for one in found.learners)
    example.draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
