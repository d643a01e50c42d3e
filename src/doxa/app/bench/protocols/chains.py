"""Chains: on all rows, or on mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import doxa
from doxa.app.bench.protocols.problem import (
    SMALL,
    Answer,
    Fit,
    Grid,
    Problem,
    Protocol,
    best,
    only,
)
from doxa.errors import MethodError

# Tried for samplers on mini-batches; with friction .1, momentum goes ten times as far.
STEPS = {
    "sgld": (0.003, 0.01, 0.03),
    "psgld": (0.0003, 0.001, 0.003),
    "sghmc": (0.0003, 0.001, 0.003),
}


def _hmc(problem: Problem, _name: str) -> Answer:
    small = problem.small
    method = doxa.HMC(
        draws=500 if small else 100, burn_in=500 if small else 200, leapfrog=30 if small else 20
    )
    sweep = problem.fit(method, likelihood="gaussian", members=2 if small else 1)
    return Answer(list(sweep))


def _nuts(problem: Problem, _name: str) -> Answer:
    if not problem.small:
        raise MethodError(f"NUTS on all rows is run on sets below {SMALL} training rows")
    method = doxa.NUTS(draws=200, burn_in=300, max_depth=7)
    return Answer(list(problem.fit(method, likelihood="gaussian", members=2)))


def _stochastic(name: str, *rates: float) -> Fit:
    """A sampler on mini-batches; the rate is one choice for the set, by validation rows."""

    def fit(problem: Problem, _name: str) -> Answer:
        epochs = 400 if problem.small else 40
        method = _sampler(name, problem.rows // 32 * epochs)

        def train(rows: Sequence[Tensor], _one: None, grid: Grid) -> Any:
            return problem.fit(
                method, likelihood="gaussian", members=2, batch_size=32, epochs=epochs,
                runs=doxa.Runs(rows=rows, grid=grid),
            )  # fmt: skip

        point = {"lr": rates[0]}
        if len(rates) > 1:
            _, point = best(problem, train, (None,), {"lr": rates})
        posteriors = list(train(problem.train, None, only(point)))
        return Answer(posteriors, facts={"chosen": {"rate": point["lr"]}})

    return fit


def _sampler(name: str, steps: int) -> Any:
    """100 draws of each chain from the last quarter of so many steps, or from four cycles."""
    if name == "cyclical":
        return doxa.CyclicalSGMCMC(thin=max(1, steps // 500))
    thin = max(1, steps // 400)
    burn_in = 500 if name == "constant-sgd" else steps - 100 * thin  # it has an optimum to start at
    return doxa.get_method(name)(draws=100, thin=thin, burn_in=burn_in)


def _not_for_networks(problem: Problem, _name: str) -> Answer:
    raise MethodError("a random walk does not mix in the hundreds of dimensions of a network")


FULL = {
    "hmc": Protocol(
        "N(0, 1) prior; small sets two chains, 500 + 500 transitions of 30 steps; large sets one, "
        "200 + 100 of 20: too short to converge there",
        _hmc,
    ),
    "nuts": Protocol(
        "N(0, 1) prior; two chains, 300 + 200 transitions, trees of at most 2^7; small sets only",
        _nuts,
    ),
}
STOCHASTIC = {
    **{
        name: Protocol(
            "two chains, N(0, 1) prior, 400 epochs (40 on large sets), B = 32, 100 draws from the "
            f"last quarter; the rate of {{{', '.join(f'{rate:g}' for rate in rates)}}} by the last "
            "fifth of the training splits, refitted on all",
            _stochastic(name, *rates),
        )
        for name, rates in STEPS.items()
    },
    "functional-prior": Protocol(
        "two chains of SGHMC; the prior is tuned to an RBF process of variance 1 and lengthscale "
        "√(2D) first, by the energy distance; else as sghmc",
        _stochastic("functional-prior", *STEPS["sghmc"]),
    ),
    "cyclical": Protocol(
        "two chains of SGLD, N(0, 1) prior, four cycles, 400 epochs in all (40 on large sets), "
        "B = 32; the rate of {0.003, 0.01, 0.03} by the last fifth of the training splits, "
        "refitted on all",
        _stochastic("cyclical", 0.003, 0.01, 0.03),
    ),
    "constant-sgd": Protocol(
        "two chains, N(0, 1) prior, 400 epochs (40 on large sets) to the optimum, B = 32; then 100 "
        "draws over a quarter as many steps at the optimal rate, or at one over the curvature",
        _stochastic("constant-sgd", 0.01),
    ),
    **{
        name: Protocol(
            "not run: a random walk does not mix in a network's weights", _not_for_networks
        )
        for name in ("metropolis", "minibatch-mh")
    },
}
