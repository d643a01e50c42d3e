"""The table of scores: everything that is known of each, in one row.

`metrics`, `Streaming`, reports, `doxa compare`, `doxa fit` and active learning take their scores
from `SCORES`. A new score is a function of a predictive and the targets in `evaluate/scores.py`,
and one row here that names it in `each`:

    score = mean of each(p, y), or of each(p, y, level) for an interval at a level

Other scores are computed from sums in `evaluate/streaming.py` (RMSE, ECE, coverage), or by
`compute` from what a report has read of the predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from doxa.evaluate.scores import interval_score_each, pinball_each, set_coverage_each, set_size_each
from doxa.predictive import Predictive

LEVEL = 0.95  # of intervals, unless a posterior has its own


@dataclass(frozen=True)
class Score:
    """One score and how it is shown.

    Attributes
    ----------
    name : str
        Its key in `doxa.evaluate.metrics`.
    label, explanation : str
        What it is called, and what it is.
    better : str
        "higher", "lower", or "near" where it should be near a value.
    each : callable or None
        A function of (p, y) that returns the values whose mean is the score: one for each row,
        element of y, or label that counts. It raises `Unavailable` for predictives that do not
        have it. A score of numbers with `at_level` takes the level, too: (p, y, level).
    of : str
        The targets that `each` is for: "numbers" (counts among them) or "classes".
    share : bool
        It lies between 0 and 1 and is shown in percent.
    at_level : bool
        It is of an interval or set, whose level belongs to its label. A conformal set has its
        own level.
    right : float or None
        What a calibrated method has; the comparison draws such scores beside it.
    compute : callable or None
        Its value for an `Evaluation` of a report, None where it has none. Reports alone show such
        a score.
    tile : bool
        It is among the large numbers at the head of a report.
    compared : bool
        It is a column of `doxa compare`. The written table has all scores.
    printed : bool
        `doxa fit` and `doxa predict` print it. The written scores are all of them.
    """

    name: str
    label: str
    better: str
    explanation: str
    each: Callable[..., Tensor] | None = None
    of: Literal["numbers", "classes"] = "numbers"
    share: bool = False
    at_level: bool = False
    right: float | None = None
    compute: Callable[[Any], float | None] | None = None
    tile: bool = False
    compared: bool = False
    printed: bool = False

    def values(self, p: Predictive, y: Any, level: float = LEVEL) -> Tensor:
        """What `each` gives, for intervals at this level."""
        assert self.each is not None
        at = (level,) if self.at_level and self.of == "numbers" else ()
        return self.each(p, y, *at)


def _balanced_accuracy(found: Any) -> float | None:
    """The mean over the classes that occur of the share of their rows that is recognised."""
    counts = found.confusion()
    if counts is None:
        return None
    total = counts.sum(axis=1)
    return float(np.mean(np.diag(counts)[total > 0] / total[total > 0]))


SCORES = (
    Score("rmse", "RMSE", "lower", "root mean squared error of the mean", tile=True, compared=True,
          printed=True),
    Score("mae", "MAE", "lower", "mean absolute error of the mean"),
    Score("accuracy", "accuracy", "higher", "share of rows whose likeliest class is the true one",
          share=True, tile=True, compared=True, printed=True),
    Score("balanced_accuracy", "balanced accuracy", "higher",
          "share of rows that are recognised, as the mean over classes: rare classes count as much "
          "as common ones", share=True, compute=_balanced_accuracy),
    Score("coverage", "coverage", "near", "share of targets inside the interval", share=True,
          at_level=True, right=LEVEL, tile=True, compared=True, printed=True),
    Score("width", "width", "lower", "mean width of that interval, in units of the target",
          at_level=True, printed=True),
    Score("interval_score", "interval score", "lower",
          "width of that interval, and 2/(1 - level) times the distance of a missed target from it",
          interval_score_each, at_level=True),
    Score("crps", "CRPS", "lower", "distance from the whole predictive distribution to the target",
          tile=True, compared=True),
    Score("pinball", "pinball loss", "lower", "mean loss of the predicted quantiles", pinball_each),
    Score("ece", "ECE", "lower", "mean gap between confidence and accuracy", share=True, right=0.0,
          tile=True, compared=True, printed=True),
    Score("brier", "Brier score", "lower", "squared distance of the probabilities from the target",
          tile=True, compared=True, printed=True),
    Score("roc_auc", "AUROC", "higher",
          "probability that a row of the rarer class has a larger probability of it than another "
          "row; of several classes, the mean over them", tile=True, compared=True, printed=True),
    Score("average_precision", "average precision", "higher",
          "mean precision over recall for the rarer class; without information it is its share; "
          "of several classes, the mean over them", compared=True,
          printed=True),
    Score("set_coverage", "set coverage", "near", "share of targets inside the conformal set",
          set_coverage_each, "classes", share=True, at_level=True, printed=True),
    Score("set_size", "set size", "lower", "mean number of classes in that set",
          set_size_each, "classes", at_level=True, printed=True),
    Score("log_likelihood", "log likelihood", "higher",
          "mean log density of the target, in nats per row", tile=True, compared=True,
          printed=True),
)  # fmt: skip


def smaller_is_better(name: str) -> bool:
    return any(each.name == name and each.better == "lower" for each in SCORES)


def score(name: str) -> Score:
    """A score by its name; one that is not in the table is shown under its name."""
    known = (each for each in SCORES if each.name == name)
    return next(known, Score(name, name.replace("_", " "), "", ""))
