"""What the rows that were held out say of a fit: how well they are predicted, and how often its
intervals hold them. A fit that is much too sure of itself, or worse than a constant, is not "ok";
nor is one whose classes are much less sure than these rows allow, or one of a method that may end
at its prior, and predicts its training rows like a constant.

Where each member holds out a part of its own, the member alone is judged by that part: the others
have seen it. A likelihood that such rows asked for (`driver/validation.py`) is judged as it was
found, with all functions moved to where that member has its mean.

What rows left out say of the likelihood itself: how sure to be of a class, the shape of noise.

A fit's own rows cannot say: on them every network is right too often. A posterior by itself is
asked by the rows that it held out. Where each member holds out a part of its own, a row is seen by
all members but one, m: its prediction is right in the middle, and that of the others in its width.
So the rows are given to the mixture of all functions f_s, moved to where member m has its mean,

    p(y_i) = 1/S Σ_s p(y_i | f_s(x_i) + f̄_m(x_i) − f̄(x_i))

and the likelihood that they ask for is that of this mixture: the spread between members is not
counted a second time (`ensemble/map.py` has the same for a level of noise, in closed form).
A likelihood says whether it asks (`Likelihood.asks_left_out`) and what the answer is
(`Likelihood.left_out`); rows that ask for nothing clearly change nothing. Their weights add up to
their effective number.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import store
from doxa.data import Data
from doxa.data.rows import effective_rows, per_effective_row, standard_error, weighted_mean
from doxa.driver.loop import Progress
from doxa.errors import MemoryBudgetError
from doxa.likelihoods import Likelihood
from doxa.likelihoods.base import LeftOut
from doxa.method import Method, Run, slice_state
from doxa.posterior import Posterior, Status
from doxa.posterior.weights import WeightPosterior
from doxa.predictive import Predictive
from doxa.predictive.classes import drawn
from doxa.predictive.form import draw_functions
from doxa.predictive.mixture import Mixture

LEVEL = 0.9
ALLOWED = 0.08  # how far the coverage may be from the level, beside what chance allows
LOSS = 0.05  # nats a row below the constant, likewise
GAINED = 0.1  # nats a row by classes that are twice as sure, likewise
_ROWS = 4096  # that are looked at, of each split
_NUMBERS = 2**18  # in y, likewise
_TINY = 1e-12  # a probability, of a class that cannot be
_FROM_EACH = 50  # functions, of a Gaussian over them
_SEEN, _DRAWS = 256, 32  # training rows that are looked at, and functions that predict them


HeldOutPredictions = list[tuple[Posterior, int]]  # who is judged by the rows of which split


def evaluate_held_out(
    posterior: Posterior, held_out_predictions: HeldOutPredictions, run: Run
) -> None:
    """Put into the record what the held-out rows say of a run."""
    data = run.rows
    assert data.validation is not None
    likelihood = run.likelihood
    seen: dict[str, list[Tensor]] = {}
    weights: list[Tensor] = []
    found_by_mixture = "left_out" in posterior.diagnostics
    for each, split in held_out_predictions:
        p, y, weight = predicted(each, data, data.validation[split], split)
        if found_by_mixture and each is not posterior:
            mixed = _mixed(posterior, each, data, data.validation[split], split)
            p, y, weight = mixed or (p, y, weight)
        score = _log_prob(p, y)
        seen.setdefault("log_prob", []).append(score)
        if weight is not None:
            weights.append(weight)
        if isinstance(y, Tensor):
            _, fitted, counts = _some(data, data.rows[split], split)
            constant = likelihood.constant(fitted, y, per_effective_row(counts))
            if constant is not None:
                seen.setdefault("gain", []).append(score.double() - constant)
            if likelihood.scales_targets:
                low, high = p.interval(LEVEL)
                inside = (y.reshape(low.shape) >= low) & (y.reshape(low.shape) <= high)
                seen.setdefault("coverage", []).append(
                    inside.double().reshape(len(inside), -1).mean(1)
                )
            elif likelihood.classifies:
                sure, twice = _confidence(p, y, likelihood, weight)
                seen.setdefault("too_sure", []).append(sure)
                seen.setdefault("twice_as_sure", []).append(twice)
    found = {
        name: Scored(torch.cat(values).double(), _joined(weights, name == "twice_as_sure"))
        for name, values in seen.items()
    }
    record = posterior.record
    record.validation = found["log_prob"].mean
    rows = len(found["log_prob"].values)
    record.diagnostics["held_out"] = {"rows": rows} | {k: v.mean for k, v in found.items()}
    status = _status(found, rows)
    if record.status == "ok" and status != "ok":  # else the method's own words stay
        record.status = status


class Scored(NamedTuple):
    """A number for each row, [N], and the rows' weights, where they have some."""

    values: Tensor
    weight: Tensor | None

    @property
    def mean(self) -> float:
        return float(weighted_mean(self.values, self.weight))

    @property
    def error(self) -> float:
        """Two standard errors of the mean."""
        return 2 * standard_error(self.values, self.weight)


