"""What a leapfrog step costs against the number of chains: HMC on the network of `samplers.py`.

A row of `samplers.py`; the figure is docs/figures/chains.png.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from problem import clock
from torch import nn

import doxa

CHAINS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "chains.png"
LEAPFROG = 20


def seconds(chains: int, mode: str) -> float:
    """A leapfrog step of all chains: the median between ticks of a fit by HMC."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=g)
    y = x[:, :1].sin() + 0.5 * torch.randn(512, 1, generator=g)
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    marks: list[tuple[int, float]] = []
    draws = 40 if chains < 64 else 20
    doxa.fit(
        net, (x, y), doxa.HMC(draws=draws, burn_in=draws, leapfrog=LEAPFROG), members=chains,
        likelihood=doxa.Gaussian(0.5), prior=doxa.Normal(1.0), engine=f"stack:{mode}",
        progress=False, callbacks=[lambda t, _: marks.append((t, clock())) or None],
    )  # fmt: skip
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]
    return statistics.median(pairs[2:]) / LEAPFROG


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for chains in CHAINS:
        row: dict[str, Any] = {"chains": chains}
        row |= {mode: seconds(chains, mode) for mode in ("eager", "compiled")}
        rows.append(row)
        print(row, flush=True)
    draw(rows)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at = [row["chains"] for row in rows]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for mode, colour in (("eager", "#c1666b"), ("compiled", "#2a6f97")):
        cost = [row[mode] * 1e3 for row in rows]
        axes[0].loglog(at, cost, "o-", color=colour, label=mode)
        axes[1].loglog(at, [1e3 * c / n for c, n in zip(cost, at, strict=True)], "o-",
                       color=colour, label=mode)  # fmt: skip
    alone = rows[0]["compiled"] * 1e3
    axes[0].loglog(at, [alone * n for n in at], "--", color="#999999", label="proportional")
    axes[0].set(title="all chains", ylabel="ms a leapfrog step")
    axes[1].set(title="each chain", ylabel="µs a leapfrog step and chain")
    for ax in axes:
        ax.set(xlabel="chains", xticks=at, xticklabels=at)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=150)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "µs a leapfrog step of the net 8-50-1, 512 rows, of all chains together and of each.\n",
        "| chains | eager | compiled | compiled, a chain |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        each = row["compiled"] / row["chains"]
        lines.append(f"| {row['chains']} | {row['eager'] * 1e6:.0f} | {row['compiled'] * 1e6:.0f} "
                     f"| {each * 1e6:.0f} |")  # fmt: skip
    return "\n".join(lines)
