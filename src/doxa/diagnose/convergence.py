"""Did the fit arrive? The driver's own status, the training curve, and the chains.

Chains are judged in function space, at training rows: weights of a network have symmetric modes
that chains need not share, functions do not.

What a chain's own figures say: its weights beside its functions, its energies, its divergences.

Weights of a network have symmetric modes (units exchanged, signs turned) that chains need not
share, so that weights which disagree are no fault by themselves; a sampler whose energies move
slowly or whose trajectories diverge misses part of the posterior, whatever R-hat says.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.diagnose.advice import (
    MORE_ROWS,
    Advice,
    any_of,
    calmer,
    coded,
    ensemble,
    longer,
    recalibrate,
    refit,
    smaller_steps,
    standardise,
    written,
)
from doxa.diagnose.data import ALPHA, DiagnosticData, normal_quantile
from doxa.diagnose.finding import Finding, bad, good, skipped, warning
from doxa.likelihoods import Categorical
from doxa.mcmc.convergence import APART, LEAST_EBFMI, LEAST_TRANSITIONS, MOST_DIVERGENT
from doxa.posterior import SamplePosterior
from doxa.posterior.chains import LEAST_DRAWS, ess_bulk, ess_tail, rhat
from doxa.posterior.chains import moved as share_moved

_LEAST_POINTS = 20
_STILL_FALLING = 0.05  # nats a row that as many steps again would bring
_ROWS = 64
_APART = 1.1
_LEAST_WORTH = 25  # draws: a Monte Carlo error of a fifth of the posterior's standard deviation


def status(patient: DiagnosticData) -> Finding:
    """What the driver said when the fit ended."""
    said = patient.posterior.status
    if said == "ok":
        return good("the fit ended as it should")
    words = f"the fit ended as {str(said)!r}: {said.reason or 'no reason was given'}"
    if said == "stopped":
        return warning(words, coded("let it run to its end", refit(patient)))
    if said == "not-converged" and patient.is_chain:
        own = chains(patient)  # of predictions, not of raw outputs: a softmax forgets a constant
        if not own.alarms:
            return good(f"{words}; but the functions have: {own.words}")
        return replace(own, words=words)
    if said == "diverged":
        return bad(words, calmer(patient))
    if said in ("worse-than-constant", "learned-nothing"):
        return bad(words, any_of(standardise(patient), longer(patient), MORE_ROWS))
    if said == "overconfident":
        return warning(words, any_of(recalibrate(patient.posterior), ensemble(patient), MORE_ROWS))
    if said == "underconfident":
        return warning(words, any_of(recalibrate(patient.posterior), longer(patient)))
    if said == "worse-than-map":
        return warning(words, _last_layer(patient))
    if said == "degenerate":
        return warning(
            words, "give the noise (likelihood=doxa.Gaussian(…)), fewer features, more rows"
        )
    return bad(words, longer(patient))


def _last_layer(patient: DiagnosticData) -> Advice:
    """For a posterior over all weights that is worse than its own maximum."""
    name = getattr(patient.base.method, "name", "")
    tuned = written(patient, tune="validation") if name == "laplace" else written(patient)
    held_out: dict[str, Any] = {"validation": 0.1} if name == "laplace" else {}
    words = "the last layer only, its prior chosen on rows held out"
    code = refit(patient, tuned, subset="'last_layer'", **held_out)
    return coded(words if held_out else "the last layer only", code)


def training(patient: DiagnosticData) -> Finding:
    """The training curve: finite, no longer falling at its end, not above where it had been."""
    history = patient.posterior.history.get("loss")
    if not history:
        return skipped("the method leaves no training curve")
    curve = torch.tensor([values for _, values in history], dtype=torch.float64)  # [T, M]
    if not bool(torch.isfinite(curve).all()):
        members = (~torch.isfinite(curve)).any(0).sum()
        return bad(
            f"the loss of {int(members)} of {curve.shape[1]} members became non-finite",
            calmer(patient),
        )
    if len(curve) < _LEAST_POINTS:
        return skipped(f"the training curve has {len(curve)} points, too few to judge")
    smooth = _smooth(curve)
    lowest = torch.minimum(smooth.amin(0), curve[0])  # the first is from before any step
    above = smooth[-1] - lowest
    if bool((above > 0.5 + 0.2 * (curve[0] - lowest)).any()):
        worst = float(above.max())
        return bad(
            f"the loss ended {worst:.2g} nats a row above the lowest it had been: it jumped out of "
            "where it was going",
            calmer(patient),
            worst,
        )
    quarter = max(10, len(curve) // 4)
    slope, error = _line(curve[-quarter:])
    further = -slope * quarter
    sure = normal_quantile(1 - ALPHA / curve.shape[1])  # over all members
    falling = (further > _STILL_FALLING) & (-slope > sure * error)
    if bool(falling.any()):
        worst = float(further.max())
        if _stopped_gaining(patient.posterior.history.get("validation")):
            return good("the loss still fell, but the rows held out no longer gained", worst)
        return warning(
            f"the loss was still falling at the end: at that pace by {worst:.2g} nats a row over "
            "another quarter of the run",
            longer(patient),
            worst,
        )
    return good("the training curve is flat at its end", float(further.max()))


def _stopped_gaining(scores: list[Any] | None) -> bool:
    """Whether every member's best look at the held-out rows came before the last tenth of them."""
    if not scores:
        return False
    best = torch.tensor([each for _, each in scores], dtype=torch.float64).argmax(0)
    return int(best.max()) < 0.9 * (len(scores) - 1)


