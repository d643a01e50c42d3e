"""A recorded step writes in place, and only into memory that nobody else holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from doxa.data import Batch
from doxa.engine import execute
from doxa.engine.execute import Executor
from doxa.optim import Adam

State = dict[str, Tensor]


def descent(state: State, _: Any, t: Tensor, rate: Tensor, owned: bool = False) -> Any:
    params = {"theta": state["theta"]}
    new = Adam().update(params, {"theta": 2.0 * state["theta"]}, state, rate, t, owned)
    return {**state, **new}, {}


def test_what_was_given_is_left_alone_and_what_was_made_is_used_again() -> None:
    params = {"theta": torch.tensor([[1.0, -2.0, 3.0]])}
    start = {**params, **Adam().init(params)}
    given = {name: value.clone() for name, value in start.items()}
    nothing, rate = torch.zeros(()), torch.tensor(0.1)
    batch, recorded = Batch((), (), nothing), Executor(descent, "traced")
    plain, now = start, start
    places = []
    for t in range(3):
        plain, _ = descent(plain, batch, torch.tensor(t), rate)
        now, _ = recorded(now, batch, torch.tensor(t), rate)
        places.append(now["theta"].data_ptr())
        assert all(torch.equal(now[name], plain[name]) for name in plain)  # torch's own kernel
    assert recorded.mode == "traced"
    assert all(torch.equal(start[name], given[name]) for name in given)
    assert len(set(places)) == 1 and start["theta"].data_ptr() not in places


def compiled_in_place(compile_: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A compiled step that overwrites its state; without `compile_`, its operations run one by
    one."""
    if not compile_:
        monkeypatch.setattr(execute, "_compiled", lambda module, _: module.forward)
    params = {"theta": torch.tensor([[1.0, -2.0, 3.0]])}
    start = {**params, **Adam().init(params), "kept": torch.ones(1)}
    example = start, Batch((), (), torch.zeros(())), torch.tensor(0), torch.tensor(0.1)
    step = lambda *given, **more: (descent(*given, **more)[0], {"loss": given[0]["theta"].sum(1)})  # noqa: E731
    return start, step, execute._traced(step, *example, None, compiled=True, in_place=True)


@pytest.mark.parametrize("compile_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compiled_step_for_a_graph_overwrites_its_state(
    compile_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new values are in the tensors that were given, after all old ones have been read."""
    start, step, compiled = compiled_in_place(compile_, monkeypatch)
    rate, batch = torch.tensor(0.1), Batch((), (), torch.zeros(()))
    now = {name: value.clone() for name, value in start.items()}
    places = {name: value.data_ptr() for name, value in now.items()}
    plain = start
    for t in range(4):
        plain, want = step(plain, batch, torch.tensor(t), rate)
        new, info = compiled(now, batch, torch.tensor(t), rate)
        assert new is now
        torch.testing.assert_close(info["loss"], want["loss"])
        torch.testing.assert_close(now, plain, rtol=1e-5, atol=1e-6)
    assert {name: value.data_ptr() for name, value in now.items()} == places
    assert not torch.equal(now["theta"], start["theta"])


def test_entries_that_change_places_are_read_before_they_are_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute, "_compiled", lambda module, _: module.forward)

    def step(state: State, *_: Any, owned: bool = False) -> Any:
        return {"a": state["b"], "b": state["a"], "c": state["a"].view(2, 1)}, {}

    start = {"a": torch.ones(1, 2), "b": torch.zeros(1, 2), "c": torch.zeros(2, 1)}
    example = start, Batch((), (), torch.zeros(())), torch.tensor(0), torch.tensor(0.1)
    swap = execute._traced(step, *example, None, compiled=True, in_place=True)
    now, _ = swap({name: value.clone() for name, value in start.items()}, *example[1:])
    assert torch.equal(now["a"], start["b"]) and torch.equal(now["b"], start["a"])
    assert torch.equal(now["c"], torch.ones(2, 1))
