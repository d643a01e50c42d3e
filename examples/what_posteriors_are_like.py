"""How close does each method come to the posterior? After Izmailov et al. (2021).

    DOXA_DATA=folder python examples/what_posteriors_are_like.py [figure.png]

Boston housing, from the UCI tables in the folder, and two moons; one network of 50 tanh units each,
one prior and one likelihood for all methods, temperature 1. HMC runs until its functions have
converged (R-hat below 1.05, shown in the figure) and is the reference. The held-out
predictions of every other method are compared with it: the share of rows with the same class
(agreement), the probability mass that differs (total variation), and the Wasserstein distance (W2;
for classes, of the draws of the probabilities). The grey band is the distance between two halves of
the chains of the reference: a smaller distance cannot be distinguished from zero. NUTS should lie
in the band, which shows that the reference does not depend on its sampler. The linear model and the
GP have their own functions and priors and are drawn hollow.

Methods have their default settings, except the samplers (`samplers`): their length, and the step of
SGHMC, which SGLD shares, were chosen by R-hat on the training rows, not by any column here.
Three and a half minutes on one core.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.console import Console

import doxa
from doxa.app.bench import uci
from doxa.app.comparison import Comparison, Reference, Split, as_tables, compare_arrays
from doxa.data.simulated import two_moons
from doxa.selection.splits import standard_error

POINTS_AND_FAMILIES = ["map", "deep-ensemble", "mean-field", "mc-dropout", "laplace"]
OWN_FUNCTIONS = {"linear": "linear", "gp": "gp"}  # models other than the network
REFERENCE = Reference(draws=1000, burn_in=600, leapfrog=60)
PANELS = {
    "log_likelihood": "held-out log likelihood\nabove HMC's, ± standard error",
    "agreement": "agreement with HMC\nhigher is closer",
    "total_variation": "total variation to HMC\nlower is closer",
    "wasserstein2": "W2 to HMC, {unit}\nlower is closer",
}
INK, QUIET, ACCENT = "#1b2430", "#6b7480", "#1f5f8b"


def samplers(n: int) -> dict[str, Any]:
    """On mini-batches of n rows, 12,000 steps each, and NUTS."""
    length: dict[str, Any] = {"draws": 200, "burn_in": 4000, "thin": 40}
    return {
        "sgld": doxa.SGLD(**length, step_size=4e-3 / n, decay=0.0),
        "psgld": doxa.PSGLD(**length),
        "sghmc": doxa.SGHMC(**length, step_size=4e-3 / n),
        "cyclical": doxa.CyclicalSGMCMC(cycles=4, draws=50, thin=12),
        "constant-sgd": doxa.ConstantSGD(**length),
        "nuts": doxa.NUTS(draws=200, burn_in=200, max_depth=6),
    }


def methods(n: int) -> dict[str, Any]:
    return {name: name for name in POINTS_AND_FAMILIES} | samplers(n)


def boston() -> Comparison:
    """The median price of a house in 506 districts from 13 numbers; a fifth is held out."""
    data = uci.load(uci.data_folder(None), "boston_housing")
    return compare_arrays(
        data.x.numpy(), data.y.numpy(), methods(405) | OWN_FUNCTIONS,
        net=doxa.nets.mlp(13, 1, hidden=(50,), activation="tanh"), likelihood="gaussian",
        prior=doxa.FanInNormal(1.0), splits=1, reference=REFERENCE, say=print,
    )  # fmt: skip


def moons() -> Comparison:
    """Two half circles, 100 points to learn from and 200 held out."""
    train, held = two_moons(100, noise=0.2, seed=0), two_moons(200, noise=0.2, seed=1)
    x, y = np.concatenate([train.x, held.x]), np.concatenate([train.y, held.y]).astype(float)
    return compare_arrays(
        x, y, methods(100),
        net=doxa.nets.mlp(2, 1, hidden=(50,), activation="tanh"), likelihood="bernoulli",
        prior=doxa.Normal(1.0), splits=[Split(np.arange(100), np.arange(100, 300))],
        reference=REFERENCE, say=print,
    )  # fmt: skip


def panel(axes: Axes, found: Comparison, name: str) -> None:
    """One dot per method, the closest on top; the grey band is the noise of the reference."""
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
    figure, grid = plt.subplots(2, 4, figsize=(13.0, 8.0), constrained_layout=True)
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
    titles = ("Boston housing\nregression, 506 rows", "two moons\n100 points, two classes")
    for line, title in zip(grid, titles, strict=True):
        line[0].set_ylabel(title, fontsize=11, fontweight="bold", color=INK, labelpad=12)
    figure.suptitle(
        "How close each method comes to the posterior that HMC finds", fontsize=12.5, color=INK
    )
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


def markdown(regression: Comparison, classification: Comparison) -> str:
    """Both sets in one table, as the docs have it."""
    heads = ["method", "Boston: total variation", "W2", "log likelihood", "status",
             "two moons: agreement", "total variation", "W2", "log likelihood",
             "status"]  # fmt: skip
    lines = [" | ".join(heads), "|".join(["---"] * len(heads))]
    names = [row.method for row in sorted(regression.rows, key=_distance)]
    for name in names:
        cells = [name]
        for found in (regression, classification):
            row = next((row for row in found.rows if row.method == name), None)
            agreement = [] if found is regression else ["agreement"]
            if row is None or row.closeness is None:
                cells += ["–"] * (len(agreement) + 4)
                continue
            wanted = [*agreement, "total_variation", "wasserstein2"]
            cells += [f"{getattr(row.closeness, each):.3f}" for each in wanted]
            cells += [f"{row.mean('log_likelihood'):.3f}", row.status]
        lines.append(" | ".join(cells))
    floors = [regression.reference.floor, classification.reference.floor]
    cells = [f"{floors[0].total_variation:.3f}", f"{floors[0].wasserstein2:.3f}", "", ""]
    cells += [f"{getattr(floors[1], each):.3f}" for each in ("agreement", "total_variation")]
    lines.append(
        " | ".join(["*HMC's two halves*", *cells, f"{floors[1].wasserstein2:.3f}", "", ""])
    )
    return "\n".join(f"| {line} |" for line in lines)


def _distance(row: Any) -> float:
    return math.inf if row.closeness is None else row.closeness.total_variation


def legend(regression: Comparison, classification: Comparison) -> str:
    lines = ["●  the same network, prior and likelihood", "○  functions of its own", ""]
    lines += ["grey: one half of HMC's chains against", "the other: the Monte Carlo error", ""]
    for name, found in (("Boston", regression), ("two moons", classification)):
        lines.append(f"{name}: R-hat of HMC's functions {found.reference.rhat:.3f}")
    return "\n".join(lines)


def main(path: str = "docs/figures/closeness.png") -> None:
    torch.set_num_threads(1)
    found = [boston(), moons()]
    console = Console(width=120)
    for each in found:
        for table in as_tables(each):
            console.print(table)
        if each.reference is None or not each.reference.converged:
            raise SystemExit("the reference has not converged: nothing to compare with")
    print(markdown(*found))
    draw(found[0], found[1], path)


if __name__ == "__main__":
    main(*sys.argv[1:2])
