"""A recorded step writes in place, and only into memory that nobody else holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.data import Batch
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
