"""Artefacts from anybody: refused with a typed error, or read as what they are.

The fuzzer (`fuzz_artefacts.py`) mutates small saved posteriors and makes their checksums anew; the
quick tests below are its findings, each by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_artefacts import dumped, seed_of

import doxa
from doxa.errors import DoxaError, StoreError
from doxa.store import read_artefact, write_artefact
from doxa.store.artefact import pack

FUZZER = Path(__file__).parents[1] / "support" / "fuzz_artefacts.py"
CASES = 20_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    x = torch.linspace(-1, 1, 24).reshape(12, 2)
    net = doxa.nets.mlp(2, 1, hidden=(3,))
    doxa.fit(net, (x, x.sum(1, keepdim=True)), "map", steps=2, members=2, progress=False).save(path)
    return path


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def forged(saved: Path, path: Path, change: Change, data: bytes | None = None) -> Path:
    """A copy with changed meta and header of its tensors, and the right checksums."""
    _, header, numbers = seed_of(saved)
    meta = read_artefact(saved)[1]
    change(meta, header)
    text = dumped(header)
    whole = struct.pack("<Q", len(text)) + text + (numbers if data is None else data)
    files = {"tensors.safetensors": whole, "meta.json": pack({}, meta).meta}
    path.mkdir()
    for name, raw in files.items():
        (path / name).write_bytes(raw)
    lines = (f"{hashlib.sha256(raw).hexdigest()}  {name}\n" for name, raw in files.items())
    (path / "checksums.sha256").write_text("".join(lines))
    return path


def test_what_is_forged_without_a_change_loads(saved: Path, tmp_path: Path) -> None:
    path = forged(saved, tmp_path / "run", lambda meta, header: None)
    x = torch.zeros(2, 2)
    assert doxa.load(path).predict(x).mean.equal(doxa.load(saved).predict(x).mean)


def put(*path: Any, value: Any) -> Change:
    def change(meta: dict[str, Any], header: dict[str, Any]) -> None:
        at: Any = meta
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("model", "widths", value=[["0", "x"]]),
        put("model", "widths", value=7),
        put("model", "output", value={"type": "tuple", "items": [3]}),
        put("model", "dtype", "name", value="int64"),
        put("model", "sites", value={"0.uniform": ["uniform", [10**9], 1, "both"]}),
        put("inputs", value=["a"]),
        put("inputs", value=[-1]),
        put("record", "seed", value=10**30),
        put("record", "status", value=None),
        put("record", "history", value=3),
        put("reason", value=[]),
        put("method", value={"type": "prior.normal"}),
        put("likelihood", value={"type": "map"}),
        put("columns", value=[3]),
        put("kind", value="gaussian"),
        put("extra", "chain", value="yes"),
        put("model", value={}),
        lambda meta, header: meta.clear(),
        lambda meta, header: header.pop("samples"),
        lambda meta, header: header["samples"].update(shape=[1, 2, 13]),
        lambda meta, header: header["samples"].update(dtype="I32"),
    ],
    ids=range(21),
)
def test_what_does_not_fit_together_is_refused(saved: Path, tmp_path: Path, change: Change) -> None:
    with pytest.raises(DoxaError):
        doxa.load(forged(saved, tmp_path / "run", change))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(saved: Path, tmp_path: Path, number: float) -> None:
    tensors, meta = read_artefact(saved)
    tensors["samples"][1, 0, 3] = number
    write_artefact(tmp_path / "run", tensors, meta)
    with pytest.raises(StoreError, match="'samples' holds NaN or infinite numbers"):
        doxa.load(tmp_path / "run")
    with pytest.raises(StoreError, match="'samples' holds NaN or infinite numbers"):
        doxa.load(tmp_path / "run", draws_budget=0)


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"1e400", b"[" * 100_000])
def test_json_that_is_none_is_refused(saved: Path, tmp_path: Path, text: bytes) -> None:
    path = forged(saved, tmp_path / "run", put("new", value="HERE"))
    raw = (path / "meta.json").read_bytes().replace(b'"HERE"', text)
    (path / "meta.json").write_bytes(raw)
    lines = (path / "checksums.sha256").read_text().splitlines()
    (path / "checksums.sha256").write_text(
        f"{lines[0]}\n{hashlib.sha256(raw).hexdigest()}  meta.json\n"
    )
    with pytest.raises(StoreError, match="not written by doxa"):
        doxa.load(path)


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("moved", [-8, 8, 4])
def test_offsets_are_checked_in_memory_and_mapped(
    saved: Path, tmp_path: Path, budget: int | None, moved: int
) -> None:
    """A tensor that lies over another one, or past the end, is no tensor."""

    def change(meta: dict[str, Any], header: dict[str, Any]) -> None:
        name = sorted(header)[-1]
        header[name]["data_offsets"] = [o + moved for o in header[name]["data_offsets"]]

    with pytest.raises(StoreError):
        read_artefact(forged(saved, tmp_path / "run", change), budget)


def test_a_network_of_a_billion_units_is_never_made(saved: Path, tmp_path: Path) -> None:
    change = put("model", "builder", "items", 1, "hidden", value=[10**9, 10**9])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DoxaError, match="the structure is not the saved one"):
        doxa.load(forged(saved, tmp_path / "run", change))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("name", ["meta.json", "tensors.safetensors", "checksums.sha256"])
@pytest.mark.parametrize("kind", ["fifo", "link", "device", "folder", "sparse"])
def test_only_regular_files_are_read(saved: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = forged(saved, tmp_path / "run", lambda meta, header: None)
    raw = (path / name).read_bytes()
    (path / name).unlink()
    if kind == "fifo":
        os.mkfifo(path / name)
    elif kind == "folder":
        (path / name).mkdir()
    elif kind == "sparse":
        (path / name).write_bytes(raw)
        os.truncate(path / name, 1 << 40)
    else:
        (tmp_path / "outside").write_bytes(raw)
        (path / name).symlink_to("/dev/zero" if kind == "device" else tmp_path / "outside")
    with pytest.raises(StoreError):
        doxa.load(path)
    with pytest.raises(StoreError):
        read_artefact(path)


@pytest.mark.slow
def test_mutated_artefacts_are_refused_or_right(tmp_path: Path) -> None:
    """In a process that may take 2 GiB more than it begins with, five seconds a case."""
    command = [sys.executable, str(FUZZER), str(CASES), "11", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert sum(found["counts"].values()) == CASES
    assert found["failures"] == []
    assert found["counts"]["answered"] > CASES / 20  # mutations that change nothing that matters
    assert found["counts"].get("overflow", 0) < CASES / 100
    assert found["peak"] < 2 << 30
