"""Deep ensembles on UCI reach the published log-likelihood: 20 splits × 5 members, one fit."""

from __future__ import annotations

import os

import pytest

from doxa.app.bench import uci
from doxa.app.bench.uci_tables import COLUMNS, cell

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not os.environ.get("DOXA_DATA"), reason="DOXA_DATA is not set"),
]


@pytest.mark.parametrize(
    "name", ["boston_housing", "concrete", "energy", "wine_quality_red", "yacht"]
)
def test_deep_ensembles_reach_the_published_log_likelihood(name: str) -> None:
    result = cell(uci.data_folder(None), "standard", name, "deep-ensemble", seed=0)
    published = COLUMNS[name]["deep ensemble"][1]
    assert result["splits"] == 20
    for score in ("log_likelihood", "log_likelihood_matched"):
        value = result["scores"][score]
        assert value["mean"] >= published - 2 * value["error"]


def test_the_gap_splits_of_a_real_set_leave_a_gap() -> None:
    data = uci.load(uci.data_folder(None), "naval_propulsion", "gap")
    assert len(data.train) == 14  # two of the sixteen features are constant
    for train, test in zip(data.train, data.test, strict=True):
        assert len(train) + len(test) == len(data.x)
        assert not set(train.tolist()) & set(test.tolist())
