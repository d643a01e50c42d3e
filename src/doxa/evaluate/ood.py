"""Scores that say how strange a row is: larger = stranger, one number a row.

From the prediction alone:

    msp                  1 − max_c p(c | x)                            (Hendrycks & Gimpel 2017)
    entropy              H[y | x]: doubt of any kind
    mutual_information   I[y; f | x]: what the functions disagree about (Houlsby et al. 2011)
    energy               −E_s log Σ_c exp f_sc(x)                      (Liu et al. 2020)
    epistemic, variance  Var_s E[y | f_s] and the total, for regression

and from the features of the last layer, which need the training rows: mahalanobis, density, knn
(see `density`). With several labels, outputs or places a row, a score is their mean. Energy is the
mean over draws of each draw's energy: the paper has one network; the mean keeps its units, and for
one draw it is the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.checks import whole
from doxa.data import rows_of
from doxa.errors import DataError, MethodError, Unavailable, did_you_mean
from doxa.evaluate.density import FeatureDensity, features
from doxa.likelihoods import Categorical
from doxa.posterior import Posterior
from doxa.predictive import Predictive
from doxa.predictive.form import mix

_LOG_PROBABILITY = 1e-4  # |logsumexp| below which logits are log probabilities


def msp(p: Predictive) -> Tensor:
    """One minus the probability of the likeliest class: [N]."""
    return _rows(p.variation_ratio)


def entropy(p: Predictive) -> Tensor:
    """The entropy of the predicted label in nats: [N]."""
    if not p.likelihood.classifies:
        raise Unavailable("entropy is a score for classes; for regression use variance")
    return _rows(p.entropy)


def mutual_information(p: Predictive) -> Tensor:
    """What a label would teach about the function, in nats: [N]. Zero for a single function."""
    if not p.likelihood.classifies:
        raise Unavailable("mutual information is a score for classes; for regression use epistemic")
    return _rows(p.mutual_information)


def energy(p: Predictive) -> Tensor:
    """Minus the log of the summed exponentials of the logits, averaged over draws: [N].

    Unlike probabilities it knows the size of the logits, so it needs logits: of probabilities
    (recalibrated ones, say) every energy is zero, and it is unavailable.
    """
    if not isinstance(p.likelihood, Categorical):
        raise Unavailable("energy needs one logit for each class")
    energies = -torch.logsumexp(p.samples, 2)  # [S, N, *site]
    if bool((energies.abs() < _LOG_PROBABILITY).all()):
        raise Unavailable("these logits are log probabilities, whose energy is zero everywhere")
    return _rows(mix(energies, p.weights))


def epistemic(p: Predictive) -> Tensor:
    """The variance of the mean over functions, in squared units of y: [N]."""
    return _rows(_regression(p, "mutual_information").epistemic)


def variance(p: Predictive) -> Tensor:
    """The total variance, in squared units of y: [N]."""
    return _rows(_regression(p, "entropy").variance)


PREDICTIVE_SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "msp": msp,
    "entropy": entropy,
    "mutual_information": mutual_information,
    "energy": energy,
    "epistemic": epistemic,
    "variance": variance,
}
FEATURE_SCORES: dict[str, Callable[[FeatureDensity, Any], Tensor]] = {
    "mahalanobis": FeatureDensity.mahalanobis,
    "density": FeatureDensity.density,
    "knn": FeatureDensity.knn,
}


def ood_scores(
    posterior: Posterior,
    x: Any,
    train: tuple[Any, Any] | FeatureDensity | None = None,
    scores: Sequence[str] | None = None,
    *,
    batch: int = 1024,
    n: int | None = None,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Every score that this posterior can give at x.

    Parameters
    ----------
    train: the training rows (x, y), for the scores on features; or a `FeatureDensity` already
        fitted to them, which saves the work when several sets are scored.
    scores: names; default: all that there are. One that is asked for by name and cannot be had
        raises, saying why.
    batch: rows at a time. n, seed: as in `predict`; every block of rows sees the same functions.

    Returns
    -------
    {name: [N]}, larger = stranger. Scores of different names have different units.

    Examples
    --------
    >>> inside, outside = (ood_scores(posterior, rows, train=(x, y)) for rows in (x_test, x_far))
    >>> {name: auroc(inside[name], outside[name]) for name in inside}
    """
    known = [*PREDICTIVE_SCORES, *FEATURE_SCORES]
    for name in scores or ():
        if name not in known:
            raise MethodError(f"unknown score {name!r}{did_you_mean(name, known)}")
    if scores is not None and len(scores) == 0:
        raise MethodError("scores is empty; leave it out to get all of them")
    x, batch = posterior.read(x), whole("batch", batch)
    rows = rows_of(x, "x")
    if rows == 0:
        raise DataError("x has no rows (N = 0)")
    found: dict[str, list[Tensor]] = {}
    if scores is None or any(name in PREDICTIVE_SCORES for name in scores):
        for start in range(0, rows, batch):
            p = posterior.predict(tree_map(lambda t, a=start: t[a : a + batch], x), n, seed)
            for name, value in _predictive_scores(p, scores).items():
                found.setdefault(name, []).append(value)
    result = {name: torch.cat(parts) for name, parts in found.items()}
    wanted = [name for name in FEATURE_SCORES if scores is None or name in scores]
    if scores is None and train is None:
        wanted = []
    if wanted:
        result |= _feature_scores(posterior, x, train, wanted, batch, required=scores is not None)
    order = known if scores is None else list(scores)
    return {name: _finite(result[name], name) for name in order if name in result}


def _predictive_scores(p: Predictive, scores: Sequence[str] | None) -> dict[str, Tensor]:
    if scores is not None:
        return {name: score(p) for name, score in PREDICTIVE_SCORES.items() if name in scores}
    values = {}
    for name, score in PREDICTIVE_SCORES.items():
        try:
            values[name] = score(p)
        except Unavailable:
            continue
    return values


def _feature_scores(
    posterior: Posterior, x: Any, train: Any, wanted: list[str], batch: int, required: bool
) -> dict[str, Tensor]:
    if train is None:
        raise MethodError(f"{wanted[0]} needs the training rows: pass train=(x, y)")
    try:
        z = features(posterior, x, batch)
    except Unavailable:
        if required:
            raise
        return {}
    if not isinstance(train, FeatureDensity):
        train = FeatureDensity.of(posterior, train, batch=batch)
    return {name: FEATURE_SCORES[name](train, z) for name in wanted}


def _regression(p: Predictive, instead: str) -> Predictive:
    if p.likelihood.classifies:
        raise Unavailable(f"variances are scores for regression; for classes use {instead}")
    return p


def _rows(values: Tensor) -> Tensor:
    """The mean over everything but rows: [N]."""
    return values if values.ndim == 1 else values.flatten(1).mean(1)


def _finite(score: Tensor, name: str) -> Tensor:
    missing = ~torch.isfinite(score)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise DataError(
            f"{name} of row {row} is {float(score[row])}: the prediction there is not finite"
        )
    return score
