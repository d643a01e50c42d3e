"""Stack, loop, chunks and traces compute the same, as closely as rounding allows.

In float64 one step from the same state agrees to 1e-10, 100 optimiser steps to 1e-9; in float32
one step to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import doxa
from doxa import Engine
from doxa.engine import works

Check = Callable[..., None]

ENGINES = {
    "vmap": Engine("stack", native=False),
    "chunk of 1": Engine("stack", chunk=1),
    "chunk of 2": Engine("stack", chunk=2),
    "loop": Engine("loop"),
    "traced": Engine("stack", "traced"),
    "loop, traced": Engine("loop", "traced"),
}


def fit(case: Any, engine: Engine, **options: Any) -> Any:
    if not case.needs_network:
        pytest.skip("brings its own functions: there is no engine to choose")
    settings = case.fast.one_step if options["steps"] == 1 else case.fast.many_steps
    posterior = case.fit(engine=engine, members=3, settings=settings, **options)
    assert posterior.diagnostics["engine"] == engine.kind
    return posterior


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("dtype", "steps", "relative"),
    [(torch.float64, 1, 1e-10), (torch.float64, 100, 1e-9), (torch.float32, 1, 1e-5)],
    ids=["one step", "100 steps", "one step, float32"],
)
def test_engines_agree(
    case_place: Any, engine: str, dtype: torch.dtype, steps: int, relative: float,
    assert_close: Check, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    options = {"dtype": dtype, "steps": steps, "optimizer": "sgd" if steps == 1 else "adam"}
    want = reference(place, tuple(options.items()))
    got = fit(place, ENGINES[engine], **options)
    assert "running eagerly" not in caplog.text, "the mode that was asked for did not run"
    assert_close(got.tensors(), want.tensors(), relative)


_references: dict[Any, Any] = {}


def reference(case: Any, options: Any) -> Any:
    key = (case, options)
    if key not in _references:
        _references[key] = fit(case, Engine("stack"), **dict(options))
    return _references[key]


def test_one_step_changes_something(case: Any) -> None:
    """Else agreement after one step would say nothing."""
    if case.row.family == "mcmc":
        pytest.skip("its steps have no rate")
    start, after = (
        fit(case, Engine("loop"), steps=1, lr=lr, dtype=torch.float64, optimizer="sgd")
        for lr in (1e-12, 0.01)
    )
    assert any(not torch.allclose(v, after.tensors()[k]) for k, v in start.tensors().items())


def test_a_mode_that_was_asked_for_is_recorded(case: Any) -> None:
    if case.row.family in ("mcmc", "laplace"):
        pytest.skip("its last stage has a mode of its own")
    posterior = fit(case, Engine("stack", "traced"), steps=3)
    assert posterior.diagnostics["mode"] == "traced"


def test_predictions_do_not_depend_on_the_engine(case: Any, assert_close: Check) -> None:
    if not case.needs_network:
        pytest.skip("brings its own functions: there is no engine to choose")
    x, _ = case.data()
    posterior = case.fit(members=2, dtype=torch.float64, steps=5)
    want = posterior.predict(x)
    for engine in (Engine("loop"), Engine("stack", native=False), Engine("stack")):
        posterior._engine = engine
        p = posterior.predict(x)
        assert_close({"mean": p.mean, "var": p.variance}, {"mean": want.mean, "var": want.variance},
                     1e-10)  # fmt: skip


def test_tiles_do_not_matter(case: Any, monkeypatch: Any, assert_close: Check) -> None:
    """The widest activation is 8 numbers of 8 bytes: 20 cells a tile make many tiles."""
    if not case.needs_network:
        pytest.skip("brings its own functions: there is no engine to choose")
    x, _ = case.data()
    posterior = case.fit(members=3, dtype=torch.float64, steps=5)
    want = posterior.functions(x, 3)
    monkeypatch.setattr("doxa.engine._TILE_BYTES", 20 * 64)
    assert_close({"f": posterior.functions(x, 3)}, {"f": want}, 1e-10)


@pytest.mark.slow
def test_compiled_agrees(case: Any, assert_close: Check) -> None:
    if case.row.family == "mcmc":
        pytest.skip("chains are not compiled")
    options = {"dtype": torch.float64, "steps": 20}
    want = fit(case, Engine("stack"), **options)
    got = fit(case, Engine("stack", "compiled"), **options)
    assert_close(got.tensors(), want.tensors(), 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["stack", "loop"])
def test_a_cuda_graph_agrees(case_place: Any, kind: str, assert_close: Check) -> None:
    if case_place.device != "cuda":
        pytest.skip("a CUDA graph needs a CUDA device")
    if case_place.row.family == "mcmc":
        pytest.skip("chains are not captured")
    options = {"dtype": torch.float64, "steps": 100}
    want = fit(place, Engine(kind), **options)
    got = fit(place, Engine(kind, "graph"), **options)
    assert_close(got.tensors(), want.tensors(), 1e-9)


def test_an_engine_that_fails_falls_back_to_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def trial(engine: Engine) -> None:
        if engine.kind == "stack":
            raise RuntimeError("no batching rule")

    chosen = works(Engine("stack"), trial)
    assert chosen.kind == "loop"
    assert "no batching rule" in chosen.reason
    assert "one at a time" in caplog.text


@pytest.mark.parametrize("spec", ["pile", "stack:slowly"])
def test_unknown_engines_are_refused(spec: str) -> None:
    with pytest.raises(doxa.errors.MethodError, match="engine"):
        Engine.parse(spec)
