"""From SGD to HMC, one term at a time, on one posterior over two weights.

    python examples/sgd_to_hmc.py [figure.png]

The posterior of a logistic regression with two weights, on correlated inputs, can be drawn on a
grid. Four algorithms explore it; each differs from the one before by one change:

    SGD     θ ← θ − η ∇Û                                    goes to the maximum, and jitters there
    SGLD    … + √(2η) ε                                     noise of the right size: samples
    SGHMC   v ← (1 − α) v − η ∇Û + √(2αη) ε,  θ ← θ + v     momentum: goes farther
    HMC     no mini-batch, no friction, accept or reject    exact

The quality of a sampler shows in the spread of its draws, relative to that of the posterior.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import doxa

INK, WALK, CLOUD = "#22303c", "#c8553d", "#2a6f97"
STEP, FRICTION, BATCH = 0.02, 0.2, 10


@dataclass(frozen=True)
class Walk:
    """One algorithm: its first steps, and its draws after burn-in. [T, 2] each."""

    name: str
    note: str
    path: Tensor
    draws: Tensor


def classes(n: int = 60, seed: int = 4) -> tuple[Tensor, Tensor]:
    """Two correlated inputs and a noisy label: the two weights can compensate each other."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.8], [0.0, 0.5]])
    y = rng.uniform(size=n) < 1 / (1 + np.exp(-(x @ np.array([1.5, 0.5]))))
    return torch.tensor(x), torch.tensor(y, dtype=torch.float64).unsqueeze(1)


def model() -> doxa.Model:
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.5, 3.0]]))  # all start here, far from the mass
    return doxa.Model(net, "bernoulli", doxa.Normal(2.0))


def posterior_on_grid(points: int = 161) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two axes, and the density on their grid, normalised to one."""
    x, y = classes()
    first, second = np.linspace(-2.2, 5, points), np.linspace(-2.8, 4, points)
    w = torch.tensor(np.stack(np.meshgrid(first, second), -1))  # [second, first, 2]
    logits = w @ x.T
    fit = (y[:, 0] * logits - nn.functional.softplus(logits)).sum(-1)
    log = fit - w.square().sum(-1) / 8
    density = torch.softmax(log.flatten(), 0).reshape(log.shape)
    return first, second, density.numpy()


def walks(draws: int = 800, path: int = 60) -> list[Walk]:
    """Each fit twice: every step from the start, and thinned draws after burn-in."""

    def run(name: str, note: str, short: doxa.Method, long: doxa.Method) -> Walk:
        options = {"members": 1, "init": "given", "batch_size": BATCH, "seed": 1}
        first = doxa.fit(model(), classes(), short, **options).samples[0]
        start = torch.tensor([[-1.5, 3.0]], dtype=torch.float64)
        settled = doxa.fit(model(), classes(), long, **options).samples[0]
        return Walk(name, note, torch.cat([start, first]), settled)

    cold, quiet = (
        {"step_size": STEP, "decay": 0.0, "temperature": 1e-12},
        {"decay": 0.0, "step_size": STEP},
    )
    moving = {"step_size": STEP / 4, "friction": FRICTION}
    return [
        run("SGD", "to the maximum", doxa.SGLD(path, 0, 1, **cold),
            doxa.SGLD(draws, 500, 5, **cold)),
        run("SGLD", "+ noise", doxa.SGLD(path, 0, 1, **quiet), doxa.SGLD(draws, 500, 5, **quiet)),
        run("SGHMC", "+ momentum", doxa.SGHMC(path, 0, 1, **moving),
            doxa.SGHMC(draws, 500, 5, **moving)),
        run("HMC", "− friction, + acceptance", doxa.HMC(15, 0, 10), doxa.HMC(draws, 300, 10)),
    ]  # fmt: skip


def spread(walk: Walk) -> tuple[float, float]:
    """Standard deviations along and across the long axis, relative to those of the posterior."""
    first, second, density = posterior_on_grid()
    across, up = np.meshgrid(first, second)
    points, weight = np.stack([across.ravel(), up.ravel()], 1), density.ravel()
    mean = weight @ points
    covariance = (points - mean).T @ ((points - mean) * weight[:, None])
    values, axes = np.linalg.eigh(covariance)
    own = (walk.draws.numpy() @ axes).std(0) / np.sqrt(values)
    return float(own[1]), float(own[0])


def draw(found: list[Walk], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first, second, density = posterior_on_grid()
    order = np.sort(density.ravel())[::-1]
    inside = [order[np.searchsorted(order.cumsum(), share)] for share in (0.95, 0.8, 0.5, 0.2)]
    figure = Figure(figsize=(14, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for ax, walk in zip(figure.subplots(1, 4, sharex=True, sharey=True), found, strict=True):
        ax.contourf(first, second, density, [*inside, density.max()], cmap="Greys", alpha=0.55)
        shown = walk.draws[:: max(1, len(walk.draws) // 400)]
        ax.plot(shown[:, 0], shown[:, 1], "o", ms=2.4, color=CLOUD, alpha=0.5, mew=0)
        ax.plot(walk.path[:, 0], walk.path[:, 1], "-", color=WALK, lw=1.3)
        ax.plot(*walk.path[0], "o", color=WALK, ms=5)
        along, across = spread(walk)
        ax.set_title(f"{walk.name}   {walk.note}", fontsize=12, color=INK, loc="left")
        label = f"spread: {along:.2f} × the posterior's\nalong its length, {across:.2f} × across"
        ax.set_xlabel(label, fontsize=9, color=INK)
        ax.set_aspect("equal")
        ax.set_xticks([])
        ax.set_yticks([])
    figure.suptitle(
        "grey: the posterior over two weights (20, 50, 80, 95 %)    red: the first steps    "
        "blue: draws after burn-in", fontsize=10, color=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "sgd_to_hmc.png")
    found = walks()
    print("           spread / posterior's: along   across")
    for walk in found:
        along, across = spread(walk)
        print(f"{walk.name:10} {along:26.2f} {across:8.2f}")
    draw(found, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
