"""What has a closed form, or has one at a maximum: linear models, Gaussian processes, Laplace."""

from __future__ import annotations

from typing import Any

import doxa
from doxa.app.bench.protocols.problem import SMALL, Answer, Fit, Problem, Protocol
from doxa.errors import MethodError


def _linear(problem: Problem, _name: str) -> Answer:
    return Answer(list(problem.fit("linear", 0)))


def _gp(problem: Problem, _name: str) -> Answer:
    if not problem.small:
        raise MethodError(f"an exact GP costs N³: it is run on sets below {SMALL} training rows")
    return Answer(list(problem.fit(doxa.GP(ard=True), 0, steps=100)))


def _laplace(structure: str, **options: Any) -> Fit:
    """The prior's width is chosen by the evidence, split by split."""

    def fit(problem: Problem, _name: str) -> Answer:
        priors = [doxa.Normal(scale) for scale in (0.1, 0.3, 1.0, 3.0)]
        sweep = problem.fit(
            doxa.Laplace(structure=structure), likelihood="gaussian", schedule="cosine",
            epochs=400 if problem.small else 40, batch_size=32, lr=0.01,
            runs=doxa.Runs(rows=problem.train, grid={"prior": priors}), **options,
        )  # fmt: skip
        best = sweep.select(by="evidence")
        chosen = [hyper["prior"].std for hyper in best.hyper]
        return Answer(list(best), facts={"chosen": {"prior": chosen}})

    return fit


_AS_LAPLACE = (
    "linearised; N(0, s²) prior with s of {.1, .3, 1, 3} by evidence; 400 epochs (40 on large "
    "sets), B = 32, rate .01 decaying"
)

EXACT = {
    "linear": Protocol("linear in the inputs; noise and prior width by evidence", _linear),
    "gp": Protocol(
        "exact, RBF kernel with a lengthscale an input, by evidence; small sets only", _gp
    ),
}
LAPLACE = {
    "laplace": Protocol(f"full Gauss–Newton, {_AS_LAPLACE}", _laplace("full")),
    "laplace-kronecker": Protocol(
        f"Kronecker-factored Gauss–Newton, {_AS_LAPLACE}", _laplace("kronecker"), "laplace"
    ),
    "laplace-diagonal": Protocol(
        f"diagonal of the Gauss–Newton, {_AS_LAPLACE}", _laplace("diagonal"), "laplace"
    ),
    "laplace-last-layer": Protocol(
        f"full Gauss–Newton of the last layer, {_AS_LAPLACE}",
        _laplace("full", subset="last_layer"),
        "laplace",
    ),
}
