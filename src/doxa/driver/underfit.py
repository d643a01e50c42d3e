"""Underfitting: a fit is compared with simple models that are fitted to the same rows.

The simple models are called yardsticks (`driver/yardsticks.py`). They are fitted to the training
rows of each split, and predict its held-out rows. The fit and the yardsticks are thus scored on the
same rows, and the scores are paired per row. The scores of the fit are those of its evaluation.
They estimate the scores of the returned posterior, and are corrected for the choices that were made
on these rows. The scores of the yardsticks are corrected in the same way. The status is "underfit"
if the gain of the best yardstick is more than 0.1 nats per row and more than 1.5 standard errors.
On simulated tables, a limit of 2.5 standard errors overlooked a third more of the bad fits, and
gave hardly fewer false alarms (`benchmarks/results/status.md`).

If all members hold out the same rows, and these are fewer than 200, there is a second comparison,
on held-out and training rows together. A yardstick then predicts each training row with a model
that is fitted without it, or without a fold of rows. A fit that is worse even on the rows that it
was trained on is also worse on new rows. The comparison with the clearer result is reported.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.data import Data
from doxa.driver.validation import Scored, ScoresBySplit, evenly, in_units, log_prob_of
from doxa.driver.yardsticks import MOST_ROWS, Yardstick, why_untested, yardsticks
from doxa.errors import MemoryBudgetError
from doxa.method import Run
from doxa.posterior import Compared, Posterior, Status

GAIN, ERRORS = 0.1, 1.5  # limits for the best yardstick, in nats per row and in standard errors
FEWEST = 30  # smallest effective number of rows that are compared
ENOUGH = 200  # with fewer held-out rows, training rows are compared too
MOST_RUNS = 4  # fits of more runs are not compared, because this would take too long

CALLED = {
    "constant": "a constant", "linear": "a linear model", "gp": "a Gaussian process",
    "nearest-neighbours": "the mean of the nearest rows", "boosted-trees": "boosted trees",
}  # fmt: skip


def compare_with_yardsticks(posterior: Posterior, scores: ScoresBySplit, run: Run) -> None:
    """Compare a fit with yardsticks, and store their gains and the status in its record.

    Parameters
    ----------
    posterior : Posterior
        The posterior of the fit. Its record is changed.
    scores : dict of int to Tensor
        The log density of each held-out row under the fit, by split.
    run : Run
        The run.
    """
    record, data = posterior.record, run.rows
    split = next(iter(scores))
    rows, parts, score = _compared_rows(scores, run)
    held_out = len(score)
    found, why = _fitted(rows, parts, held_out, posterior, split, run)
    if not found:
        record.diagnostics["yardsticks"] = {"tested": False, "why": why}
        return
    if len(scores) == 1 and held_out < ENOUGH:
        x, y = in_units(data, rows[held_out:], split)
        with suppress(MemoryBudgetError):
            score = torch.cat([score, log_prob_of(posterior.predict(x), y).double().cpu()])
    each = [_gains(found, score[:n], rows[:n], data) for n in {held_out, len(score)}]
    enough = [gains for gains in each if gains.effective >= FEWEST]
    if not enough:  # the training rows took too much memory
        record.diagnostics["yardsticks"] = {"tested": False, "why": _few(each[0].effective, data)}
        return
    gains = max(enough, key=lambda gains: gains.share)
    mean, best, error = gains.mean, gains.best, gains.error
    compared: Compared = {
        "tested": True, "rows": gains.rows, "trained": len(rows), "best": best, "error": error,
    }  # fmt: skip
    record.diagnostics["yardsticks"] = {**mean, **compared}
    if gains.share > 1:
        other = f', or use the method "{best}"' if best in ("gp", "linear") else ""
        reason = (
            f"{CALLED[best]}, fitted to the same rows, predicts {gains.rows} rows that it has not "
            f"seen {mean[best]:.2g} nats per row better than this fit (standard error "
            f"{error:.2g}): the fit has not learned what the inputs say about y; standardise "
            "(standardize=True), train longer (steps, patience), use a larger network or another "
            f"learning rate{other}"
        )
        record.status = record.status.or_before(Status("underfit", reason))


class _Gains(NamedTuple):
    """The mean gain of each yardstick over a fit, in nats per row; the name of the best one and the
    standard error of its gain; and the number and the effective number of rows."""

    mean: dict[str, float]
    best: str
    error: float
    rows: int
    effective: float

    @property
    def share(self) -> float:
        """The gain of the best yardstick, divided by the limit above which a fit is underfit."""
        return self.mean[self.best] / max(GAIN, ERRORS * self.error)


def _gains(found: list[Yardstick], score: Tensor, rows: Tensor, data: Data) -> _Gains:
    n, weight, group = len(score), data.weight_of(rows), data.groups_of(rows)
    each = {
        one.name: Scored(one.held_out[:n] - one.optimism - score, weight, group) for one in found
    }
    mean = {name: gain.mean for name, gain in each.items()}
    best = max(mean, key=lambda name: mean[name])
    return _Gains(mean, best, each[best].new_error, n, data.effective_rows(rows))


def _fitted(
    rows: Tensor, parts: Tensor, held_out: int, posterior: Posterior, split: int, run: Run
) -> tuple[list[Yardstick], str]:
    """The yardsticks fitted to these rows, and the reason if there are none."""
    data = run.rows
    weight = data.weight_of(rows)
    used = len(rows) if int(parts.max()) == 0 else held_out  # with one split, training rows too
    count = data.effective_rows(rows[:used])
    if count < FEWEST:
        return [], _few(count, data)
    if len(set(run.run_of)) > MOST_RUNS:
        return [], f"the fit has more than {MOST_RUNS} runs"
    likelihood = run.likelihoods[data.run_of(split)] if run.likelihoods else run.likelihood
    x, y = in_units(data, rows, split)
    why = why_untested(x, y, likelihood)
    if why:
        return [], why
    classes = run.output[0] if likelihood.class_axis else 0
    found = yardsticks(x, y, likelihood, weight, posterior.record.seed or 0, parts, classes)
    return found, "no simple model could be fitted"


def _few(count: float, data: Data) -> str:
    what = "rows" if data.group is None else "groups of rows"
    return f"{count:.0f} {what} are too few: {FEWEST} are needed"


def _compared_rows(scores: ScoresBySplit, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """At most `MOST_ROWS` rows for the yardsticks, held-out rows first; the part of each row, which
    is −1 for training rows; and the log density of the held-out rows under the fit."""
    data = run.rows
    held = [data.evaluated(split).cpu() for split in scores]
    rows = torch.cat([evenly(own, len(s)) for own, s in zip(held, scores.values(), strict=True)])
    sizes = torch.tensor([len(score) for score in scores.values()])
    part = torch.arange(len(sizes)).repeat_interleave(sizes)
    others = evenly(data.rows[next(iter(scores))].cpu(), 2 * MOST_ROWS)
    others = others[~torch.isin(others, torch.cat(held))]
    count = max(MOST_ROWS // 2, MOST_ROWS - len(others))
    some = evenly(torch.arange(len(rows)), count)
    if len(others):
        others = evenly(others, MOST_ROWS - len(some))
    part = torch.cat([part[some], torch.full((len(others),), -1)])
    score = torch.cat(list(scores.values())).double().cpu()
    return torch.cat([rows[some], others]), part, score[some]
