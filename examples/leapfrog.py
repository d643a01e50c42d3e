"""A leapfrog trajectory, its energy, and how the error falls with the step size.

    python examples/leapfrog.py [figure.png]

Left: trajectories on a curved density, one per step size, from the same point with the same
momentum. Middle: the energy along them: it wobbles around a nearby value and does not drift, which
is why long trajectories are still accepted. Right: the root mean square error at a fixed length
against the step size ε, with slope 2.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from doxa.mcmc.kernel import Point, leapfrog

LENGTH = 6.0
SHOWN = {0.35: "#e07a5f", 0.2: "#2a6f97", 0.05: "#81b29a"}


def banana(theta: Tensor) -> tuple[Tensor, Tensor]:
    """log π = −½x² − 2(y − ½x²)², up to a constant, and its gradient: [M], [M, 2]."""
    x, y = theta.unbind(1)
    bend = y - 0.5 * x.square()
    value = -0.5 * x.square() - 2 * bend.square()
    return value, torch.stack([-x + 4 * bend * x, -4 * bend], 1)


def point(theta: Tensor, momentum: Tensor) -> Point:
    return Point(theta, momentum, *banana(theta))


def trajectory(start: Point, step: float) -> tuple[Tensor, Tensor]:
    """Positions [T, 2] and energies [T] of one particle."""
    metric, size = torch.ones_like(start.theta), torch.full_like(start.theta[:, :1], step)
    points = [start]
    for _ in range(round(LENGTH / step)):
        points.append(leapfrog(banana, points[-1], metric, size))
    return torch.cat([p.theta for p in points]), torch.cat([p.energy for p in points])


def errors(steps: list[float]) -> list[float]:
    """RMS energy error of 500 trajectories from the density itself, at a length of 1."""
    g = torch.Generator().manual_seed(1)
    x, noise, *momentum = torch.randn(4, 500, generator=g, dtype=torch.float64)
    start = point(torch.stack([x, 0.5 * x.square() + 0.5 * noise], 1), torch.stack(momentum, 1))
    found = []
    for step in steps:
        size = torch.full((500, 1), step, dtype=torch.float64)
        end = leapfrog(banana, start, torch.ones_like(start.theta), size, round(1 / step))
        found.append(float((end.energy - start.energy).square().mean().sqrt()))
    return found


def main(path: str = "leapfrog.png") -> None:
    start = point(torch.tensor([[-1.6, 1.4]]).double(), torch.tensor([[1.3, 0.4]]).double())
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), constrained_layout=True)
    x, y = torch.linspace(-3, 3, 200).double(), torch.linspace(-1.2, 4.2, 200).double()
    cells = torch.stack(torch.meshgrid(x, y, indexing="xy"), 2).reshape(-1, 2)
    left.contourf(x, y, banana(cells)[0].exp().reshape(200, 200), levels=12, cmap="Blues")
    for step, colour in SHOWN.items():
        theta, energy = trajectory(start, step)
        time = step * torch.arange(len(energy))
        left.plot(*theta.T, "o-", ms=3, lw=1, color=colour, label=f"ε = {step}")
        middle.plot(time, energy - energy[0], "o-", ms=3, lw=1, color=colour)
        worst = (energy - energy[0]).abs().max()
        print(f"step {step}: {len(energy) - 1} steps, largest energy error {worst:.3f}")
    left.plot(*start.theta[0], "k*", ms=12)
    left.set(xlim=(-3, 3), ylim=(-1.2, 4.2), title="positions", xlabel="θ₁", ylabel="θ₂")
    left.legend(frameon=False, loc="upper center", ncol=3, fontsize=8)
    middle.axhline(0, color="0.7", lw=1)
    middle.set(title="energy error H − H₀ on the way", xlabel="time")
    steps = [1 / k for k in (4, 8, 16, 32, 64, 128)]
    seen = errors(steps)
    right.loglog(steps, seen, "o-", color="#2a6f97", label="RMS error at time 1")
    right.loglog(steps, [seen[-1] * (s / steps[-1]) ** 2 for s in steps], "--", color="0.5",
                 label="ε²")  # fmt: skip
    right.set(title="and at its end, against the step", xlabel="ε")
    right.legend(frameon=False)
    slope = torch.tensor([seen[2] / seen[-1]]).log() / torch.tensor([steps[2] / steps[-1]]).log()
    print(f"slope of the error in ε: {float(slope):.3f}")
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
