"""Variational methods, with one Gaussian noise level: learned, and of dropout from a grid.

Rates, and the width that q starts with, are chosen by validation rows. A q that starts narrow has
not widened to the end when the steps are used up: its bound is lower than that of one that started
wide, and on some sets it predicts better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# Observation precisions tried for MC dropout, in units of y, as in the code of its paper.
PRECISIONS = {
    "boston_housing": (0.1, 0.15, 0.2), "concrete": (0.025, 0.05, 0.075),
    "energy": (0.25, 0.5, 0.75), "kin8nm": (150.0, 200.0, 250.0),
    "naval_propulsion": (30000.0, 40000.0, 50000.0), "power_plant": (0.05, 0.1, 0.15),
    "protein": (0.025, 0.05, 0.075), "wine_quality_red": (2.5, 3.0, 3.5),
    "yacht": (0.25, 0.5, 0.75),
}  # fmt: skip
DROPOUT = (0.005, 0.01, 0.05, 0.1)
Length = Mapping[str, Any]


def _dropout(
    method: Any, grid: Grid, masks: int, small: Length, large: Length, **common: Any
) -> Fit:
    """A point of the grid and one of the noise levels for each split, by the last fifth of its
    training rows; then all of them."""

    def fit(problem: Problem, name: str) -> Answer:
        noises = [doxa.Gaussian(noise=tau**-0.5) for tau in PRECISIONS[name]]
        options = {"likelihood": noises[0], **common, **(small if problem.small else large)}
        kept, held = problem.validation()
        every = {**grid, "likelihood": noises}
        tried = problem.fit(method, runs=doxa.Runs(rows=kept, grid=every), **options)
        few = 1000 if problem.small else 200
        found: dict[int, tuple[float, dict[str, Any]]] = {}
        for posterior, spec in zip(tried, tried.specs, strict=True):
            value = problem.score(posterior, held[spec.split], few)
            if spec.split not in found or value > found[spec.split][0]:
                found[spec.split] = (value, dict(spec.hyper))
        chosen = {field: [found[r][1][field] for r in range(len(held))] for field in every}
        sweep = problem.fit(method, runs=doxa.Runs(rows=problem.train, per_split=chosen), **options)
        told = {field: [getattr(v, "std", v) for v in chosen[field]] for field in grid}
        told["precision"] = [own.noise**-2 for own in chosen["likelihood"]]
        return Answer(list(sweep), masks, {"chosen": told, **_learned(sweep)})

    return fit


def _learned(sweep: Any) -> dict[str, Any]:
    """What concrete dropout found, layer by layer."""
    own = [posterior.record.diagnostics.get("p") for posterior in sweep]
    if own[0] is None:
        return {}
    return {"p": {site: [float(p[site][0]) for p in own] for site in own[0]}}


def _gaussian_noise(
    method: Any, grid: Grid, pieces: int = 1, small: int = 400, large: int = 40, samples: int = 1000
) -> Fit:
    """So many epochs in batches of 32 for each of the pieces that a batch is cut into; one point
    of the grid for the set, by validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        epochs = pieces * (small if problem.small else large)

        def train(rows: Sequence[Tensor], _one: None, grid: Grid) -> Any:
            return problem.fit(
                method, likelihood="gaussian", epochs=epochs, batch_size=32 * pieces,
                schedule="cosine", runs=doxa.Runs(rows=rows, grid=grid),
            )  # fmt: skip

        _, point = best(problem, train, (None,), grid, 200, 5)
        sweep = train(problem.train, None, only(point))
        return Answer(list(sweep), samples, {"chosen": said(point), "method": str(method)})

    return fit


_CHOSEN = "by the last fifth of the first five training splits, refitted on all"
_LENGTH = "400 epochs (40 on large sets), B = 32"

