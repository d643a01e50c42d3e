"""What a posterior says as its inputs move away from the data, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.evaluate import shifts
from doxa.evaluate.streaming import metrics
from doxa.posterior import Posterior


def sweep(
    posterior: Posterior,
    x: Tensor,
    y: Any,
    shift: str | Callable[[Tensor, float], Tensor],
    levels: Sequence[float] | None = None,
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    n: int | None = None,
    seed: int = 0,
) -> list[dict[str, float]]:
    """One row a level: the metrics of `doxa.evaluate.metrics`, and how much of which doubt.

    Parameters
    ----------
    x, y: test images [N, C, H, W] from 0 to 1, and what they show; any x for a shift of your own.
    shift: a name from `shifts.SHIFTS`, or a function of (x, level).
    levels: in the shift's units; default for a named one: untouched, then the five severities.
    prepare: from shifted images to what the network was fitted on (standardisation).
    n: samples in each prediction. seed: of the noise in the shift.

    Returns
    -------
    Rows {"level", metrics…, "entropy", "mutual_information"}; "epistemic" and "aleatoric" (mean
    variances) for regression.
    """
    if levels is None:
        if not isinstance(shift, str):
            raise DataError("a shift of your own has no severities here: give its levels")
        levels = [0.0, *shifts.SEVERITIES.get(shift, ())]
    if len(levels) == 0:
        raise DataError("levels is empty: a sweep needs at least one")
    table = []
    for level in levels:
        level = float(level)
        moved = shifts.shifted(x, shift, level, seed) if isinstance(shift, str) else shift(x, level)
        with torch.no_grad():
            p = posterior.predict(moved if prepare is None else prepare(moved), n)
        doubts = ("entropy", "mutual_information") if p.likelihood.classifies else (
            "epistemic", "aleatoric",
        )  # fmt: skip
        known = [name for name in doubts if hasattr(p, name)]
        doubt = {name: float(getattr(p, name).double().mean()) for name in known}
        table.append({"level": level, **metrics(p, y), **doubt})
    return table
