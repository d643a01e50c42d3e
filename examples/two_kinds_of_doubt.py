"""Aleatoric and epistemic uncertainty: ambiguity has entropy, distance also mutual information.

    python examples/two_kinds_of_doubt.py [figure.png]

Two classes overlap in a region with many rows: there every function that fits the data predicts a
probability near one half. Far from all data the functions disagree with each other instead. The
entropy of the prediction is large in both places; its two parts distinguish them,

    H[y | x, D]  =  E_f H[y | f, x]  +  I[y; f | x, D]
    total           aleatoric           epistemic

The posterior is sampled by Hamiltonian Monte Carlo over a small network, so no approximation of the
posterior affects the result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import doxa

AMBIGUOUS, FAR = (0.0, 0.0), (0.0, 5.5)
INK, CLASSES = "#22303c", ("#c8553d", "#2a6f97")


@dataclass(frozen=True)
class Uncertainty:
    """In nats: [2], at the ambiguous point and at the far one."""

    ambiguity: Tensor  # expected entropy
    disagreement: Tensor  # mutual information


def overlapping_classes(n: int = 240, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two clouds side by side that share their middle: x [n, 2], y [n]."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    x = np.stack([rng.normal(np.where(y == 0, -1.0, 1.0), 1.0), rng.normal(0.0, 0.7, n)], 1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def fitted(draws: int = 200, burn_in: int = 200, leapfrog: int = 30) -> doxa.Posterior:
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 2))
    method = doxa.HMC(draws=draws, burn_in=burn_in, leapfrog=leapfrog)
    return doxa.fit(net, overlapping_classes(), method, likelihood="categorical", members=4)


def uncertainty(posterior: doxa.Posterior) -> Uncertainty:
    p = posterior.predict(torch.tensor([AMBIGUOUS, FAR]))
    return Uncertainty(p.expected_entropy, p.mutual_information)


def draw(posterior: doxa.Posterior, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=2.6, foreground="black")]
    x, y = overlapping_classes()
    across, up = np.meshgrid(np.linspace(-7, 7, 141), np.linspace(-7, 7, 141))
    grid = torch.tensor(np.stack([across.ravel(), up.ravel()], 1), dtype=torch.float32)
    p = posterior.predict(grid)
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 0.66))
    maps = [
        ("probability of the blue class", p.probs[:, 1], "RdBu", 1.0),
        ("entropy: total uncertainty (nats)", p.entropy, "magma", float(np.log(2))),
        (
            "mutual information: disagreement (nats)",
            p.mutual_information,
            "magma",
            float(np.log(2)),
        ),
    ]
    for ax, (title, values, colours, top) in zip(axes, maps, strict=False):
        image = ax.pcolormesh(
            across, up, values.reshape(across.shape), cmap=colours, vmin=0, vmax=top
        )
        figure.colorbar(image, ax=ax, shrink=0.86, pad=0.02)
        ax.set_title(title, fontsize=10.5, color=INK)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_aspect("equal")
        for (a, b), label in ((AMBIGUOUS, "A"), (FAR, "B")):
            ax.plot(a, b, "o", ms=9, mfc="none", mec="white", mew=1.6, path_effects=outline)
            ax.annotate(
                label, (a, b), (8, 5), textcoords="offset points", size=13, weight="bold",
                color="white", path_effects=outline,
            )  # fmt: skip
    for c in (0, 1):
        own = x[y == c]
        axes[0].plot(own[:, 0], own[:, 1], "o", ms=3.2, color=CLASSES[c], mec="white", mew=0.4)
    found, places = uncertainty(posterior), ["A: classes\noverlap", "B: far from\nall data"]
    axes[3].bar(places, found.ambiguity.numpy(), 0.55, color="#8fb8d8", label="ambiguity")
    axes[3].bar(
        places, found.disagreement, 0.55, found.ambiguity, color="#c8553d", label="disagreement"
    )
    axes[3].axhline(np.log(2), color=INK, lw=0.8, ls=":")
    axes[3].text(0.5, np.log(2) + 0.01, "log 2", fontsize=8, ha="center", color=INK)
    axes[3].set_ylim(0, 1.0)
    axes[3].set_title("the two parts of entropy", fontsize=10.5, color=INK)
    axes[3].legend(frameon=False, fontsize=9, loc="upper center")
    axes[3].spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "two_kinds_of_doubt.png")
    posterior = fitted()
    found = uncertainty(posterior)
    print("                      entropy   mutual information")
    for name, a, d in zip(("classes overlap", "far from data"), *vars(found).values(), strict=True):
        print(f"{name:20} {float(a + d):8.3f} {float(d):10.3f}")
    draw(posterior, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
