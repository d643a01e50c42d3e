"""Checks of convergence: the status of the fit, the training curve, MCMC chains and their energies.

`status` and `training` are for every method. `chains`, `weights` and `energy` are for MCMC.

Chains are compared in function space, at training rows. The weights of a network have symmetric
modes (permuted units, changed signs), and two chains may be in different modes; their functions
agree all the same. So R-hat of the weights is reported, but weights that disagree are no fault.
A sampler misses part of the posterior if its energies change slowly (a small E-BFMI) or if its
trajectories diverge, even if R-hat is close to 1.
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
    another,
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
from doxa.mcmc.convergence import APART, LEAST_EBFMI, LEAST_TRANSITIONS, MOST_DIVERGENT
from doxa.posterior import SamplePosterior
from doxa.posterior.chains import LEAST_DRAWS, ess_bulk, ess_tail, rhat
from doxa.posterior.chains import moved as share_moved

_LEAST_POINTS = 20
_STILL_FALLING = 0.05  # nats per row, over another quarter of the run
_ROWS = 64
_APART = 1.1
_LEAST_ESS = 25  # a Monte Carlo error of a fifth of the posterior's standard deviation


def status(case: DiagnosticData) -> Finding:
    """The status that the driver gave to the fit."""
    outcome = case.posterior.status
    if outcome == "ok":
        return good("the fit ended as it should")
    message = f"the fit ended as {str(outcome)!r}: {outcome.reason or 'no reason was given'}"
    if outcome == "stopped":
        return warning(message, coded("let it run to its end", refit(case)))
    if outcome == "not-converged" and case.is_chain:
        own = chains(case)  # of predictions, not of raw outputs: a softmax ignores a constant
        if not own.alarms:
            return good(f"{message}; but the functions have converged: {own.words}")
        return replace(own, words=message)
    if outcome == "diverged":
        return bad(message, calmer(case))
    if outcome in ("worse-than-constant", "prior-collapse"):
        return bad(message, any_of(standardise(case), longer(case), MORE_ROWS))
    if outcome == "overconfident":
        return warning(message, any_of(recalibrate(case.posterior), ensemble(case), MORE_ROWS))
    if outcome == "underfit":
        compared = case.posterior.diagnostics.yardsticks
        best = "" if compared is None else compared.get("best", "")
        simple = another(case, best) if best in ("gp", "linear") else None
        return warning(message, any_of(standardise(case), longer(case), ensemble(case), simple))
    if outcome == "underconfident":
        return warning(message, any_of(recalibrate(case.posterior), longer(case)))
    if outcome == "not-evaluated":
        return warning(message, MORE_ROWS)
    if outcome == "worse-than-map":
        return warning(message, _last_layer(case))
    if outcome == "degenerate":
        return warning(
            message,
            "set the noise (likelihood=doxa.Gaussian(…)), use fewer features, or more rows",
        )
    return bad(message, longer(case))


def _last_layer(case: DiagnosticData) -> Advice:
    """Advice for a posterior over all weights that predicts worse than its MAP estimate."""
    settings = case.base.method.by_held_out
    tuned = written(case, **settings)
    held_out: dict[str, Any] = {"validation": 0.1} if settings else {}
    text = "the last layer only, with its prior chosen on held-out rows"
    code = refit(case, tuned, subset="'last_layer'", **held_out)
    return coded(text if held_out else "the last layer only", code)


def training(case: DiagnosticData) -> Finding:
    """The training loss: finite, flat at its end, and not far above its earlier minimum."""
    history = case.posterior.history.get("loss")
    if not history:
        return skipped("the method records no training curve")
    curve = torch.tensor([values for _, values in history], dtype=torch.float64)  # [T, M]
    if not bool(torch.isfinite(curve).all()):
        members = (~torch.isfinite(curve)).any(0).sum()
        return bad(
            f"the loss of {int(members)} of {curve.shape[1]} members became non-finite",
            calmer(case),
        )
    if len(curve) < _LEAST_POINTS:
        return skipped(f"the training curve has {len(curve)} points, too few to evaluate")
    smooth = _smooth(curve)
    lowest = torch.minimum(smooth.amin(0), curve[0])  # curve[0] is the loss before any step
    above = smooth[-1] - lowest
    if bool((above > 0.5 + 0.2 * (curve[0] - lowest)).any()):
        worst = float(above.max())
        return bad(
            f"the loss ended {worst:.2g} nats per row above its earlier minimum: the optimiser "
            "left a better region",
            calmer(case),
            worst,
        )
    quarter = max(10, len(curve) // 4)
    slope, error = _line(curve[-quarter:])
    further = -slope * quarter
    sure = normal_quantile(1 - ALPHA / curve.shape[1])  # over all members
    falling = (further > _STILL_FALLING) & (-slope > sure * error)
    if bool(falling.any()):
        worst = float(further.max())
        if _stopped_gaining(case.posterior.history.get("validation")):
            return good("the loss still fell, but held-out rows no longer improved", worst)
        return warning(
            f"the loss was still falling at the end: at that rate by {worst:.2g} nats per row over "
            "another quarter of the run",
            longer(case),
            worst,
        )
    return good("the training curve is flat at its end", float(further.max()))


def _stopped_gaining(scores: list[Any] | None) -> bool:
    """Whether every member had its best held-out score before the last tenth of the scores."""
    if not scores:
        return False
    best = torch.tensor([each for _, each in scores], dtype=torch.float64).argmax(0)
    return int(best.max()) < 0.9 * (len(scores) - 1)


def _smooth(curve: Tensor, width: int = 5) -> Tensor:
    """Running medians over `width` points: [T − width + 1, M]."""
    return curve.unfold(0, width, 1).median(-1).values


def _line(values: Tensor) -> tuple[Tensor, Tensor]:
    """The least-squares slope of each column, per recorded step, and its standard error."""
    t = torch.arange(len(values), dtype=values.dtype)
    t = (t - t.mean()).unsqueeze(1)
    square = t.square().sum()
    slope = (t * values).sum(0) / square
    rest = values - values.mean(0) - t * slope
    return slope, (rest.square().sum(0) / (len(values) - 2) / square).sqrt()


def chains(case: DiagnosticData) -> Finding:
    """Chains that do not move, chains that disagree, and a small effective sample size."""
    base = case.base
    if not isinstance(base, SamplePosterior) or not case.is_chain:
        return skipped("the method runs no MCMC chains")
    count, draws = base.samples.shape[:2]
    moved = share_moved(base.samples)  # [K]
    accept = case.posterior.diagnostics.get("accept", [])
    lowest = min([float(moved.min()), *accept])
    if draws > 1 and lowest < 0.05:
        stuck = int((moved < 0.05).sum())
        return bad(
            f"{stuck or 1} of {count} chains hardly move: the lowest acceptance is {lowest:.2g}",
            any_of(standardise(case), longer(case)),
            lowest,
        )
    if draws < LEAST_DRAWS:
        return skipped(f"{draws} draws per chain are too few to evaluate")
    values = _functions(case, count, draws)
    if not bool(torch.isfinite(values).all()):
        return bad("some draws give functions that are not finite", calmer(case))
    worst = float(rhat(values).max())
    bulk, tail = float(ess_bulk(values).min()), float(ess_tail(values).min())
    message = (
        f"R-hat of the functions is {worst:.3f} at most; the effective sample size of "
        f"{count * draws} draws is {bulk:.0f} (tails: {tail:.0f})"
    )
    if math.isinf(worst) or worst > _APART:
        return bad(f"the chains disagree: {message}", longer(case), worst)
    if min(bulk, tail) < _LEAST_ESS:
        return warning(f"the effective sample size is small: {message}", longer(case), worst)
    return good(message, worst)


def _functions(case: DiagnosticData, count: int, draws: int) -> Tensor:
    """Function values at some training rows and the parameters of the likelihood:
    [K, T, entries]. Logits are normalised, since a constant does not change predictions."""
    few = case.train.thinned(_ROWS, case.seed)
    p = case.base.predict(few.x)
    parts = []
    for head in p.heads:
        f = head.samples.detach().cpu()
        if head.likelihood.class_axis:
            f = torch.log_softmax(f, 2)
        parts.append(f.reshape(count, draws, -1))
    assert isinstance(case.base, SamplePosterior)
    for group in case.base.groups(None, 0):  # one group: nothing is thinned
        for value in group.theta().values():
            parts.append(value.detach().cpu().reshape(count, draws, -1))
    return torch.cat([part.double() for part in parts], 2)


_MOST_WEIGHTS = 1000


def weights(case: DiagnosticData) -> Finding:
    """R-hat of single weights: for information, beside that of the functions."""
    base = case.base
    if not isinstance(base, SamplePosterior) or not case.is_chain:
        return skipped("the method runs no MCMC chains")
    if base.samples.shape[1] < LEAST_DRAWS:
        return skipped(f"{base.samples.shape[1]} draws per chain are too few to evaluate")
    size = base.samples.shape[2]
    some = torch.linspace(0, size - 1, min(size, _MOST_WEIGHTS)).long().unique()
    values = base.samples[:, :, some.to(base.samples.device)].detach().cpu()
    if not bool(torch.isfinite(values).all()):
        return bad("some draws hold weights that are not finite", calmer(case))
    each = rhat(values)
    worst, apart = float(each.max()), float((each > APART).double().mean())
    message = (
        f"R-hat of {len(some)} weights is {worst:.3g} at most, the smallest effective sample size "
        f"is {float(ess_bulk(values).min()):.0f}"
    )
    if apart == 0:
        return good(f"{message}: the chains agree for every weight", worst)
    return good(
        f"{message}; {apart:.0%} of them are above {APART}: chains may be in symmetric modes, "
        "which give the same functions; the check of the functions is the one that matters for "
        "predictions",
        worst,
    )


def energy(case: DiagnosticData) -> Finding:
    """Divergent transitions and E-BFMI of a Hamiltonian sampler, from its diagnostics."""
    found = case.posterior.diagnostics
    if "divergences" not in found and "ebfmi" not in found:
        return skipped("the method runs no MCMC chains with energies")
    count, share = int(found.get("divergences", 0)), float(found.get("divergent_share", 0.0))
    ratios = [r for r in found.get("ebfmi", []) if math.isfinite(r)]
    lowest = min(ratios, default=math.nan)
    message = f"{count} transitions diverged"
    if ratios:
        message = f"{message}; E-BFMI is {lowest:.2f} at least"
    if share > MOST_DIVERGENT:
        return bad(
            f"{message}: {share:.1%} of trajectories entered regions where the step size is too "
            "large; the draws miss these regions",
            any_of(smaller_steps(case), "another parametrisation (scaled, non-centred)"),
            share,
        )
    enough = ratios and found.get("transitions", 0) >= LEAST_TRANSITIONS
    if enough and lowest < LEAST_EBFMI:
        return warning(
            f"{message} (below {LEAST_EBFMI}): energies are explored slowly and tails too little",
            any_of(longer(case), "another parametrisation"),
            lowest,
        )
    return good(message, lowest if ratios else None)
