"""When held-out rows are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from doxa.data import Data, Standardisation
from doxa.driver.stopping import EarlyStopping


def test_a_look_is_an_epoch_of_each_members_own_rows() -> None:
    """Two runs of 50 and 100 rows with two members, each of which holds out another part: four
    splits, and batches of 5 rows. Of a long stage, no more than a hundred looks."""
    x = torch.zeros(150, 1)
    rows = [torch.arange(n) for n in (50, 50, 100, 100)]
    scales = [Standardisation()] * 2
    data = Data(x, x, rows, scales, x.device, x.dtype, 150, validation=rows, owners=[0, 0, 1, 1])
    run: Any = SimpleNamespace(
        data=data, settings=SimpleNamespace(batch_size=5), split_of=[0, 1, 2, 3],
        run_of=[0, 0, 1, 1],
    )  # fmt: skip
    method: Any = None
    for steps, intervals in {400: [10, 10, 20, 20], 1500: [15, 15, 20, 20]}.items():
        stopping = EarlyStopping.of(run, method, steps, patience=3)
        assert stopping is not None
        assert stopping.intervals == intervals
