"""Ambiguity gives entropy without mutual information, distance gives both."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_kinds_of_doubt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_kinds_of_doubt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_split_tells_ambiguity_from_distance(example: ModuleType, tmp_path: Path) -> None:
    posterior = example.fitted(draws=50, burn_in=100, leapfrog=20)
    found = example.doubt(posterior)
    entropy = found.ambiguity + found.disagreement
    # both places are doubtful: more than 80 % of a coin toss
    assert (entropy > 0.8 * math.log(2)).all() and (entropy <= math.log(2) + 1e-5).all()
    ambiguous, far = (found.disagreement / entropy).tolist()
    assert ambiguous < 0.1 and far > 0.4
    example.draw(posterior, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000
