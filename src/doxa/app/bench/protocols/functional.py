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


def _lengths(
    method: Any,
    epochs: Sequence[int],
    grid: Grid,
    batch: int,
    samples: int | None,
    held: Sequence[float | None] = (None,),
) -> Fit:
    """One of some lengths (a tenth on large sets), of some shares of the rows that `fit` holds out
    for early stopping and the noise, and of the points of the grid for the set."""

    def fit(problem: Problem, _name: str) -> Answer:
        def train(rows: Sequence[Tensor], one: tuple[int, float | None], grid: Grid) -> Any:
            length, share = one
            return problem.fit(
                method, likelihood="gaussian", epochs=length if problem.small else length / 10,
                batch_size=batch, schedule="cosine", runs=doxa.Runs(rows=rows, grid=grid),
                validation=share,
            )  # fmt: skip

        tried = list(itertools.product(epochs, held))
        one, point = best(problem, train, tried, grid, samples and 200, 5)
        sweep = train(problem.train, one, only(point))
        chosen = {"epochs": one[0], "held_out": one[1], **said(point)}
        return Answer(list(sweep), samples, {"chosen": chosen})

    return fit


_CHOSEN = "by the last fifth of the first five training splits, refitted on all"

FUNCTIONAL = {
    "fbnn": Protocol(
        "a GP prior, RBF with a lengthscale an input, fitted to mini-batches; 16 functions a step "
        "at 20 rows and 20 points, B = 64; 100 or 800 epochs (a tenth on large sets) and the rate, "
        f".01 or .03 decaying, {_CHOSEN}; 1,000 samples",
        _lengths(
            doxa.FunctionalVI(samples=16, rows=20), (100, 800), {"lr": (0.01, 0.03)}, 64, 1000
        ),
    ),
    "vip": Protocol(
        "20 functions of the network, whose N(0, 1) prior is learned, α = ½, B = 32; 50, 200 or "
        "800 epochs (a tenth on large sets) and the rate, .003 or .01 decaying, "
        f"{_CHOSEN}; closed form",
        _lengths(doxa.ImplicitProcess(), (50, 200, 800), {"lr": (0.003, 0.01)}, 32, None),
    ),
}
