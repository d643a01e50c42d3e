"""What a fit will take is known before it runs, and an error shows the same numbers."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import doxa
from doxa.app.cli import app
from doxa.errors import MemoryBudgetError, MethodError, UnknownSetting
from doxa.method.method import in_units


def pictures(count: int = 300) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 16, 16, generator=g), torch.randint(4, (count,), generator=g)


def network() -> nn.Module:
    """Its activations per row: 8 × 16 × 16 numbers after the ReLU, and the input."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 4))


def test_nothing_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stack(*_: Any, **__: Any) -> None:
        raise AssertionError("members were made")

    monkeypatch.setattr(import_module("doxa.fit"), "stack", stack)
    found = doxa.plan(network(), pictures(), "deep-ensemble", epochs=3, likelihood="categorical")
    assert (found.members, found.rows, found.batch_size, found.steps) == (
        5,
        270,
        128,
        3 * (270 // 128),
    )
    assert found.weights == sum(p.numel() for p in network().parameters())
    assert found.memory["weights"] == 5 * 4 * found.weights
    assert found.bytes == sum(found.memory.values())
    assert found.seconds is not None and 0 < found.seconds[0] == found.seconds[1]


def test_activations_are_those_that_autograd_keeps() -> None:
    """Counted by hand: the convolution keeps its input, and the ReLU its output, which the linear
    layer keeps as well."""
    options: dict[str, Any] = {"members": 1, "validation": None, "likelihood": "categorical"}
    whole = doxa.plan(network(), pictures(), "map", batch_size=100, **options)
    row = 4 * (3 * 256 + 8 * 256)
    assert whole.memory["activations"] == 100 * row
    pieces = doxa.plan(network(), pictures(), "map", batch_size=100, microbatch=10, **options)
    assert pieces.memory["activations"] == 10 * row
    assert pieces.bytes == whole.bytes - 90 * row
    assert whole.smaller["microbatch=25"] == whole.bytes - 75 * row


def test_what_is_advised_takes_what_it_says() -> None:
    """Each advice that is an argument of `fit`, given to `plan`."""
    options: dict[str, Any] = {"batch_size": 100, "members": 3, "likelihood": "categorical"}
    method = doxa.SGLD(draws=500, burn_in=10, thin=1)
    found = doxa.plan(network(), pictures(), method, validation=None, **options)
    assert (
        found.smaller["draws_budget=0 (draws on disk)"] == found.bytes - found.memory["draws kept"]
    )
    again = doxa.plan(network(), pictures(), method, validation=None, draws_budget=0, **options)
    assert again.bytes == found.smaller["draws_budget=0 (draws on disk)"]
    assert "draws kept" not in again.memory
    held = doxa.plan(network(), pictures(), "map", **options)
    assert held.memory["held-out copy"] == held.memory["weights"]
    loop = doxa.plan(network(), pictures(), "map", engine="loop", **options)
    assert loop.bytes == held.smaller['engine="loop"']
    one, all_three = (
        doxa.plan(network(), pictures(), "map", engine=engine, **options).memory["activations"]
        for engine in ("loop", "stack")
    )
    assert all_three == 3 * one


def test_an_error_shows_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"members": 2, "likelihood": "categorical", "progress": False}
    found = doxa.plan(network(), pictures(), "map", **options)
    monkeypatch.setattr("doxa.method.method.free_memory", lambda device: found.bytes)
    doxa.fit(network(), pictures(), "map", steps=1, engine="loop:eager", **options)
    monkeypatch.setattr("doxa.method.method.free_memory", lambda device: found.bytes - 1)
    monkeypatch.setattr(import_module("doxa.plan"), "free_memory", lambda device: found.bytes - 1)
    with pytest.raises(MemoryBudgetError) as caught:
        doxa.fit(network(), pictures(), "map", steps=1, **options)
    message = str(caught.value)
    assert f"({found.bytes} bytes)" in message
    for name, size in found.memory.items():
        assert f"{name} {in_units(size)}" in message
    for text, size in found.smaller.items():
        assert f"{text} takes {in_units(size)}" in message
    refused = doxa.plan(network(), pictures(), "map", **options)
    assert not refused.fits and refused.seconds is None
    assert "the fit would be refused" in str(refused)


def test_networks_that_leave_out_a_part_count() -> None:
    """One network and 100 rows: parts are fitted first, side by side."""
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    found = doxa.plan(doxa.nets.mlp(3, 1), (x, x[:, 0]), "map", likelihood="gaussian")
    assert found.members == 5 and found.parts and "each without a part of the rows" in str(found)
    alone = doxa.plan(doxa.nets.mlp(3, 1), (x, x[:, 0]), "map", validation=None)
    assert alone.members == 1 and not alone.parts and alone.bytes < found.bytes


def test_it_prints_all_of_it() -> None:
    found = doxa.plan(network(), pictures(), "map", likelihood="categorical", validation=0.2)
    text = str(found)
    assert text.startswith(f"map: one network of {found.weights:,} weights")
    for name, size in {**found.memory, **found.smaller}.items():
        assert re.search(rf"{re.escape(in_units(size))}\s+{re.escape(name)}", text)


