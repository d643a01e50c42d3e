"""Is a predictive worse than that of its own maximum, the weights alone?

On held-out rows, averaging over an honest posterior loses nothing. On the rows that were fitted it
may: the mean of Σ log p(y | θ) over a Gaussian posterior lies γ/2 below its maximum, with γ the
number of well-determined parameters, and the predictive's log score lies above that mean. Nor is it
more than ½ log 2 a target: with Gaussian noise a row's predictive variance is σ²(1 + h), with h,
its leverage, at most 1 (a diagonal matrix counts more parameters than the data determine). A loss
is much, and said in the status, where it is above the less of these by a tenth of a nat a row (the
geometric mean of the probabilities given to what came true is then a tenth lower), and beyond
chance.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Standardisation
from doxa.laplace.curvature import output_size
from doxa.laplace.posterior import LaplacePosterior
from doxa.method import Run
from doxa.posterior import SamplePosterior, Status
from doxa.predictive import Predictive

_MOST_ROWS = 1000
_MOST_NUMBERS = 1 << 24  # of outputs, over rows and draws
MUCH = 0.1  # nats a row


class Rows(NamedTuple):
    """Rows of one run in fitted units, and whether the fit had not seen them."""

    x: Any
    y: Any
    held_out: bool

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
    return Rows(x, y, held_out)


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


def below_its_maximum(posterior: LaplacePosterior, rows: Rows) -> Tensor:
    """How far each row's log score lies below that of the members' maxima alone, [N]."""
    point = SamplePosterior(
        posterior.model, posterior.method, posterior.base_likelihood, inputs=posterior.inputs,
        ids=posterior.ids, samples=posterior.mean.unsqueeze(1), constants=posterior.constants,
        buffers=posterior.buffers, layers=posterior.layers,
    )  # fmt: skip
    return log_scores(point, rows) - log_scores(posterior, rows)


def beyond_chance(below: Tensor, errors: float = 2.0) -> bool:
    """The mean is more than so many standard errors above zero; two: by chance once in forty."""
    error = float(below.std()) / math.sqrt(len(below)) if len(below) > 1 else math.inf
    return float(below.mean()) > errors * error


def judge(posterior: LaplacePosterior, rows: Rows, expected: float) -> None:
    """The comparison as a diagnostic, and in the status where much is lost; `expected` nats a row
    are what an honest posterior may lose on rows that were fitted."""
    below = below_its_maximum(posterior, rows)
    lost = float(below.mean())
    posterior.record.diagnostics["below_maximum"] = {"nats": lost, "rows": rows.words}
    targets = output_size(posterior.network.output) if posterior.likelihood.is_normal else 1
    most = 0.0 if rows.held_out else 0.5 * math.log(2.0) * targets
    allowed = MUCH + min(expected, most)
    if lost <= allowed or not beyond_chance(below):
        return
    posterior.record.status = Status(
        "worse-than-map",
        f"on {len(below)} {rows.words}, the predictive's log score is {lost:.2g} nats a row below "
        f"that of the weights alone (at most {allowed:.2g} were to be expected): "
        + _advice(posterior, rows),
    )


def _advice(posterior: LaplacePosterior, rows: Rows) -> str:
    advice = []
    if not posterior.linearised:
        advice.append("predictive='linearised'")
    if posterior.priors is None:
        advice.append("a prior whose scale is found (tune='evidence')")
    elif posterior.method.tune == "evidence" or not rows.held_out:
        advice.append(
            "a prior scale chosen on held-out rows (tune='validation', validation=(x, y))"
        )
    if posterior.network.subset == "all":
        advice.append("subset='last_layer'")
    return "try " + ", or ".join(advice or ["tune='validation'", "another method"])
