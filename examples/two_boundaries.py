"""Decision boundaries of logistic regression: the MAP estimate, and the posterior average.

    python examples/two_boundaries.py [figure.png]

The point estimate (MAP: training with weight decay) is confident far from all data: its contours
are parallel lines. The average of the same model over the posterior of its three weights has curved
contours: lines that all fit the few points disagree away from them, and the probability returns
towards one half. The boundary at one half hardly moves; the confidence on either side changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import doxa

INK, CLASSES = "#22303c", ("#c8553d", "#2a6f97")
FAR = torch.tensor([[5.5, 4.5], [-5.5, -4.5]], dtype=torch.float64)  # no point is near


def few_points(n: int = 14, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Two classes side by side: x [n, 2], y [n, 1]."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    x = np.stack([rng.normal(np.where(y == 0, -1.0, 1.0), 0.8), rng.normal(0, 0.8, n)], 1)
    return torch.tensor(x), torch.tensor(y, dtype=torch.float64).unsqueeze(1)


def logistic() -> doxa.Model:
    return doxa.Model(nn.Linear(2, 1).double(), "bernoulli", doxa.Normal(3.0))


def fitted(draws: int = 1000) -> tuple[doxa.Posterior, doxa.Posterior]:
    """The MAP estimate and the posterior of one model on one data set."""
    point = doxa.fit(logistic(), few_points(), "map", steps=3000)
    average = doxa.fit(logistic(), few_points(), doxa.HMC(draws=draws, burn_in=500, leapfrog=10))
    return point, average


def probability(posterior: doxa.Posterior, x: Tensor) -> np.ndarray:
    """The probability of the blue class: the mean over functions of the posterior."""
    return posterior.predict(x).mean[:, 0].numpy()


def draw(point: doxa.Posterior, average: doxa.Posterior, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    x, y = few_points()
    across, up = np.meshgrid(np.linspace(-6, 6, 161), np.linspace(-6, 6, 161))
    grid = torch.tensor(np.stack([across.ravel(), up.ravel()], 1))
    lines = average.functions(grid, 25)[..., 0].numpy()
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    titles = ("point estimate", "25 draws of the posterior", "posterior average")
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=12, color=INK, loc="left")
        ax.set_aspect("equal")
        ax.set_xticks([])
        ax.set_yticks([])
    for ax, posterior in ((axes[0], point), (axes[2], average)):
        p = probability(posterior, grid).reshape(across.shape)
        image = ax.contourf(across, up, p, np.linspace(0, 1, 21), cmap="RdBu", alpha=0.75)
        marks = ax.contour(across, up, p, [0.05, 0.25, 0.5, 0.75, 0.95], colors=INK,
                           linewidths=[0.9, 0.9, 2.2, 0.9, 0.9])  # fmt: skip
        ax.clabel(marks, fmt="%.2f", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.85, label="probability of the blue class")
    for values in lines:
        axes[1].contour(across, up, values.reshape(across.shape), [0.0], colors=INK,
                        linewidths=0.9, alpha=0.55)  # fmt: skip
    for ax in axes:
        for c in (0, 1):
            own = x[y[:, 0] == c]
            ax.plot(own[:, 0], own[:, 1], "o", ms=6, color=CLASSES[c], mec="white", mew=0.8)
    figure.savefig(path, dpi=120)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "two_boundaries.png")
    point, average = fitted()
    print("probability of blue at     ", *[f"({a:.1f}, {b:.1f})" for a, b in FAR.tolist()])
    for name, posterior in (("point estimate", point), ("posterior average", average)):
        print(f"{name:27}", *[f"{p:11.3f}" for p in probability(posterior, FAR)])
    draw(point, average, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
