"""The Python blocks of the pages that a user reads first: each runs after those before it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
# Names that a page uses without defining them: data, networks and posteriors of its reader.
LINE = """
import torch, doxa
x = torch.linspace(-2, 2, 60)[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1)
net = doxa.nets.mlp(1, 1, hidden=(8,))
data = (x, y)
"""
CLASSES = """
import torch, doxa
x_pool = torch.randn(300, 4)
y_pool = (x_pool[:, 0] + x_pool[:, 1] > 0).long()
pool, x_test, y_test = x_pool[100:], x_pool[:100], y_pool[:100]
net = torch.nn.Sequential(
    torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
)
posterior = doxa.fit(net, (x_test, y_test), "mc-dropout", likelihood="categorical", steps=100)
"""
FITTED = (
    LINE
    + """
x_test, y_test = x[::2] + 0.01, y[::2]
posterior = doxa.fit(net, data, "laplace", standardize=True, steps=200)
"""
)
DENSITY = (
    LINE
    + """
def log_density(p):
    return -0.5 * p["a"].square().sum()

init = {"a": torch.zeros(2)}
"""
)
SETUP = {
    "active": CLASSES, "calibration": "", "design": "", "doctor": FITTED, "evaluate": "",
    "guide": LINE, "many_processes": LINE, "plots": "", "sample": "", "sampling": DENSITY,
    "tables": "", "watch": "",
    "watching_samplers": "",
}  # fmt: skip
SKIPPED = ("peft.", 'output="scores"')  # they need PEFT, and a network with named outputs
FEWER = {
    "budget=300": "budget=40",
    "range(5)": "range(2)",
    "draws=1000": "draws=40",
    "burn_in=1000": "burn_in=50",
    "draws=2000": "draws=20",
}  # quicker


def blocks(page: str) -> list[str]:
    """Fenced blocks of Python, also those inside lists."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.mark.slow
@pytest.mark.parametrize("page", SETUP)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        exec(compile(SETUP[page], f"the setup of {page}", "exec"), names)
        for i, block in enumerate(blocks(page)):
            if any(word in block for word in SKIPPED):
                continue
            for many, few in FEWER.items():
                block = block.replace(many, few)
            exec(compile(block, f"docs/{page}.md, block {i}", "exec"), names)


def test_every_page_has_blocks() -> None:
    assert [page for page in SETUP if not blocks(page)] == []
