"""Detection of out-of-distribution inputs: scores per row, and how well they separate two sets.

All scores are larger for out-of-distribution inputs. From the prediction alone:

    msp                  1 − max_c p(c | x)                            (Hendrycks & Gimpel 2017)
    entropy              H[y | x]: total uncertainty
    mutual_information   I[y; f | x]: disagreement of the functions    (Houlsby et al. 2011)
    energy               −E_s log Σ_c exp f_sc(x)                      (Liu et al. 2020)
    epistemic, variance  Var_s E[y | f_s] and the total, for regression

If a row has several labels, outputs or places, its score is their mean. Energy is the mean over
draws of the energy of each draw: the paper has one network; the mean keeps its units, and equals
the paper's score for one draw.

From the features z(x) of the last layer, compared with those of the training rows
(`FeatureDensity`):

    mahalanobis   min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c),  Σ shared by the classes   (Lee et al. 2018)
    density       −log Σ_c π_c N(z; μ_c, Σ_c),  one Σ_c per class     (DDU: Mukhoti et al. 2023)
    knn           distance of z/‖z‖ to its k-th nearest training row         (Sun et al. 2022)

Regression, and any other target without one class per row, has one Gaussian. ReLU features have
dead units, so every covariance gets a ridge on its diagonal: a small share of the mean variance.
All feature scores are computed in float64.

Metrics of a score, with inside scores s_i and outside (out-of-distribution) scores t_j:

    AUROC = P(t > s) + ½ P(t = s)                                  (Mann & Whitney, 1947)
    AUPR  = Σ_k (R_k − R_{k−1}) P_k over the distinct thresholds   (average precision)
    FPR95 = share of the outside at or below the smallest t that keeps 95 % of the inside

Ties are counted exactly: every number is a ratio of integer counts, for any order of the rows. The
definition of FPR95 is that of Hendrycks & Gimpel (2017) and Liang et al. (2018): inside rows should
pass the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.checks import positive, whole
from doxa.data import rows_of
from doxa.errors import DataError, MethodError, ShapeError, Unavailable, did_you_mean
from doxa.posterior import Posterior
from doxa.predictive import Predictive
from doxa.predictive.form import mix


def auroc(inside: Any, outside: Any) -> float:
    """The probability that an outside row scores above an inside row; a tie counts one half.

    Parameters
    ----------
    inside : array_like [N]
        Scores of in-distribution rows.
    outside : array_like [M]
        Scores of out-of-distribution rows. Larger scores should mean out-of-distribution.

    Returns
    -------
    float
        1 if every outside row has a larger score than every inside row, 0.5 for a score without
        information.

    Examples
    --------
    >>> auroc([0.1, 0.2], [0.2, 0.9])
    0.875
    """
    inside, outside = _both(inside, outside)
    ranked = inside.sort().values
    below = torch.searchsorted(ranked, outside, right=False).sum()
    up_to = torch.searchsorted(ranked, outside, right=True).sum()
    return int(below + up_to) / (2 * len(inside) * len(outside))


def aupr(inside: Any, outside: Any, positive: str = "out") -> float:
    """Average precision, with the outside ("out") or the inside ("in") rows as positives.

    Its value for a score without information is the share of positives, not one half.
    """
    inside, outside = _both(inside, outside)
    if positive not in ("out", "in"):
        raise MethodError(f"positive must be 'out' or 'in', not {positive!r}")
    hits, misses = (outside, inside) if positive == "out" else (-inside, -outside)
    scores, order = torch.cat([hits, misses]).sort(descending=True)
    found = (order < len(hits)).cumsum(0)
    last = torch.ones_like(order, dtype=torch.bool)  # the last row of each run of equal scores
    last[:-1] = scores[1:] != scores[:-1]
    found, seen = found[last].double(), (last.nonzero().flatten() + 1).double()
    gained = torch.diff(found, prepend=found.new_zeros(1))
    return float((gained * found / seen).sum() / len(hits))


def fpr95(inside: Any, outside: Any, level: float = 0.95) -> float:
    """The share of outside rows that pass a threshold which a share `level` of inside rows pass."""
    inside, outside = _both(inside, outside)
    if not 0.0 < level <= 1.0:
        raise MethodError(f"level must lie in (0, 1], not {level}")
    kept = math.ceil(level * len(inside) - 1e-9)  # 0.95 × 20 is 19 rows, whatever the rounding
    threshold = inside.sort().values[max(kept, 1) - 1]
    return int((outside <= threshold).sum()) / len(outside)


def ood_metrics(inside_scores: Any, outside_scores: Any) -> dict[str, float]:
    """auroc, aupr_out, aupr_in and fpr95 of one score."""
    return {
        "auroc": auroc(inside_scores, outside_scores),
        "aupr_out": aupr(inside_scores, outside_scores, "out"),
        "aupr_in": aupr(inside_scores, outside_scores, "in"),
        "fpr95": fpr95(inside_scores, outside_scores),
    }


def _both(inside: Any, outside: Any) -> tuple[Tensor, Tensor]:
    first = _scores(inside, "inside")
    return first, _scores(outside, "outside").to(first.device)


def _scores(values: Any, name: str) -> Tensor:
    scores = torch.as_tensor(values)
    if scores.ndim != 1:
        raise ShapeError(f"{name} must be one score per row, [N], got shape {list(scores.shape)}")
    if len(scores) == 0:
        raise DataError(f"{name} is empty: a ranking needs at least one row on each side")
    scores = scores.detach().double()
    missing = torch.isnan(scores)
    if bool(missing.any()):
        row = int(missing.nonzero()[0])
        raise DataError(f"{name}: the score of row {row} is NaN; look at the predictions there")
    return scores


_CHUNK_BYTES = 64 << 20  # of distances held at a time
DEFAULT_K = 50


class FeatureDensity:
    """Gaussians and neighbours of training features, fitted once and used many times.

    Parameters
    ----------
    features: [N, D]; further axes (the places of an image) are averaged.
    labels: [N] classes, or None for one Gaussian.
    k: which neighbour; default 50, or N where there are fewer rows.
    ridge: added to the diagonal of each covariance, as a share of the mean shared variance.

    Examples
    --------
    >>> density = FeatureDensity(torch.randn(500, 8))
    >>> density.mahalanobis(torch.zeros(1, 8)) < density.mahalanobis(torch.full((1, 8), 9.0))
    tensor([True])
    """

    def __init__(
        self, features: Any, labels: Any = None, *, k: int | None = None, ridge: float = 1e-6
    ) -> None:
        z = _features(features, "the training features")
        rows, width = z.shape
        self.k = min(DEFAULT_K, rows) if k is None else whole("k", k)
        if self.k > rows:
            raise DataError(f"k = {self.k} neighbours, but there are only {rows} training rows")
        ridge = positive("ridge", ridge)
        index = _index(labels, z)
        classes = int(index.max()) + 1
        count = torch.bincount(index, minlength=classes).double()
        total = z.new_zeros(classes, width).index_add_(0, index, z)
        self.means = total / count[:, None]
        away = z - self.means[index]
        shared = away.T @ away / rows
        variance = shared.diagonal().mean()
        if not float(variance) > 0.0:
            raise DataError("every training row has the same features: distances have no meaning")
        jitter = ridge * variance * torch.eye(width, dtype=z.dtype, device=z.device)
        own = torch.stack([away[index == c].T @ away[index == c] for c in range(classes)])
        self._shared = torch.linalg.cholesky(shared + jitter)
        self._own = torch.linalg.cholesky(own / count[:, None, None] + jitter)
        self._log_share = (count / rows).log()
        self._directions = _unit(z)

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        train: tuple[Any, Any],
        *,
        k: int | None = None,
        ridge: float = 1e-6,
        batch: int = 1024,
    ) -> FeatureDensity:
        """From a posterior's features at its training rows (x, y); classes are used where there
        is one per row."""
        x, y = train
        labels = torch.as_tensor(y) if posterior.base_likelihood.classifies else None
        if labels is not None and labels.numel() != labels.shape[0]:
            labels = None
        return cls(features(posterior, x, batch), labels, k=k, ridge=ridge)

    def mahalanobis(self, features: Any) -> Tensor:
        """The squared distance to the nearest class, [N]."""
        z = self._check(features)
        return torch.stack([_squared(z - mean, self._shared) for mean in self.means]).amin(0)

    def density(self, features: Any) -> Tensor:
        """Minus the log density of the mixture of class Gaussians, [N]."""
        z = self._check(features)
        logs = []
        for mean, factor, log_share in zip(self.means, self._own, self._log_share, strict=True):
            normaliser = factor.diagonal().log().sum() + 0.5 * len(mean) * math.log(2.0 * math.pi)
            logs.append(log_share - normaliser - 0.5 * _squared(z - mean, factor))
        return -torch.logsumexp(torch.stack(logs), 0)

    def knn(self, features: Any) -> Tensor:
        """The distance between directions to the k-th nearest training row, [N]."""
        z = _unit(self._check(features))
        step = max(1, _CHUNK_BYTES // (8 * len(self._directions)))
        parts = []
        for start in range(0, len(z), step):
            cosine = z[start : start + step] @ self._directions.T
            kth = cosine.topk(self.k, 1, sorted=True).values[:, -1]
            parts.append((2.0 - 2.0 * kth).clamp_min(0.0).sqrt())  # ‖a − b‖² = 2 − 2 aᵀb
        return torch.cat(parts)

    def _check(self, features: Any) -> Tensor:
        z = _features(features, "the features").to(self.means.device)
        if z.shape[1] != self.means.shape[1]:
            raise ShapeError(
                f"features of width {z.shape[1]}, but the density was fitted to "
                f"{self.means.shape[1]}"
            )
        return z


def features(posterior: Posterior, x: Any, batch: int = 1024) -> Tensor:
    """A posterior's features at x, a block of rows at a time: [N, D]; places are averaged."""
    x, batch = posterior.read(x), whole("batch", batch)
    rows = rows_of(x, "x")
    if rows == 0:
        raise DataError("x has no rows (N = 0)")
    blocks = [
        posterior.features(tree_map(lambda t, a=start: t[a : a + batch], x))
        for start in range(0, rows, batch)
    ]
    return torch.cat([_flat(block) for block in blocks])


