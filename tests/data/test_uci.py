"""Deep ensembles on UCI reach the published log-likelihood: 20 splits × 5 members, one fit."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not os.environ.get("DOXA_DATA"), reason="DOXA_DATA is not set"),
]


def _benchmark():  # type: ignore[no-untyped-def]
    path = Path(__file__).parents[2] / "benchmarks" / "uci.py"
    spec = importlib.util.spec_from_file_location("uci", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["boston_housing", "concrete", "energy", "yacht"])
def test_deep_ensembles_reach_the_published_log_likelihood(name: str) -> None:
    row = _benchmark().deep_ensemble(name)
    published = row["published"][1]
    assert row["splits"] == 20
    assert row["ll_matched"] >= published - 2 * row["ll_matched_se"]
    assert row["ll"] >= published - 2 * row["ll_se"]
    assert row["seconds"] < row["loop_seconds"] / 4  # one stacked fit against a loop over nets
