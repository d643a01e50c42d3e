"""Alternatives: a fit with the default settings is followed by fits with other settings.

A network that is trained with a small learning rate and a narrow prior may end on a plateau, and
miss structure that it could learn. Held-out rows show this only by comparison with a fit that
learns more. So a method may declare `Alternatives`: a wider prior, a larger learning rate, and
values of its own settings. They are fitted as stacked runs, with the same held-out rows, and the
best posterior is returned.

**The choice.** An alternative replaces the best fit so far only if its score on the m held-out rows
is clearly better:

    gain > max(0.02, 2/m) nats per held-out row

This limit is larger than the optimism of choosing the best of a few fits on the same rows. If the
status of the best fit so far does not say that it has learned too little, the gain must also be
above two standard errors of the score. The reason is that networks with a wide prior differ more
from each other, and the gain of their mean over a single network is estimated from the same
networks. The scores of an alternative are corrected for one more choice (`driver/validation.py`).
If a single network is cross-fitted, the alternatives are cross-fitted too, and only the chosen
settings are fitted to all rows (`driver/fits.py`).

**The rounds.** With fewer than `FEW_ROWS` rows, alternatives are always fitted, because further
fits cost little. With more rows, they are fitted only if the status of the first fit says that it
has learned too little. Another round fits the best settings with twice as many steps. There are at
most `ROUNDS` rounds. They continue while a round gains at least `MUCH` nats per held-out row, or
while it gains less and the status still says that too little is learned.

**The conditions.** Only settings that the user has not given are changed. There are no alternatives
if `prior`, `lr`, `steps`, `epochs`, `schedule`, `optimizer` or a setting of the method is given, or
if `validation` is not "auto". They are fitted only for tables of numbers and networks with at most
`MOST_WEIGHTS` weights, because a stack of several small networks costs little more than one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from doxa.data.rows import effective_rows
from doxa.driver.runs import RunSpec
from doxa.driver.setup import MOST_WEIGHTS, Given
from doxa.driver.validation import correct_for_choice
from doxa.method import Method
from doxa.method.method import Alternatives
from doxa.model.model import Network, Problem
from doxa.posterior import Posterior
from doxa.posterior.base import AlternativeFits

log = logging.getLogger("doxa")

FEW_ROWS = 1000  # with fewer rows, alternatives are always fitted
ROUNDS = 3
LEAST, MUCH = 0.02, 0.2  # gain in nats per held-out row: to choose an alternative, and to continue
ERRORS = 2.0  # gain in standard errors, to replace a fit that has learned enough
SETTINGS = "alternative settings"  # key of an alternative's settings in the record's metadata
LEARNED_LITTLE = ("underfit", "prior-collapse", "worse-than-constant")

Fitted = Callable[[Sequence[RunSpec], int, str], Sequence[Posterior]]


def alternatives_of(
    method: Method, problem: Problem, given: Given, specs: Sequence[RunSpec]
) -> tuple[Alternatives, Network] | None:
    """The alternatives of a method, if a fit may use them.

    Parameters
    ----------
    method : Method
        The method.
    problem : Problem
        The problem with the default prior.
    given : Given
        The data of the fit.
    specs : sequence of RunSpec
        The runs.

    Returns
    -------
    tuple of (Alternatives, Network) or None
        The alternatives, and the problem with their prior. None if the method has none, if the user
        has given settings, if the data are not a table of numbers, or if the network is large.
    """
    if not isinstance(problem, Network) or not problem.model.default_prior:
        return None
    found = method.alternatives_on(problem)
    if found is None:
        return None
    table = (
        given.source is None and given.tasks is None and isinstance(given.x, Tensor)
        and given.x.ndim == 2 and given.x.is_floating_point()
    )  # fmt: skip
    if not table or problem.layout.size > MOST_WEIGHTS or any(spec.hyper for spec in specs):
        return None
    names = {name for settings in found.settings for name in settings} - {"lr"}
    if any(getattr(method, name) != getattr(type(method)(), name) for name in names):
        return None
    return found, Network(problem.model.with_prior(found.prior))


def best_of_alternatives(
    first: Sequence[Posterior], specs: Sequence[RunSpec], found: Alternatives, given: Given,
    fitted: Fitted,
) -> list[Posterior]:  # fmt: skip
    """Fit alternatives, and return the best posterior of each run.

    Parameters
    ----------
    first : sequence of Posterior
        The posteriors with the default settings, one per run.
    specs : sequence of RunSpec
        The runs.
    found : Alternatives
        The alternatives of the method.
    given : Given
        The data of the fit.
    fitted : callable
        Fits alternatives. Its arguments are the runs with their settings, the factor by which the
        number of steps is multiplied, and the name of the folder for checkpoints.

    Returns
    -------
    list of Posterior
        For each run, the posterior with the default settings or that of an alternative.
    """
    best = list(first)
    gained = [math.inf if _rows(given, spec) < FEW_ROWS else 0.0 for spec in specs]
    tried = [0] * len(best)
    settings: list[Sequence[Mapping[str, float]]] = [found.settings] * len(best)
    for round_ in range(ROUNDS):
        again = [
            r for r, posterior in enumerate(best)
            if posterior.validation is not None and posterior.status != "stopped"
            and (gained[r] >= MUCH or (_learned_little(posterior) and gained[r] >= 0))
        ]  # fmt: skip
        if not again:
            break
        each = [replace(specs[r], hyper=dict(own)) for r in again for own in settings[r]]
        posteriors = iter(fitted(each, 2**round_, f"alternatives-{round_}"))
        for r in again:
            own = [next(posteriors) for _ in settings[r]]
            tried[r] += len(own)
            i = max(range(len(own)), key=lambda i: _score(own[i]))
            gain = _score(own[i]) - _score(best[r])
            chosen = gain > _margin(best[r]) and own[i].status != "diverged"
            best[r], gained[r] = (own[i], gain) if chosen else (best[r], -math.inf)
            settings[r] = [settings[r][i]]
    for r, (posterior, before) in enumerate(zip(best, first, strict=True)):
        if not tried[r]:
            continue
        assert before.validation is not None
        changed = posterior.record.metadata.pop(SETTINGS, "")
        alternatives: AlternativeFits = {
            "tried": tried[r], "chosen": posterior is not before, "settings": changed,
            "validation_of_defaults": before.validation,
        }  # fmt: skip
        posterior.record.diagnostics["alternatives"] = alternatives
        if posterior is not before:
            correct_for_choice(posterior)
            log.info(
                "%sother settings than the defaults predict the held-out rows better, by %.2g nats "
                "per row: %s", f"run {r}: " if len(best) > 1 else "",
                _score(posterior) - before.validation, changed,
            )  # fmt: skip
    return best


def _learned_little(posterior: Posterior) -> bool:
    return str(posterior.status) in LEARNED_LITTLE


def _score(posterior: Posterior) -> float:
    value = posterior.validation
    return -float("inf") if value is None or value != value else value


def _margin(posterior: Posterior) -> float:
    found = posterior.record.diagnostics.get("held_out", {})
    rows, error = found.get("rows", 0), found.get("log_prob_error", 0.0)
    errors = 0.0 if _learned_little(posterior) else ERRORS
    return float(max(LEAST, 2 / max(1, rows), errors * error))


def _rows(given: Given, spec: RunSpec) -> float:
    rows = given.rows_of_run(spec)
    return len(rows) if given.weight is None else effective_rows(given.weight[rows])


def changed_settings(found: Alternatives, settings: Any, rate: float, steps: int) -> str:
    """The settings of an alternative as text."""
    own = {"prior": found.prior, "lr": rate, "steps": steps} | dict(settings)
    return ", ".join(f"{name}={value!r}" for name, value in own.items())
