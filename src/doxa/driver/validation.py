"""Validation after training: held-out rows evaluate the fit and calibrate the likelihood.

**Evaluation** (`evaluate_held_out`). The held-out rows give the mean log predictive density, the
coverage of intervals and the confidence of classes. The status of a fit is not "ok" if it is
strongly overconfident, worse than a constant, or strongly underconfident about classes.
`compare_with_yardsticks` (`driver/underfit.py`) compares these scores with those of simple models.
`check_prior_collapse` uses training rows instead: a
method that may collapse to its prior is not "ok" if it predicts its training rows no better than a
constant.

What is reported is an estimate for new rows: of the mean score and of the coverage that the
returned posterior has there, with a standard error. Two things are corrected for.

Members. If each member m holds out its own part of the rows, only its functions were not trained on
that part. So the mixture of all functions, shifted to the mean of member m, is scored there
(`moved`, below). The width of this mixture is that of the posterior, but its location is that of
one member, which is less accurate than the mean of all members. The expected difference of each
score s is added. It needs no targets: they are drawn from the posterior p̄ at inputs of the part,

    E s(p̄, y)  ≈  mean_i s(p_m, y_i)  +  mean_ij E_{y ~ p̄(x_i)} [s(p̄, y) − s(p_j, y)]

where p_j is the mixture, shifted to the mean of member j. For the log density the second term is
the mean Kullback–Leibler divergence of p_j from p̄, the ambiguity of Krogh & Vedelsby (1995). It is
the mean over all members, because member m differs more from the others at its own part than
elsewhere: they were trained on these rows, and m was not.

Choices. The same rows have chosen numbers: the step at which training stops, the learned parameters
of the likelihood, and its calibration. A number that maximises the log-likelihood of m rows raises
their mean by 1/m more than that of new rows, on average (Akaike, 1974). This is subtracted for each
number. For normal errors it is the effect of errors of new rows that are larger by the share 1/m;
so the coverage at level 1 − α is smaller by 2 z φ(z)/m, with z the quantile of 1 − α/2. A choice
that gained less than 1/(2m) over a fixed alternative (the first and the last step that were scored;
the likelihood before calibration) counts as twice its gain: if the alternative is right, the rows
show a gain g by chance, and new rows lose as much. A step is chosen by the part of one member. If
members are mixed or share a parameter, m is the number of all held-out rows for parameters of the
likelihood.

Two biases remain. Networks that are cross-fitted are trained on fewer rows than the posterior that
is returned, and the standard error is that of the held-out rows alone.

**Calibration** (`calibrate_on_held_out`). Held-out rows estimate parameters of the likelihood, such
as the temperature of a categorical or the shape of the noise. Training rows cannot be used, because
networks predict them too well. If all members hold out the same rows, the posterior is used as it
is. If each member holds out its own part, a row is held out from one member m only. The location of
its prediction is then right for m, and the width for all members together. So the calibration uses
the mixture of all functions f_s, shifted to the mean of member m,

    p(y_i) = 1/S Σ_s p(y_i | f_s(x_i) + f̄_m(x_i) − f̄(x_i))

and the likelihood is calibrated within this mixture, so that the spread between members is not
counted twice (`ensemble/map.py` has the same for a noise level, in closed form).
`Likelihood.calibrates_on_held_out` is True for a likelihood with such parameters, and
`Likelihood.calibrate_held_out` estimates them; without clear evidence from the rows, nothing
changes. The weights of the rows are scaled to add up to their effective number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import store
from doxa.data import Data
from doxa.data.rows import (
    effective_rows,
    number_of_rows,
    per_effective_row,
    standard_error,
    weighted_mean,
)
from doxa.driver.loop import Progress
from doxa.errors import MemoryBudgetError
from doxa.likelihoods import Likelihood
from doxa.likelihoods.base import CalibratedLikelihood
from doxa.method import Method, Run, slice_state
from doxa.posterior import HeldOutCalibration, Posterior, Status
from doxa.posterior.weights import WeightPosterior
from doxa.predictive import Predictive
from doxa.predictive.classes import drawn
from doxa.predictive.form import draw_functions
from doxa.predictive.mixture import Mixture

LEVEL = 0.9
FEWEST_EVALUATED = 12  # effective number of held-out rows; fewer do not make a status "ok"
# A status is given if a threshold and two standard errors are both exceeded.
ALLOWED = 0.08  # difference between the coverage and its level
LOSS = 0.05  # nats per row below the constant
GAINED = 0.1  # nats per row gained with logits twice as large
_ROWS = 4096  # rows used of each split, at most
_NUMBERS = 2**18  # numbers used of y, at most
_COMPARED = 512  # rows of each split at which members are compared
_MOST_DRAWS, _DRAWN = 40, 4096  # targets drawn per row, and for all rows of a split
_Z = 1.6448536269514722  # the normal quantile of 1 − α/2 at LEVEL = 1 − α
# What coverage loses per nat: errors that are larger by the share e lower it by 2 z φ(z) e.
_PER_NAT = 2 * _Z * math.exp(-0.5 * _Z**2) / math.sqrt(2 * math.pi)
_TINY = 1e-12  # lower limit of a probability
_FROM_EACH = 50  # functions drawn from each Gaussian over functions
_SEEN, _DRAWS = 256, 32  # training rows, and functions that predict them, for prior collapse


PosteriorsBySplit = list[tuple[Posterior, int]]  # a posterior, and the split that evaluates it
ScoresBySplit = dict[int, Tensor]  # the log density of the held-out rows of each split


class Choices(NamedTuple):
    """What the held-out rows have chosen in a fit.

    Parameters
    ----------
    steps : sequence of float
        For each member, what the step at which its training stopped has gained over the first and
        the last one that were scored, in nats per row; 0 if it is one of them.
    parameters : int
        The number of parameters of the likelihood, and of settings of the method.
    calibration : float
        What the calibration of the likelihood has gained, in nats per row.
    """

    steps: Sequence[float] = ()
    parameters: int = 0
    calibration: float = 0.0

    @property
    def numbers(self) -> int:
        """How many numbers they have chosen for a member."""
        return (max(self.steps, default=0.0) > 0) + self.parameters + (self.calibration > 0)


def evaluate_held_out(
    posterior: Posterior, posteriors_by_split: PosteriorsBySplit, run: Run, choices: Choices,
    alone: bool = False,
) -> ScoresBySplit:  # fmt: skip
    """Evaluate a run on its held-out rows, and store scores and status in the record. `alone`: the
    posteriors are evaluated and not their mixture; a fit to all rows follows. Returns the log
    density of each row, corrected as its mean is."""
    data, pooled = run.rows, run.pooled_rows is not None
    assert data.validation is not None
    likelihood = run.likelihood
    seen: dict[int, list[dict[str, Tensor]]] = {}  # of each split, for the members that hold it out
    weights: dict[int, Tensor | None] = {}
    splits = dict.fromkeys(split for _, split in posteriors_by_split)
    sizes = {s: _effective(data, data.validation[s]) for s in splits}
    together = sum(sizes.values())
    members = () if alone else [each for each, _ in posteriors_by_split]
    steps = list(choices.steps) or [0.0]
    if len(steps) != len(posteriors_by_split):  # members with the same rows: they are mixed
        steps = [sum(steps) / len(steps)] * len(posteriors_by_split)
    for (each, split), step in zip(posteriors_by_split, steps, strict=True):
        one = _evaluated(posterior, each, members, data, split, likelihood)
        shared = pooled or one.mixed
        optimism = min(1 / (together if pooled else sizes[split]), 2 * step)
        optimism += choices.parameters / (together if shared else sizes[split])
        optimism += min(1 / together, 2 * choices.calibration)
        shift = {"log_prob": -optimism, "coverage": -_PER_NAT * optimism}
        scores = {
            name: values + (one.gained.get(name, 0.0) + shift.get(name, 0.0))
            for name, values in one.values.items()
        }
        weights[split] = one.weight
        if isinstance(one.y, Tensor):
            _, fitted, counts = _some(data, data.rows[split], split)
            constant = likelihood.constant(fitted, one.y, per_effective_row(counts))
            if constant is not None:
                scores["gain"] = scores["log_prob"] - constant
        seen.setdefault(split, []).append(scores)
    weight = [w for w in weights.values() if w is not None]
    found = {
        name: Scored(
            torch.cat([torch.stack([own[name] for own in each]).mean(0) for each in seen.values()]),
            _joined(weight, name == "twice_as_sure"),
        )
        for name in next(iter(seen.values()))[0]
    }
    record = posterior.record
    record.validation = found["log_prob"].mean
    rows = len(found["log_prob"].values)
    means = {name: scored.mean for name, scored in found.items()}
    errors = {f"{k}_error": found[k].new_error for k in ("log_prob", "gain") if k in found}
    if "coverage" in found:
        means["coverage"] = min(1.0, max(0.0, means["coverage"]))
        errors["coverage_error"] = found["coverage"].with_two_rows.new_error
    by = "one part" if len(splits) == 1 else "cross-fitting" if alone else "parts of the members"
    record.diagnostics["held_out"] = {
        "rows": rows, **means, **errors, "by": by, "corrected_for": choices.numbers,
    }  # fmt: skip
    status = _status(found, rows)
    if status == "ok" and pooled and together < FEWEST_EVALUATED:
        status = Status("not-evaluated", not_evaluated(rows))
    record.status = record.status.or_before(status)
    sizes_scored = [len(each[0]["log_prob"]) for each in seen.values()]
    return dict(zip(seen, found["log_prob"].values.split(sizes_scored), strict=True))


def not_evaluated(rows: int) -> str:
    """The reason for the status of a fit whose held-out rows are too few, or which has none."""
    few = f"{rows} held-out rows are not enough" if rows else "no rows were held out"
    return (
        f"{few} to evaluate this fit: use a method that needs no held-out rows (gp, linear), or "
        "more rows"
    )


class Scored(NamedTuple):
    """One number per row, [N], and the weights of the rows, if there are any."""

    values: Tensor
    weight: Tensor | None

    @property
    def mean(self) -> float:
        return float(weighted_mean(self.values, self.weight))

    @property
    def error(self) -> float:
        """Two standard errors of the mean."""
        return 2 * standard_error(self.values, self.weight)

    @property
    def new_error(self) -> float:
        """The standard error of the mean, from an unbiased variance; 0 for a single row."""
        error = standard_error(self.values, self.weight, 1)
        return error if math.isfinite(error) else 0.0

    @property
    def with_two_rows(self) -> Scored:
        """With two additional rows, 0 and 1, which have the weight of one effective row each: rows
        that are all inside are no evidence for certainty (Agresti & Coull, 1998)."""
        values = torch.cat([self.values, self.values.new_tensor([0.0, 1.0])])
        if self.weight is None:
            return Scored(values, None)
        one = self.weight.sum() / effective_rows(self.weight)
        return Scored(values, torch.cat([self.weight, one.expand(2)]))


class Evaluated(NamedTuple):
    """The scores of the held-out rows of one split.

    Parameters
    ----------
    values : dict of Tensor
        Each score of each row.
    y, weight : targets and weights of the rows.
    gained : dict of float
        How much larger the mean of each score is for the posterior of all members.
    mixed : bool
        Whether the mixture of all members was scored, shifted to the mean of one member.
    """

    values: dict[str, Tensor]
    y: Any
    weight: Tensor | None
    gained: dict[str, float]
    mixed: bool


def _evaluated(
    posterior: Posterior, own: Posterior, members: Sequence[Posterior], data: Data, split: int,
    likelihood: Likelihood,
) -> Evaluated:  # fmt: skip
    """Scores of the held-out rows of a split, from `own`, which was not trained on them. `members`
    are those of `posterior`, each alone; if there are none or one, `own` is scored as it is."""
    assert data.validation is not None
    rows = data.validation[split]
    if len(members) > 1:
        x, y, weight = _some(data, rows, split)
        form = moved(posterior, own, x) if isinstance(y, Tensor) else None
        if form is not None:
            scores = _scores(Predictive.of(form), y, likelihood, weight)
            x, few, counts = _some(data, rows, split, _COMPARED)
            gained = _gained_by_mean(posterior, members, x, few, likelihood, counts)
            return Evaluated(scores, y, weight, gained, True)
    p, y, weight = predicted(own, data, rows, split)
    return Evaluated(_scores(p, y, likelihood, weight), y, weight, {}, False)


def _gained_by_mean(
    posterior: Posterior, members: Sequence[Posterior], x: Any, y: Tensor, likelihood: Likelihood,
    weight: Tensor | None,
) -> dict[str, float]:  # fmt: skip
    """The mean difference of each score between the posterior and the same functions, shifted to
    the mean of each member, for targets that are drawn from the posterior at x. Of y, only ignored
    labels are used."""
    forms = [moved(posterior, each, x) for each in (posterior, *members)]
    whole, *shifted = (Predictive.of(form) for form in forms if form is not None)
    count = max(len(members), min(_MOST_DRAWS, _DRAWN // len(y)))
    draws = whole.sample(count).reshape(-1, *y.shape)
    ignored = likelihood.ignore_index
    if ignored is not None:
        draws = torch.where(y.to(draws.device) == ignored, ignored, draws)
    bounds = _bounds(whole, likelihood)
    gained: dict[str, float] = {}
    for j, p in enumerate(shifted):
        own_bounds = _bounds(p, likelihood)
        for some in draws[j :: len(shifted)]:
            ours = _scores(whole, some, likelihood, weight, bounds)
            theirs = _scores(p, some, likelihood, weight, own_bounds)
            for name, values in ours.items():
                rows = None if weight is None else _joined([weight], name == "twice_as_sure")
                more = float(weighted_mean(values - theirs[name], rows))
                gained[name] = gained.get(name, 0.0) + more / len(draws)
    return gained


Bounds = tuple[Tensor, Tensor] | None


def _bounds(p: Predictive, likelihood: Likelihood) -> Bounds:
    return p.interval(LEVEL) if likelihood.scales_targets else None


def _scores(
    p: Any, y: Any, likelihood: Likelihood, weight: Tensor | None, bounds: Bounds = None
) -> dict[str, Tensor]:
    """The scores of each row: log density, and whether it is inside its interval or two measures of
    confidence. `bounds` are the intervals, if they are known."""
    found = {"log_prob": log_prob_of(p, y).double()}
    if not isinstance(y, Tensor):
        return found
    if likelihood.scales_targets:
        low, high = bounds or p.interval(LEVEL)
        inside = (y.reshape(low.shape) >= low) & (y.reshape(low.shape) <= high)
        found["coverage"] = inside.double().reshape(len(inside), -1).mean(1)
    elif likelihood.classifies:
        sure, twice = _confidence(p, y, likelihood, weight)
        found |= {"too_sure": sure.double(), "twice_as_sure": twice.double()}
    return found


def _effective(data: Data, rows: Tensor) -> float:
    return number_of_rows(rows, data.weight_of(rows))


def _joined(weights: list[Tensor], one_more: bool) -> Tensor | None:
    """The weights of the rows of all splits. `one_more`: with one additional row per split, which
    has the weight of one effective row."""
    if not weights:
        return None
    if one_more:
        each = [torch.cat([w, w.sum().reshape(1) / effective_rows(w)]) for w in weights]
    return torch.cat(each if one_more else weights)


def check_prior_collapse(posterior: Posterior, run: Run) -> None:
    """Set the status "prior-collapse" if training rows are predicted no better than by a
    constant."""
    record, split = posterior.record, run.split_of[0]
    collapsed = Status("prior-collapse")
    if record.status.or_before(collapsed) is not collapsed:
        return
    p, y, weight = predicted(posterior, run.rows, run.rows.rows[split], split, _SEEN, _DRAWS)
    if not isinstance(y, Tensor):
        return
    constant = run.likelihood.constant(y, y, per_effective_row(weight))
    if constant is None:
        return
    gain = Scored(log_prob_of(p, y).double() - constant, weight)
    if not gain.mean > gain.error:
        record.status = Status(
            "prior-collapse",
            f"{len(gain.values)} training rows are predicted no better than by a constant "
            f"({gain.mean:.2g} nats per row): use a smaller initial scale, more steps, another "
            "learning rate or a narrower prior; or there is nothing to learn in the data",
        )


def posteriors_by_split(
    posterior: Posterior, method: Method, run: Run, part: slice, result: Progress
) -> PosteriorsBySplit:
    """The posterior of a run, whose members are `part`, and its split. If members hold out
    different rows: the posterior of each member alone, and its split."""
    splits = run.split_of[part]
    if len(set(splits)) == 1:
        return [(posterior, splits[0])]
    each: PosteriorsBySplit = []
    for m, split in zip(range(part.start, part.stop), splits, strict=True):
        own = slice(m, m + 1)
        alone = method.finish(
            run.select_members(own), slice_state(result.state, own), result.draws(own)
        )
        alone.record.seed = posterior.record.seed
        each.append((alone, split))
    return each


def predicted(
    posterior: Posterior, data: Data, rows: Tensor, split: int, most: int = _ROWS,
    draws: int | None = None,
) -> tuple[Any, Any, Tensor | None]:  # fmt: skip
    """Predictions of rows, their targets and their weights. If memory is short, fewer rows are
    used."""
    while True:
        x, y, weight = _some(data, rows, split, most)
        try:
            return posterior.predict(x, draws), y, weight
        except MemoryBudgetError:
            if most == 1:
                raise
            most = max(1, min(most, len(rows)) // 4)


def moved(posterior: Posterior, alone: Posterior, x: Any) -> Mixture | None:
    """All functions at x, shifted to the mean of one member. Gaussians over functions are sampled.
    None if the prediction is not a mixture of functions."""
    try:
        whole = drawn(posterior.predict(x).form)
        own = whole if alone is posterior else drawn(alone.predict(x).form)
    except MemoryBudgetError:
        return None
    if not (type(own) is Mixture and type(whole) is Mixture):
        return None
    away = own.f.mean(0) - whole.f.mean(0)
    f, theta, weights = whole.f, whole.theta, whole.weights
    if whole.f_variance is not None:
        f, theta, weights = draw_functions(f, whole.f_variance, theta, weights, 0, _FROM_EACH)
    return Mixture(whole.likelihood, f + away, theta, weights, None)


def _some(
    data: Data, rows: Tensor, split: int, most: int = _ROWS
) -> tuple[Any, Any, Tensor | None]:
    """At most `most` of the rows, in the units of x and y, and their weights."""
    rows = counted(data, rows, most)
    return *in_units(data, rows, split), data.weight_of(rows)


def counted(data: Data, rows: Tensor, most: int) -> Tensor:
    """At most `most` of the rows, evenly spaced."""
    one = tree_flatten(data.take(rows[:1], torch.tensor(0))[1])[0]
    most = max(1, min(most, _NUMBERS // max(1, sum(t.numel() for t in one))))
    return evenly(rows, most)


def evenly(rows: Tensor, most: int) -> Tensor:
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most)).round().long()]


def in_units(data: Data, rows: Tensor, split: int) -> tuple[Any, Any]:
    """Rows in the units of x and y."""
    run = data.run_of(split)
    x, y = data.take(rows, torch.tensor(run))
    scales = data.scales[run].to(data.device, torch.float64)
    if scales.x_loc is not None:
        x = tree_map(
            lambda t, loc, scale: t.double() * scale + loc if t.is_floating_point() else t,
            x, scales.x_loc, scales.x_scale,
        )  # fmt: skip
    if scales.y_loc is not None:
        y = y.double() * scales.y_scale + scales.y_loc
    return x, y


def log_prob_of(p: Any, y: Any) -> Tensor:
    if isinstance(y, tuple | list):  # the sum of the heads' scores
        return torch.stack([h.log_prob(t) for h, t in zip(p.heads, y, strict=True)]).sum(0)
    return torch.as_tensor(p.log_prob(y))


def _confidence(
    p: Any, y: Tensor, likelihood: Likelihood, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Two measures of confidence.

    First, the probability of the most likely class minus 1 if it is right, else minus 0, [N].
    Second, the gain in nats of logits twice as large, log p_y − log Σ p², [N + 1]. The additional
    row is a wrong prediction: a few rows that are all right are no evidence for certainty.
    """
    table, y = p.probs.double(), y.long()
    if table.shape == y.shape:  # Bernoulli
        table = torch.stack([1 - table, table], 1)
    ignored = likelihood.ignore_index
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    likeliest, right = table.amax(1), (table.argmax(1) == y).double()
    truth = table.gather(1, (y * counted).unsqueeze(1)).squeeze(1).clamp_min(_TINY)
    squares = table.square().sum(1).log()
    wrong = ((1 - likeliest) / (table.shape[1] - 1)).clamp_min(_TINY).log() - squares

    def each(value: Tensor) -> Tensor:
        value = (value * counted).reshape(len(y), -1).sum(1)
        return value / counted.reshape(len(y), -1).sum(1).clamp(min=1)

    one = weighted_mean(each(wrong), weight).reshape(1)
    gained = torch.cat([each(truth.log() - squares), one])
    return each(likeliest - right), gained


