"""A prior over functions instead of weights: functional VI compared with mean-field VI.

    python examples/functional_vi.py [folder]

Three functions after Sun et al. (2019): a cubic under a GP prior with an RBF kernel, a partly
observed wave under a periodic kernel, and steps under a prior that is only a sampler of step
functions. Left: mean-field on the same network, with N(0, 1) on its weights; middle: functional VI;
right: draws of the prior over functions. One to two minutes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import doxa

INK, BAND, TRUE = "#22303c", "#c8553d", "#2a6f97"
STEPS = 6  # jumps of a step function at most


class Problem(NamedTuple):
    """Rows, the true function on a grid, and the prior over functions."""

    name: str
    x: Tensor
    y: Tensor
    grid: Tensor
    truth: Tensor
    noise: float
    prior: Any


def jumps(x: Tensor, z: Tensor) -> Tensor:
    """A step function: jumps of standard normal height at uniform places in [-3, 3]."""
    places = 3 * torch.erf(z[:STEPS] / math.sqrt(2))
    return z[STEPS] + ((x[:, :1] > places) * z[STEPS + 1 :]).sum(1)


def problems() -> list[Problem]:
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    uniform = lambda n, a, b: a + (b - a) * torch.rand(n, 1, generator=g)  # noqa: E731
    grid = torch.linspace(-3, 3, 121).unsqueeze(1)

    cubic = lambda x: x**3 / 3  # noqa: E731
    x = uniform(20, -2, 2)
    first = Problem(
        "cubic, RBF kernel", x, cubic(x) + 0.15 * normal(20, 1), grid, cubic(grid), 0.15,
        doxa.GPPrior("rbf", lengthscale=1.0, variance=9.0),
    )  # fmt: skip
    wave = lambda x: (math.pi * x).sin()  # noqa: E731
    x = torch.cat([uniform(12, -1.5, -0.2), uniform(12, 0.2, 1.0)])
    second = Problem(
        "wave, periodic kernel", x, wave(x) + 0.1 * normal(24, 1), grid, wave(grid), 0.1,
        doxa.GPPrior("periodic", period=2.0),
    )  # fmt: skip
    step = lambda x: torch.where(x < -1, -1.0, torch.where(x < 0.8, 1.0, 0.0))  # noqa: E731
    x = uniform(40, -2, 2)
    third = Problem(
        "steps, an implicit prior", x, step(x) + 0.1 * normal(40, 1), grid, step(grid), 0.1,
        doxa.ImplicitPrior(jumps, 2 * STEPS + 1),
    )  # fmt: skip
    return [first, second, third]


def fitted(problem: Problem, method: Any, steps: int) -> Any:
    net = doxa.nets.mlp(1, 1, hidden=(50, 50), activation="relu")
    return doxa.fit(
        net, (problem.x, problem.y), method, likelihood=doxa.Gaussian(noise=problem.noise),
        validation=None, steps=steps, lr=0.01, schedule="cosine", progress=False, seed=0,
    )  # fmt: skip


def answers(problem: Problem, steps: int = 1500) -> dict[str, Any]:
    """Each method's posterior."""
    # measurement points wherever the figure looks
    margin = float((3 - problem.x.abs().max()) / (problem.x.max() - problem.x.min()))
    functional = doxa.FunctionalVI(
        function_prior=problem.prior,
        samples=32,
        margin=max(margin, 0.7),
        measured_rows=24,
        extra_points=30,
    )
    return {
        "mean-field VI": fitted(problem, doxa.MeanField(samples=4), steps),
        "functional VI": fitted(problem, functional, steps),
    }


def panel(axes: Any, problem: Problem, f: Tensor, title: str) -> None:
    """Draws [S, N], their mean and two standard deviations."""
    grid, mean, std = problem.grid[:, 0].numpy(), f.mean(0).numpy(), f.std(0).numpy()
    axes.fill_between(grid, mean - 2 * std, mean + 2 * std, color=BAND, alpha=0.18, lw=0)
    axes.plot(grid, f[:5].numpy().T, color=BAND, lw=0.7, alpha=0.6)
    axes.plot(grid, mean, color=BAND, lw=1.8)
    axes.plot(grid, problem.truth[:, 0].numpy(), color=TRUE, lw=1.2, ls="--")
    axes.plot(problem.x[:, 0].numpy(), problem.y[:, 0].numpy(), ".", color=INK, ms=5)
    most = 2 * float(problem.y.abs().max())
    axes.set(title=title, ylim=(-most, most), xlim=(-3, 3))


def main(folder: Path, steps: int = 1500) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    rows = figure.subplots(3, 3)
    for own, problem in zip(rows, problems(), strict=True):
        for axes, (name, posterior) in zip(own, answers(problem, steps).items(), strict=False):
            f = posterior.functions(problem.grid, 400)[..., 0]
            panel(axes, problem, f, f"{problem.name}: {name}")
            error = (f.mean(0) - problem.truth[:, 0]).square().mean().sqrt()
            print(f"{problem.name}, {name}: error of the mean {float(error):.2f}")
        drawn = problem.prior.sample(problem.grid, 6)[..., 0].numpy()
        own[2].plot(problem.grid[:, 0].numpy(), np.asarray(drawn).T, color=INK, lw=0.8)
        own[2].set(title="the prior over functions", xlim=(-3, 3))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "functional_vi.png"
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"))
