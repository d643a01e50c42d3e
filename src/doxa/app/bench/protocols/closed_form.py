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


def _wide(name: str, depths: tuple[int, ...]) -> Fit:
    """An infinitely wide network; its depth by the evidence, split by split."""

    def fit(problem: Problem, _name: str) -> Answer:
        if not problem.small:
            raise MethodError(f"{name} costs N³: it is run on sets below {SMALL} training rows")
        tried = [list(problem.fit(doxa.get_method(name)(depth=depth), 0)) for depth in depths]
        if len(depths) == 1:
            return Answer(tried[0])
        best = [max(range(len(depths)), key=lambda i: own[i].log_evidence)
                for own in zip(*tried, strict=True)]  # fmt: skip
        chosen = {"depth": [depths[i] for i in best]}
        return Answer([tried[i][r] for r, i in enumerate(best)], facts={"chosen": chosen})

    return fit


def _inducing(method: Any) -> Fit:
    """On all sets: a step does not see how many rows there are."""

    def fit(problem: Problem, _name: str) -> Answer:
        return Answer(list(problem.fit(method(), 0, steps=3000, batch_size=500, schedule="cosine")))

    return fit


def _laplace(subset: str = "all", **settings: Any) -> Fit:
    """The prior's width is chosen by the evidence, split by split."""

    def fit(problem: Problem, _name: str) -> Answer:
        priors = [doxa.Normal(scale) for scale in (0.1, 0.3, 1.0, 3.0)]
        sweep = problem.fit(
            doxa.Laplace(**settings), likelihood="gaussian", schedule="cosine", subset=subset,
            epochs=400 if problem.small else 40, batch_size=32, lr=0.01,
            runs=doxa.Runs(rows=problem.train, grid={"prior": priors}),
        )  # fmt: skip
        best = sweep.select(by="evidence")
        chosen = [hyper["prior"].std for hyper in best.hyper]
        return Answer(list(best), facts={"chosen": {"prior": chosen}})

    return fit


_AS_LAPLACE = (
    "linearised; N(0, s²) prior with s of {.1, .3, 1, 3} by evidence; 400 epochs (40 on large "
    "sets), B = 32, rate .01 decaying"
)

_AS_SPARSE = (
    "100 inducing points, RBF kernels with a lengthscale an input, on the bound; 3,000 steps, "
    "B = 500, rate .02 decaying"
)

EXACT = {
    "linear": Protocol("linear in the inputs; noise and prior width by evidence", _linear),
    "gp": Protocol(
        "exact, RBF kernel with a lengthscale an input, by evidence; small sets only", _gp
    ),
    "nngp": Protocol(
        "exact, ReLU; σ_w, σ_b, noise and one, two or three hidden layers by evidence; small sets "
        "only",
        _wide("nngp", (1, 2, 3)),
    ),
    "ntk": Protocol(
        "the ensemble after training, ReLU, two hidden layers, σ_w, σ_b and noise by the evidence "
        "of a GP with its kernel; small sets only",
        _wide("ntk", (2,)),
    ),
    "sparse-gp": Protocol(f"sparse, {_AS_SPARSE}", _inducing(lambda: doxa.SparseGP())),
    "deep-gp": Protocol(f"two layers, {_AS_SPARSE}", _inducing(lambda: doxa.DeepGP())),
    "deep-gp-3": Protocol(
        f"three layers, {_AS_SPARSE}", _inducing(lambda: doxa.DeepGP(layers=3)), "deep-gp"
    ),
}
_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "laplace-kronecker": ("Kronecker-factored Gauss–Newton", {"structure": "kronecker"}),
    "laplace-low-rank": ("50 eigenpairs of the Gauss–Newton", {"structure": "low-rank"}),
    "laplace-diagonal": ("diagonal of the Gauss–Newton", {"structure": "diagonal"}),
    "laplace-fisher": ("full empirical Fisher", {"structure": "full", "curvature": "fisher"}),
    "laplace-last-layer": (
        "full Gauss–Newton of the last layer", {"structure": "full", "subset": "last_layer"}
    ),
}  # fmt: skip
LAPLACE = {
    "laplace": Protocol(f"full Gauss–Newton, {_AS_LAPLACE}", _laplace(structure="full")),
    **{
        name: Protocol(f"{words}, {_AS_LAPLACE}", _laplace(**settings), "laplace")
        for name, (words, settings) in _FORMS.items()
    },
}
