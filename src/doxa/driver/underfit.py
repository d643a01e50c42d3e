"""Underfitting: whether simple models of the same rows predict held-out rows better than a fit.

Yardsticks (`driver/yardsticks.py`) are fitted to the training rows of each split and predict its
held-out rows, so that the scores of each row are paired. The scores of the fit are those of the
evaluation: they estimate the scores of the returned posterior, and are corrected for what these
rows have chosen. The yardsticks are corrected in the same way. The status is "underfit" if the gain
of the best yardstick is more than 0.1 nats per row and more than 2.5 standard errors. These are
many, because the best of five is tested.

If all members hold out the same rows, and these are fewer than 100, training rows are used, too:
there a yardstick predicts each row by a model without it, or without a fold of rows. A fit that is
worse on rows that it was trained on is worse on new rows, too.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from doxa.data.rows import effective_rows
from doxa.driver.validation import Scored, ScoresBySplit, evenly, in_units, log_prob_of
from doxa.driver.yardsticks import MOST_ROWS, Yardstick, why_untested, yardsticks
from doxa.errors import MemoryBudgetError
from doxa.method import Run
from doxa.posterior import Compared, Posterior, Status

GAIN, ERRORS = 0.1, 2.5  # of the best yardstick: nats per row, and standard errors
FEWEST = 30  # effective number of rows that are compared
ENOUGH = 100  # if all members hold out the same rows, and fewer: training rows are compared, too
MOST_RUNS = 4  # fits of more runs are not compared, which would take too long

CALLED = {
    "constant": "a constant", "linear": "a linear model", "gp": "a Gaussian process",
    "nearest-neighbours": "the mean of the nearest rows", "boosted-trees": "boosted trees",
}  # fmt: skip


def compare_with_yardsticks(posterior: Posterior, scores: ScoresBySplit, run: Run) -> None:
    """Compare a fit with simple models of the same rows, and store their gains and the status.

    `scores` are those of its held-out rows, by split."""
    record, data = posterior.record, run.rows
    split = next(iter(scores))
    rows, parts, score = _compared_rows(scores, run)
    found, why = _fitted(rows, parts, len(score), posterior, split, run)
    if found and len(scores) == 1 and len(score) < ENOUGH:
        x, y = in_units(data, rows[len(score) :], split)
        with suppress(MemoryBudgetError):
            score = torch.cat([score, log_prob_of(posterior.predict(x), y).double().cpu()])
    weight = data.weight_of(rows[: len(score)])
    gains = {
        each.name: Scored(each.held_out[: len(score)] - each.optimism - score, weight)
        for each in found
    }
    if not gains:
        record.diagnostics["yardsticks"] = {"tested": False, "why": why}
        return
    mean = {name: gain.mean for name, gain in gains.items()}
    best = max(mean, key=lambda name: mean[name])
    error = gains[best].new_error
    compared: Compared = {
        "tested": True, "rows": len(score), "trained": len(rows), "best": best, "error": error,
    }  # fmt: skip
    record.diagnostics["yardsticks"] = {**mean, **compared}
    if mean[best] > max(GAIN, ERRORS * error):
        other = f', or use the method "{best}"' if best in ("gp", "linear") else ""
        reason = (
            f"{CALLED[best]}, fitted to the same rows, predicts {len(score)} rows that it has not "
            f"seen {mean[best]:.2g} nats per row better than this fit (standard error "
            f"{error:.2g}): the fit has not learned what the inputs say about y; standardise "
            "(standardize=True), train longer (steps, patience), use a larger network or another "
            f"learning rate{other}"
        )
        record.status = record.status.or_before(Status("underfit", reason))


def _fitted(
    rows: Tensor, parts: Tensor, held_out: int, posterior: Posterior, split: int, run: Run
) -> tuple[list[Yardstick], str]:
    """The yardsticks of these rows; or the reason if there are none."""
    data = run.rows
    weight = data.weight_of(rows)
    used = len(rows) if int(parts.max()) == 0 else held_out  # with or without training rows
    count = float(used) if weight is None else effective_rows(weight[:used])
    if count < FEWEST:
        return [], f"{count:.0f} rows are too few: {FEWEST} are needed"
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


def _compared_rows(scores: ScoresBySplit, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """At most `MOST_ROWS` rows for yardsticks, first the held-out ones; the part of each; and the
    log density of the held-out ones."""
    data = run.rows
    assert data.validation is not None
    held = [data.validation[split].cpu() for split in scores]
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
