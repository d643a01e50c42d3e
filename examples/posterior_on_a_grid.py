"""A nonlinear model of two weights: its posterior on a grid, and the same by sampling.

    python examples/posterior_on_a_grid.py [figure.png]

    y = a tanh(b x) + ε,   ε ~ N(0, 0.3²),   a ~ N(0, 2²),   b ~ N(0, 2²) above 0

is the smallest neural network: one hidden unit. Its likelihood is not Gaussian in (a, b): a small b
with a large a gives nearly the same curve, and the posterior is curved. With two weights the
integral can be computed on a grid, exact to many digits; with more weights one needs samples.
Moments and predictions of draws by NUTS agree with the grid within their Monte Carlo error.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import doxa

NOISE, PRIOR = 0.3, 2.0
INK, GRID, DRAWS = "#22303c", "#c8553d", "#2a6f97"
X = torch.tensor([-1.2, -0.7, -0.3, 0.1, 0.5, 0.9, 1.1], dtype=torch.float64)
Y = torch.tensor([-1.33, -0.62, -0.63, 0.26, 0.48, 1.21, 0.83], dtype=torch.float64)


def log_density(p: dict[str, Tensor]) -> Tensor:
    """log p(y | a, b) + log p(a, b) without constants, of one pair or of a grid of them."""
    f = p["a"].unsqueeze(-1) * torch.tanh(p["b"].unsqueeze(-1) * X)
    misfit = ((Y - f) / NOISE).square().sum(-1)
    return -0.5 * (misfit + (p["a"].square() + p["b"].square()) / PRIOR**2)


class Grid(NamedTuple):
    """Values of a [A] and b [B], and the probability of each pair [A, B]."""

    a: Tensor
    b: Tensor
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Of values [A, B, ...] over the posterior."""
        return torch.tensordot(self.weight, values, 2)

    def pairs(self) -> tuple[Tensor, Tensor]:
        a, b = torch.meshgrid(self.a, self.b, indexing="ij")
        return a, b


def on_a_grid(points: int = 800) -> Grid:
    """The midpoint rule on −10 < a < 10, 0 < b < 10, where all of the posterior is."""
    middle = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    a, b = 20 * middle - 10, 10 * middle
    pairs = torch.meshgrid(a, b, indexing="ij")
    weight = log_density({"a": pairs[0], "b": pairs[1]}).flatten().softmax(0)
    return Grid(a, b, weight.reshape(points, points))


def drawn(draws: int = 1000) -> doxa.Draws:
    """Four chains."""
    return doxa.sample(
        log_density, {"a": 1.0, "b": 1.0}, doxa.NUTS(draws=draws, burn_in=500, target_accept=0.95),
        members=4, constraints={"b": "positive"}, progress=False,
    )  # fmt: skip


def draw(grid: Grid, draws: doxa.Draws, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    a, b = draws["a"].flatten(), draws["b"].flatten()
    figure = Figure(figsize=(13, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    density = (grid.weight / grid.weight.max()).T.numpy()
    levels = [math.exp(-r) for r in (4.6, 3.0, 1.9, 1.2, 0.7, 0.3)]
    axes[0].scatter(a[::4], b[::4], s=7, color=DRAWS, alpha=0.5, lw=0)
    axes[0].contour(grid.a, grid.b, density, levels, colors=GRID, linewidths=1.2)
    axes[0].set(xlim=(0, 6), ylim=(0, 4), xlabel="a", ylabel="b")
    axes[0].set_title("posterior: grid (lines), NUTS (points)", loc="left", color=INK)
    for values, of, weight, name in (
        (a, grid.a, grid.weight.sum(1), "a"), (b, grid.b, grid.weight.sum(0), "b"),
    ):  # fmt: skip
        width, shade = float(of[1] - of[0]), 0.55 if name == "a" else 0.25
        axes[1].hist(values.numpy(), 60, range=(0, 6), density=True, color=DRAWS, alpha=shade)
        axes[1].plot(of, weight / width, color=GRID, lw=1.8)
        top = int(weight.argmax())
        axes[1].annotate(name, (float(of[top]), float(weight[top]) / width), (4, 4),
                         textcoords="offset points", color=INK, fontsize=13)  # fmt: skip
    axes[1].set(xlim=(0, 6), yticks=[])
    axes[1].set_title("each weight: grid (lines), NUTS (bars)", loc="left", color=INK)
    x = torch.linspace(-3, 3, 121, dtype=torch.float64)
    ga, gb = grid.pairs()
    exact, square = torch.stack(
        [torch.stack([grid.mean(f), grid.mean(f.square())]) for f in
         (ga * torch.tanh(gb * at) for at in x)], 1,
    )  # fmt: skip
    spread = (square - exact.square() + NOISE**2).sqrt()
    f = a[:, None] * torch.tanh(b[:, None] * x)
    band = (f.var(0) + NOISE**2).sqrt()
    axes[2].plot(x, f[::100].T, color=DRAWS, lw=0.6, alpha=0.4)
    axes[2].fill_between(
        x, f.mean(0) - 2 * band, f.mean(0) + 2 * band, color=DRAWS, alpha=0.18, lw=0
    )
    for line in (exact, exact - 2 * spread, exact + 2 * spread):
        axes[2].plot(x, line, color=GRID, lw=1.4)
    axes[2].plot(X, Y, "o", color=INK, ms=5)
    axes[2].set_title("y, mean ± 2 sd: grid (lines), NUTS (band)", loc="left", color=INK)
    figure.savefig(path, dpi=110)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "posterior_on_a_grid.png")
    grid, draws = on_a_grid(), drawn()
    a, b = grid.pairs()
    print(f"{'':8}{'grid':>10}{'NUTS':>10}")
    for name, exact, found in (
        ("E a", grid.mean(a), draws["a"].mean()), ("E b", grid.mean(b), draws["b"].mean()),
        ("E ab", grid.mean(a * b), (draws["a"] * draws["b"]).mean()),
    ):  # fmt: skip
        print(f"{name:8}{float(exact):10.4f}{float(found):10.4f}")
    print(f"chains: {draws.status}")
    draw(grid, draws, path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