def test_a_chain_is_measured_in_gradients() -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    method = doxa.HMC(draws=10, burn_in=10)
    found = doxa.plan(doxa.nets.mlp(3, 1), (x, x[:, 0]), method, members=2)
    assert found.gradients == method.gradients and "gradients of all 100 rows" in str(found)
    bare = doxa.plan(None, (x, x[:, 0]), "gp")
    assert bare.seconds is None and bare.bytes > 0


def test_arguments_are_checked_as_in_fit() -> None:
    x = torch.randn(100, 3)
    with pytest.raises(UnknownSetting, match=r"doxa\.plan has no keyword 'stepz'; did you mean"):
        doxa.plan(doxa.nets.mlp(3, 1), (x, x[:, 0]), "map", stepz=3)  # type: ignore[call-arg]
    with pytest.raises(MethodError, match="microbatch"):
        doxa.plan(doxa.nets.mlp(3, 1), (x, x[:, 0]), "map", microbatch=0)


def test_the_shell_prints_it_and_writes_nothing(tmp_path: Path) -> None:
    table, out = tmp_path / "rows.csv", tmp_path / "run"
    x = np.random.default_rng(0).normal(size=(200, 2))
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": x[:, 0]}).to_csv(table, index=False)
    command = ["fit", str(table), "--target", "y", "--out", str(out), "--plan", "--steps", "7"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "deep-ensemble: 5 networks of" in done.output and "at the peak" in done.output
    assert not out.exists()


def test_members_in_turn_are_planned_as_one_and_what_is_kept_of_the_others() -> None:
    """Ten members in the loop take less than ten times one; with callbacks, which see all of them,
    they are trained together. `benchmarks/memory_plan.py` compares this with the peak."""
    options: dict[str, Any] = {"members": 10, "likelihood": "categorical", "engine": "loop"}
    turns = doxa.plan(network(), pictures(), "map", validation=None, **options)
    together = doxa.plan(
        network(), pictures(), "map", validation=None, callbacks=[lambda *_: None], **options
    )
    blocks = doxa.plan(network(), pictures(), "map", validation=None, block_size=10, **options)
    copy = turns.memory["weights"]
    assert together.bytes == blocks.bytes
    assert together.bytes - turns.bytes == int(15 * copy) - int((15 / 10 + 4) * copy)
    few = doxa.plan(network(), pictures(30), "deep-ensemble", **options)
    held = doxa.plan(network(), pictures(30), "deep-ensemble", block_size=10, **options)
    assert few.bytes == held.bytes, "parts of 3 rows are pooled"


@pytest.mark.parametrize(
    "method, options, expected",
    [
        ("deep-ensemble", {"members": 6}, 1),  # small networks are one block
        ("deep-ensemble", {"members": 6, "block_size": 2}, 3),
        ("deep-ensemble", {"members": 6, "engine": "loop"}, 6),
        ("deep-ensemble", {"members": 6, "block_size": 2, "callbacks": [print]}, 3),
        ("deep-ensemble", {"members": 6, "engine": "loop", "callbacks": [print]}, 1),
        ("map", {"members": 2, "runs": doxa.Runs(seeds=[0, 1]), "block_size": 1}, 4),
        ("map", {"members": 1}, 1),  # parts of the rows, which are pooled
        ("functional-prior", {"members": 2, "block_size": 1}, 1),  # it shares nothing
    ],
)
def test_the_plan_says_how_many_processes_help(
    tmp_path: Path, method: str, options: dict[str, Any], expected: int
) -> None:
    """As many as `doxa.blocks` lists."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=g)
    given = (doxa.nets.mlp(2, 1, (8,)), (x, x.sum(1)), method)
    plan = doxa.plan(*given, **options)
    assert plan.processes == expected
    assert len(doxa.blocks(*given, checkpoint=tmp_path, **options)) == expected
    lines = [line for line in repr(plan).splitlines() if line.startswith("blocks")]
    if expected > 1:
        assert lines == [f"blocks   {expected}, which as many processes can divide"]
    else:
        assert lines == ["blocks   one: more than one process does not help"] * (plan.members > 1)


def test_few_held_out_rows_are_pooled_in_the_plan(tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    given = (doxa.nets.mlp(2, 1, (8,)), (x, x.sum(1)), "deep-ensemble")
    options = {"members": 6, "block_size": 1}
    assert doxa.plan(*given, **options).processes == 1
    assert len(doxa.blocks(*given, checkpoint=tmp_path, **options)) == 1


def test_the_plan_counts_blocks_of_rows_where_all_members_are_one_block() -> None:
    """As many as the fit has: by the rule, and as the user asks for."""
    x = torch.randn(70_000, 8, generator=torch.Generator().manual_seed(0))
    net = doxa.nets.mlp(8, 1, (50,))
    assert doxa.plan(net, (x, x.sum(1)), "hmc", members=4, validation=None).processes == 16
    few = (net, (x[:300], x[:300].sum(1)))
    assert doxa.plan(*few, "hmc", members=4, validation=None).processes == 1
    options = {"members": 2, "microbatches": 4, "steps": 2, "validation": None, "progress": False}
    plan, fit = doxa.plan(*few, "map", **options), doxa.fit(*few, "map", **options)
    assert plan.processes == fit.diagnostics["row_blocks"]["count"] == 4
