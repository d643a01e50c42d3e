"""Neural processes: predicting a function from a few of its points, without training on it.

    python examples/neural_process.py [figure.png [FOLDER]]

A task is a function drawn from a Gaussian process and seen at some points. A neural process is
trained on thousands of such tasks, each cut into a context and targets, and afterwards predicts a
new function from its context in one pass. The best possible prediction is known here: that of the
Gaussian process that drew the function, with its lengthscale, given the same points. The printed
scores are log likelihoods per point on 500 new tasks; one normal for all points would score −0.9.

Training is short, about a minute in total on one core. The paper uses 100,000 steps, as does
`benchmarks/neural_processes.py`: FOLDER holds its saved results, which are then drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import doxa
from doxa.data import TaskSampler
from doxa.data.simulated import KERNELS, gp_tasks

INK, BLUE, GREY = "#22303c", "#2a6f97", "#9aa5b1"
SMALL = {
    "cnp": doxa.CNP(width=64),
    "anp": doxa.AttentiveNP(width=32, heads=4, samples=2),
    "convcnp": doxa.ConvCNP(width=32, layers=4),
}


def trained(name: str, steps: int) -> Any:
    """A neural process that has seen `steps` batches of 16 functions."""
    return doxa.fit(None, TaskSampler(gp_tasks()), SMALL[name], steps=steps, lr=2e-3)


def score(posterior: Any, tasks: int = 500) -> float:
    """The mean log-likelihood of a target, on tasks that were not seen."""
    sampler = TaskSampler(gp_tasks(), seed=1, look=2)
    x, y, context, targets = sampler.drawn(("test",), tasks, torch.device("cpu"))
    seen = context.unsqueeze(2)
    given = {"context_x": x * seen, "context_y": y * seen, "context": context, "target_x": x}
    logs = posterior.predict(given, n=20).log_prob(y.reshape(-1, 1).float()).reshape(tasks, -1)
    return float(((logs * targets).sum(1) / targets.sum(1)).mean())


def one_function(seed: int = 3, points: int = 7) -> tuple[Tensor, Tensor]:
    """Some points of a function: lengthscale 0.4, scale 1, noise 0.02."""
    g = torch.Generator().manual_seed(seed)
    x = (4 * torch.rand(points, 1, generator=g, dtype=torch.float64) - 2).sort(0).values
    covariance = kernel(x, x) + 0.02**2 * torch.eye(points)
    draw = torch.randn(points, generator=g, dtype=torch.float64)
    return x, torch.linalg.cholesky(covariance) @ draw


def kernel(a: Tensor, b: Tensor) -> Tensor:
    return KERNELS["rbf"]((a - b.T).abs() / 0.4)


def truth(x: Tensor, y: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the process that drew the function, given the points."""
    noisy = kernel(x, x) + 0.02**2 * torch.eye(len(x))
    cross = kernel(grid, x)
    solved = torch.linalg.solve(noisy, cross.T)
    variance = 1 + 0.02**2 - (cross * solved.T).sum(1)
    return cross @ torch.linalg.solve(noisy, y), variance.clamp_min(0).sqrt()


def draw(posteriors: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(posteriors), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    x, y = one_function()
    grid = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]
    mean, std = truth(x, y, grid)
    for axes, (name, posterior) in zip(
        figure.subplots(1, len(posteriors), sharey=True), posteriors.items(), strict=True
    ):
        known = posterior.condition(x, y)
        p = known.predict(grid)
        at, middle, spread = grid[:, 0], p.mean, 2 * p.std
        axes.fill_between(at, middle - spread, middle + spread, color=BLUE, alpha=0.25, lw=0)
        if posterior.method.latent:
            axes.plot(at, known.functions(grid, 5).T, color=BLUE, lw=0.6, alpha=0.7)
        axes.plot(at, middle, color=BLUE, label=name)
        for line in (mean - 2 * std, mean + 2 * std):
            axes.plot(at, line, color=GREY, lw=0.9, ls="--")
        axes.plot(at, mean, color=GREY, lw=0.9, ls="--", label="the process itself")
        axes.plot(x[:, 0], y, "o", color=INK, ms=4)
        axes.set(title=name, ylim=(-3, 3), xlabel="x")
        axes.legend(frameon=False, loc="lower left", fontsize=8)
    figure.savefig(path, dpi=150)


def main(path: Path, folder: Path | None = None, steps: int = 500) -> None:
    if folder is None:
        posteriors = {name: trained(name, steps) for name in SMALL}
    else:
        names = ("cnp", "np", "anp", "tnp", "convcnp")
        posteriors = {name: doxa.load(folder / f"gp-{name}") for name in names}
    for name, posterior in posteriors.items():
        print(f"{name}: {score(posterior):.2f} a point")
    draw(posteriors, path)
    print(f"figure: {path}")


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    main(*(given or [Path("neural_process.png")]))