def _joined(weights: list[Tensor], one_more: bool) -> Tensor | None:
    """Weights of the rows of all splits; `one_more`: of one row more in each, which counts as one
    of them."""
    if not weights:
        return None
    if one_more:
        each = [torch.cat([w, w.sum().reshape(1) / effective_rows(w)]) for w in weights]
    return torch.cat(each if one_more else weights)


def check_prior_collapse(posterior: Posterior, run: Run) -> None:
    """Say so where rows that a run was trained on are predicted no better than by a constant."""
    split = run.split_of[0]
    p, y, weight = predicted(posterior, run.rows, run.rows.rows[split], split, _SEEN, _DRAWS)
    if posterior.record.status != "ok" or not isinstance(y, Tensor):
        return
    constant = run.likelihood.constant(y, y, per_effective_row(weight))
    if constant is None:
        return
    gain = Scored(_log_prob(p, y).double() - constant, weight)
    if not gain.mean > gain.error:
        posterior.record.status = Status(
            "learned-nothing",
            f"{len(gain.values)} of its own training rows are predicted no better than by a "
            f"constant ({gain.mean:.2g} nats per row): start narrower, train longer, at another "
            "rate or under a narrower prior; or there is nothing to learn",
        )


def held_out_predictions(
    posterior: Posterior, method: Method, run: Run, part: slice, result: Progress
) -> HeldOutPredictions:
    """A run, whose members are `part`, and its rows; or each of its members, where each has rows
    of its own."""
    splits = run.split_of[part]
    if len(set(splits)) == 1:
        return [(posterior, splits[0])]
    each: HeldOutPredictions = []
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
    """Predictions of rows, what they were, and their weights: of fewer where memory does not allow
    for all."""
    while True:
        x, y, weight = _some(data, rows, split, most)
        try:
            return posterior.predict(x, draws), y, weight
        except MemoryBudgetError:
            if most == 1:
                raise
            most = max(1, min(most, len(rows)) // 4)


def moved(posterior: Posterior, alone: Posterior, x: Any) -> Mixture | None:
    """All functions at x, drawn where they are Gaussian, moved to where one member has its mean;
    None where they are not kept."""
    try:
        whole = drawn(posterior.predict(x)._form)
        own = whole if alone is posterior else drawn(alone.predict(x)._form)
    except MemoryBudgetError:
        return None
    if not (type(own) is Mixture and type(whole) is Mixture):
        return None
    away = own.f.mean(0) - whole.f.mean(0)
    f, theta, weights = whole.f, whole.theta, whole.weights
    if whole.f_variance is not None:
        f, theta, weights = draw_functions(f, whole.f_variance, theta, weights, 0, _FROM_EACH)
    return Mixture(whole.likelihood, f + away, theta, weights, None)


def _mixed(
    posterior: Posterior, alone: Posterior, data: Data, rows: Tensor, split: int
) -> tuple[Any, Any, Tensor | None] | None:
    x, y, weight = _some(data, rows, split)
    form = moved(posterior, alone, x)
    return None if form is None else (Predictive.of(form), y, weight)


def _some(
    data: Data, rows: Tensor, split: int, most: int = _ROWS
) -> tuple[Any, Any, Tensor | None]:
    """At most so many of the rows, in the units of x and y, and their weights."""
    rows = counted(data, rows, most)
    return *in_units(data, rows, split), data.weight_of(rows)


def counted(data: Data, rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows, evenly."""
    one = tree_flatten(data.take(rows[:1], torch.tensor(0))[1])[0]
    most = max(1, min(most, _NUMBERS // max(1, sum(t.numel() for t in one))))
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


def _log_prob(p: Any, y: Any) -> Tensor:
    if isinstance(y, tuple | list):  # the heads' own scores, added up
        return torch.stack([h.log_prob(t) for h, t in zip(p.heads, y, strict=True)]).sum(0)
    return torch.as_tensor(p.log_prob(y))


def _confidence(
    p: Any, y: Tensor, likelihood: Likelihood, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """How much larger the probability of the likeliest class is than its being right, [N]; and how
    many nats logits twice as large would gain, log p_y − log Σ p², [N + 1]: one row more is wrong,
    so that a few rows that are all right do not say that none ever is."""
    table, y = p.probs.double(), y.long()
    if table.shape == y.shape:  # Bernoulli
        table = torch.stack([1 - table, table], 1)
    ignored = getattr(likelihood, "ignore_index", None)
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
    """What is wrong, beyond what chance allows (two standard errors)."""
    error = {name: scored.error for name, scored in found.items()}
    mean = {name: scored.mean for name, scored in found.items()}
    if "gain" in mean and not mean["gain"] > -max(LOSS, error["gain"]):
        reason = (
            f"the {rows} rows held out are predicted {-mean['gain']:.2g} nats a row worse than by "
            "a constant: are inputs and targets of unit scale (standardize=True)? Else train "
            "longer, or at another learning rate"
        )
        return Status("worse-than-constant", reason)
    if mean.get("coverage", LEVEL) < LEVEL - max(ALLOWED, error.get("coverage", 0.0)):
        what = f"{LEVEL:.0%} intervals hold {mean['coverage']:.0%} of the {rows} rows held out"
    elif mean.get("too_sure", 0.0) > max(ALLOWED, error.get("too_sure", 0.0)):
        what = (
            f"on the {rows} rows held out the likeliest class is right {mean['too_sure']:.0%} less "
            "often than it says"
        )
    elif mean.get("twice_as_sure", 0.0) > max(GAINED, error.get("twice_as_sure", 0.0)):
        return Status(
            "underconfident",
            f"the {rows} rows held out would be predicted {mean['twice_as_sure']:.2g} nats a row "
            "better with logits twice as large: it is far less sure than it could be; train "
            "longer, recalibrate it (doxa.evaluate.recalibrate), or give logits a wider prior",
        )
    else:
        return Status()
    advice = "recalibrate it (doxa.evaluate.recalibrate), or use another method"
    return Status("overconfident", f"{what}: it is too sure of itself; {advice}")


log = logging.getLogger("doxa")

FEWEST = 10  # rows left out, by their effective number: fewer are not asked
_MOST_NUMBERS = 2**19  # in all functions that are looked at
_FUNCTIONS = 50  # of them

Asked = tuple[Tensor, Tensor, dict[str, Tensor], Tensor]  # f [S, N, ...], y, theta, weight [N]


def calibrate_on_held_out(
    posterior: Posterior,
    held_out_predictions: HeldOutPredictions,
    method: Method,
    run: Run,
    stopped: bool,
) -> None:
    """Give a posterior, and those that are judged in its place, the likelihood that the rows left
    out ask for; `stopped` says whether training ended where they are predicted best. Methods that
    do not overfit integrate over what could be asked."""
    before = posterior.base_likelihood
    if not (
        method.overfits and before.calibrates_on_held_out and isinstance(posterior, WeightPosterior)
    ):
        return
    rows = _rows(posterior, held_out_predictions, run)
    if rows is None or effective_rows(rows[3]) < FEWEST:
        return
    found = before.left_out(*rows, stopped=len(held_out_predictions) * stopped)
    if found is None:
        return
    for each in {id(p): p for p in (posterior, *(p for p, _ in held_out_predictions))}.values():
        assert isinstance(each, WeightPosterior)
        _take_up(each, found)
    posterior.record.metadata["fitted_likelihood"] = store.encode(before)
    posterior.record.diagnostics["left_out"] = {"rows": len(rows[1]), "likelihood": found.said}
    log.info("likelihood: %s, by %d rows left out", found.said, len(rows[1]))


def _take_up(posterior: WeightPosterior, found: LeftOut) -> None:
    """Its outputs mean from now on what was found."""
    model = posterior.network.meaning(found.likelihood)
    posterior.base_likelihood, posterior.model = found.likelihood, model
    for name, more in found.moved.items():
        weights: Tensor = getattr(posterior, posterior.flat)
        index = posterior.layout.index([f"likelihood.{name}"]).to(weights.device)
        by = torch.full((*weights.shape[:-1], len(index)), more).to(weights)
        setattr(posterior, posterior.flat, weights.index_add(-1, index, by))


def _rows(posterior: Posterior, held_out_predictions: HeldOutPredictions, run: Run) -> Asked | None:
    """What the rows left out are asked with; None where functions are not kept."""
    data, most = run.rows, _MOST_NUMBERS // len(held_out_predictions)
    assert data.validation is not None
    parts: list[Asked] = []
    for alone, split in held_out_predictions:
        rows = counted(data, data.validation[split], most // _FUNCTIONS)
        form = moved(posterior, alone, in_units(data, rows, split)[0])
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
