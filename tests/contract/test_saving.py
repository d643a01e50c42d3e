"""Saved, loaded, and asked again: the same numbers, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import doxa
from doxa import store
from doxa.errors import ModelError


def test_a_loaded_posterior_gives_the_same_answers(case: Any, answers: Any, tmp_path: Path) -> None:
    x, y = case.data()
    posterior = case.posterior(torch.float64)
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", device=case.device)
    assert again.method == posterior.method
    assert again.members == posterior.members
    assert again.kind == posterior.kind
    for name in ("log_evidence", "elbo", "status", "validation", "diagnostics", "history"):
        assert getattr(again, name) == getattr(posterior, name), name
    assert again.status.reason == posterior.status.reason
    got, want = (answers(p.predict(x), y) for p in (again, posterior))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.by_family
def test_functions_and_draws_are_the_same_too(case: Any, tmp_path: Path) -> None:
    x, _ = case.data()
    posterior = case.posterior()
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", device=case.device)
    assert torch.equal(again.functions(x, 1, seed=1), posterior.functions(x, 1, seed=1))
    if posterior.kind in ("sample", "gaussian", "laplace"):
        for name, value in posterior.draw(1).items():
            assert torch.equal(again.draw(1)[name], value)


@pytest.mark.by_family
def test_saving_again_changes_nothing(case: Any, tmp_path: Path) -> None:
    x, _ = case.data()
    case.posterior().save(tmp_path / "one")
    doxa.load(tmp_path / "one").save(tmp_path / "two")
    one, two = (doxa.load(tmp_path / name) for name in ("one", "two"))
    assert torch.equal(one.predict(x).mean, two.predict(x).mean)
    (a, meta_a), (b, meta_b) = (store.read_artefact(tmp_path / name) for name in ("one", "two"))
    assert meta_a == meta_b
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.by_family
def test_a_run_of_a_sweep_is_saved_like_any_posterior(
    case: Any, answers: Any, tmp_path: Path
) -> None:
    x, y = case.data()
    runs = doxa.Runs(rows=[torch.arange(25), torch.arange(40)], grid=case.fast.grid)
    posterior = case.fit(runs=runs, steps=10)[-1]
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", device=case.device)
    got, want = (answers(p.predict(x), y) for p in (again, posterior))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.by_family
def test_a_network_without_a_builder_is_handed_over(trained: Any, tmp_path: Path) -> None:
    x, _ = trained.data()
    net = trained.net()
    del net.doxa_builder
    posterior = trained.fit(net=net, steps=5)
    posterior.save(tmp_path / "run")
    with pytest.raises(ModelError, match="net="):
        doxa.load(tmp_path / "run")
    other = doxa.nets.mlp(2, 1 if trained.regression else 3, hidden=(9,), activation="tanh")
    with pytest.raises(ModelError, match=r"0\.weight"):
        doxa.load(tmp_path / "run", net=other)
    again = doxa.load(tmp_path / "run", net=trained.net(), device=trained.device)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_nothing_is_pickled(case: Any, tmp_path: Path) -> None:
    case.posterior().save(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".txt", ".sha256", ""}
    for path in files:
        start = path.read_bytes()[:2]
        assert start not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"), path


FRESH = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import doxa
from doxa import store

failed = {}
for run in sorted(Path(sys.argv[1]).glob("*/posterior")):
    inputs, _ = store.read_artefact(run.parent / "expected")
    p = doxa.load(run).predict(inputs["x"])
    got = {"mean": p.mean, "variance": p.variance, "log_prob": p.log_prob(inputs["y"])}
    wrong = [name for name in got if not torch.equal(got[name], inputs[name])]
    if wrong:
        failed[run.parent.name] = wrong
sys.stdout.write(json.dumps(failed))
"""


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_answers(available: list[Any], tmp_path: Path) -> None:
    """All methods at once: starting Python costs more than predicting."""
    for case in available:
        x, y = case.data()
        posterior = case.posterior(torch.float64)
        p = posterior.predict(x)
        posterior.save(tmp_path / str(case) / "posterior")
        expected = {"mean": p.mean, "variance": p.variance, "log_prob": p.log_prob(y)}
        store.write_artefact(tmp_path / str(case) / "expected", {"x": x, "y": y, **expected}, {})
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
