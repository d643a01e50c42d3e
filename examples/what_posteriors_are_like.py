"""How close does each method come to the posterior? After Izmailov et al. (2021).

    python examples/what_posteriors_are_like.py [figure.png]

Two small sets, one network of 50 hidden units each, one prior and one likelihood for all methods,
temperature 1. HMC runs until its functions have converged (R-hat below 1.05, shown in the figure)
and is the reference. Every other method's held-out predictions are compared with its: do they name
the same class (agreement), how much probability would have to move (total variation), and how far
(W2; for classes, of the draws' probabilities). The grey band is as close as one half of the
reference's chains comes to the other: nothing closer can be told from the posterior. The linear
model and the GP have functions and priors of their own and are drawn hollow. All settings are the
methods' defaults. About two minutes on one core.
"""

from __future__ import annotations

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from sklearn.datasets import load_diabetes

import doxa
from doxa.app.comparison import Comparison, Reference, Split, as_tables, compare_arrays
from doxa.app.comparison.result import standard_error
from doxa.data_sets import two_moons

EVERYWHERE = ["map", "deep-ensemble", "mean-field", "mc-dropout", "laplace"]
OWN_FUNCTIONS = ["linear", "gp"]  # not the network's posterior: they show what it is not
PANELS = {
    "log_likelihood": "held-out log likelihood\nabove HMC's, ± standard error",
    "agreement": "agreement with HMC\nhigher is closer",
    "total_variation": "total variation to HMC\nlower is closer",
    "wasserstein2": "W2 to HMC, {unit}\nlower is closer",
}
INK, QUIET, ACCENT = "#1b2430", "#6b7480", "#1f5f8b"


def diabetes() -> Comparison:
    """Disease progression of 442 patients from 10 measurements; a fifth is held out."""
    x, y = load_diabetes(return_X_y=True)
    return compare_arrays(
        x, y, [*EVERYWHERE, *OWN_FUNCTIONS],
        net=doxa.nets.mlp(10, 1, hidden=(50,)), likelihood="gaussian", prior=doxa.FanInNormal(1.0),
        splits=1, reference=Reference(draws=1000, burn_in=600, leapfrog=40), say=print,
    )  # fmt: skip


def moons() -> Comparison:
    """Two half circles, 100 points to learn from and 200 held out."""
    train, held = two_moons(100, noise=0.2, seed=0), two_moons(200, noise=0.2, seed=1)
    x, y = np.concatenate([train.x, held.x]), np.concatenate([train.y, held.y]).astype(float)
    return compare_arrays(
        x, y, EVERYWHERE,
        net=doxa.nets.mlp(2, 1, hidden=(50,)), likelihood="bernoulli", prior=doxa.Normal(1.0),
        splits=[Split(np.arange(100), np.arange(100, 300))],
        reference=Reference(draws=1000, burn_in=600, leapfrog=40), say=print,
    )  # fmt: skip


def panel(axes: Axes, found: Comparison, name: str) -> None:
    """A dot a method, the closest on top; the grey band is the reference's own noise."""
    reference = found.reference
    rows = sorted(found.rows, key=lambda row: -row.closeness.total_variation)
    gains = [row.each[0] - reference.each[0] for row in rows]  # paired, row by row
    above = name == "log_likelihood"
    values = [
        g.mean() if above else getattr(r.closeness, name) for r, g in zip(rows, gains, strict=True)
    ]
    for k, (row, value, gain) in enumerate(zip(rows, values, gains, strict=True)):
        if above:
            axes.errorbar(value, k, xerr=standard_error(gain), color=QUIET, lw=1.2, zorder=1)
        own = row.method in OWN_FUNCTIONS
        axes.plot(value, k, "o", ms=8, mec=ACCENT, mfc="white" if own else ACCENT, mew=1.6)
    if above:
        axes.axvline(0.0, color=QUIET, lw=1.1, zorder=0)
    else:
        floor = getattr(reference.floor, name)
        edge = 1.0 if name == "agreement" else 0.0
        axes.axvspan(min(edge, floor), max(edge, floor), color="#d9dde2", lw=0, zorder=0)
        axes.axvline(floor, color=QUIET, ls="--", lw=1.1, zorder=0)
        furthest = max((*values, floor), key=lambda value: abs(value - edge))
        room = 0.08 * (furthest - edge)
        axes.set_xlim(*sorted((edge - 0.3 * room, furthest + room)))
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    unit = "in units of y" if found.likelihood == "gaussian" else "of the draws' probabilities"
    axes.set_title(PANELS[name].format(unit=unit), fontsize=9.5, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.grid(axis="x", color="#eceae4")
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(regression: Comparison, classification: Comparison, path: str) -> None:
    figure, grid = plt.subplots(2, 4, figsize=(13.0, 6.5), constrained_layout=True)
    for line, found in zip(grid, (regression, classification), strict=True):
        for axes, name in zip(line, PANELS, strict=True):
            if name == "agreement" and found is regression:
                axes.axis("off")
                axes.text(0.0, 0.95, legend(regression, classification), va="top", fontsize=9,
                          color=INK, transform=axes.transAxes, linespacing=1.6)  # fmt: skip
                continue
            panel(axes, found, name)
            if axes is not line[0]:
                axes.set_yticklabels([])
    titles = ("diabetes\nregression, 442 patients", "two moons\n100 points, two classes")
    for line, title in zip(grid, titles, strict=True):
        line[0].set_ylabel(title, fontsize=11, fontweight="bold", color=INK, labelpad=12)
    figure.suptitle(
        "How close each method comes to the posterior that HMC finds", fontsize=12.5, color=INK
    )
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


def legend(regression: Comparison, classification: Comparison) -> str:
    lines = ["●  the same network, prior and likelihood", "○  functions of its own", ""]
    lines += ["grey: one half of HMC's chains against", "the other; nothing closer can be told", ""]
    for name, found in (("diabetes", regression), ("two moons", classification)):
        lines.append(f"{name}: R-hat of HMC's functions {found.reference.rhat:.3f}")
    return "\n".join(lines)


def main(path: str = "docs/figures/closeness.png") -> None:
    torch.set_num_threads(1)
    found = [diabetes(), moons()]
    console = Console(width=120)
    for each in found:
        for table in as_tables(each):
            console.print(table)
        if each.reference is None or not each.reference.converged:
            raise SystemExit("the reference has not converged: nothing to compare with")
    draw(found[0], found[1], path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
