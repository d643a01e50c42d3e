"""Probabilities that mean what they say: a posterior corrected on rows it has not seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from doxa.errors import MethodError, did_you_mean
from doxa.evaluate.recalibrate.histogram import Histogram, fit_histogram
from doxa.evaluate.recalibrate.isotonic import Isotonic, fit_isotonic
from doxa.evaluate.recalibrate.linear import Dirichlet, Vector, fit_dirichlet, fit_vector
from doxa.evaluate.recalibrate.quantile import Quantile, fit_quantile
from doxa.evaluate.recalibrate.rows import check_one_head, check_unseen, labelled, pair
from doxa.evaluate.recalibrate.temperature import Temperature, fit_temperature
from doxa.evaluate.recalibrate.variance import Variance, fit_variance
from doxa.likelihoods import Heads, Likelihood
from doxa.posterior import Posterior, TransformedPosterior

__all__ = [
    "Dirichlet", "Histogram", "Isotonic", "Quantile", "Temperature", "Variance", "Vector",
    "recalibrate",
]  # fmt: skip

CLASSES: dict[str, Callable[..., Any]] = {
    "temperature": fit_temperature,
    "vector": fit_vector,
    "dirichlet": fit_dirichlet,
    "isotonic": fit_isotonic,
    "histogram": fit_histogram,
}
NUMBERS: dict[str, Callable[..., Any]] = {"quantile": fit_quantile, "variance": fit_variance}


def recalibrate(
    posterior: Posterior, data: Any, kind: str = "temperature", **options: Any
) -> TransformedPosterior:
    """The posterior with its predictions corrected on held-out rows.

    Parameters
    ----------
    posterior: any posterior, a transformed one too.
    data: (x, y) that the fit has not seen; on its own training rows a network looks surer than it
        is right to be. Rows that were passed to `fit` are an error (`doxa.data.fitted_rows` says
        how they are recognised), except where the fit read them from a stream.
    kind: for classes "temperature", "vector", "dirichlet", "isotonic" or "histogram"; for numbers
        "quantile" or "variance".
    options: of the kind: dirichlet `off_diagonal`, `intercept` (0: no regularisation); isotonic
        `floor`; histogram `bins`, `equal_mass`; quantile `knots`.

    Returns
    -------
    A posterior whose `transform` holds what was fitted, as in `.transform.temperature`.

    Probabilities are corrected after averaging over members and draws: the average is what is
    scored, and on it temperature, vector, unregularised Dirichlet and two-class isotonic never
    worsen the log-likelihood of the calibration rows. Entropy and variance are split into their
    parts in the base's proportions. `functions`, `draw` and `features` are the base's.
    """
    x, y = pair(data)
    fitter = _fitter(kind, posterior.base_likelihood)
    known = [
        name
        for name, parameter in inspect.signature(fitter).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            raise MethodError(f"{kind!r} has no option {name!r}{did_you_mean(name, known)}")
    check_unseen(posterior, x, y)
    p = posterior.predict(x)
    check_one_head(p)
    transform = fitter(labelled(p, y), **options) if kind in CLASSES else fitter(p, y, **options)
    return TransformedPosterior(posterior, transform)


def _fitter(kind: str, likelihood: Likelihood) -> Callable[..., Any]:
    every = CLASSES | NUMBERS
    if kind not in every:
        raise MethodError(f"no recalibration named {kind!r}{did_you_mean(str(kind), every)}")
    if isinstance(likelihood, Heads):
        raise MethodError(
            f"this posterior has {len(likelihood.likelihoods)} heads; only predictions of one "
            "head can be recalibrated"
        )
    if likelihood.discrete and not likelihood.classifies:
        raise MethodError(
            f"no recalibration is for counts, which this {likelihood.name} posterior predicts; "
            "conformal(posterior, data, kind='split') gives intervals that hold"
        )
    possible = CLASSES if likelihood.classifies else NUMBERS
    if kind not in possible:
        what = "classes" if kind in CLASSES else "numbers"
        raise MethodError(
            f"{kind!r} recalibrates predictions of {what}, but this posterior's likelihood is "
            f"{likelihood.name}; for it there are: {', '.join(possible)}"
        )
    return every[kind]
