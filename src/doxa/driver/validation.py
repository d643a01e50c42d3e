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

`evaluate_rows` does the same for a finished posterior and new rows, which have chosen nothing: the
rows of `doxa fit --test`, of a report and of the diagnostics. So there is one set of thresholds,
and one status.

**Groups.** If rows belong to groups, the held-out rows are whole groups, and a group counts as one
row: standard errors are clustered by group, and numbers of rows are numbers of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data import Data, as_tensors, rows_of
from doxa.data.dependence import read_groups
from doxa.data.fitted_rows import reference_of
from doxa.data.rows import number_of_rows, per_effective_row, standard_error, weighted_mean
from doxa.driver.loop import Progress
from doxa.errors import MemoryBudgetError
from doxa.likelihoods import Likelihood
from doxa.method import Method, Run, slice_state
from doxa.posterior import Posterior, Status
from doxa.posterior.certificate import Certificate, input_scores
from doxa.predictive import Predictive
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
_EVALUATED_BY = {
    "one part": "held-out rows", "parts of the members": "held-out parts of each member",
    "cross-fitting": "cross-fitted parts",
}  # fmt: skip
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
    noise : float
        How much better noise that varies with x scores these rows than rows that have no part in
        it, in nats per row, by cross-validation.
    """

    steps: Sequence[float] = ()
    parameters: int = 0
    calibration: float = 0.0
    noise: float = 0.0

    @property
    def numbers(self) -> int:
        """How many numbers they have chosen for a member."""
        return (
            (max(self.steps, default=0.0) > 0)
            + self.parameters
            + ((self.calibration > 0) + (self.noise > 0))
        )


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
    groups: dict[int, Tensor] = {}
    sizes = {s: data.effective_rows(data.validation[s]) for s in splits}
    together = sum(sizes.values())
    members = () if alone else [each for each, _ in posteriors_by_split]
    steps = list(choices.steps) or [0.0]
    if len(steps) != len(posteriors_by_split):  # members with the same rows: they are mixed
        steps = [sum(steps) / len(steps)] * len(posteriors_by_split)
    each_evaluated = [
        _evaluated(posterior, each, members, data, split, likelihood)
        for each, split in posteriors_by_split
    ]
    for (_, split), one in zip(posteriors_by_split, each_evaluated, strict=True):
        group = data.groups_of(counted(data, data.evaluated(split), len(one.values["log_prob"])))
        if group is not None:
            groups[split] = group
    optimistic = _optimistic(data, each_evaluated, [s for _, s in posteriors_by_split], groups)
    for (_, split), one, step in zip(posteriors_by_split, each_evaluated, steps, strict=True):
        shared = pooled or one.mixed
        optimism = min(1 / (together if pooled else sizes[split]), 2 * step)
        optimism += choices.parameters / (together if shared else sizes[split])
        optimism += min(1 / together, 2 * choices.calibration) + choices.noise
        optimism *= optimistic
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
            *_joined(weight, list(groups.values()), name == "twice_as_sure"),
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
        "rows": rows, **means, **errors, "by": by,
        "corrected_for": choices.numbers if optimistic else 0,
    }  # fmt: skip
    if groups:
        record.diagnostics["held_out"]["groups"] = len(torch.cat(list(groups.values())).unique())
    assumed = "exchangeable" if data.evaluation is None else "ordered"
    record.certificate = _certificate(_EVALUATED_BY[by], found, assumed=assumed)
    status = _status(found, rows)
    if groups or data.evaluation is not None:
        pooled, together = True, found["log_prob"].number
    if status == "ok" and pooled and together < FEWEST_EVALUATED:
        status = Status("not-evaluated", not_evaluated(rows, together if groups else None))
    record.status = record.status.or_before(status)
    sizes_scored = [len(each[0]["log_prob"]) for each in seen.values()]
    return dict(zip(seen, found["log_prob"].values.split(sizes_scored), strict=True))


def _certificate(
    by: str, found: dict[str, Scored], level: float = LEVEL, assumed: str = "exchangeable"
) -> Certificate:
    scores = {name: scored.values for name, scored in found.items()}
    log_prob = found["log_prob"]
    return Certificate.of(by, scores, log_prob.weight, level, assumed, log_prob.group)


def evaluate_rows(
    posterior: Posterior, x: Any, y: Any, name: str = "test rows", seen: Any = None,
    certify: bool = True, groups: Any = None,
) -> Status:  # fmt: skip
    """Evaluate a posterior on rows that the fit has not used, and return its status after that.

    The thresholds are those of held-out rows. The status of the posterior changes if it was "ok" or
    "not-evaluated". If the posterior is recalibrated, these rows also decide if it is still over-
    or underconfident, or worse than a constant. Any other status is kept unless that of these rows
    comes before it (`Status.ORDER`). With fewer than 12 rows every status is kept.

    Parameters
    ----------
    posterior : Posterior
        Its status may be changed.
    x, y : array or Tensor
        The rows, in the units of the fit. At most 4,096 of them, evenly spaced, are used.
    name : str, default "test rows"
        What the message about the status calls the rows.
    seen : array or Tensor, optional
        Targets of the training rows, for the constant prediction. Without them, the mean and scale
        of standardised targets are used; if there are none, the gain is not evaluated.
    certify : bool, default True
        Whether the certificate of the posterior becomes that of these rows.
    groups : array-like, optional
        The group of each row, if rows belong together. A group counts as one row.

    Returns
    -------
    Status
        The status of the posterior.
    """
    x, p, y = _predicted_evenly(posterior, posterior.read(x), y)
    likelihood, constant = posterior.base_likelihood, None
    if isinstance(y, Tensor):
        y = p.targets(y)
        scales = posterior.scales
        if seen is None and scales.y_loc is not None:
            seen = torch.stack([scales.y_loc - scales.y_scale, scales.y_loc + scales.y_scale])
        if seen is not None:
            constant = likelihood.constant(as_tensors(seen, "y").to(y), y)
    scores = row_scores(p, y, likelihood)
    if constant is not None:
        scores["gain"] = scores["log_prob"] - constant
    rows, record = len(scores["log_prob"]), posterior.record
    code = None if groups is None else read_groups(groups, len(groups))
    own = [] if code is None else [evenly(code, rows)]
    found = {
        key: Scored(values, *_joined([], own, key == "twice_as_sure"))
        for key, values in scores.items()
    }
    if found["log_prob"].number < FEWEST_EVALUATED:
        return record.status
    level = p.guaranteed_level or LEVEL
    status = _status(found, rows, name, level)
    changes = ["ok", "not-evaluated"]
    if posterior.transform is not None:
        changes += ["worse-than-constant", "overconfident", "underconfident"]
    again = record.status in changes
    record.status = status if again else record.status.or_before(status)
    if certify:
        record.certificate = _certificate(name, found, level)
        posterior.input_reference = reference_of(input_scores(posterior, x, p))
    return record.status


def _predicted_evenly(posterior: Posterior, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """At most `_ROWS` rows, evenly spaced: x, predictions and y. If memory is short, fewer."""
    y, count, most = tree_map(torch.as_tensor, y), rows_of(x, "x"), _ROWS
    while True:
        index = evenly(torch.arange(count), most)
        some, targets = (tree_map(lambda t: t[index.to(t.device)], each) for each in (x, y))  # noqa: B023
        try:
            return some, posterior.predict(some), targets
        except MemoryBudgetError:
            if most == 1:
                raise
            most = max(1, min(most, count) // 4)


def correct_for_choice(posterior: Posterior) -> None:
    """Correct the scores of a posterior that the held-out rows have chosen among several."""
    record = posterior.record
    found = record.diagnostics["held_out"]
    optimism = 1 / found["rows"]
    for name, shift in (("log_prob", 1.0), ("gain", 1.0), ("coverage", _PER_NAT)):
        if name in found:
            found[name] -= shift * optimism
    found["corrected_for"] += 1
    assert record.validation is not None and record.certificate is not None
    record.validation -= optimism
    record.certificate = record.certificate.corrected(optimism)


def not_evaluated(rows: int, groups: float | None = None) -> str:
    """The reason for the status of a fit whose held-out rows are too few, or which has none.
    `groups`: the effective number of groups of these rows."""
    if groups is not None:
        return (
            f"{rows} held-out rows of {groups:.3g} groups are not enough to evaluate this fit for "
            f"new groups: {FEWEST_EVALUATED} held-out groups are needed"
        )
    few = f"{rows} held-out rows are not enough" if rows else "no rows were held out"
    return (
        f"{few} to evaluate this fit: use a method that needs no held-out rows (gp; linear from 12 "
        "rows on), or more rows"
    )


def _optimistic(
    data: Data, each: Sequence[Evaluated], splits: Sequence[int], groups: Mapping[int, Tensor]
) -> float:
    """The factor of the correction for choices: 0 if the rows that evaluate have chosen nothing, 1
    without groups. With groups, m is the number of independent rows whose mean score has the same
    standard error (Takeuchi, 1976), and not the number of groups."""
    if data.evaluation is not None:
        return 0.0
    if not groups:
        return 1.0
    first = dict(zip(splits, each, strict=True))
    weight = [one.weight for one in first.values() if one.weight is not None]
    values = torch.cat([one.values["log_prob"] for one in first.values()])
    scored = Scored(values, *_joined(weight, [groups[split] for split in first], False))
    return scored.number / scored.independent


class Scored(NamedTuple):
    """One number per row, [N], and the weights and groups of the rows, if there are any."""

    values: Tensor
    weight: Tensor | None
    group: Tensor | None = None

    @property
    def number(self) -> float:
        """The effective number of rows."""
        return number_of_rows(self.values, self.weight, self.group)

    @property
    def independent(self) -> float:
        """The number of independent rows whose mean has the same standard error: at least the
        number of groups, and at most that of rows."""
        rows, clustered = number_of_rows(self.values, self.weight), 0.5 * self.error
        alone = standard_error(self.values, self.weight)
        found = rows * (alone / clustered) ** 2 if clustered > 0 else rows
        return min(rows, max(self.number, found))

    @property
    def mean(self) -> float:
        return float(weighted_mean(self.values, self.weight))

    @property
    def error(self) -> float:
        """Two standard errors of the mean."""
        return 2 * standard_error(self.values, self.weight, group=self.group)

    @property
    def new_error(self) -> float:
        """The standard error of the mean, from an unbiased variance; 0 for a single row."""
        error = standard_error(self.values, self.weight, 1, self.group)
        return error if math.isfinite(error) else 0.0

    @property
    def with_two_rows(self) -> Scored:
        """With two additional rows, 0 and 1, which have the weight of one effective row each: rows
        that are all inside are no evidence for certainty (Agresti & Coull, 1998)."""
        values = torch.cat([self.values, self.values.new_tensor([0.0, 1.0])])
        if self.weight is None and self.group is None:
            return Scored(values, None)
        weight = torch.ones_like(self.values) if self.weight is None else self.weight
        one, group = weight.sum() / self.number, self.group
        if group is not None:
            group = torch.cat([group, torch.tensor([-1, -2])])
        return Scored(values, torch.cat([weight, one.expand(2)]), group)


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
    rows = data.evaluated(split)
    if len(members) > 1:
        x, y, weight = _some(data, rows, split)
        form = moved(posterior, own, x) if isinstance(y, Tensor) else None
        if form is not None:
            scores = row_scores(Predictive.of(form), y, likelihood, weight)
            x, few, counts = _some(data, rows, split, _COMPARED)
            gained = _gained_by_mean(posterior, members, x, few, likelihood, counts)
            return Evaluated(scores, y, weight, gained, True)
    p, y, weight = predicted(own, data, rows, split)
    return Evaluated(row_scores(p, y, likelihood, weight), y, weight, {}, False)


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
            ours = row_scores(whole, some, likelihood, weight, bounds)
            theirs = row_scores(p, some, likelihood, weight, own_bounds)
            for name, values in ours.items():
                rows = None if weight is None else _joined([weight], [], name == "twice_as_sure")[0]
                more = float(weighted_mean(values - theirs[name], rows))
                gained[name] = gained.get(name, 0.0) + more / len(draws)
    return gained


Bounds = tuple[Tensor, Tensor] | None


def _bounds(p: Predictive, likelihood: Likelihood) -> Bounds:
    return p.interval(LEVEL) if likelihood.scales_targets else None


def row_scores(
    p: Any, y: Any, likelihood: Likelihood, weight: Tensor | None = None, bounds: Bounds = None
) -> dict[str, Tensor]:
    """The scores of each row: log density, and whether it is inside its interval or two measures of
    confidence. `bounds` are the intervals, if they are known. A conformal prediction is scored at
    its own level, also its sets of classes."""
    found = {"log_prob": log_prob_of(p, y).double()}
    if not isinstance(y, Tensor):
        return found
    level = p.guaranteed_level
    if likelihood.scales_targets or (level is not None and not likelihood.classifies):
        low, high = bounds or p.interval(LEVEL if level is None else level)
        inside = (y.reshape(low.shape) >= low) & (y.reshape(low.shape) <= high)
        found["coverage"] = inside.double().reshape(len(inside), -1).mean(1)
    elif likelihood.classifies:
        sure, twice = _confidence(p, y, likelihood, weight)
        found |= {"too_sure": sure.double(), "twice_as_sure": twice.double()}
        if level is not None and likelihood.ignore_index is None:
            held = p.prediction_set(level).movedim(1, -1)  # [N, ..., C]
            inside = held.gather(-1, y.long().reshape(*held.shape[:-1], 1))
            found["coverage"] = inside.double().reshape(len(y), -1).mean(1)
    return found


def _joined(
    weights: list[Tensor], groups: list[Tensor], one_more: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The weights and the groups of the rows of all splits. `one_more`: with one additional row per
    split, which has the weight of one effective row and is a group of its own."""
    if one_more and groups:
        weights = weights or [torch.ones(len(g), dtype=torch.float64) for g in groups]
    if one_more and weights:
        counts = [
            number_of_rows(w, w, groups[k] if groups else None) for k, w in enumerate(weights)
        ]
        weights = [
            torch.cat([w, w.sum().reshape(1) / m]) for w, m in zip(weights, counts, strict=True)
        ]
        groups = [torch.cat([g, torch.tensor([-1 - k])]) for k, g in enumerate(groups)]
    return (torch.cat(weights) if weights else None), (torch.cat(groups) if groups else None)


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
        alone = run.select_members(own).posterior(
            method, slice_state(result.state, own), result.draws(own)
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
    found = moved_by(posterior, alone, x)
    return None if found is None else found[0]


def moved_by(posterior: Posterior, alone: Posterior, x: Any) -> tuple[Mixture, Tensor] | None:
    """As `moved`, and the shift [N, ...]."""
    try:
        whole = posterior.predict(x).form.of_draws
        own = whole if alone is posterior else alone.predict(x).form.of_draws
    except MemoryBudgetError:
        return None
    if not (type(own) is Mixture and type(whole) is Mixture):
        return None
    away = own.f.mean(0) - whole.f.mean(0)
    f, theta, weights = whole.f, whole.theta, whole.weights
    if whole.f_variance is not None:
        f, theta, weights = draw_functions(f, whole.f_variance, theta, weights, 0, _FROM_EACH)
    return Mixture(whole.likelihood, f + away, theta, weights, None), away


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


def _status(
    found: dict[str, Scored], rows: int, name: str = "held-out rows", level: float = LEVEL
) -> Status:
    """The status by the thresholds above and two standard errors."""
    error = {name: scored.error for name, scored in found.items()}
    mean = {name: scored.mean for name, scored in found.items()}
    if "gain" in mean and not mean["gain"] > -max(LOSS, error["gain"]):
        reason = (
            f"the {rows} {name} are predicted {-mean['gain']:.2g} nats per row worse than "
            "by a constant: scale inputs and targets (standardize=True), train longer, or use "
            "another learning rate"
        )
        return Status("worse-than-constant", reason)
    regions = "sets of classes" if "too_sure" in mean else "intervals"
    if mean.get("coverage", level) < level - max(ALLOWED, error.get("coverage", 0.0)):
        what = f"{level:.0%} {regions} contain {mean['coverage']:.0%} of the {rows} {name}"
    elif mean.get("too_sure", 0.0) > max(ALLOWED, error.get("too_sure", 0.0)):
        what = (
            f"on the {rows} {name} the accuracy of the most likely class is "
            f"{mean['too_sure']:.0%} below its mean probability"
        )
    elif mean.get("twice_as_sure", 0.0) > max(GAINED, error.get("twice_as_sure", 0.0)):
        return Status(
            "underconfident",
            f"the {rows} {name} would be predicted {mean['twice_as_sure']:.2g} nats per row "
            "better with logits twice as large: the fit is underconfident; train longer, "
            "recalibrate it (doxa.evaluate.recalibrate), or use a prior with larger logits",
        )
    else:
        return Status()
    advice = "recalibrate it (doxa.evaluate.recalibrate), or use another method"
    return Status("overconfident", f"{what}: the fit is overconfident; {advice}")