def _flat(z: Tensor) -> Tensor:
    return z if z.ndim <= 2 else z.flatten(2).mean(2)


def _features(values: Any, name: str) -> Tensor:
    z = torch.as_tensor(values).detach()
    if z.ndim < 2 or z.numel() == 0:
        raise ShapeError(f"{name} must be [N, D] with at least one row, got {list(z.shape)}")
    z = _flat(z.double())
    if not bool(torch.isfinite(z).all()):
        row = int((~torch.isfinite(z)).any(1).nonzero()[0])
        raise DataError(f"{name} of row {row} are not finite")
    return z


def _index(labels: Any, z: Tensor) -> Tensor:
    """Classes as 0, 1, ... without gaps: [N]."""
    if labels is None:
        return torch.zeros(len(z), dtype=torch.long, device=z.device)
    labels = torch.as_tensor(labels).to(z.device)
    if labels.numel() != len(z):
        raise ShapeError(f"{labels.numel()} labels for {len(z)} rows of features")
    index: Tensor = labels.flatten().unique(return_inverse=True)[1]
    return index


def _unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)


def _squared(away: Tensor, factor: Tensor) -> Tensor:
    """δᵀ (L Lᵀ)⁻¹ δ of each row."""
    return torch.linalg.solve_triangular(factor, away.T, upper=False).square().sum(0)


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

    It depends on the size of the logits, which probabilities do not contain. From probabilities
    (for example recalibrated ones) every energy is zero, so the score is unavailable.
    """
    if not p.likelihood.class_axis:
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
    """All out-of-distribution scores of a posterior at x.

    Parameters
    ----------
    posterior : Posterior
        The posterior that predicts.
    x : array_like
        Inputs, N rows.
    train : tuple (x, y) or FeatureDensity, optional
        The training rows, for the scores on features; or a `FeatureDensity` that is already fitted
        to them, which saves time when several sets are scored.
    scores : sequence of str, optional
        Names of scores. The default is all that are available. A named score that is not available
        raises an error with the reason.
    batch : int, default 1024
        Number of rows at a time.
    n, seed : int, optional
        As in `predict`. Every block of rows uses the same functions.

    Returns
    -------
    dict of str to Tensor [N]
        Scores by name, larger for out-of-distribution inputs. Different scores have different
        units.

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
