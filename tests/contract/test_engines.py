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
from doxa.engine import fall_back_to_loop, tiles

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
    settings = case.fast.one_step if options["steps"] == 1 else case.fast.many_steps
    posterior = case.fit(engine=engine, members=3, settings=settings, **options)
    assert posterior.diagnostics["engine"] == engine.kind
    return posterior


def agree(case: Any, engine: str, relative: float, assert_close: Check, **options: Any) -> None:
    want = reference(case, tuple(options.items()))
    assert_close(fit(case, ENGINES[engine], **options).tensors(), want.tensors(), relative)


@pytest.mark.by_family
@pytest.mark.parametrize("engine", ENGINES)
def test_one_step(
    trained: Any, engine: str, assert_close: Check, caplog: pytest.LogCaptureFixture
) -> None:
    agree(trained, engine, 1e-10, assert_close, dtype=torch.float64, steps=1, optimizer="sgd")
    assert "running eagerly" not in caplog.text, "the mode that was asked for did not run"


@pytest.mark.by_family
def test_one_step_in_chunks(trained_regression: Any, assert_close: Check) -> None:
    """Of every method: a step that reads a tensor of all members from outside of its arguments
    would broadcast it against a chunk of them. Three members in chunks of two."""
    options = {"dtype": torch.float64, "steps": 1, "optimizer": "sgd"}
    agree(trained_regression, "chunk of 2", 1e-10, assert_close, **options)


@pytest.mark.slow
@pytest.mark.by_family
@pytest.mark.parametrize("engine", ["chunk of 2", "loop", "traced"])
def test_a_hundred_steps(trained_regression: Any, engine: str, assert_close: Check) -> None:
    agree(trained_regression, engine, 1e-9, assert_close, dtype=torch.float64, steps=100)


@pytest.mark.by_family
@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_one_step_in_float32(trained_regression: Any, engine: str, assert_close: Check) -> None:
    case = trained_regression
    agree(case, engine, 1e-5, assert_close, dtype=torch.float32, steps=1, optimizer="sgd")


_references: dict[Any, Any] = {}


def reference(case: Any, options: Any) -> Any:
    key = (case, options)
    if key not in _references:
        _references[key] = fit(case, Engine("stack"), **dict(options))
    return _references[key]


@pytest.mark.by_family
def test_one_step_changes_something(trained: Any) -> None:
    """Else agreement after one step would say nothing."""
    if trained.row.family == "mcmc":
        pytest.skip("its steps have no rate")
    start, after = (
        fit(trained, Engine("loop"), steps=1, lr=lr, dtype=torch.float64, optimizer="sgd")
        for lr in (1e-12, 0.01)
    )
    assert any(not torch.allclose(v, after.tensors()[k]) for k, v in start.tensors().items())


@pytest.mark.by_family
def test_predictions_do_not_depend_on_the_engine(trained: Any, assert_close: Check) -> None:
    x, _ = trained.data()
    posterior = trained.fit(members=2, dtype=torch.float64, steps=5)
    want = posterior.predict(x)
    for engine in (Engine("loop"), Engine("stack", native=False), Engine("stack")):
        posterior._engine = engine
        p = posterior.predict(x)
        got = {"mean": p.mean, "variance": p.variance}
        assert_close(got, {"mean": want.mean, "variance": want.variance}, 1e-10)


@pytest.mark.by_family
def test_tiles_do_not_matter(trained: Any, monkeypatch: Any, assert_close: Check) -> None:
    """The widest activation is 8 numbers of 8 bytes: 20 cells a tile make many tiles."""
    if trained.device != "cpu":
        pytest.skip("the GPU's tiles are larger than this data")
    x, _ = trained.data()
    posterior = trained.fit(members=3, dtype=torch.float64, steps=5)
    want = posterior.functions(x, 3)
    monkeypatch.setattr("doxa.engine.engine._TILE_BYTES", 20 * 64)
    assert len(list(tiles(3, len(x), 8, 8, torch.device("cpu")))) > 3
    assert_close({"f": posterior.functions(x, 3)}, {"f": want}, 1e-10)


@pytest.mark.slow
def test_compiled(
    trained_regression: Any, assert_close: Check, caplog: pytest.LogCaptureFixture
) -> None:
    if trained_regression.row.family == "mcmc":
        pytest.skip("a transition takes minutes to compile")
    options = {"dtype": torch.float64, "steps": 20}
    want = fit(trained_regression, Engine("stack"), **options)
    got = fit(trained_regression, Engine("stack", "compiled"), **options)
    assert "running eagerly" not in caplog.text
    assert_close(got.tensors(), want.tensors(), 1e-9)


@pytest.mark.parametrize("kind", ["stack", "loop"])
def test_a_cuda_graph(
    trained: Any, kind: str, assert_close: Check, caplog: pytest.LogCaptureFixture
) -> None:
    if trained.device != "cuda":
        pytest.skip("a CUDA graph needs a CUDA device")
    options = {"dtype": torch.float64, "steps": 100}
    want = fit(trained, Engine(kind), **options)
    got = fit(trained, Engine(kind, "graph"), **options)
    assert "running eagerly" not in caplog.text
    assert_close(got.tensors(), want.tensors(), 1e-9)


@pytest.mark.by_family
def test_several_parameter_vectors_are_stacked(trained_regression: Any) -> None:
    """Members, or the particles inside of one: what counts is how many vectors there are."""
    trained = trained_regression
    short = {"steps": 2, "settings": trained.fast.one_step}
    width = trained.method(**trained.fast.one_step).width
    for members in (1, 2):
        posterior = trained.fit(members=members, **short)
        several = members * width > 1
        assert posterior.diagnostics["engine"] == ("stack" if several else "loop")
        assert (str(members * width) in posterior.diagnostics["engine_reason"]) == several


@pytest.mark.slow
@pytest.mark.by_family
@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_a_name_and_an_engine_ask_for_the_same_mode(trained: Any, mode: str) -> None:
    """Also of the parts that HMC and NUTS execute by themselves. On a GPU a step of fbnn is never
    recorded: its eigendecomposition waits for the host."""
    expected = "eager" if (trained.name, trained.device) == ("fbnn", "cuda") else mode
    short = {"steps": 3, "members": 2, "settings": trained.fast.many_steps}
    posteriors = [trained.fit(engine=e, **short) for e in (f"stack:{mode}", Engine("stack", mode))]
    assert [p.diagnostics["mode"] for p in posteriors] == [expected, expected]
    one, two = (p.tensors() for p in posteriors)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_an_engine_that_fails_falls_back_to_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    def trial(engine: Engine) -> None:
        if engine.kind == "stack":
            raise RuntimeError("no batching rule")

    chosen = fall_back_to_loop(Engine("stack"), trial)
    assert chosen.kind == "loop"
    assert "no batching rule" in chosen.reason
    assert "one at a time" in caplog.text


@pytest.mark.parametrize("kind", ["stack", "loop"])
def test_a_mode_that_is_named_is_not_chosen_again(kind: str) -> None:
    """None would leave it to each stage, which a short fit does not show."""
    assert Engine.parse(f"{kind}:eager") == Engine(kind, "eager", reason="asked for")
    assert Engine.parse(kind).mode == Engine(kind).mode == "eager"
    assert Engine.parse(f"{kind}:traced").mode == "traced"


@pytest.mark.parametrize("spec", ["pile", "stack:slowly"])
def test_unknown_engines_are_refused(spec: str) -> None:
    with pytest.raises(doxa.errors.MethodError, match="engine"):
        Engine.parse(spec)
