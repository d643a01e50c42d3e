"""The page on out-of-distribution behaviour runs as it stands, and says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doxa.evaluate.ood import FEATURE_SCORES, PREDICTIVE_SCORES
from doxa.evaluate.shifts import SHIFTS

PAGE = (Path(__file__).parents[2] / "docs" / "ood.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    exec(compile(blocks[0], "docs/ood.md", "exec"), names)
    found = dict(re.findall(r"(\w+) +AUROC (\S+)", capsys.readouterr().out))
    assert list(found) == [*list(PREDICTIVE_SCORES)[:4], *FEATURE_SCORES]
    assert float(found["mutual_information"]) > 0.7 and float(found["density"]) > 0.95
    assert float(found["energy"]) < 0.5  # as the page says
    exec(compile(blocks[1], "docs/ood.md", "exec"), names)
    table = names["table"]
    assert isinstance(table, list) and [row["level"] for row in table] == [0, 45, 90]


def test_every_score_and_shift_is_on_the_page() -> None:
    for name in (*PREDICTIVE_SCORES, *FEATURE_SCORES, *SHIFTS):
        assert f"`{name}`" in PAGE