def _status(found: dict[str, Scored], rows: int) -> Status:
    """The status by the thresholds above and two standard errors."""
    error = {name: scored.error for name, scored in found.items()}
    mean = {name: scored.mean for name, scored in found.items()}
    if "gain" in mean and not mean["gain"] > -max(LOSS, error["gain"]):
        reason = (
            f"the {rows} held-out rows are predicted {-mean['gain']:.2g} nats per row worse than "
            "by a constant: scale inputs and targets (standardize=True), train longer, or use "
            "another learning rate"
        )
        return Status("worse-than-constant", reason)
    if mean.get("coverage", LEVEL) < LEVEL - max(ALLOWED, error.get("coverage", 0.0)):
        what = f"{LEVEL:.0%} intervals contain {mean['coverage']:.0%} of the {rows} held-out rows"
    elif mean.get("too_sure", 0.0) > max(ALLOWED, error.get("too_sure", 0.0)):
        what = (
            f"on the {rows} held-out rows the accuracy of the most likely class is "
            f"{mean['too_sure']:.0%} below its mean probability"
        )
    elif mean.get("twice_as_sure", 0.0) > max(GAINED, error.get("twice_as_sure", 0.0)):
        return Status(
            "underconfident",
            f"the {rows} held-out rows would be predicted {mean['twice_as_sure']:.2g} nats per row "
            "better with logits twice as large: the fit is underconfident; train longer, "
            "recalibrate it (doxa.evaluate.recalibrate), or use a prior with larger logits",
        )
    else:
        return Status()
    advice = "recalibrate it (doxa.evaluate.recalibrate), or use another method"
    return Status("overconfident", f"{what}: the fit is overconfident; {advice}")


