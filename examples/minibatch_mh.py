"""Metropolis on mini-batches: the bias of draws whose acceptance uses a part of the data.

    python examples/minibatch_mh.py [figure.png]

A Gaussian mean with known noise has a Gaussian posterior. A random walk with Metropolis's
acceptance on all 64 rows samples it exactly. If acceptance is estimated on a batch, some batches
accept bad proposals: the draws spread too far, and more so for smaller batches and larger moves.
SGLD, which never rejects, has a different bias at a constant step. Both biases vanish as steps
become smaller; the last panel shows their rates.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import doxa

INK = "#22303c"
COLOURS = ("#2a6f97", "#d19a2a", "#c8553d")
ROWS, CHAINS = 64, 60
BATCHES = (64, 16, 4)
STEPS = (0.03, 0.1, 0.3, 1.0)  # ηλ


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean.expand(x.shape[0], 1)


@dataclass(frozen=True)
class Bias:
    """Draws at ηλ = 0.3 for each batch size, and the ratio of variances at each step."""

    draws: dict[int, np.ndarray]
    walk: dict[int, list[float]]  # {batch: [step]}
    langevin: list[float]  # SGLD on the smallest batch


def rows() -> tuple[Tensor, Tensor]:
    y = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.zeros(ROWS, 1, dtype=torch.float64), y


def exact() -> tuple[float, float]:
    """Mean and variance of the posterior: noise 1, prior N(0, 1)."""
    variance = 1 / (ROWS + 1.0)
    return float(rows()[1].sum()) * variance, variance


def measured(draws: int = 40) -> Bias:
    mean, variance = exact()

    def sampled(method: doxa.Method, batch: int) -> np.ndarray:
        model = doxa.Model(Mean(), doxa.Gaussian(1.0))
        fitted = doxa.fit(
            model, rows(), method, members=CHAINS, batch_size=batch, init="given",
            engine="stack:eager",
        )  # fmt: skip
        return fitted.samples.flatten().numpy()

    def ratio(found: np.ndarray) -> float:
        return float(np.mean((found - mean) ** 2) / variance)

    walk: dict[int, list[float]] = {}
    kept = {}
    for batch in BATCHES:
        for share in STEPS:
            gap = int(np.clip(3 / share, 5, 30))
            method = doxa.MinibatchMH(draws, 4 * gap, gap, "walk", step_size=share * variance)
            found = sampled(method, batch)
            walk.setdefault(batch, []).append(ratio(found))
            if share == 0.3:
                kept[batch] = found
    calm = [
        doxa.SGLD(draws, 4 * gap, gap, step_size=share * variance, decay=0.0)
        for share in STEPS
        for gap in [int(np.clip(3 / share, 5, 30))]
    ]
    return Bias(kept, walk, [ratio(sampled(method, BATCHES[-1])) for method in calm])


def draw(bias: Bias, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mean, variance = exact()
    std = variance**0.5
    figure = Figure(figsize=(12, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    at = np.linspace(-6, 6, 201)
    left.fill_between(at, np.exp(-0.5 * at**2) / np.sqrt(2 * np.pi), color="#d9dde1", lw=0)
    left.text(0, 0.15, "posterior", ha="center", color=INK, fontsize=10)
    for (batch, found), colour in zip(bias.draws.items(), COLOURS, strict=True):
        height, edges = np.histogram((found - mean) / std, 48, (-6, 6), density=True)
        left.stairs(height, edges, color=colour, lw=1.8, label=f"acceptance on {batch} rows")
    left.set_title("draws of a random walk, ηλ = 0.3", fontsize=11, color=INK, loc="left")
    left.set_xlabel("weight, in standard deviations of the posterior", color=INK)
    left.set_yticks([])
    for (batch, ratios), colour in zip(bias.walk.items(), COLOURS, strict=True):
        right.plot(STEPS, ratios, "o-", color=colour, label=f"Metropolis on {batch} rows")
    right.plot(STEPS, bias.langevin, "s--", color=INK, label=f"SGLD on {BATCHES[-1]} rows")
    right.axhline(1, color=INK, lw=0.8)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_title(
        "variance of the draws over the posterior's", fontsize=11, color=INK, loc="left"
    )
    right.set_xlabel("step size, ηλ", color=INK)
    right.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "minibatch_mh.png")
    bias = measured()
    print("variance / posterior's, at ηλ =" + "".join(f"{share:8}" for share in STEPS))
    for batch, ratios in bias.walk.items():
        print(f"Metropolis, {batch:2} rows         " + "".join(f"{r:8.2f}" for r in ratios))
    print(
        f"SGLD, {BATCHES[-1]:2} rows               " + "".join(f"{r:8.2f}" for r in bias.langevin)
    )
    draw(bias, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
