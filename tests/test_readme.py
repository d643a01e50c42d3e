"""The README's first snippet, as pasted: it runs, and what it prints is good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_first_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        exec(compile(found[1], "README.md", "exec"), names)  # what a newcomer pastes
    posterior, p, y = (names[name] for name in ("posterior", "p", "y"))
    assert posterior.status == "ok"  # type: ignore[attr-defined]
    scores = names["doxa"].evaluate.metrics(p, y[400:])  # type: ignore[attr-defined, index]
    # Noise 0.3 has −0.2 nats a row at best, a constant about −1.3; 95 % intervals of 100 rows hold
    # 88 or fewer by chance once in two hundred times.
    assert scores["log_likelihood"] > -0.9 and scores["coverage"] > 0.88
    assert (tmp_path / "run" / "meta.json").exists()