log = logging.getLogger("doxa")

FEWEST = 10  # effective number of held-out rows; fewer are not used for calibration
_MOST_NUMBERS = 2**19  # function values that are used, at most
_FUNCTIONS = 50  # functions that are used, at most

CalibrationRows = tuple[  # f [S, N, ...], y, theta, weight [N]
    Tensor, Tensor, dict[str, Tensor], Tensor
]


def calibrate_on_held_out(
    posterior: Posterior,
    posteriors_by_split: PosteriorsBySplit,
    method: Method,
    run: Run,
    stopped: bool,
    alone: bool = False,
) -> float:
    """Calibrate the likelihood of a posterior, and of its members alone, on the held-out rows.
    Returns what it has gained there, in nats per row; 0 without calibration.

    `stopped`: whether training used early stopping on these rows. Only methods that overfit are
    calibrated; the others integrate over the parameters of the likelihood. `alone`: each member is
    calibrated alone, without the spread between members.
    """
    before = posterior.base_likelihood
    if not (
        method.overfits and before.calibrates_on_held_out and isinstance(posterior, WeightPosterior)
    ):
        return 0.0
    rows = _rows(None if alone else posterior, posteriors_by_split, run)
    if rows is None or effective_rows(rows[3]) < FEWEST:
        return 0.0
    stops = 1 if run.pooled_rows else len(posteriors_by_split)  # steps that the rows have chosen
    found = before.calibrate_held_out(*rows, stopped=stops * stopped)
    if found is None:
        return 0.0
    for each in {id(p): p for p in (posterior, *(p for p, _ in posteriors_by_split))}.values():
        assert isinstance(each, WeightPosterior)
        _take_up(each, found)
    posterior.record.metadata["fitted_likelihood"] = store.encode(before)
    calibration: HeldOutCalibration = {"rows": len(rows[1]), "likelihood": found.message}
    posterior.record.diagnostics["held_out_calibration"] = calibration
    log.info("likelihood: %s, by %d held-out rows", found.message, len(rows[1]))
    return found.gain