def _smooth(curve: Tensor, width: int = 5) -> Tensor:
    """Running medians over `width` points: [T − width + 1, M]."""
    return curve.unfold(0, width, 1).median(-1).values


def _line(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least-squares slope of each column, a step of the record, and its standard error."""
    t = torch.arange(len(values), dtype=values.dtype)
    t = (t - t.mean()).unsqueeze(1)
    square = t.square().sum()
    slope = (t * values).sum(0) / square
    rest = values - values.mean(0) - t * slope
    return slope, (rest.square().sum(0) / (len(values) - 2) / square).sqrt()


def chains(patient: DiagnosticData) -> Finding:
    """Chains that stick, chains that disagree, chains worth too few draws."""
    base = patient.base
    if not isinstance(base, SamplePosterior) or not patient.is_chain:
        return skipped("the method runs no chains")
    count, draws = base.samples.shape[:2]
    moved = share_moved(base.samples)  # [K]
    accept = patient.posterior.diagnostics.get("accept", [])
    lowest = min([float(moved.min()), *accept])
    if draws > 1 and lowest < 0.05:
        stuck = int((moved < 0.05).sum())
        return bad(
            f"{stuck or 1} of {count} chains hardly move: the lowest acceptance is {lowest:.2g}",
            any_of(standardise(patient), longer(patient)),
            lowest,
        )
    if draws < LEAST_DRAWS:
        return skipped(f"{draws} draws a chain are too few to judge")
    values = _functions(patient, count, draws)
    if not bool(torch.isfinite(values).all()):
        return bad("some draws give functions that are not finite", calmer(patient))
    worst = float(rhat(values).max())
    bulk, tail = float(ess_bulk(values).min()), float(ess_tail(values).min())
    told = (
        f"R-hat of the functions is {worst:.3f} at most; {count * draws} draws are worth "
        f"{bulk:.0f} independent ones (tails: {tail:.0f})"
    )
    if math.isinf(worst) or worst > _APART:
        return bad(f"the chains disagree: {told}", longer(patient), worst)
    if min(bulk, tail) < _LEAST_WORTH:
        return warning(f"the chains are worth little: {told}", longer(patient), worst)
    return good(told, worst)


def _functions(patient: DiagnosticData, count: int, draws: int) -> Tensor:
    """What predictions rest on, at some training rows, and the likelihood's own parameters:
    [K, T, entries]. Logits count up to a constant, which no prediction sees."""
    few = patient.train.thinned(_ROWS, patient.seed)
    p = patient.base.predict(few.x)
    heads = p.heads if hasattr(p, "heads") else (p,)
    parts = []
    for head in heads:
        f = head.samples.detach().cpu()
        if isinstance(head.likelihood, Categorical):
            f = torch.log_softmax(f, 2)
        parts.append(f.reshape(count, draws, -1))
    assert isinstance(patient.base, SamplePosterior)
    for group in patient.base.groups(None, 0):  # one: nothing is thinned
        for value in group.theta().values():
            parts.append(value.detach().cpu().reshape(count, draws, -1))
    return torch.cat([part.double() for part in parts], 2)


_MOST_WEIGHTS = 1000


def weights(patient: DiagnosticData) -> Finding:
    """How far the chains agree weight by weight: a fact to read beside that of the functions."""
    base = patient.base
    if not isinstance(base, SamplePosterior) or not patient.is_chain:
        return skipped("the method runs no chains")
    if base.samples.shape[1] < LEAST_DRAWS:
        return skipped(f"{base.samples.shape[1]} draws a chain are too few to judge")
    size = base.samples.shape[2]
    some = torch.linspace(0, size - 1, min(size, _MOST_WEIGHTS)).long().unique()
    values = base.samples[:, :, some.to(base.samples.device)].detach().cpu()
    if not bool(torch.isfinite(values).all()):
        return bad("some draws hold weights that are not finite", calmer(patient))
    each = rhat(values)
    worst, apart = float(each.max()), float((each > APART).double().mean())
    told = (
        f"R-hat of {len(some)} weights is {worst:.3g} at most, the least effective size "
        f"{float(ess_bulk(values).min()):.0f}"
    )
    if apart == 0:
        return good(f"{told}: the chains agree weight by weight", worst)
    return good(
        f"{told}; {apart:.0%} of them are above {APART}: chains may sit in modes that are mirror "
        "images of each other; what predictions rest on is the check of the functions",
        worst,
    )


def energy(patient: DiagnosticData) -> Finding:
    """Divergent transitions and E-BFMI of a Hamiltonian sampler, as its record says."""
    found = patient.posterior.diagnostics
    if "divergences" not in found and "ebfmi" not in found:
        return skipped("the method runs no chains with energies")
    count, share = int(found.get("divergences", 0)), float(found.get("divergent_share", 0.0))
    ratios = [r for r in found.get("ebfmi", []) if math.isfinite(r)]
    lowest = min(ratios, default=math.nan)
    told = f"{count} transitions diverged"
    if ratios:
        told = f"{told}; E-BFMI is {lowest:.2f} at least"
    if share > MOST_DIVERGENT:
        return bad(
            f"{told}: {share:.1%} of trajectories met places that the step size cannot follow, "
            "which the draws then miss",
            any_of(smaller_steps(patient), "other parameters (scaled, non-centred)"),
            share,
        )
    judged = ratios and found.get("transitions", 0) >= LEAST_TRANSITIONS
    if judged and lowest < LEAST_EBFMI:
        return warning(
            f"{told} (below {LEAST_EBFMI}): energies are explored slowly, tails too little",
            any_of(longer(patient), "other parameters"),
            lowest,
        )
    return good(told, lowest if ratios else None)
