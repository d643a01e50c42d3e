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

A prior's scale by rows that were held out, from the evidence's outwards.

Of half decades of the precision, the nearest that predicts held-out rows as well as the best, to a
standard error (Breiman et al. 1984). At the last of them H is the prior's alone.

What settings ask of each other, and of a run, before anything is computed.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Standardisation, free_memory
from doxa.data.rows import number_of_rows, standard_error, weighted_mean
from doxa.errors import MemoryBudgetError, MethodError
from doxa.laplace import functional, layers, posterior
from doxa.laplace.curvature import output_size
from doxa.laplace.forms import Sums
from doxa.laplace.posterior import LaplacePosterior
from doxa.method import Run, State
from doxa.posterior import SamplePosterior, Status
from doxa.predictive import Predictive

if TYPE_CHECKING:
    from doxa.laplace.laplace import Laplace


WORSE = "worse-than-map"  # the status

_MOST_ROWS = 1000
_MOST_NUMBERS = 1 << 24  # of outputs, over rows and draws
_MUCH = 0.1  # nats a row
_LEAST = 0.01  # the same, of classes that were fitted with hardly a doubt left


class EvaluationRows(NamedTuple):
    """Rows of one run in fitted units, whether the fit had not seen them, and their weights, where
    they have some."""

    x: Any
    y: Any
    held_out: bool
    weight: Tensor | None = None

    @property
    def words(self) -> str:
        return "held-out rows" if self.held_out else "rows it was fitted to"


def evaluation_rows(run: Run) -> EvaluationRows | None:
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
    return EvaluationRows(x, y, held_out, data.weight_of(index[::step]))


def log_scores(posterior: LaplacePosterior | SamplePosterior, rows: EvaluationRows) -> Tensor:
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


def below_its_maximum(posterior: LaplacePosterior, rows: EvaluationRows) -> Below:
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


