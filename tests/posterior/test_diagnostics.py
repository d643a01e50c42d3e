"""The record of a fit: typed attributes, a mapping, the same after saving, and documented whole."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa.errors import StoreError
from doxa.posterior import Diagnostics
from doxa.posterior.saving import read_record

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "posterior_diagnostics.md").read_text(encoding="utf-8")


def fitted(method: Any = "deep-ensemble", **options: Any) -> Any:
    x = torch.linspace(-2, 2, 40)[:, None]
    return doxa.fit(
        doxa.nets.mlp(1, 1, (8,)), (x, torch.sin(2 * x)), method, steps=30, members=2, **options
    )


def test_attributes_are_the_entries(tmp_path: Path) -> None:
    posterior = fitted(validation=0.25)
    found = posterior.diagnostics
    for name in Diagnostics.fields():
        assert getattr(found, name) == found.get(name)
    assert found.steps == found["steps"] > 0 and found.rows == 30
    assert found.held_out is not None and found.held_out["rows"] == 10
    assert found.stopping is not None and len(found.stopping["kept_step"]) == 2
    assert found.own == {}
    posterior.save(tmp_path / "p")
    again = doxa.load(tmp_path / "p").diagnostics
    assert type(again) is Diagnostics and again == found
    assert json.loads(json.dumps(found)) == found


def test_an_entry_that_a_fit_lacks_is_none_and_the_others_are_the_methods_own() -> None:
    found = fitted(doxa.SWAG(rank=2, cycle=2), validation=None).diagnostics
    assert found.held_out is None and found.stopping is None and "held_out" not in found
    assert set(found.own) == {"points"}
    assert "points" in found | {"more": 1}


def test_a_wrong_type_in_an_artefact_is_refused() -> None:
    plain: dict[str, Any] = {"status": "ok"}
    for name, value in {"engine": 3, "stopping": [], "warnings": "no", "mode": 1}.items():
        with pytest.raises(StoreError, match=name):
            read_record(plain | {"diagnostics": {name: value}}, "", {})
    assert type(read_record(plain | {"diagnostics": {}}, "", {}).diagnostics) is Diagnostics


def rows(heading: str) -> dict[str, str]:
    """The first and last cells of the table rows under a heading."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {each[0]: each[-1] for each in cells}


def test_the_page_has_every_attribute_with_its_docstring() -> None:
    shown = {name.strip("`"): text for name, text in rows("Of every fit").items()}
    scores = {"rows", *doxa.posterior.HeldOut.__annotations__}
    assert {k: v for k, v in shown.items() if k not in scores} == {
        k: v for k, v in Diagnostics.fields().items() if k not in scores
    }
    assert scores <= shown.keys()


def test_the_page_has_every_entry_of_a_method() -> None:
    """Entries that the source assigns by name, and those of a kernel's `report`."""
    assigned = re.compile(r"""diagnostics\["([^"]+)"\] = """)
    found: set[str] = set()
    for path in (ROOT / "src" / "doxa").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(assigned.findall(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "report":
                for inner in ast.walk(node):
                    keys = inner.keys if isinstance(inner, ast.Dict) else []
                    found |= {k.value for k in keys if isinstance(k, ast.Constant)}
    found -= {"loss", "log_density"}  # of the `report` of a step, which is no diagnostic
    shown = set(re.findall(r"`([^`]+)`", " ".join(rows("Of a method"))))
    assert len(found) > 20
    assert found - shown - set(Diagnostics.fields()) == set()
