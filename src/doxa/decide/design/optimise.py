"""The best design of a space: on a grid, by gradients, or by Bayesian optimisation.

    d* = argmax_d EIG(d)

Gradients ascend from several starts side by side, with new draws at every step. Bayesian
optimisation fits a Gaussian process (`doxa.GP`) to the estimates so far and next tries the design
whose expected improvement E max(f(d) − f_best, 0) is largest (Jones et al., 1998): for estimates
that cost much and have no gradient. The best design is evaluated again on new draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.draws import source
from doxa.decide.design.eig import eig
from doxa.decide.design.experiment import Box, Experiment, Reals, Sequence, Space, compared
from doxa.errors import MethodError, did_you_mean
from doxa.fit import fit

WAYS = ("grid", "gradient", "bayes")


@dataclass(frozen=True)
class Best:
    """The result of `best_design`: the best design, its value and error on new draws, and all
    designs that were tried, with their values."""

    design: Tensor
    value: float
    error: float
    designs: Tensor
    values: Tensor
    way: str


def best_design(
    experiment: Experiment,
    way: str = "grid",
    *,
    estimator: str = "pce",
    points: int = 64,
    steps: int | None = None,
    starts: int = 8,
    rate: float = 0.05,
    seed: int = 0,
    **draws: Any,
) -> Best:
    """The design with the largest expected information gain.

    Parameters
    ----------
    experiment : Experiment
        The experiment.
    way : {"grid", "gradient", "bayes"}
        "grid": all designs of a list, or about `points` of a box. "gradient": `starts` designs and
        `steps` steps of Adam; a step of `rate` is that fraction of the width of the space. "bayes":
        `starts` random designs, then `steps` more, each chosen by a Gaussian process (needs the
        extra doxa[gp]).
    estimator : str
        As in `eig`.
    points, steps, starts : int
        Numbers of designs and steps: see `way`.
    rate : float
        The step size of "gradient".
    seed : int
        The random seed.
    **draws : int
        Numbers of draws of the estimator, as in `eig`.

    Returns
    -------
    Best
        The best design, with its value on new draws.
    """
    if way not in WAYS:
        raise MethodError(f"way must be one of {', '.join(WAYS)}{did_you_mean(str(way), WAYS)}")
    checks.whole("starts", starts)
    space = experiment.space
    if way == "gradient" and not _continuous(space):
        raise MethodError(f"{space} has no gradient: search it by 'grid' or 'bayes'")
    if way == "grid":
        designs, thinned = compared(space, checks.whole("points", points))
        gain = lambda few: eig(experiment, few, estimator, seed=seed, **draws).values.detach()  # noqa: E731
        values = gain(designs)
        if thinned and isinstance(space, Sequence):
            better = space.exchanged(designs[int(values.argmax())], gain, points).unsqueeze(0)
            designs, values = torch.cat([designs, better]), torch.cat([values, gain(better)])
    elif way == "gradient":
        count = 100 if steps is None else checks.whole("steps", steps)
        designs = _ascended(experiment, estimator, starts, count, rate, seed, draws)
        values = eig(experiment, designs, estimator, seed=seed, **draws).values.detach()
    else:
        count = 12 if steps is None else checks.whole("steps", steps)
        designs, values = _surrogate(experiment, estimator, starts, count, seed, draws)
    winner = designs[int(values.argmax())]
    again = eig(experiment, winner.unsqueeze(0), estimator, seed=seed + 1, **draws)
    return Best(winner, float(again.values), float(again.errors), designs, values, way)


def _continuous(space: Space) -> bool:
    if isinstance(space, Sequence):
        return all(_continuous(part) for part in space.spaces)
    return isinstance(space, Box | Reals)


def _start(experiment: Experiment, n: int, seed: int) -> Tensor:
    space = experiment.space
    like = space.low if isinstance(space, Box) else torch.zeros((), dtype=experiment.dtype)
    return space.draw(n, source("cpu", "starts", seed), like)


def _width(space: Space, designs: Tensor) -> Tensor:
    """The range of designs in each coordinate."""
    if isinstance(space, Box):
        return (space.high - space.low).to(designs)
    return designs.std(0).clamp_min(1e-6) if len(designs) > 1 else torch.ones_like(designs[0])


def _ascended(
    experiment: Experiment, estimator: str, starts: int, steps: int, rate: float, seed: int,
    draws: dict[str, Any],
) -> Tensor:  # fmt: skip
    space = experiment.space
    designs = _start(experiment, starts, seed)
    width = _width(space, designs)
    leaf = (designs / width).requires_grad_()
    adam = torch.optim.Adam([leaf], lr=checks.positive("rate", rate))
    for t in range(steps):
        for group in adam.param_groups:
            group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * t / steps))
        at = leaf * width
        values = eig(experiment, at, estimator, seed=seed + 2 + t, **draws).values
        (leaf.grad,) = torch.autograd.grad(-values.sum(), leaf)
        adam.step()
        with torch.no_grad():
            leaf.copy_(space.nearest(leaf * width) / width)
    return (leaf * width).detach()


def _surrogate(
    experiment: Experiment, estimator: str, starts: int, steps: int, seed: int,
    draws: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    space = experiment.space
    designs = _start(experiment, max(3, starts), seed)
    values = eig(experiment, designs, estimator, seed=seed, **draws).values.detach()
    for t in range(steps):
        candidates = space.draw(512, source("cpu", "candidates", seed, t), designs)
        posterior = fit(
            None, (designs.reshape(len(designs), -1), values), "gp", standardize=True, seed=seed,
            steps=10, progress=False,
        )  # fmt: skip
        gain = _improvement(posterior, candidates.flatten(1) if candidates.ndim > 1
                            else candidates.unsqueeze(1), values)  # fmt: skip
        chosen = candidates[int(gain.argmax())].unsqueeze(0)
        value = eig(experiment, chosen, estimator, seed=seed, **draws).values.detach()
        designs, values = torch.cat([designs, chosen]), torch.cat([values, value])
    return designs, values


def _improvement(posterior: Any, x: Tensor, values: Tensor) -> Tensor:
    """E max(f − f_best, 0) = s [z Φ(z) + φ(z)],  z = (m − f_best)/s."""
    p = posterior.predict(x.to(values))
    mean, std = p.mean.flatten(), p.epistemic.flatten().sqrt().clamp_min(1e-9)
    z = (mean - values.max()) / std
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return std * (z * torch.special.ndtr(z) + density)