VARIATIONAL = {
    "mean-field": Protocol(
        "N(0, 1) prior, T = 1, four draws a step, 400 epochs (80 on large sets), B = 32; the rate, "
        f".01 or .03 decaying, and the first width, .001, .01 or .05, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.MeanField(samples=4, estimator="weights"), large=80,
            grid={"lr": (0.01, 0.03), "initial_std": (0.001, 0.01, 0.05)},
        ),
    ),
    "low-rank-vi": Protocol(
        f"rank 10, N(0, 1) prior, T = 1, four draws a step, {_LENGTH}; the rate, .01 or .03 "
        f"decaying, and the first width, .001 or .01, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.LowRankVI(samples=4), grid={"lr": (0.01, 0.03), "initial_std": (0.001, 0.01)}
        ),
    ),
    "last-layer-vi": Protocol(
        f"features learned on the same bound, {_LENGTH}; the rate, .01 or .03 decaying, and the "
        f"prior, N(0, .3²) or N(0, 1), {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.LastLayerVI(),
            grid={"lr": (0.01, 0.03), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "flow-vi": Protocol(
        "a spline flow over the last layer, features learned on the same bound, 400 epochs (80 on "
        "large sets), B = 128; the rate, .01 or .03 decaying, and the prior, N(0, .3²) or N(0, 1), "
        f"{_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            "flow-vi", pieces=4, small=100, large=20,
            grid={"lr": (0.01, 0.03), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "mnf": Protocol(
        "N(0, 1) prior, first width .001, 800 epochs (80 on large sets), B = 128: a step costs as "
        f"much as five of mean-field's; the rate, .01 or .03 decaying, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.MNF(initial_std=0.001), grid={"lr": (0.01, 0.03)}, pieces=4, small=200, large=20
        ),
    ),
    "rank1": Protocol(
        "four components, factors N(1, .3²), four times as many epochs in batches of 128, of which "
        "each component has a quarter; the rate, .003 or .01 decaying, and the prior of the "
        f"weights, N(0, .3²) or N(0, 1), {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.Rank1(), pieces=4,
            grid={"lr": (0.003, 0.01), "prior": (doxa.Normal(0.3), doxa.Normal(1.0))},
        ),
    ),
    "ivon": Protocol(
        f"N(0, 1) prior, T = 1, β₂ = 1 − 4/steps, four draws a step, {_LENGTH}; the rate, .1 or .3 "
        f"decaying, and the first curvature, 1 or 10, {_CHOSEN}; 1,000 samples",
        _gaussian_noise(
            doxa.IVON(samples=4), grid={"lr": (0.1, 0.3), "initial_curvature": (1.0, 10.0)}
        ),
    ),
    "mc-dropout": Protocol(
        "masks on inputs and hidden units; p of {.005, .01, .05, .1} and one of three noise "
        "levels by the last fifth of each training split, refitted on all of it; 4,000 epochs, "
        "B = 128, rate .001 (large sets: 40 epochs, B = 32, rate .005 decaying, which validation "
        "rows preferred); 10,000 masks",
        _dropout(
            doxa.MCDropout(insert="all"), {"p": DROPOUT}, 10_000,
            {"epochs": 4000, "lr": 0.001, "batch_size": 128, "schedule": "constant"},
            {"epochs": 40, "lr": 0.005, "batch_size": 32, "schedule": "cosine"},
            prior=doxa.Normal(100.0),
        ),
    ),
    "concrete-dropout": Protocol(
        "masks on inputs and hidden units; the prior, N(0, s²) with s of .2, .5, 1 or 10, and one "
        "of the noise levels of MC dropout by the last fifth of each training split, refitted on "
        "all of it; 1,600 epochs (160 on large sets), B = 128, rate .01 decaying; 1,000 masks",
        _dropout(
            doxa.ConcreteDropout(insert="all"),
            {"prior": tuple(doxa.Normal(s) for s in (0.2, 0.5, 1.0, 10.0))}, 1000,
            *({"epochs": n, "lr": 0.01, "batch_size": 128, "schedule": "cosine"}
              for n in (1600, 160)),
        ),
    ),
}  # fmt: skip
