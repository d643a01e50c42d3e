"""Is a predictive worse than that of its own maximum, the weights alone?

On held-out rows, averaging over an honest posterior loses nothing. On the rows that were fitted it
may, for the maximum was fitted to them too. With Gaussian noise a row of leverage h has the
predictive variance σ²(1 + h), and its squared residual is (1 − h)σ² on average, where that of a new
row is (1 + h)σ²: fitting made the score of the maximum look better by h, and that of the predictive
by h/(1 + h). The difference, h²/(1 + h), is of second order. Leverages add up to γ, the number of
well-determined parameters, so that h = γ/nd for each of the d directions in a row's outputs. A
matrix without correlations counts more of them than there are (Σ x/(x + δ) is larger over its
diagonal than over its eigenvalues: Schur), and could excuse anything: where it would, γ is that of
layers' factors, which have some, if it is less.

A loss is much, and said in the status, where it is above that by a tenth of a nat a row (the
geometric mean of the probabilities given to what came true is then a tenth lower), of classes on
fitted rows also where it is above half of the maximum's own loss, if that is less; and beyond
chance. (Held-out rows choose a scale where much is lost: where classes are told apart with hardly a
doubt, less than a tenth of a nat is no reason to give up the doubt far away.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Standardisation
from doxa.data.weights import number_of_rows, standard_error, weighted_mean
from doxa.laplace.curvature import output_size
from doxa.laplace.posterior import LaplacePosterior
from doxa.method import Run
from doxa.posterior import SamplePosterior, Status
from doxa.predictive import Predictive

WORSE = "worse-than-map"  # the status

_MOST_ROWS = 1000
_MOST_NUMBERS = 1 << 24  # of outputs, over rows and draws
_MUCH = 0.1  # nats a row
_LEAST = 0.01  # the same, of classes that were fitted with hardly a doubt left


class Rows(NamedTuple):
    """Rows of one run in fitted units, whether the fit had not seen them, and their weights, where
    they have some."""

    x: Any
    y: Any
    held_out: bool
    weight: Tensor | None = None

    @property
    def words(self) -> str:
        return "held-out rows" if self.held_out else "rows it was fitted to"


def judged(run: Run) -> Rows | None:
    """At most a thousand rows of a run, evenly spread: those that all its members held out, where
    there are any. None where a row is a set of points."""
    data, split = run.rows, run.split_of[0]
    if data.tasks:
        return None
    index, held_out = data.rows[split], False
    if data.validation is not None and len(set(run.split_of)) == 1:
        index, held_out = data.validation[split], True
    most = max(1, min(_MOST_ROWS, _MOST_NUMBERS // (100 * output_size(run.net.output))))
    step = math.ceil(len(index) / most)
    x, y = data.take(index[::step], torch.tensor(run.run_of[0]))
    return Rows(x, y, held_out, data.weight_of(index[::step]))


def log_scores(posterior: LaplacePosterior | SamplePosterior, rows: Rows) -> Tensor:
    """log p(y | x) of each row in fitted units, [N]; heads' own scores are added up."""
    fitted = copy.copy(posterior)
    fitted.scales = Standardisation()
    p = fitted.predict(rows.x)
    if isinstance(rows.y, tuple | list):
        return torch.stack([_each(h, t) for h, t in zip(p.heads, rows.y, strict=True)]).sum(0)
    return _each(p, rows.y)


def _each(p: Predictive, y: Tensor) -> Tensor:
    score = p.log_prob(y).double()
    return score if score.ndim == 1 else score.flatten(1).sum(1)


class Below(NamedTuple):
    """How far each row's log score lies below that of the members' maxima alone, [N], how far is
    much, and the rows' weights."""

    each: Tensor
    much: float
    weight: Tensor | None

    @property
    def mean(self) -> float:
        return float(weighted_mean(self.each, self.weight))

    def beyond(self, allowed: float) -> bool:
        """More than is allowed, and not by chance."""
        return self.mean > allowed and beyond_chance(self.each, self.weight)


def below_its_maximum(posterior: LaplacePosterior, rows: Rows) -> Below:
    point = SamplePosterior(
        posterior.model, posterior.method, posterior.base_likelihood, inputs=posterior.inputs,
        ids=posterior.ids, samples=posterior.maximum.unsqueeze(1), constants=posterior.constants,
        buffers=posterior.buffers, layers=posterior.layers,
    )  # fmt: skip
    alone, much = log_scores(point, rows), _MUCH
    if posterior.likelihood.classifies and not rows.held_out:
        much = min(_MUCH, max(_LEAST, -0.5 * float(weighted_mean(alone, rows.weight))))
    return Below(alone - log_scores(posterior, rows), much, rows.weight)


def beyond_chance(below: Tensor, weight: Tensor | None, errors: float = 2.0) -> bool:
    """The mean is more than so many standard errors above zero; two: by chance once in forty."""
    several = number_of_rows(below, weight) > 1
    error = standard_error(below, weight, correction=1) if several else math.inf
    return float(weighted_mean(below, weight)) > errors * error


def judge(
    posterior: LaplacePosterior, rows: Rows, determined: float,
    nearer: Callable[[], float] | None = None,
) -> None:  # fmt: skip
    """The comparison as a diagnostic, and in the status where much is lost; `determined` is γ/n, by
    which rows that were fitted lose more, and `nearer` works it out with correlations, where it has
    none."""
    below = below_its_maximum(posterior, rows)
    posterior.record.diagnostics["below_maximum"] = {"nats": below.mean, "rows": rows.words}
    outputs = output_size(posterior.network.output)
    directions = max(1, outputs - posterior.likelihood.classifies)  # a softmax has one less

    def most(share: float) -> float:
        leverage = 0.0 if rows.held_out else share / directions
        return below.much + directions * leverage**2 / (1.0 + leverage)

    if not below.beyond(below.much):
        return
    allowed = most(determined)
    if nearer is not None and not below.beyond(allowed):
        allowed = min(allowed, most(nearer()))
    lost = (
        f"on {len(below.each)} {rows.words}, the predictive's log score is {below.mean:.2g} nats a "
        "row below that of the weights alone"
    )
    if below.beyond(allowed):
        expected = f" (at most {allowed:.2g} were to be expected): "
        posterior.record.status = Status(WORSE, lost + expected + _advice(posterior, rows))
    else:
        posterior.record.status = Status(
            "ok", f"{lost}, which their leverages may excuse: rows that were not fitted would tell "
            "(validation=(x, y))",
        )  # fmt: skip


def _advice(posterior: LaplacePosterior, rows: Rows) -> str:
    advice = []
    if not posterior.linearised:
        advice.append("predictive='linearised'")
    elif posterior.likelihood.classifies and posterior.method.centre == "mode":
        advice.append("centre='mean'")
    if posterior.priors is None:
        advice.append("a prior whose scale is found (tune='evidence')")
    elif posterior.method.tune == "evidence" or not rows.held_out:
        advice.append(
            "a prior scale chosen on held-out rows (tune='validation', validation=(x, y))"
        )
    if posterior.network.subset == "all":
        advice.append("subset='last_layer'")
    return "try " + ", or ".join(advice or ["tune='validation'", "another method"])