def _take_up(posterior: WeightPosterior, found: CalibratedLikelihood) -> None:
    """Replace the likelihood of a posterior by the calibrated one."""
    model = posterior.network.with_likelihood(found.likelihood)
    posterior.base_likelihood, posterior.model = found.likelihood, model
    for name, more in found.moved.items():
        weights: Tensor = getattr(posterior, posterior.flat)
        index = posterior.layout.index([f"likelihood.{name}"]).to(weights.device)
        by = torch.full((*weights.shape[:-1], len(index)), more).to(weights)
        setattr(posterior, posterior.flat, weights.index_add(-1, index, by))


def adopt_likelihood(posterior: Posterior, other: Posterior) -> None:
    """Give a posterior the likelihood of another one, and the values of its learned parameters."""
    assert isinstance(posterior, WeightPosterior) and isinstance(other, WeightPosterior)
    model = posterior.network.with_likelihood(other.base_likelihood)
    posterior.base_likelihood, posterior.model = other.base_likelihood, model
    names = [name for name in other.layout.names if name.startswith("likelihood.")]
    if names:
        weights: Tensor = getattr(posterior, posterior.flat)
        theirs = getattr(other, other.flat)[..., other.layout.index(names)]
        value = theirs.flatten(0, -2).mean(0).to(weights)
        index = posterior.layout.index(names).to(weights.device)
        value = value.expand(*weights.shape[:-1], len(names))
        setattr(posterior, posterior.flat, weights.index_copy(-1, index, value))


