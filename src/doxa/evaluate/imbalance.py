"""Scores and decisions for classes of very different sizes.

Accuracy says little where one class is rare: a classifier that never predicts it is right in most
rows. These scores are about one class, the *positive* one, whose probability p ranks the rows:

    AUROC = P(p of a positive row > p of a negative row) + P(they are equal)/2
    AP    = Σ_k (R_k − R_{k−1}) P_k

with precision P_k = TP/(TP + FP) and recall R_k = TP/(TP + FN) of the rows with p at or above the
k-th largest value of p; rows with equal p enter together. Both depend on the order of p alone. AP
(average precision) of a ranking without information is the share of positives, AUROC is one half.
With two classes the positive one is the rarer in y (of equally frequent ones, label 1); with
several, the scores are means over the classes that occur, each against the rest.

**Decisions by cost.** If a false positive costs a, and a false negative costs b, the expected cost
is least if rows with p ≥ a/(a + b) are called positive (Elkan, 2001). Among several classes, the
decision d with the least Σ_c p_c cost[c, d] is best. Both are right if the probabilities are.

**Reliability.** Given the probabilities, the number of positive rows has the mean Σ p and the
variance Σ p (1 − p). `rare_class` compares it with the number that was observed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError
from doxa.evaluate.paired import Labelled, check_predicted, labelled
from doxa.predictive import Predictive


def roc_auc(p: Predictive, y: Any, positive: int | None = None, sample_weight: Any = None) -> float:
    """The area under the receiver operating characteristic.

    Parameters
    ----------
    p : Predictive
        Predictions of classes.
    y : array_like [N]
        The labels.
    positive : int, optional
        The positive class. Default: the rarer of two classes in y; of several, the mean over the
        classes that occur.
    sample_weight : array_like [N], optional
        The weight of each label.

    Returns
    -------
    float
        1 if every positive row has a larger probability than every negative row.

    Examples
    --------
    >>> import doxa
    >>> p = doxa.Predictive.from_probs([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    >>> roc_auc(p, [0, 0, 1, 1])
    0.75
    """
    return _mean_over_classes(p, y, positive, sample_weight, "roc_auc")


def average_precision(
    p: Predictive, y: Any, positive: int | None = None, sample_weight: Any = None
) -> float:
    """The average precision: the area under the curve of precision by recall, as a sum of steps.

    Parameters
    ----------
    p, y, positive, sample_weight
        As in `roc_auc`.

    Returns
    -------
    float
        1 if every positive row has a larger probability than every negative row; the share of
        positive rows for probabilities without information.

    Examples
    --------
    >>> import doxa
    >>> p = doxa.Predictive.from_probs([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    >>> round(average_precision(p, [0, 0, 1, 1]), 4)
    0.8333
    """
    return _mean_over_classes(p, y, positive, sample_weight, "average_precision")


@dataclass(frozen=True)
class Threshold:
    """A threshold on the probability of the positive class, and what it does to some rows.

    Attributes
    ----------
    probability : float
        Rows with at least this probability are called positive.
    cost : float
        The mean cost of these decisions per row.
    confusion : Tensor
        [2, 2]: the weight of the rows that are negative and positive (rows of the table) by the
        decision (columns).
    precision, recall : float
        The share of called rows that are positive, and the share of positive rows that are called;
        NaN where there are none.
    """

    probability: float
    cost: float
    confusion: Tensor

    @property
    def precision(self) -> float:
        return _share(self.confusion[1, 1], self.confusion[:, 1].sum())

    @property
    def recall(self) -> float:
        return _share(self.confusion[1, 1], self.confusion[1].sum())


def threshold(
    p: Predictive,
    y: Any,
    cost_false_positive: float = 1.0,
    cost_false_negative: float = 1.0,
    positive: int | None = None,
    sample_weight: Any = None,
    search: bool = False,
) -> Threshold:
    """The threshold on the probability of one class with the least expected cost.

    Parameters
    ----------
    p, y, positive, sample_weight
        As in `roc_auc`. The default of `positive` is the rarest class in y.
    cost_false_positive, cost_false_negative : float
        The costs of the two mistakes. Their ratio decides.
    search : bool
        False: a/(a + b), which needs calibrated probabilities, and does not depend on y. True: the
        threshold with the least cost on these rows, the largest of several. Its cost is then too
        optimistic for new rows; use calibration rows that are not scored.

    Returns
    -------
    Threshold

    Examples
    --------
    >>> import doxa
    >>> p = doxa.Predictive.from_probs([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    >>> found = threshold(p, [0, 0, 1, 1], cost_false_positive=1, cost_false_negative=3)
    >>> found.probability, found.recall, found.cost
    (0.25, 1.0, 0.25)
    """
    costs = float(cost_false_positive), float(cost_false_negative)
    if not all(math.isfinite(cost) and cost > 0 for cost in costs):
        raise DataError(f"costs must be positive and finite, got {costs[0]:g} and {costs[1]:g}")
    table = labelled(p, y)
    weight = _weights(table, sample_weight)
    k = _positive(table, positive, weight)
    score, yes = table.comparable(table.probs[:, k]), table.label == k
    total = weight.sum()

    def at(value: float) -> Threshold:
        called = score >= value
        cells = [(weight * (yes == t) * (called == c)).sum() for t in (0, 1) for c in (0, 1)]
        confusion = torch.stack(cells).reshape(2, 2)
        cost = costs[0] * confusion[0, 1] + costs[1] * confusion[1, 0]
        return Threshold(value, float(cost / total), confusion)

    if not search:
        return at(float(table.comparable(torch.tensor(costs[0] / sum(costs)).double())))
    value, positives, negatives = _running(score, yes, weight)
    cost = costs[0] * negatives + costs[1] * (positives[-1] - positives)
    cost = torch.cat([costs[1] * positives[-1:], cost])  # first: nothing is called
    place = int(cost.argmin())
    return at(float(value[place - 1]) if place else math.nextafter(float(value[0]), math.inf))


def least_cost(p: Predictive, costs: Any) -> Tensor:
    """The decision with the least expected cost for each row.

    Parameters
    ----------
    p : Predictive
        Predictions of C classes (two for a Bernoulli).
    costs : array_like [C, D]
        costs[c, d] is the cost of decision d if the class is c. D may differ from C: a decision may
        be "ask a person".

    Returns
    -------
    Tensor
        The numbers of the decisions, one for each label; the first of several equal ones.

    Examples
    --------
    >>> import doxa
    >>> p = doxa.Predictive.from_probs([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> least_cost(p, [[0, 1, 0.3], [5, 0, 0.3]]).tolist()
    [2, 2, 1]
    """
    probs = check_predicted(p.probs, "probability").double()
    if p.likelihood.binary:
        probs = torch.stack([1.0 - probs, probs], 1)
    table = torch.as_tensor(costs).to(probs)
    if table.ndim != 2 or len(table) != probs.shape[1] or table.shape[1] == 0:
        raise ShapeError(
            f"costs must have the shape [{probs.shape[1]}, decisions], got {list(table.shape)}"
        )
    if not bool(torch.isfinite(table).all()):
        raise DataError("costs must be finite")
    return torch.tensordot(probs, table, ([1], [0])).argmin(-1)


@dataclass(frozen=True)
class RareClass:
    """How well one class is predicted.

    Attributes
    ----------
    label : int
        The class.
    observed, expected : float
        The (weighted) number of its rows, and the sum of its probabilities.
    error : float
        The standard deviation of the number of rows, given the probabilities.
    share : float
        The share of its rows.
    roc_auc, average_precision : float
        See the functions; NaN where no or all rows have this class.
    recall : float
        The share of its rows for which it is the likeliest class.
    """

    label: int
    observed: float
    expected: float
    error: float
    share: float
    roc_auc: float
    average_precision: float
    recall: float

    @property
    def z(self) -> float:
        """(observed − expected)/error: beyond ± 3, the probabilities are too small or too large on
        average."""
        return (self.observed - self.expected) / max(self.error, 1e-12)


def rare_class(
    p: Predictive, y: Any, positive: int | None = None, sample_weight: Any = None
) -> RareClass:
    """Scores and reliability of the rarest class that occurs, or of class `positive`.

    Examples
    --------
    >>> import doxa
    >>> p = doxa.Predictive.from_probs([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    >>> found = rare_class(p, [0, 0, 0, 1])
    >>> found.label, found.observed, round(found.expected, 6), found.recall
    (1, 1.0, 1.6, 1.0)
    """
    table = labelled(p, y)
    weight = _weights(table, sample_weight)
    k = _positive(table, positive, weight)
    score, yes = table.probs[:, k], (table.label == k).double()
    variance = (weight.square() * score * (1.0 - score)).sum()
    found = {name: _score(table, k, weight, name) for name in ("roc_auc", "average_precision")}
    observed = (weight * yes).sum()
    return RareClass(
        k, float(observed), float((weight * score).sum()), float(variance.sqrt()),
        float(observed / weight.sum()), **found,
        recall=_share((weight * yes * (table.top == k)).sum(), observed),
    )  # fmt: skip


def ranking_scores(probs: Tensor, label: Tensor, decimals: int) -> dict[str, float]:
    """AUROC and average precision of class probabilities [L, C]; empty where one class alone
    occurs."""
    table = Labelled(probs, label, probs.shape[1] == 2, decimals)
    weight = torch.ones_like(probs[:, 0])
    found = {name: _overall(table, weight, name) for name in ("roc_auc", "average_precision")}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _mean_over_classes(
    p: Predictive, y: Any, positive: int | None, sample_weight: Any, name: str
) -> float:
    table = labelled(p, y)
    weight = _weights(table, sample_weight)
    if positive is not None:
        value = _score(table, _positive(table, positive, weight), weight, name)
    else:
        value = _overall(table, weight, name)
    if not math.isfinite(value):
        raise DataError("the rows have one class only: two are needed to rank them")
    return value


def _overall(table: Labelled, weight: Tensor, name: str) -> float:
    """The score of the rarer of two classes, or the mean over the classes that occur."""
    number = table.probs.shape[1]
    if number == 2:
        return _score(table, _rarest(table, weight), weight, name)
    there = torch.bincount(table.label, weight, number).nonzero().flatten().tolist()
    return sum(_score(table, k, weight, name) for k in there) / max(1, len(there))


def _score(table: Labelled, k: int, weight: Tensor, name: str) -> float:
    score, yes = table.comparable(table.probs[:, k]), table.label == k
    _, positives, negatives = _running(score, yes, weight)
    if not (positives[-1] > 0 and negatives[-1] > 0):
        return math.nan
    gained = torch.diff(positives, prepend=positives.new_zeros(1)) / positives[-1]
    if name == "average_precision":
        return float((gained * positives / (positives + negatives)).sum())
    more = torch.diff(negatives, prepend=negatives.new_zeros(1))
    above = negatives[-1] - negatives + 0.5 * more  # negatives that rank lower; ties by half
    return float((gained * above).sum() / negatives[-1])


def _running(score: Tensor, yes: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different scores, the largest first, and the weight of positive and of negative rows at
    or above each; rows without weight do not count."""
    score, yes, weight = (t[weight > 0] for t in (score, yes, weight))
    ordered, order = score.sort(descending=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    hit = yes[order].double()
    positives, negatives = ((weight[order] * part).cumsum(0) for part in (hit, 1.0 - hit))
    return ordered[last], positives[last], negatives[last]


def _weights(table: Labelled, given: Any) -> Tensor:
    """One weight for each label that counts."""
    count = len(table.label)
    if given is None:
        return torch.ones_like(table.probs[:, 0])
    weight = torch.as_tensor(given).to(table.probs).flatten()
    if len(weight) != count:
        raise ShapeError(f"{len(weight)} weights for {count} labels")
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()) or not bool((weight > 0).any()):
        raise DataError("weights must be finite and not negative, and one of them positive")
    return weight


def _positive(table: Labelled, given: int | None, weight: Tensor) -> int:
    number = table.probs.shape[1]
    if given is None:
        return _rarest(table, weight)
    if not 0 <= given < number:
        raise DataError(f"there are classes 0 to {number - 1}, and no class {given}")
    return given


def _rarest(table: Labelled, weight: Tensor) -> int:
    """The class with the least weight of those that occur, the last of several."""
    total = torch.bincount(table.label, weight, table.probs.shape[1])
    found = torch.where(total > 0, total, math.inf)
    return int((found == found.min()).nonzero()[-1])


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if bool(whole > 0) else math.nan
