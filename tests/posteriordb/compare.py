"""Draws against reference draws: how far apart the means are, and how different the spreads.

    Δ = |mean − mean*| / sd*,    ratio = sd / sd*,    R-hat, effective sizes, for every column

The aims are Δ < 0.1, a ratio between 0.95 and 1.05, and R-hat below 1.01.
"""

from __future__ import annotations

import torch
from models import Reference
from torch import Tensor

from doxa.posterior.chains import ess_bulk, ess_tail, rhat

SHIFT, SPREAD, RHAT = 0.1, 0.05, 1.01


def table(reference: Reference, draws: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """{column: figures} of draws in natural space, [K, T, ...] each."""
    own, theirs = reference.shown(dict(draws)), reference.draws
    assert own.keys() == theirs.keys()
    rows = {}
    for name, expected in theirs.items():
        value = own[name].double().cpu()
        flat = value.flatten(2) if value.ndim > 2 else value.unsqueeze(2)
        truth = expected.flatten(0, 1).reshape(-1, flat.shape[2])
        shift = (flat.mean((0, 1)) - truth.mean(0)).abs() / truth.std(0)
        ratio = flat.flatten(0, 1).std(0) / truth.std(0)
        figures = {
            "shift": shift, "ratio": ratio, "rhat": rhat(flat), "ess_bulk": ess_bulk(flat),
            "ess_tail": ess_tail(flat),
        }  # fmt: skip
        for i in range(flat.shape[2]):
            label = f"{name}[{i + 1}]" if value.ndim > 2 else name
            rows[label] = {k: float(v[i]) for k, v in figures.items()}
    return rows


def misses(rows: dict[str, dict[str, float]]) -> list[str]:
    """What is beyond the aims, in words."""
    found = []
    for name, row in rows.items():
        if not row["shift"] < SHIFT:
            found.append(f"{name}: mean {row['shift']:.3f} sd away")
        if not abs(row["ratio"] - 1) < SPREAD:
            found.append(f"{name}: sd ratio {row['ratio']:.3f}")
        if not row["rhat"] < RHAT:
            found.append(f"{name}: R-hat {row['rhat']:.4f}")
    return found


def worst(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    """The worst figure over the columns."""
    column = lambda k: torch.tensor([row[k] for row in rows.values()])  # noqa: E731
    ratio = column("ratio")
    return {
        "shift": float(column("shift").max()), "ratio": float(ratio[(ratio - 1).abs().argmax()]),
        "rhat": float(column("rhat").max()), "ess_bulk": float(column("ess_bulk").min()),
        "ess_tail": float(column("ess_tail").min()),
    }  # fmt: skip
