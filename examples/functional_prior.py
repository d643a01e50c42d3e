"""A prior over weights tuned to a Gaussian process: functions before and after the tuning.

    python examples/functional_prior.py [figure.png]

Functions of a network of tanh units under N(0, 1) are large. `functional_prior` finds a standard
deviation for each tensor under which they look like draws of a Gaussian process with lengthscale 1.
The lower panels show the posterior of both priors after twelve points, and the distance to the
process during tuning.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import doxa

INK, BEFORE, AFTER, PROCESS = "#22303c", "#c8553d", "#2a6f97", "#7a8b99"
GRID = torch.linspace(-3, 3, 121).reshape(-1, 1)
TARGET = doxa.GPPrior("rbf", lengthscale=1.0)


def few_points() -> tuple[Tensor, Tensor]:
    """Twelve noisy points of a wave, with a gap in the middle."""
    x = torch.cat([torch.linspace(-2.4, -0.9, 6), torch.linspace(0.7, 2.2, 6)]).reshape(-1, 1)
    noise = 0.1 * torch.randn(12, 1, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(2 * x) + noise


def network() -> nn.Module:
    return doxa.nets.mlp(1, 1, hidden=(30, 30), activation="tanh")


def tuned_and_default(steps: int = 300) -> dict[str, object]:
    """Standard normal weights, and weights tuned to the process on [−3, 3]."""
    tuned = doxa.functional_prior(network(), GRID, TARGET, steps=steps, seed=0)
    return {"weights N(0, 1)": doxa.Normal(1.0), "tuned prior": tuned}


def posterior(prior: object, draws: int = 60) -> doxa.Posterior:
    """The posterior by HMC: exact up to Monte Carlo error."""
    model = doxa.Model(network(), doxa.Gaussian(0.1), prior)
    method = doxa.HMC(draws=draws, burn_in=150, leapfrog=60)
    return doxa.fit(model, few_points(), method, members=2)


def draw(priors: dict[str, object], posteriors: dict[str, doxa.Posterior], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 3)
    x = GRID[:, 0]
    first, second = posteriors.values()
    panels = [
        ("network, weights N(0, 1)", first.prior_functions(GRID, 14, seed=1), BEFORE),
        ("the same network, tuned prior", second.prior_functions(GRID, 14, seed=1), AFTER),
        ("the process: RBF, lengthscale 1", TARGET.sample(GRID, 14, seed=1), PROCESS),
    ]
    for axis, (title, functions, colour) in zip(top, panels, strict=True):
        axis.plot(x, functions[..., 0].T, color=colour, alpha=0.6, lw=1)
        axis.set(title=title, ylim=(-25, 25) if colour == BEFORE else (-3.5, 3.5))
    for axis, (name, fitted), colour in zip(
        bottom[:2], posteriors.items(), (BEFORE, AFTER), strict=True
    ):
        p = fitted.predict(GRID)
        axis.plot(x, fitted.functions(GRID, 25)[..., 0].T, color=colour, alpha=0.25, lw=0.8)
        axis.plot(x, p.mean[:, 0], color=INK, lw=1.5)
        axis.plot(*(t[:, 0] for t in few_points()), "o", color=INK, ms=4)
        axis.set(title=f"posterior, {name}", ylim=(-4, 4))
    distances = priors["tuned prior"].distances  # type: ignore[attr-defined]
    smooth = distances.unfold(0, 10, 1).mean(-1)
    bottom[2].plot(distances, color=PROCESS, lw=0.6, alpha=0.6)
    bottom[2].plot(torch.arange(len(smooth)) + 5, smooth, color=AFTER)
    bottom[2].set(title="energy distance to the process", xlabel="step", ylim=(-0.01, None))
    bottom[2].axhline(0, color=INK, lw=0.6)
    figure.savefig(path, dpi=110)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "functional_prior.png")
    priors = tuned_and_default()
    sys.stdout.write("".join(f"{n}: {p}\n" for n, p in priors["tuned prior"].items()))  # type: ignore[attr-defined]
    draw(priors, {name: posterior(prior) for name, prior in priors.items()}, path)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
