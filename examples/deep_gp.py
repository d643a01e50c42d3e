"""Sparse and deep Gaussian processes: regression on a step, and classification.

    python examples/deep_gp.py [folder] [step] [classes]

step     100 noisy rows of a step under an exact GP, a sparse one, and deep ones of two and three
         layers. A GP has one lengthscale: if it is short enough for the step, the function
         oscillates everywhere else. A deep GP transforms its input first. Two minutes.
classes  three interleaved arms under a sparse GP, with its optimised inducing points.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa

INK, OURS, BLUE, GREEN = "#22303c", "#c8553d", "#2a6f97", "#4f772d"
SPREAD = 0.02  # of the step's noise


def step(rows: int = 100) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(rows, 1, generator=g, dtype=torch.float64) - 1
    return x, (x > 0).double() + SPREAD * torch.randn(rows, 1, generator=g, dtype=torch.float64)


def arms(rows: int = 300) -> tuple[Tensor, Tensor]:
    """Rows of three arms that turn around the origin, and the arm of each row."""
    g = torch.Generator().manual_seed(1)
    label = torch.arange(rows) % 3
    along = torch.rand(rows, generator=g, dtype=torch.float64)
    angle = 2 * math.pi * label / 3 + 3.0 * along
    x = (0.2 + along)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return x + 0.06 * torch.randn(rows, 2, generator=g, dtype=torch.float64), label


def fit(data: Any, method: Any, **options: Any) -> Any:
    """Fit to all rows, so that the bounds of different methods are of the same data."""
    return doxa.fit(
        None, data, method, likelihood="gaussian", standardize=True, validation=None, **options
    )


def draw_step(folder: Path) -> None:
    import matplotlib.pyplot as plt

    data, at = step(), torch.linspace(-1.5, 1.5, 400).double()[:, None]
    panels = {
        "exact GP": (doxa.GP(), {}),
        "sparse GP, 25 points": (doxa.SparseGP(inducing=25), {}),
        "deep GP, 2 layers": (doxa.DeepGP(inducing=25), {"steps": 1500}),
        "deep GP, 3 layers": (doxa.DeepGP(inducing=25, layers=3), {"steps": 1500}),
    }
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), sharey=True, layout="constrained")
    for axis, (name, (method, options)) in zip(axes, panels.items(), strict=True):
        posterior = fit(data, method, **options)
        found = posterior.log_evidence if posterior.elbo is None else posterior.elbo
        word = "evidence" if posterior.elbo is None else "bound"
        axis.plot(at[:, 0], posterior.functions(at, 20)[..., 0].T, lw=0.6, color=BLUE, alpha=0.7)
        axis.plot(data[0][:, 0], data[1][:, 0], ".", ms=4, color=INK)
        axis.set_title(f"{name}\n{word} {found:.0f}", fontsize=10)
        axis.set_ylim(-0.6, 1.6)
    figure.savefig(folder / "deep_gp_step.png", dpi=110)


def draw_classes(folder: Path) -> None:
    import matplotlib.pyplot as plt

    x, y = arms()
    posterior = doxa.fit(
        None, (x, y), doxa.SparseGP(inducing=30), likelihood="categorical", steps=600
    )
    side = torch.linspace(-1.6, 1.6, 60).double()
    grid = torch.cartesian_prod(side, side)
    p = posterior.predict(grid)
    colours = torch.tensor([[0.78, 0.33, 0.24], [0.16, 0.44, 0.59], [0.31, 0.47, 0.18]]).double()
    image = 1 - p.probs @ (1 - colours)
    extent = (-1.6, 1.6, -1.6, 1.6)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    picture = image.reshape(60, 60, 3).transpose(0, 1)
    axes[0].imshow(picture, origin="lower", extent=extent, alpha=0.6)
    for label, colour in enumerate((OURS, BLUE, GREEN)):
        own = x[y == label]
        axes[0].plot(own[:, 0], own[:, 1], ".", ms=4, color=colour)
    points = posterior.points[0]
    axes[0].plot(points[:, 0], points[:, 1], "x", ms=6, color=INK)
    axes[0].set_title("class probabilities, rows, inducing points (×)", fontsize=10)
    information = p.mutual_information.reshape(60, 60).T
    shown = axes[1].imshow(information, origin="lower", extent=extent, cmap="magma")
    figure.colorbar(shown, ax=axes[1], shrink=0.8)
    axes[1].set_title("mutual information, nats", fontsize=10)
    figure.savefig(folder / "sparse_gp_classes.png", dpi=110)


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    parts = [name for name in sys.argv[1:] if name in ("step", "classes")]
    folders = [Path(name) for name in sys.argv[1:] if name not in parts]
    folder = folders[0] if folders else Path()
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts or ("step", "classes"):
        {"step": draw_step, "classes": draw_classes}[part](folder)


if __name__ == "__main__":
    main()
