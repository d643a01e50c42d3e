"""Active learning on the digits of scikit-learn: four acquisition functions compared.

    python examples/active_learning.py [--out active_learning.png]

The pool has 1,200 small images of digits, and 597 others are the test set. Dropout networks start
from 20 labels and choose ten rows per round: the least certain ones (the smallest margin between
two classes), the most informative ones about the network, one by one (BALD) or jointly (BatchBALD),
or random ones. In each round, the networks of all acquisition functions and seeds are one stacked
fit.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import doxa
from doxa.decide.active import Learned, learn

WAYS = ("margin", "bald", "batch_bald", "random")


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(found.data, dtype=torch.float32) / 16.0
    return x[order], torch.tensor(found.target)[order]


def campaign(
    seeds: int = 3, budget: int = 150, steps: int = 300, rows: int = 1200, progress: bool = True
) -> Learned:
    """Learning curves of every acquisition function and seed."""
    x, y = digits()
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.25), nn.Linear(100, 10))
    return learn(
        net, x[:rows], y[:rows], doxa.MCDropout(), by=WAYS, seeds=range(seeds), start=20, step=10,
        budget=budget, test=(x[1200:], y[1200:]), n=50, sample=400, steps=steps, lr=1e-2,
        likelihood="categorical", validation=None, progress=progress,
    )  # fmt: skip


def draw(found: Learned, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for way in WAYS:
        labels, mean, spread = map(
            torch.tensor, zip(*found.mean_curve(way, "accuracy"), strict=True)
        )
        (line,) = axis.plot(labels, 100 * mean, label=way.replace("_", " "))
        low, high = 100 * (mean - spread), 100 * (mean + spread)
        axis.fill_between(labels, low, high, alpha=0.15, color=line.get_color())
    axis.set(xlabel="labels", ylabel="% of test images right", title="Digits, ten labels per round")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--out", type=Path, default=Path("active_learning.png"))
    asked = ask.parse_args()
    found = campaign()
    print(found.table("accuracy", 0.85, 0.90, 0.93))
    draw(found, asked.out)
    print(f"written to {asked.out}")


if __name__ == "__main__":
    main()