def compare_with_map(
    posterior: LaplacePosterior, rows: EvaluationRows, determined: float,
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


def _advice(posterior: LaplacePosterior, rows: EvaluationRows) -> str:
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


log = logging.getLogger("doxa")

# times the evidence's, nearest first
_PRECISIONS = tuple(10 ** (k / 2) for k in sorted(range(-2, 9), key=abs))


@dataclass(frozen=True)
class HeldOut:
    """Chooses one member's scale.

    sums: by which learned noise is settled under each. posterior: of a run and a state. if_better:
    only where θ* alone predicts the rows better. trained: they stopped training, at a good θ*.
    """

    sums: Sums
    posterior: Callable[[Run, State], LaplacePosterior]
    if_better: bool
    trained: bool

    def chosen(self, run: Run, state: State) -> tuple[State, str]:
        """The state under that scale, and who chose it: "evidence" or "validation"."""
        rows = evaluation_rows(run)
        assert rows is not None and rows.held_out  # one member has one part
        if self.if_better:
            below = below_its_maximum(self.posterior(run, state), rows)
            if not below.beyond(below.much if self.trained else 0.0):
                return state, "evidence"
        tried, scores = [], []
        for factor in _PRECISIONS:  # learned noise is at its type-II maximum under each
            scaled = {**state, "tau": factor * state["tau"]}
            tried.append(self.sums.settle(run, scaled, scale=False))
            scores.append(log_scores(self.posterior(run, tried[-1]), rows))
        best = max(scores, key=lambda each: float(weighted_mean(each, rows.weight)))
        behind = [beyond_chance(best - each, rows.weight, errors=1.0) for each in scores]
        chosen = tried[behind.index(False)]
        scale, before = (float(s["tau"].log().mean().mul(-0.5).exp()) for s in (chosen, state))
        log.info("laplace: prior scale %.3g by held-out rows (%.3g by evidence)", scale, before)
        return chosen, "validation"


_FULL = 2000  # weights of which a full matrix is made in some three seconds
_MOST_FULL = 5000  # the same, in half a minute


def check_settings(method: Laplace) -> None:
    held_whole = method.structure in ("auto", "full")
    if method.polish and not held_whole:
        raise MethodError("polish solves with the full matrix: use structure='full'")
    if method.curvature == "hessian" and not held_whole:
        raise MethodError("curvature='hessian' is held whole: use structure='full', or 'ggn'")
    if method.rows is not None and method.structure != "functional":
        raise MethodError("rows are those of a kernel: use structure='functional'")
    if method.subnetwork is not None and not (held_whole and method.curvature == "ggn"):
        raise MethodError("a subnetwork has a full Gauss–Newton matrix: use structure='full'")
    if method.prior_scale == "layer" and method.structure == "functional":
        raise MethodError("a kernel has one scale: use prior_scale='shared', or structure='full'")
    if method.link not in posterior.DRAWN_LINKS and method.predictive != "linearised":
        raise MethodError(
            f"link={method.link!r} is for Gaussian logits: use predictive='linearised', or "
            "link='samples'"
        )
    if method.centre == "mean" and method.predictive != "linearised":
        raise MethodError("centre='mean' is that of the linearised network: use 'linearised'")
    if not method.evidence_steps:
        return
    if not method.train:
        raise MethodError("evidence_steps are steps of training: use train=True, or 0")
    if method.subnetwork is not None:
        raise MethodError("a subnetwork is chosen after training: use evidence_steps=0")
    if method.curvature == "hessian":
        raise MethodError(
            "before a maximum the Hessian is no precision: with evidence_steps, use curvature='ggn'"
        )


def choose_structure(method: Laplace, run: Run) -> str:
    """The structure that is named; of "auto", the full matrix where weights, or rows × outputs, are
    few, or where a setting needs it; else the factors of layers, or what the network can have in
    their place."""
    if method.structure != "auto":
        return method.structure
    weights = len(run.subset_index)
    needed = method.polish or method.curvature == "hessian" or method.subnetwork is not None
    if needed or weights <= _FULL:
        return "full"
    if _few_rows(method, run):
        return "functional"
    if has_factors(run):
        return "kronecker"
    return "full" if weights <= _MOST_FULL else "diagonal"


def has_factors(run: Run) -> bool:
    return bool(run.prior.is_gaussian) and layers.factored(run.net, run.net.subset_names)


def _few_rows(method: Laplace, run: Run) -> bool:
    """Whether a kernel, in all runs, is as small as a matrix of few weights, and has what it needs:
    one scale of a Gaussian prior, and one level of noise."""
    longest = max(map(len, run.rows.rows))
    if longest * output_size(run.net.output) > _FULL or not run.prior.is_gaussian:
        return False
    return method.prior_scale == "shared" and Sums(functional.Kernel()).groups(run) == 1


def check_run(method: Laplace, run: Run, sums: Sums) -> None:
    if not method.train and run.settings.fresh:
        raise MethodError(
            "train=False takes the weights as they are, but init='fresh' would replace them by "
            "random ones: use fit(..., init='given') with a trained network"
        )
    if method.tunes(run) and not run.prior.is_gaussian:
        raise MethodError(
            f"tune={method.tune!r} scales a Gaussian prior: use Normal or FanInNormal, or None"
        )
    if method.tune == "validation" and run.rows.validation is None:
        raise MethodError(
            "tune='validation' needs held-out rows: use fit(..., validation=0.1), or "
            "validation=(x, y) with rows that a trained network has not seen"
        )
    posterior.check_link(method.link, run.likelihood)
    if method.centre == "mean" and not run.likelihood.classifies:
        raise MethodError(
            f"centre='mean' is for classes, and the likelihood is {run.likelihood.name}: use "
            "centre='mode' (with Gaussian noise they are the same)"
        )
    if method.subnetwork is not None and not run.prior.is_gaussian:
        raise MethodError("a subnetwork needs a Gaussian prior: use Normal or FanInNormal")
    if method.evidence_steps and not (method.tunes(run) or sums.learns_noise(run)):
        raise MethodError(
            "evidence_steps re-estimate learned noise and the prior's scale, and here neither is "
            "free: use tune='evidence', or 0"
        )
    _check_memory(method, run, sums)


def _check_memory(method: Laplace, run: Run, sums: Sums) -> None:
    size, groups = len(run.subset_index), sums.groups(run)
    need = sums.form.bytes(run, groups)
    if method.structure == "functional":
        functional.check(run, need, groups)
    if need > 0.8 * free_memory(run.device):
        smaller = "kronecker" if method.structure == "full" else "diagonal"
        raise MemoryBudgetError(
            f"{run.size} {method.structure} matrices over {size} weights take "
            f"{need / 2**30:.3g} GiB; use structure={smaller!r}, subset='last_layer', or fewer "
            "members at once"
        )
