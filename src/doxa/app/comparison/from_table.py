"""The comparison of methods on a table: its columns' meaning, and a table of held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from doxa.app.comparison.compare import Say, compare_arrays
from doxa.app.comparison.reference import Reference
from doxa.app.comparison.result import Comparison
from doxa.app.comparison.splits import Split
from doxa.app.fitting import Plan, make_net
from doxa.app.schema import Schema

if TYPE_CHECKING:
    import pandas as pd


def compare_tables(
    schema: Schema,
    frame: pd.DataFrame,
    test: pd.DataFrame | None,
    methods: Sequence[str],
    plan: Plan,
    *,
    splits: int = 5,
    test_fraction: float = 0.2,
    reference: str | Reference | None = "auto",
    say: Say | None = None,
) -> Comparison:
    """The same for a table; with a table of held-out rows there is one split."""
    x, _ = schema.features(frame)
    y = schema.targets(frame)
    chosen: int | list[Split] = splits
    if test is not None:
        n = len(x)
        x = np.concatenate([x, schema.features(test)[0]])
        y = np.concatenate([y, schema.targets(test)])
        chosen = [Split(np.arange(n), np.arange(n, len(x)))]
    return compare_arrays(
        x,
        y,
        methods,
        net=make_net(plan, schema.inputs, schema.outputs),
        likelihood=schema.likelihood,
        splits=chosen,
        test_fraction=test_fraction,
        reference=reference,
        seed=plan.seed,
        say=say,
        validation=plan.held_out,
        progress=True,
        **plan.options(),
    )
