"""Checks of predictive skill and of epistemic uncertainty.

`skill` compares the predictions with the best constant of the training rows: the mean and spread of
y, the frequencies of its classes, or the average count. `overfitting` compares test rows with
training rows. `members` looks for members of an ensemble that are copies or that have not trained.
`width` compares the variance of the posterior with that of functions drawn from the prior, and
with a lower bound: a model with a single free parameter, fitted to n rows with noise σ², has

    Var[f] ≥ σ² / n

so the epistemic variance of a posterior over a whole network is too small if it is well below
σ²/n. `far` compares epistemic uncertainty at out-of-distribution inputs with that at training rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.diagnose.advice import (
    MORE_ROWS,
    NEW_ROWS,
    another,
    any_of,
    calmer,
    coded,
    colder,
    early_stopping,
    ensemble,
    longer,
    narrower_prior,
    refit,
    standardise,
)
from doxa.diagnose.data import ALPHA, DiagnosticData, Head, Scored, mean_above_zero, normal_quantile
from doxa.diagnose.finding import Finding, bad, good, number, skipped, warning
from doxa.noise import generator
from doxa.posterior import Posterior, SamplePosterior
from doxa.predictive import Predictive

_DRAWS = 400


def prior_variance(case: DiagnosticData, head: Head) -> Tensor:
    """The mean variance of E[y | f] over functions of the prior, at the training rows."""
    base, scored = case.base, head.train
    f = base.prior_functions(case.few.x, _DRAWS, seed=0)
    means = (
        f if base.base_likelihood.scales_targets else base.base_likelihood.plain().mean(f, {}, 1)
    )
    variance = means.double().var(0, correction=0)
    if scored.likelihood.class_axis:
        variance = variance.sum(1)
    return scored.one(variance).mean()


_LEAST_ROWS = 10
_GAP = 0.5  # nats per row
_CLEAR = 0.05  # p-value of the gain over a constant
_UNAWARE = 1.5  # ratio of squared errors to the predictive variance


def skill(case: DiagnosticData, head: Head) -> Finding:
    """Whether predictions are better than a constant, on the test rows if there are any."""
    scored = head.unseen
    gain = scored.log_prob - constant_scores(head.train, scored)
    mean = float(gain.mean())
    where = "test" if head.test is not None else "training"
    if not bool(torch.isfinite(gain).all()):
        return bad(
            f"predictions at the {where} rows are not finite, or exclude an observed target",
            calmer(case),
        )
    side = "better" if mean > 0 else "worse"
    message = f"{number(abs(mean))} nats per row {side} than a constant"
    if mean <= 0 and mean_above_zero(-gain) < ALPHA:
        return bad(
            f"predictions at the {where} rows are {message}",
            any_of(standardise(case), longer(case), MORE_ROWS),
            mean,
        )
    if not mean_above_zero(gain) < _CLEAR:  # also of a single row, which has no spread
        few = f"{len(gain)} {where} rows are too few to show whether the model learned anything"
        return skipped(f"{few}: its predictions are {message}, maybe by chance", MORE_ROWS, mean)
    return good(f"predictions at the {where} rows are {message}", mean)


def constant_scores(train: Scored, scored: Scored) -> Tensor:
    """log p of each row under the best constant of the training rows. The elements of a row are
    taken to have equal scores."""
    y, seen = scored.y.double(), train.y.double()
    elements = max(1, scored.targets[0].numel())
    if scored.classifies:
        classes = scored.probs.shape[1]
        counts = torch.bincount(train.y.long(), minlength=classes).double() + 0.5
        each = (counts / counts.sum()).log()[scored.y.long()]
    elif scored.likelihood.discrete:
        rate = seen.mean().clamp_min(1e-3)
        each = y * rate.log() - rate - torch.lgamma(y + 1)
    else:
        spread = seen.std(correction=0).clamp_min(1e-12)
        each = torch.distributions.Normal(seen.mean(), spread).log_prob(y)
    return each * elements


def overfitting(case: DiagnosticData, head: Head) -> Finding:
    """Test scores far below training scores, with errors larger than predicted.

    A gap alone is no fault: a flexible model fits its training rows better. It is a fault if the
    errors on the test rows are larger than the posterior predicts."""
    test = head.test
    if test is None:
        return skipped("there are no test rows", NEW_ROWS)
    if len(test) < _LEAST_ROWS:
        return skipped(f"{len(test)} test rows are too few to detect overfitting", MORE_ROWS)
    gap = float(head.train.log_prob.mean() - test.log_prob.mean())
    both = (head.train.log_prob.var() / len(head.train) + test.log_prob.var() / len(test)).sqrt()
    unaware, errors = _unaware(test)
    message = f"test rows score {number(gap)} nats below the training rows"
    if gap > _GAP and gap > normal_quantile(1 - ALPHA) * float(both) and unaware:
        return bad(
            f"the model has overfitted its training rows: {message}, and {errors}",
            any_of(early_stopping(case), ensemble(case), narrower_prior(case), MORE_ROWS),
            gap,
        )
    return good(f"{message}; {errors}", gap)


def _unaware(test: Scored) -> tuple[bool, str]:
    """Whether errors are larger than predicted, and a message."""
    if test.classifies:
        confidence, top = test.probs.max(1)
        excess = float(confidence.mean() - (top == test.y).double().mean())
        return excess > 0.05, f"confidence minus accuracy is {excess:+.1%}"
    ratio = float(test.z.square().mean())
    return ratio > _UNAWARE, f"squared errors are {number(ratio)} times the predictive variance"


COLLAPSED = 0.05  # of σ²/n
COPIES = 0.7  # of the norm of the weights: half the distance of independent members
_AS_WIDE = 0.5  # of the prior's variance
_FAR = 5.0  # standard deviations
_FAR_KINDS = ("inputs scaled out", "noise")


def members(case: DiagnosticData, head: Head) -> Finding:
    """Members that are copies of one another, and members that have not trained.

    The weights of independent members are as far apart as random vectors of the same norm: √2
    times the norm. Copies, and members with the same initial weights, are closer. Functions alone
    do not show this, since good members may agree wherever there is data."""
    if case.kept is None or case.kept[0] < 2:
        return _point(case) if case.is_point else skipped("there are no members to compare")
    count, draws = case.kept
    apart = _weight_distance(case.base)
    if draws == 1 and apart < COPIES:
        return bad(
            f"the {count} members are almost copies: their weights differ by {apart:.2g} of their "
            "norm, where independent fits differ by 1.4",
            coded("different initial weights for each member", refit(case, init="'fresh'")),
            apart,
        )
    alone = head.train.p.has_samples  # a transform may have no draws per member
    lost = _lost(head.train, count) if alone else 0
    if 0 < lost < count:
        return bad(
            f"{lost} of {count} members predict worse than a constant would: they have not trained",
            any_of(calmer(case), longer(case)),
            float(lost),
        )
    trained = ", and all of them have trained" if alone else ""
    return good(f"the {count} members differ{trained}", apart)


def _point(case: DiagnosticData) -> Finding:
    return skipped(
        "the method gives one function: it has no epistemic uncertainty to evaluate",
        any_of(another(case, "laplace"), another(case, "deep-ensemble")),
    )


def _weight_distance(base: Posterior) -> float:
    """The mean distance between the weights of members, as a share of their mean norm. Both are
    measured from the mean of the prior (which is 1 for normalisation scales: all members start
    there)."""
    assert isinstance(base, SamplePosterior)
    weights = (base.samples[:, -1] - base.network.bound_prior.mean).double()
    count = len(weights)
    distance = torch.cdist(weights, weights).sum() / (count * (count - 1))
    return float(distance / weights.norm(dim=1).mean().clamp_min(1e-300))


def _narrowness(scored: Scored, rows: int) -> float:
    """The epistemic variance, as a multiple of σ²/n."""
    floor = scored.aleatoric.mean() / rows
    return float(scored.epistemic.mean() / floor)


def _lost(scored: Scored, count: int) -> int:
    """How many members predict worse than the best constant, each by itself."""
    y, f = scored.y.double(), scored.p.samples
    lost = 0
    for member in f.chunk(count):
        if scored.likelihood.discrete:
            alone = Predictive.from_samples(member, scored.likelihood)
            gain = alone.log_prob(scored.targets).mean() - constant_scores(scored, scored).mean()
        else:
            error = (y - scored.one(member, 1).mean(0)).square().mean()
            gain = y.var(correction=0) - error
        lost += not float(gain) > 0
    return lost


def width(case: DiagnosticData, head: Head) -> Finding:
    """Epistemic variance near that of the prior (nothing was learned), or far below σ²/n."""
    if case.is_point:
        return _point(case)
    share = _narrowness(head.train, case.rows)
    ensemble = case.kept is not None and case.kept[1] == 1  # evaluated in `members`
    if share < COLLAPSED and not ensemble:
        return bad(
            f"the posterior has collapsed: its epistemic variance is {share:.2g} of the least "
            f"possible with {case.rows} rows (noise variance divided by rows)",
            colder(case),
            share,
        )
    before = prior_variance(case, head)
    ratio = float(head.train.epistemic.mean() / before)
    if ratio > _AS_WIDE:
        return warning(
            f"the posterior is nearly as wide as the prior ({ratio:.0%} of its variance at the "
            "training rows): the model learned almost nothing from the data",
            any_of(MORE_ROWS, longer(case)),
            ratio,
        )
    return good(f"the posterior has {ratio:.2g} of the prior's variance", share)


def far(case: DiagnosticData, head: Head) -> Finding:
    """Epistemic uncertainty should be larger where there was no training data."""
    if case.is_point:
        return _point(case)
    x = case.few.x
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return skipped(
            "x is not one table of floating-point numbers: no out-of-distribution inputs can be "
            "made from it"
        )
    here = _epistemic(case.posterior, x, head)
    ratios = {
        name: _epistemic(case.posterior, inputs, head) / max(here, 1e-300)
        for name, inputs in _out_of_distribution_inputs(x, case.seed).items()
    }
    message = ", ".join(f"{number(value)} times on {name}" for name, value in ratios.items())
    most = max(ratios[name] for name in _FAR_KINDS)  # shuffled columns need not be far
    if most < 1.0:
        return warning(
            "the posterior is less uncertain at out-of-distribution inputs than at training rows: "
            f"epistemic uncertainty is {message}",
            any_of(
                another(case, "gp", "deep-ensemble", "hmc"),
                "doxa.evaluate.ood_scores, to detect such inputs",
            ),
            most,
        )
    return good(f"epistemic uncertainty is {message}", most)


def _out_of_distribution_inputs(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Inputs that are not from the distribution of x, by kind."""
    axes = [0] if x.ndim <= 2 else list(range(x.ndim))
    centre = x.double().mean(axes, keepdim=True)
    scale = x.double().std(axes, keepdim=True).nan_to_num(0.0)
    dice = torch.randn(x.shape, generator=generator(seed, "doctor", "far"), dtype=torch.float64)
    made = {
        _FAR_KINDS[0]: centre + _FAR * (x.double() - centre),
        _FAR_KINDS[1]: centre + _FAR * scale * dice.to(x.device),
    }
    if x.ndim == 2 and x.shape[1] > 1:
        order = torch.rand(x.shape, generator=generator(seed, "doctor", "shuffle")).argsort(0)
        made["shuffled columns"] = x.gather(0, order.to(x.device)).double()
    return {name: value.to(x.dtype) for name, value in made.items()}


def _epistemic(posterior: Posterior, x: Tensor, head: Head) -> float:
    """The mean variance over functions: of E[y] for numbers, of the logits for classes. (A softmax
    saturates far from the data, so mutual information may fall even if functions disagree.)"""
    p = posterior.predict(x)
    if head.label:
        p = p.heads[int(head.label.strip(" ()").rpartition(" ")[2])]
    if not p.likelihood.classifies:
        return float(p.epistemic.double().mean())
    if not p.has_samples and p.splits:
        return float(p.mutual_information.double().mean())
    logits = (p.samples if p.has_samples else posterior.functions(x, 100)).double()
    if p.likelihood.class_axis:
        logits = logits - logits.mean(2, keepdim=True)  # a constant changes nothing
    return float(logits.var(0, correction=0).mean())
