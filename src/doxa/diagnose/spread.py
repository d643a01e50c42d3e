"""Is there the right amount of disagreement? Members, the posterior against its prior, and what
happens far from the data.

The least that n rows leave open is known: even a model with a single free number, fitted to n rows
of noise σ², leaves its mean uncertain by

    Var[f] ≥ σ² / n

so that a posterior over a whole network whose epistemic variance falls well below σ²/n claims more
than any data could have taught it.

How wide the belief was before the data: the variance of functions drawn from the prior.

Did it learn anything, and does it hold on rows it has not seen?

The yardstick is the best constant: the mean and spread of y, the frequencies of its classes, the
average count, from the training rows.
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
from doxa.likelihoods import Categorical
from doxa.noise import generator
from doxa.posterior import Posterior, SamplePosterior
from doxa.predictive import Predictive

_DRAWS = 400


def prior_variance(patient: DiagnosticData, head: Head) -> Tensor:
    """The mean variance of E[y | f] over functions of the prior, at the training rows."""
    base, scored = patient.base, head.train
    f = base.prior_functions(patient.few.x, _DRAWS, seed=0)
    means = (
        f if base.base_likelihood.scales_targets else base.base_likelihood.plain().mean(f, {}, 1)
    )
    variance = means.double().var(0, correction=0)
    if isinstance(scored.likelihood, Categorical):
        variance = variance.sum(1)
    return scored.one(variance).mean()


_LEAST_ROWS = 10
_GAP = 0.5  # nats a row
_CLEAR = 0.05  # chance of so large a gain over a constant where there is none
_UNAWARE = 1.5  # of the squared errors that were announced


def skill(patient: DiagnosticData, head: Head) -> Finding:
    """Better than a constant, on the test rows where there are any."""
    scored = head.unseen
    gain = scored.log_prob - constant_scores(head.train, scored)
    mean = float(gain.mean())
    where = "test" if head.test is not None else "training"
    if not bool(torch.isfinite(gain).all()):
        return bad(
            f"predictions at the {where} rows are not finite, or rule out what happened",
            calmer(patient),
        )
    told = f"{number(abs(mean))} nats a row {'better' if mean > 0 else 'worse'} than a constant"
    if mean <= 0 and mean_above_zero(-gain) < ALPHA:
        return bad(
            f"predictions at the {where} rows are {told}",
            any_of(standardise(patient), longer(patient), MORE_ROWS),
            mean,
        )
    if not mean_above_zero(gain) < _CLEAR:  # also of a single row, which has no spread
        few = f"{len(gain)} {where} rows cannot tell whether it learned anything"
        return skipped(f"{few}: on them it is {told}, which may be chance", MORE_ROWS, mean)
    return good(f"predictions at the {where} rows are {told}", mean)


def constant_scores(train: Scored, scored: Scored) -> Tensor:
    """log p of each row under the best constant of the training rows; rows have one element, or
    as many alike."""
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


def overfitting(patient: DiagnosticData, head: Head) -> Finding:
    """Much worse on new rows than on its own, and not aware of it.

    A gap alone is no fault: what is flexible knows its own rows better. It is one where the
    posterior announced smaller errors than it makes."""
    test = head.test
    if test is None:
        return skipped("there are no test rows", NEW_ROWS)
    if len(test) < _LEAST_ROWS:
        return skipped(f"{len(test)} test rows are too few to see overfitting on", MORE_ROWS)
    gap = float(head.train.log_prob.mean() - test.log_prob.mean())
    both = (head.train.log_prob.var() / len(head.train) + test.log_prob.var() / len(test)).sqrt()
    unaware, told = _unaware(test)
    words = f"test rows score {number(gap)} nats below the training rows"
    if gap > _GAP and gap > normal_quantile(1 - ALPHA) * float(both) and unaware:
        return bad(
            f"it has learned its rows by heart: {words}, and {told}",
            any_of(early_stopping(patient), ensemble(patient), narrower_prior(patient), MORE_ROWS),
            gap,
        )
    return good(f"{words}; {told}", gap)


def _unaware(test: Scored) -> tuple[bool, str]:
    """Whether errors are larger than announced."""
    if test.classifies:
        confidence, top = test.probs.max(1)
        excess = float(confidence.mean() - (top == test.y).double().mean())
        return excess > 0.05, f"it is {excess:+.1%} surer than it is right"
    ratio = float(test.z.square().mean())
    return ratio > _UNAWARE, f"squared errors are {number(ratio)} of what it announces"


COLLAPSED = 0.05  # of σ²/n
COPIES = 0.7  # of the weights' length: half of what independent members have
_AS_WIDE = 0.5  # of the prior's variance
_FAR = 5.0  # standard deviations
_FAR_KINDS = ("inputs scaled out", "noise")


def members(patient: DiagnosticData, head: Head) -> Finding:
    """Members that are copies of one another, or of which some never trained.

    Members that found their own way have weights as far apart as vectors of their length in
    random directions, √2 of it. Copies, and members that started from one place, do not; functions
    alone cannot tell, since members may rightly agree wherever there is data."""
    if patient.kept is None or patient.kept[0] < 2:
        return _point(patient) if patient.is_point else skipped("there are no members to compare")
    count, draws = patient.kept
    apart = _weight_distance(patient.base)
    if draws == 1 and apart < COPIES:
        return bad(
            f"the {count} members are all but copies: their weights differ by {apart:.2g} of their "
            "length, where independent fits differ by 1.4",
            coded("a start of its own for each member", refit(patient, init="'fresh'")),
            apart,
        )
    alone = hasattr(head.train.p, "samples")  # a transform may leave no draws to tell apart
    lost = _lost(head.train, count) if alone else 0
    if 0 < lost < count:
        return bad(
            f"{lost} of {count} members predict worse than a constant would: they have not trained",
            any_of(calmer(patient), longer(patient)),
            float(lost),
        )
    told = ", and have all trained alike" if alone else ""
    return good(f"the {count} members differ{told}", apart)


def _point(patient: DiagnosticData) -> Finding:
    return skipped(
        "the method gives one function: it has no epistemic uncertainty to judge",
        any_of(another(patient, "laplace"), another(patient, "deep-ensemble")),
    )


def _weight_distance(base: Posterior) -> float:
    """The mean distance between members' weights, as a share of their mean length; both from where
    the prior is centred (1 for normalisation scales, which all members share at the start)."""
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


def width(patient: DiagnosticData, head: Head) -> Finding:
    """As wide as the prior: nothing was learned. A point: more is claimed than data can teach."""
    if patient.is_point:
        return _point(patient)
    share = _narrowness(head.train, patient.rows)
    ensemble = patient.kept is not None and patient.kept[1] == 1  # judged as members
    if share < COLLAPSED and not ensemble:
        return bad(
            f"the posterior has collapsed: its epistemic variance is {share:.2g} of the least that "
            f"{patient.rows} rows leave open (noise variance over rows)",
            colder(patient),
            share,
        )
    before = prior_variance(patient, head)
    ratio = float(head.train.epistemic.mean() / before)
    if ratio > _AS_WIDE:
        return warning(
            f"the posterior is nearly as wide as the prior ({ratio:.0%} of its variance at the "
            "training rows): the data taught it next to nothing",
            any_of(MORE_ROWS, longer(patient)),
            ratio,
        )
    return good(f"the data left {ratio:.2g} of the prior's variance", share)


def far(patient: DiagnosticData, head: Head) -> Finding:
    """Epistemic uncertainty should grow where there was no data."""
    if patient.is_point:
        return _point(patient)
    x = patient.few.x
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return skipped("x is not one table of floating-point numbers: none can be made far away")
    here = _epistemic(patient.posterior, x, head)
    ratios = {
        name: _epistemic(patient.posterior, strange, head) / max(here, 1e-300)
        for name, strange in _out_of_distribution_inputs(x, patient.seed).items()
    }
    told = ", ".join(f"{number(value)} times on {name}" for name, value in ratios.items())
    most = max(ratios[name] for name in _FAR_KINDS)  # shuffled columns need not be far
    if most < 1.0:
        return warning(
            f"the posterior is surer of strange inputs than of its own: epistemic uncertainty is "
            f"{told}",
            any_of(
                another(patient, "gp", "deep-ensemble", "hmc"),
                "doxa.evaluate.ood_scores, to keep such inputs out",
            ),
            most,
        )
    return good(f"epistemic uncertainty is {told}", most)


def _out_of_distribution_inputs(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Rows that cannot come from where x came from."""
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
    """The mean variance over functions: of E[y] for numbers, of the logits for classes. (Far away a
    softmax saturates, so that mutual information may rightly fall where functions disagree.)"""
    p = posterior.predict(x)
    if head.label:
        p = p.heads[int(head.label.strip(" ()").rpartition(" ")[2])]
    if not p.likelihood.classifies:
        return float(p.epistemic.double().mean())
    if not hasattr(p, "samples") and hasattr(p, "mutual_information"):
        return float(p.mutual_information.double().mean())
    logits = (p.samples if hasattr(p, "samples") else posterior.functions(x, 100)).double()
    if isinstance(p.likelihood, Categorical):
        logits = logits - logits.mean(2, keepdim=True)  # a constant changes nothing
    return float(logits.var(0, correction=0).mean())
