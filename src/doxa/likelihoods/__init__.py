"""Likelihoods p(y | f) of targets y given network outputs f, by name or as objects.

`LIKELIHOODS` is the table of likelihoods. The names that `fit`, the estimators and the command line
accept, the tables that `doxa fit` reads, saved artefacts and the tests all use it. What other parts
of doxa need to know about a likelihood, it declares itself: see `Likelihood`.
"""

from __future__ import annotations

from collections.abc import Sequence

from doxa.errors import ModelError
from doxa.likelihoods.base import Likelihood, Theta
from doxa.likelihoods.classes import Bernoulli, Categorical
from doxa.likelihoods.compose import Affine, Heads
from doxa.likelihoods.gaussian import Gaussian, HeteroscedasticGaussian, StudentT
from doxa.likelihoods.infer import Inferred, infer
from doxa.likelihoods.negative_binomial import NegativeBinomial
from doxa.likelihoods.poisson import Poisson

__all__ = [
    "LIKELIHOODS",
    "Affine",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heads",
    "HeteroscedasticGaussian",
    "Inferred",
    "Likelihood",
    "NegativeBinomial",
    "Poisson",
    "StudentT",
    "Theta",
    "assumed",
    "infer",
    "likelihood",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    kind.name: kind
    for kind in (
        Gaussian,
        HeteroscedasticGaussian,
        StudentT,
        Poisson,
        NegativeBinomial,
        Bernoulli,
        Categorical,
    )
}


def assumed(name: str) -> Likelihood:
    """The likelihood of a name that was inferred, not given: held-out calibration may replace
    it."""
    return Gaussian(assumed=True) if name == "gaussian" else likelihood(name)


def likelihood(spec: str | Likelihood | Sequence[str | Likelihood]) -> Likelihood:
    """A likelihood from its name, itself, or a sequence of either: one for each head."""
    if isinstance(spec, Likelihood):
        return spec
    if isinstance(spec, str):
        if spec not in LIKELIHOODS:
            known = ", ".join(sorted(LIKELIHOODS))
            raise ModelError(f"no likelihood is called {spec!r}; there are {known}")
        return LIKELIHOODS[spec]()
    if isinstance(spec, tuple | list):
        return Heads(tuple(likelihood(part) for part in spec))
    if isinstance(spec, type) and issubclass(spec, Likelihood):
        raise ModelError(f"a likelihood is a name or an object: {spec.__name__}(), not its class")
    raise ModelError(f"a likelihood is a name or an object, got {type(spec).__name__}")
