"""When held-out rows are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import doxa
from doxa.data import Data, Standardisation
from doxa.driver.loop import EarlyStopping


def test_a_look_is_an_epoch_of_each_members_own_rows() -> None:
    """Two runs of 50 and 100 rows with two members, each of which holds out another part: four
    splits, and batches of 5 rows. Of a long stage, no more than a hundred looks."""
    x = torch.zeros(150, 1)
    rows = [torch.arange(n) for n in (50, 50, 100, 100)]
    scales = [Standardisation()] * 2
    data = Data(x, x, rows, scales, x.device, x.dtype, 150, validation=rows, owners=[0, 0, 1, 1])
    run: Any = SimpleNamespace(
        data=data, settings=SimpleNamespace(batch_size=5), split_of=[0, 1, 2, 3],
        run_of=[0, 0, 1, 1], pooled_rows=None,
    )  # fmt: skip
    method: Any = None
    for steps, intervals in {400: [10, 10, 20, 20], 1500: [15, 15, 20, 20]}.items():
        stopping = EarlyStopping.of(run, method, steps, patience=3)
        assert stopping is not None
        assert stopping.intervals == intervals


@pytest.mark.parametrize("steps, interval", [(31, 3), (1000, 10)])
def test_a_look_per_epoch_and_at_most_a_hundred(steps: int, interval: int) -> None:
    """48 rows in batches of 16 are three steps; of 1,000 steps a hundredth is ten. The last step is
    always looked at."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 2, generator=g), torch.randn(64, generator=g)
    posterior = doxa.fit(
        doxa.nets.mlp(2, 1, hidden=(2,)), (x, y), "map", steps=steps, batch_size=16,
        validation=0.25, patience=10_000, lr=1e-4, progress=False,
    )  # fmt: skip
    looks = [step for step, _ in posterior.history["validation"]]
    assert looks == [*range(interval, steps, interval), steps]
