"""The README's blocks, as pasted one after the other: they run, and what they print is good."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
LONG = ("bench", "demo", "serve", "studio")  # minutes, data that is not here, or until Ctrl-C


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language, also those inside lists."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", README, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for of, text in found if of == language]


def pasted(texts: list[str]) -> dict[str, Any]:
    """What a newcomer has after pasting them into one prompt."""
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for i, text in enumerate(texts):
            exec(compile(text, f"README.md, Python block {i}", "exec"), names)
    return names


@pytest.mark.slow
def test_the_first_snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = pasted(blocks("python")[:1])
    assert names["posterior"].status == "ok"
    scores = names["doxa"].evaluate.metrics(names["p"], names["y"][400:])
    # Noise 0.3 has −0.2 nats a row at best, a constant about −1.3; 95 % intervals of 100 rows hold
    # 88 or fewer by chance once in two hundred times.
    assert scores["log_likelihood"] > -0.9 and scores["coverage"] > 0.88
    assert (tmp_path / "run" / "meta.json").exists()


@pytest.mark.slow
def test_every_python_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = blocks("python")
    assert len(texts) >= 4
    names = pasted(texts)
    assert names["draws"].status == "ok" and names["draws"]["sigma"].shape == (4, 1000)
    assert len(names["sweep"]) == 60 and len(names["sweep"].select(by="validation")) == 20
    low, high = names["guaranteed"].predict(names["x_new"]).interval()
    inside = (low <= names["y"][400:]) & (names["y"][400:] <= high)
    assert float(inside.double().mean()) >= 0.9  # these are the rows that it was calibrated on


@pytest.mark.slow
def test_every_doxa_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small table, in the order of the page; of those that take minutes, only the help."""
    from typer.testing import CliRunner

    from doxa.app.cli import app

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 2))
    table = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x.sum(1) + 0.1 * rng.normal(size=150)})
    table[:120].to_csv("data.csv", index=False)
    for name in ("test.csv", "held_out.csv"):
        table[120:].to_csv(name, index=False)
    table[120:].to_csv("january.csv", index=False)
    table[120:].drop(columns="y").to_csv("new.csv", index=False)
    table.drop(columns="y").to_parquet("big.parquet", row_group_size=50)
    table.assign(y=table["y"].where(table.index < 30)).to_csv("pool.csv", index=False)
    lines = [line for text in blocks("") for line in text.splitlines() if line.startswith("doxa ")]
    assert len(lines) >= 5
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        short = [*arguments, "--help"] if arguments[0] in LONG else arguments
        done = CliRunner().invoke(app, short, input="12345\nq\n")
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert (tmp_path / "predictions.csv").exists()
