"""Functional methods, with one Gaussian noise level that is learned.

Lengths, rates and first widths are chosen by validation rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

import doxa
from doxa.app.bench.protocols.problem import (
    Answer,
    Fit,
    Grid,
    Problem,
    Protocol,
    best,
    only,
    said,
)

_NOISES = ("learned", "evidence")


def _lengths(
    methods: Sequence[Any],
    epochs: Sequence[int],
    grid: Grid,
    batch: int,
    samples: int | None,
    **network: Any,
) -> Fit:
    """One of some methods, of some lengths (a tenth on large sets), with or without rows held out,
    and of the points of the grid for the set."""

    def fit(problem: Problem, _name: str) -> Answer:
        def train(rows: Sequence[Tensor], one: tuple[Any, int, float | None], grid: Grid) -> Any:
            method, length, share = one
            return problem.fit(
                method, likelihood="gaussian", epochs=length if problem.small else length / 10,
                batch_size=batch, schedule="cosine", runs=doxa.Runs(rows=rows, grid=grid),
                validation=share, **network,
            )  # fmt: skip

        tried = list(itertools.product(methods, epochs, (None, 0.1)))
        one, point = best(problem, train, tried, grid, samples and 200, 5)
        sweep = train(problem.train, one, only(point))
        noise = getattr(one[0], "noise", "learned")
        chosen = {"noise": noise, "epochs": one[1], "held_out": one[2], **said(point)}
        return Answer(list(sweep), samples, {"chosen": chosen})

    return fit


_CHOSEN = "by the last fifth of the first five training splits, refitted on all"
_HELD = "no rows held out, or a tenth for early stopping and the noise"

FUNCTIONAL = {
    "fbnn": Protocol(
        "a GP prior, RBF with a lengthscale an input, fitted to mini-batches; 16 functions a step "
        "at 20 rows and 20 points, B = 64; 100 or 300 epochs (a tenth on large sets), noise "
        "learned with the weights or by the kernel's evidence, the rate, .01 or .03 decaying, and "
        f"{_HELD}: {_CHOSEN}; 1,000 samples",
        _lengths(
            [doxa.FunctionalVI(samples=16, rows=20, noise=noise) for noise in _NOISES],
            (100, 300),
            {"lr": (0.01, 0.03)},
            64,
            1000,
        ),
    ),
    "vip": Protocol(
        "20 functions of the network, whose prior is learned, α = ½, B = 32; 50 or 200 epochs (a "
        "tenth on large sets), a start at .1 or .03 of N(0, 1), the rate, .003 or .01 decaying, "
        f"and {_HELD}: {_CHOSEN}; closed form",
        _lengths(
            [doxa.ImplicitProcess()],
            (50, 200),
            {"initial_scale": (0.1, 0.03), "lr": (0.003, 0.01)},
            32,
            None,
        ),
    ),
    "vip-deep": Protocol(
        "as vip, on the paper's network: two hidden layers of 10 tanh units; 400 epochs, a "
        f"start at .3, .1 or .03: {_CHOSEN}",
        _lengths(
            [doxa.ImplicitProcess()],
            (400,),
            {"initial_scale": (0.3, 0.1, 0.03), "lr": (0.003, 0.01)},
            32,
            None,
            hidden=(10, 10),
            activation="tanh",
        ),
        "vip",
    ),
}
