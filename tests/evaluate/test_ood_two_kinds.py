"""Ambiguity gives entropy without mutual information, distance gives both."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
from examples import load


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("two_kinds_of_doubt")


@pytest.mark.slow
def test_the_split_tells_ambiguity_from_distance(example: ModuleType, tmp_path: Path) -> None:
    posterior = example.fitted(draws=50, burn_in=100, leapfrog=20)
    found = example.uncertainty(posterior)
    entropy = found.ambiguity + found.disagreement
    # both places are uncertain: more than 80 % of a coin toss
    assert (entropy > 0.8 * math.log(2)).all() and (entropy <= math.log(2) + 1e-5).all()
    ambiguous, far = (found.disagreement / entropy).tolist()
    assert ambiguous < 0.1 and far > 0.4
    example.draw(posterior, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
