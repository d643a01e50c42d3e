"""Validation of a Laplace fit: its settings, its status, and its prior scale on held-out rows.

Comparison with the MAP estimate (`compare_with_map`). The log score of the Laplace predictive is
compared with the log score of the weights θ* alone. On held-out rows, the average over a good
posterior loses nothing. On training rows it may lose, because θ* was fitted to the same rows. With
Gaussian noise, a row of leverage h has the predictive variance σ²(1 + h). Its squared residual is
(1 − h)σ² on average; the squared residual of a new row is (1 + h)σ². Training therefore improves
the apparent score of θ* by h, and the apparent score of the predictive by h/(1 + h). The
difference, h²/(1 + h), is of second order. The leverages add up to γ, the number of well-determined
parameters, so that h = γ/nd for each of the d directions in the outputs of one row. A diagonal
matrix overestimates γ, because Σ x/(x + δ) is larger over the diagonal than over the eigenvalues
(Schur). Such an estimate could explain any loss. Where it would, γ is computed again from Kronecker
factors, which have correlations within layers, and the smaller of the two is used.

The status is "worse-than-map" where the loss is statistically significant and exceeds the expected
loss by more than 0.1 nats per row (the geometric mean of the probabilities of the observed targets
is then 10 % lower). For classes on training rows the limit is half of the loss of θ* itself, if
that is less than 0.1. On held-out rows the limit stays at 0.1: where the classes are separated
almost perfectly, a smaller loss is no reason to give up the uncertainty far from the data.

Prior scale on held-out rows (`HeldOut`). The candidates are half decades of the prior precision
around the one of maximal evidence. The chosen one is the candidate nearest to the evidence's whose
held-out score is within one standard error of the best (Breiman et al. 1984). At the largest
candidate, H is practically the prior precision alone.

Validation of settings (`check_settings`, `choose_structure`, `check_run`). Conflicts between
settings, or between settings and a run, are raised before anything is computed.
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
from doxa.laplace.curvature import output_shapes, output_size
from doxa.laplace.forms import Sums, noise_groups
from doxa.laplace.posterior import LaplacePosterior
from doxa.method import Run, State
from doxa.posterior import SamplePosterior, Status
from doxa.predictive import Predictive

if TYPE_CHECKING:
    from doxa.laplace.laplace import Laplace


WORSE = "worse-than-map"  # the status

_MOST_ROWS = 1000
_MOST_NUMBERS = 1 << 24  # of outputs, over rows and draws
_DENSE = 100  # targets of a row (pixels), above which an eighth of the rows is enough
_MUCH = 0.1  # nats per row: the largest acceptable loss
_LEAST = 0.01  # lower bound of that limit, for classes that θ* fits almost perfectly


class EvaluationRows(NamedTuple):
    """Rows of one run, in fitted units.

    `held_out` is True for rows that the fit has not used. `weight` is None for unweighted rows.
    """

    x: Any
    y: Any
    held_out: bool
    weight: Tensor | None = None

    @property
    def label(self) -> str:
        return "held-out rows" if self.held_out else "rows it was fitted to"


def evaluation_rows(run: Run) -> EvaluationRows | None:
    """At most 1000 evenly spaced rows of a run, fewer where a row has many outputs.

    They are held-out rows, if all members have the same held-out rows; otherwise training rows.
    None where one row is a set of points (a task).
    """
    data, split = run.rows, run.split_of[0]
    if data.tasks:
        return None
    index, held_out = data.rows[split], False
    if data.validation is not None and len(set(run.split_of)) == 1:
        index, held_out = data.validation[split], True
    most = max(1, min(_MOST_ROWS, _MOST_NUMBERS // (100 * output_size(run.net.output))))
    if targets(run) > _DENSE:
        most = max(1, most // 8)
    step = math.ceil(len(index) / most)
    x, y = data.take(index[::step], torch.tensor(run.run_of[0]))
    return EvaluationRows(x, y, held_out, data.weight_of(index[::step]))


def targets(run: Run) -> int:
    """The number of targets of a row, over all heads."""
    return sum(math.prod(shape) for shape in output_shapes(run.likelihood.event(run.net.output)))


def log_scores(posterior: LaplacePosterior | SamplePosterior, rows: EvaluationRows) -> Tensor:
    """log p(y | x) of each row in fitted units, [N]; the scores of several heads are summed."""
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
    """The loss against the MAP estimates of the members.

    `each` [N] is the log score of the MAP estimates minus that of the predictive, for each row.
    `much` is the largest acceptable mean. `weight` are the weights of the rows.
    """

    each: Tensor
    much: float
    weight: Tensor | None

    @property
    def mean(self) -> float:
        return float(weighted_mean(self.each, self.weight))

    def beyond(self, allowed: float) -> bool:
        """Whether the mean loss is above `allowed`, and statistically significant."""
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
    """Whether the mean is more than `errors` standard errors above zero.

    Two standard errors are exceeded by chance in one case out of forty.
    """
    several = number_of_rows(below, weight) > 1
    error = standard_error(below, weight, correction=1) if several else math.inf
    return float(weighted_mean(below, weight)) > errors * error


def compare_with_map(
    posterior: LaplacePosterior, rows: EvaluationRows, determined: float,
    nearer: Callable[[], float] | None = None,
) -> None:  # fmt: skip
    """Record the comparison with the MAP estimate as a diagnostic, and a large loss in the status.

    `determined` is γ/n, which bounds the expected loss on training rows. Where `determined` comes
    from a matrix without correlations, `nearer` computes γ/n from one that has some.
    """
    below = below_its_maximum(posterior, rows)
    posterior.record.diagnostics["below_maximum"] = {"nats": below.mean, "rows": rows.label}
    outputs = output_size(posterior.network.output)
    directions = max(1, outputs - posterior.likelihood.classifies)  # a softmax has one fewer

    def most(share: float) -> float:
        leverage = 0.0 if rows.held_out else share / directions
        return below.much + directions * leverage**2 / (1.0 + leverage)

    if not below.beyond(below.much):
        return
    allowed = most(determined)
    if nearer is not None and not below.beyond(allowed):
        allowed = min(allowed, most(nearer()))
    lost = (
        f"on {len(below.each)} {rows.label}, the log score of the predictive is {below.mean:.2g} "
        "nats per row below that of the weights alone"
    )
    if below.beyond(allowed):
        expected = f" (expected: at most {allowed:.2g}): "
        posterior.record.status = Status(WORSE, lost + expected + _advice(posterior, rows))
    else:
        posterior.record.status = Status(
            "ok", f"{lost}; the leverage of these rows can explain this. Pass validation=(x, y) to "
            "compare on held-out rows",
        )  # fmt: skip


def _advice(posterior: LaplacePosterior, rows: EvaluationRows) -> str:
    advice = []
    if not posterior.linearised:
        advice.append("predictive='linearised'")
    elif posterior.likelihood.classifies and posterior.method.mean_correction is False:
        advice.append("mean_correction=True")
    if posterior.priors is None:
        advice.append("a prior scale of maximal evidence (tune='evidence')")
    elif posterior.method.tune == "evidence" or not rows.held_out:
        advice.append(
            "a prior scale chosen on held-out rows (tune='validation', validation=(x, y))"
        )
    if posterior.network.subset == "all":
        advice.append("subset='last_layer'")
    return "try " + ", or ".join(advice or ["tune='validation'", "another method"])


log = logging.getLogger("doxa")

# factors of the precision of maximal evidence, nearest to 1 first
_PRECISIONS = tuple(10 ** (k / 2) for k in sorted(range(-2, 9), key=abs))


@dataclass(frozen=True)
class HeldOut:
    """Selects the prior scale of one member on held-out rows.

    sums: the curvature sums; they settle the learned noise under each candidate.
    posterior: makes the posterior of a run and a state.
    if_better: select only where θ* alone predicts the held-out rows better than the predictive.
    trained: the held-out rows also stopped the training, so that θ* predicts them well.
    """

    sums: Sums
    posterior: Callable[[Run, State], LaplacePosterior]
    if_better: bool
    trained: bool

    def chosen(self, run: Run, state: State) -> tuple[State, str]:
        """The state under the selected scale, and its source: "evidence" or "validation"."""
        rows = evaluation_rows(run)
        assert rows is not None and rows.held_out  # a single member has a single split
        if self.if_better:
            below = below_its_maximum(self.posterior(run, state), rows)
            if not below.beyond(below.much if self.trained else 0.0):
                return state, "evidence"
        tried, scores = [], []
        for factor in _PRECISIONS:  # the learned noise is at its type-II maximum under each
            scaled = {**state, "tau": factor * state["tau"]}
            tried.append(self.sums.settle(run, scaled, scale=False))
            scores.append(log_scores(self.posterior(run, tried[-1]), rows))
        best = max(scores, key=lambda each: float(weighted_mean(each, rows.weight)))
        behind = [beyond_chance(best - each, rows.weight, errors=1.0) for each in scores]
        chosen = tried[behind.index(False)]
        scale, before = (float(s["tau"].log().mean().mul(-0.5).exp()) for s in (chosen, state))
        log.info(
            "laplace: prior scale %.3g from held-out rows (%.3g from the evidence)", scale, before
        )
        return chosen, "validation"


FULL = 2000  # number of weights for which a full matrix takes about three seconds
_MOST_FULL = 5000  # the same for half a minute
_EXACT = 10  # outputs of a row whose curvature is exact by default


def check_settings(method: Laplace) -> None:
    held_whole = method.structure in ("auto", "full")
    if method.newton_steps and not held_whole:
        raise MethodError("newton_steps needs the full matrix: use structure='full'")
    if method.curvature == "hessian" and not held_whole:
        raise MethodError("curvature='hessian' needs structure='full'; or use curvature='ggn'")
    if method.kernel_rows is not None and method.structure != "functional":
        raise MethodError("kernel_rows= selects the rows of a kernel: use structure='functional'")
    if method.curvature == "sampled" and method.structure == "functional":
        raise MethodError("a kernel is over all outputs: use curvature='ggn', or another structure")
    if method.subnetwork is not None and not (held_whole and method.curvature in ("auto", "ggn")):
        raise MethodError("subnetwork= needs a full Gauss–Newton matrix: use structure='full'")
    if method.tuned_scale == "layer" and method.structure == "functional":
        raise MethodError("a kernel has one scale: use tuned_scale='shared', or structure='full'")
    if method.link not in posterior.DRAWN_LINKS and method.predictive != "linearised":
        raise MethodError(
            f"link={method.link!r} is for Gaussian logits: use predictive='linearised', or "
            "link='samples'"
        )
    if method.mean_correction is True and method.predictive != "linearised":
        raise MethodError("mean_correction=True needs predictive='linearised'")
    if not method.evidence_steps:
        return
    if not method.train:
        raise MethodError("evidence_steps are steps of training: use train=True, or 0")
    if method.subnetwork is not None:
        raise MethodError("a subnetwork is chosen after training: use evidence_steps=0")
    if method.curvature == "hessian":
        raise MethodError(
            "away from a maximum the Hessian may not be positive definite: with "
            "evidence_steps, use curvature='ggn'"
        )


def choose_structure(method: Laplace, run: Run) -> str:
    """The structure that `method` names; "auto" is resolved here.

    "auto" is "full" where the weights are few or a setting needs the full matrix, "functional"
    where rows × outputs are few, otherwise "kronecker". A network without Kronecker factors has
    "full" up to a larger number of weights, then "diagonal".
    """
    if method.structure != "auto":
        return method.structure
    weights = len(run.subset_index)
    needed = method.newton_steps or method.curvature == "hessian" or method.subnetwork is not None
    if needed or weights <= FULL:
        return "full"
    if method.curvature != "sampled" and _few_rows(method, run):
        return "functional"
    if has_factors(run):
        return "kronecker"
    return "full" if weights <= _MOST_FULL else "diagonal"


def choose_curvature(method: Laplace, run: Run) -> str:
    """The curvature that `method` names; "auto" is resolved here, for a known structure.

    "sampled" for more than ten outputs per row, if every block or entry is a sum over many draws;
    a matrix of many weights would have the rank of the draws. Each of several noise levels needs
    the curvature of its own outputs.
    """
    if method.curvature != "auto":
        return method.curvature
    outputs = output_size(run.net.output)
    many = outputs > max(_EXACT, method.curvature_draws) and noise_groups(run) == 1
    return "sampled" if many and method.structure in ("diagonal", "kronecker") else "ggn"


def has_factors(run: Run) -> bool:
    return bool(run.prior.is_gaussian) and layers.factored(run.net, run.net.subset_names)


def _few_rows(method: Laplace, run: Run) -> bool:
    """Whether the kernel of every run is small, and "functional" supports the settings: a Gaussian
    prior with one scale, and one noise level."""
    longest = max(run.rows.counts)
    if (
        run.rows.stream is not None
        or longest * output_size(run.net.output) > FULL
        or not run.prior.is_gaussian
    ):
        return False
    return method.tuned_scale == "shared" and Sums(functional.Kernel()).groups(run) == 1


def _check_stream(method: Laplace) -> None:
    """An error for settings that need all rows at once."""
    wrong = [
        f"{name}={getattr(method, name)!r}" for name, allowed in (
            ("structure", ("auto", "full", "diagonal", "block-diagonal", "kronecker")),
            ("newton_steps", (None, 0)), ("mean_correction", ("auto", False)),
        ) if getattr(method, name) not in allowed
    ]  # fmt: skip
    if wrong:
        raise MethodError(
            f"laplace with {wrong[0]} needs all rows at once, and a stream is read by windows: "
            "leave the setting out, or fit a sample, stream.sample(10_000)"
        )


def check_run(method: Laplace, run: Run, sums: Sums) -> None:
    if not method.train and run.settings.fresh:
        raise MethodError(
            "train=False keeps the weights of the network, but init='fresh' replaces them by "
            "random ones: use fit(..., init='given') with a trained network"
        )
    if run.rows.stream is not None:
        _check_stream(method)
    if method.curvature == "sampled" and noise_groups(run) > 1:
        raise MethodError(
            "curvature='sampled' has one noise level for all outputs: use per_output=False, or "
            "curvature='ggn'"
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
    if method.mean_correction is True and not run.likelihood.classifies:
        raise MethodError(
            f"mean_correction=True is for classes, and the likelihood is {run.likelihood.name}: "
            "use mean_correction=False (with Gaussian noise they are the same)"
        )
    if method.subnetwork is not None and not run.prior.is_gaussian:
        raise MethodError("a subnetwork needs a Gaussian prior: use Normal or FanInNormal")
    if method.evidence_steps and not (method.tunes(run) or sums.learns_noise(run)):
        raise MethodError(
            "evidence_steps re-estimate learned noise and the prior scale, but both are fixed "
            "here: use tune='evidence', or evidence_steps=0"
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