def _rows(
    posterior: Posterior | None, posteriors_by_split: PosteriorsBySplit, run: Run
) -> CalibrationRows | None:
    """The held-out rows and the functions at them. None if a prediction is not a mixture of
    functions."""
    data, most = run.rows, _MOST_NUMBERS // len(posteriors_by_split)
    assert data.validation is not None
    parts: list[CalibrationRows] = []
    for alone, split in posteriors_by_split:
        rows = counted(data, data.validation[split], most // _FUNCTIONS)
        form = moved(posterior or alone, alone, in_units(data, rows, split)[0])
        if form is None:
            return None
        some = torch.linspace(0, len(form.f) - 1, min(len(form.f), _FUNCTIONS)).round().long()
        f = form.f[some.to(form.f.device)]
        theta = {k: v[some.to(v.device)] for k, v in form.theta.items()}
        y = data.take(rows, torch.tensor(data.run_of(split)))[1]
        one = torch.ones(len(rows), dtype=torch.float64, device=f.device)
        weight = data.weight_of(rows)
        parts.append((f, y, theta, one if weight is None else weight.to(one)))
    fs, ys, thetas, weights = zip(*parts, strict=True)
    weight = per_effective_row(torch.cat(weights))
    weight = torch.ones_like(torch.cat(weights)) if weight is None else weight
    return torch.cat(fs, 1), torch.cat(ys), thetas[0], weight
