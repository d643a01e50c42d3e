"""Kernels as priors over functions: draws before and after the data, for four kernels.

    python examples/gaussian_process.py [figure.png]

The data are sixty monthly values with a trend and a season, with a gap; two more years are
predicted. Kernels are given as text, such as "linear + rbf * periodic". Every kernel fits the
observed months; they differ in the gap and in the future. The evidence, computed without the
future, ranks them: the kernel with both trend and season has the largest.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import doxa

INK, LINE, DATA = "#22303c", "#2a6f97", "#c8553d"
KERNELS = {
    "rbf": "smooth", "matern12": "rough", "periodic": "a season",
    "linear + rbf * periodic": "a trend, and a season that may change",
}  # fmt: skip
NOW, LATER = 6.0, 8.0  # years


def series(later: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Years [n, 1] and values [n, 1]: of the first six years without a gap, or of the next two."""
    t = np.arange(0, LATER, 1 / 12)
    rng = np.random.default_rng(seed)
    y = 0.4 * (t - 3) + np.sin(2 * math.pi * t) + 0.35 * np.cos(4 * math.pi * t)
    y += 0.15 * rng.normal(size=len(t))
    part = t >= NOW if later else (t < NOW) & ((t < 2.6) | (t > 3.6))
    return torch.from_numpy(t[part])[:, None], torch.from_numpy(y[part])[:, None]


def fitted(kernel: str) -> doxa.Posterior:
    return doxa.fit(None, series(), doxa.GP(kernel), progress=False)


def foreseen(posterior: doxa.Posterior) -> float:
    """The mean log likelihood of the two held-out years."""
    x, y = series(later=True)
    return float(posterior.predict(x).log_prob(y).mean())


def draw(posteriors: dict[str, doxa.Posterior], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    x = torch.linspace(0, LATER, 321, dtype=torch.float64)[:, None]
    at, seen, coming = x[:, 0].numpy(), series(), series(later=True)
    figure = Figure(figsize=(15, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(posteriors), sharex=True, sharey=True)
    for (kernel, posterior), (before, after) in zip(posteriors.items(), axes.T, strict=True):
        before.set_title(f'"{kernel}"\n{KERNELS[kernel]}', fontsize=11, color=INK, loc="left")
        before.plot(at, posterior.prior_functions(x, 5)[..., 0].T, color=LINE, lw=1, alpha=0.8)
        p = posterior.predict(x)
        mean, std = p.mean[:, 0].numpy(), p.std[:, 0].numpy()
        after.fill_between(at, mean - 2 * std, mean + 2 * std, color=LINE, alpha=0.15, lw=0)
        after.plot(at, posterior.functions(x, 5)[..., 0].T, color=LINE, lw=0.8, alpha=0.7)
        after.plot(*seen, "o", ms=3, color=DATA)
        after.plot(*coming, "o", ms=3, mfc="white", mec=DATA, mew=0.8)
        after.axvline(NOW, color=INK, lw=0.8, ls=":")
        text = (
            f"evidence {posterior.log_evidence:.1f},  unseen years {foreseen(posterior):.2f} a row"
        )
        after.set_title(text.replace("-", "−"), fontsize=10, color=INK, loc="left")
        after.set_ylim(-5, 5)
        after.set_xlabel("years")
    axes[0, 0].set_ylabel("before the data")
    axes[1, 0].set_ylabel("after the data")
    figure.savefig(path, dpi=100)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "gaussian_process.png")
    posteriors = {kernel: fitted(kernel) for kernel in KERNELS}
    print(f"{'kernel':26}{'evidence':>10}{'unseen years':>14}  hyper-parameters")
    for kernel, posterior in posteriors.items():
        found = {
            name: round(float(np.ravel(value)[0]), 3)
            for name, value in posterior.diagnostics["kernel"].items()
        }
        print(f"{kernel:26}{posterior.log_evidence:10.1f}{foreseen(posterior):14.2f}  {found}")
    draw(posteriors, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
