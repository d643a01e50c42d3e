"""Networks of growing width become a Gaussian process, and so do ensembles of trained ones.

    python examples/infinite_width.py [figure.png]

Left: the exact posterior of an infinitely wide network (NNGP), from a few points. Middle: the
distribution of an ensemble of such networks during gradient descent (NTK), at three times.
Right: random networks of width n have kernels K̂ and Θ̂ whose squared distance from the limits
falls as 1/n. About a minute on one core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doxa
from doxa.function.wide import Architecture, empirical_ntk, finite_network

WEIGHT_STD, BIAS_STD = 1.5, 0.3
INK, BLUE, RED = "#22303c", "#2a6f97", "#c8553d"
TIMES = (1.0, 10.0, 1000.0)


def few_points() -> tuple[Tensor, Tensor]:
    x = torch.tensor([-2.6, -2.2, -1.0, -0.7, 0.3, 1.6, 2.1], dtype=torch.float64)[:, None]
    return x, torch.sin(1.5 * x) + 0.3 * x


def drawn(architecture: Architecture, inputs: int, width: int, seed: int) -> nn.Sequential:
    """A network of this width with weights from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return finite_network(architecture, inputs, 1, width, WEIGHT_STD, BIAS_STD)


def distances(
    widths: Sequence[int], counts: Sequence[int], activation: str = "erf", rows: int = 4
) -> dict[str, list[float]]:
    """Mean squared distances of K̂ and Θ̂ from K and Θ, relative to those of 0, over networks."""
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
    architecture = Architecture.fully_connected(2, activation)
    limits = {
        kind: architecture.matrix(x.double(), None, WEIGHT_STD, BIAS_STD, kind)
        for kind in ("nngp", "ntk")
    }
    found: dict[str, list[float]] = {kind: [] for kind in limits}
    for width, count in zip(widths, counts, strict=True):
        squares = dict.fromkeys(limits, 0.0)
        for seed in range(count):
            net = drawn(architecture, 5, width, seed)
            with torch.no_grad():
                hidden = net[:-1](x)  # the last hidden layer
            near = {
                "nngp": BIAS_STD**2 + WEIGHT_STD**2 / width * hidden @ hidden.mT,
                "ntk": empirical_ntk(net, x),
            }
            for kind, limit in limits.items():
                away = (near[kind].double() - limit).square().mean() / limit.square().mean()
                squares[kind] += float(away) / count
        for kind in limits:
            found[kind].append(squares[kind])
    return found


def slope(widths: Sequence[int], squares: Sequence[float]) -> float:
    """The slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(widths), np.log(squares), 1)[0])


def draw(path: Path, widths: Sequence[int], found: dict[str, list[float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = few_points()
    grid = torch.linspace(-4, 4, 200, dtype=torch.float64)[:, None]
    settings: dict[str, Any] = {
        "depth": 2, "activation": "erf", "weight_std": WEIGHT_STD, "bias_std": BIAS_STD,
        "noise": 0.05, "learn_kernel": False,
    }  # fmt: skip
    figure = Figure(figsize=(13, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    posterior = doxa.fit(None, data, doxa.NNGP(**settings))
    band(left, grid, posterior.predict(grid), BLUE, "mean, ± 2 std")
    for f in posterior.functions(grid, 5):
        left.plot(grid[:, 0], f[:, 0], color=INK, lw=0.6, alpha=0.5)
    left.set_title("NNGP: infinitely wide, exact posterior")
    for time, colour in zip(TIMES, ("#b8b8b8", RED, BLUE), strict=True):
        trained = doxa.fit(None, data, doxa.NTK(**settings, time=time))
        band(middle, grid, trained.predict(grid), colour, f"t = {time:g}")
    middle.set_title("NTK: an ensemble of them after training")
    for axis in (left, middle):
        axis.plot(data[0], data[1], "o", color=INK, ms=5, zorder=5)
        axis.set(xlabel="x", xlim=(-4, 4), ylim=(-2.2, 2.2))
        axis.legend(frameon=False, loc="upper left")
    for kind, name, colour in (("nngp", "K̂ (NNGP)", BLUE), ("ntk", "Θ̂ (NTK)", RED)):
        fitted = slope(widths, found[kind])
        right.loglog(widths, found[kind], "o-", color=colour, label=f"{name}: slope {fitted:.2f}")
    line = [found["ntk"][0] * widths[0] / w for w in widths]
    right.loglog(widths, line, "--", color=INK, lw=0.8, label="1/width")
    right.set(xlabel="width", ylabel="squared distance from the limit, relative")
    right.set_xticks(widths, [str(w) for w in widths], minor=False)
    right.set_title("Finite networks approach it at 1/width")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)


def band(axis: Any, grid: Tensor, p: doxa.Predictive, colour: str, label: str) -> None:
    mean, std = p.mean[:, 0], p.epistemic[:, 0].sqrt()
    axis.plot(grid[:, 0], mean, color=colour, lw=1.8, label=label)
    axis.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color=colour, alpha=0.18, lw=0)


def main() -> None:
    widths, counts = (64, 256, 1024, 4096), (60, 40, 20, 6)
    found = distances(widths, counts)
    for kind, squares in found.items():
        each = ", ".join(f"{w}: {math.sqrt(s):.3f}" for w, s in zip(widths, squares, strict=True))
        print(f"{kind}  relative distance  {each};  slope {slope(widths, squares):.2f}")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "infinite_width.png")
    draw(path, widths, found)
    print(path)


if __name__ == "__main__":
    main()
