"""Cross-fitting: networks that are evaluated, and then a fit to all rows.

**Few rows, or few groups, and one network.**

With fewer than 600 rows, a part that could be held out from a single network has fewer than sixty
rows. They cannot tell a network that predicts badly from bad luck. With fewer than 50 rows, or with
a part of fewer than ten groups, they cannot stop its training either, and every row is needed to
train on. So the rows are divided into K parts, and K networks are trained at once, each without one
part. (Between 50 and 600 rows, this is done for networks of at most 20,000 weights, for which K
networks take little longer than one.) Their held-out rows, which are all rows, do three things:

    stopping      the step at which the sum of the K held-out scores is largest
    noise         one estimate of the likelihood's parameters, and its calibration
    evaluation    scores and status, of each network alone on its own part

The posterior that is returned is trained on all rows. Its training ends at the same step, and its
likelihood has the estimated parameters. The evaluation is slightly pessimistic, because the K
networks are trained on fewer rows, and slightly optimistic, because one step and the noise are
chosen on the rows that are scored.

**Rows in order of time.** A fit that is used for later rows must be evaluated on later rows, but
the posterior that is returned needs the last rows most. So all members are trained on the first
rows, the rows after them stop the training and estimate the noise, and the last rows evaluate
(`setup.later_rows`). Then all members are trained on all rows, each up to its own step. The
evaluation is pessimistic where the newest rows help.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from doxa.driver.calibration import adopt_likelihood
from doxa.driver.finish import run_fit
from doxa.driver.loop import Progress
from doxa.driver.runs import RunSpec
from doxa.method import FitSettings, Method, Run
from doxa.posterior import Posterior

log = logging.getLogger("doxa")


class LogOnce(logging.Filter):
    """Inside the `with` blocks of one object, this thread logs each message once: a fit is prepared
    for the parts and for all rows, from the same data and the same network."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        message = record.getMessage()
        new = message not in self._logged
        self._logged.add(message)
        return new

    def __enter__(self) -> Self:
        log.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        log.removeFilter(self)


@dataclass(frozen=True)
class CrossFit:
    """The result of the networks that were evaluated, for the fit to all rows.

    Parameters
    ----------
    evaluated : sequence of Posterior
        One per run: the likelihood, the scores and the status.
    stop_at : dict
        The step at which each stage with early stopping ends, for each member of the fit to all
        rows.
    noise : Tensor, default None
        The likelihood's parameters, [M, ...].
    parts : int
        K; 0 for rows in order of time.
    """

    evaluated: Sequence[Posterior]
    stop_at: dict[int, list[int]]
    noise: Tensor | None
    parts: int

    def settings(self, settings: FitSettings) -> FitSettings:
        """The settings of the fit to all rows."""
        return replace(settings, stop_at=self.stop_at, held_out_noise=self.noise)

    def of_runs(self, runs: Sequence[int]) -> CrossFit:
        """The same for some of the runs. Runs have one member each if there are parts."""
        count = len(next(iter(self.stop_at.values()), self.evaluated)) // len(self.evaluated)
        members = [r * count + m for r in runs for m in range(count)]
        return CrossFit(
            [self.evaluated[r] for r in runs],
            {stage: [steps[m] for m in members] for stage, steps in self.stop_at.items()},
            None if self.noise is None else self.noise[members], self.parts,
        )  # fmt: skip

    def apply(self, posteriors: Sequence[Posterior]) -> None:
        """Give the posteriors of the fit to all rows the scores, the status and the calibrated
        likelihood."""
        for posterior, evaluated in zip(posteriors, self.evaluated, strict=True):
            found, record = evaluated.record, posterior.record
            record.validation, record.certificate = found.validation, found.certificate
            for key in ("held_out", "held_out_calibration", "yardsticks", "alternatives"):
                if key in found.diagnostics:
                    record.diagnostics[key] = found.diagnostics[key]
            held_out = record.diagnostics.setdefault("held_out", {})
            if self.parts:
                held_out["cross_fit_parts"] = self.parts
            else:
                held_out["later_rows"] = True
            if "fitted_likelihood" in found.metadata:
                record.metadata["fitted_likelihood"] = found.metadata["fitted_likelihood"]
            if "held_out_calibration" in found.diagnostics:
                adopt_likelihood(posterior, evaluated)
            record.status = record.status.or_before(found.status)


def cross_fit(
    run: Run, method: Method, specs: Sequence[RunSpec], began: float,
    checkpoint: str | Path | None, digest: str,
) -> CrossFit:  # fmt: skip
    """Fit the members of each run, each without its own part of the rows, and evaluate them.

    `checkpoint` is the folder of the fit; the parts have a folder of their own in it."""
    count = run.size // len(specs)
    log.info(
        "%d networks are trained without a part of the rows each: these rows stop the training, "
        "estimate the noise and evaluate the fit, which is then trained on all rows", count
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint) / "parts"
    evaluated, result = run_fit(run, method, specs, began, folder, digest, parts=True)
    return CrossFit(evaluated, _stops(result, count), _noise(result, count), count)


def fit_in_order(
    run: Run, method: Method, specs: Sequence[RunSpec], began: float,
    checkpoint: str | Path | None, digest: str,
) -> CrossFit:  # fmt: skip
    """Fit the members of each run to the first rows, and evaluate them on the last ones."""
    log.info(
        "rows in order of time: the members are first trained on the first %d rows; %d later rows "
        "stop the training, and the last %d evaluate it; the fit is then trained on all rows",
        len(run.rows.rows[0]), len(run.rows.held_out_rows().rows[0]), len(run.rows.evaluated(0)),
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint) / "parts"
    evaluated, result = run_fit(run, method, specs, began, folder, digest)
    return CrossFit(evaluated, result.stops, result.state.get("noise"), 0)


def _stops(result: Progress, count: int) -> dict[int, list[int]]:
    """The median step of the networks of each run. They differ only if one has diverged."""
    return {
        stage: [
            sorted(steps[start : start + count])[count // 2]
            for start in range(0, len(steps), count)
        ]
        for stage, steps in result.stops.items()
    }


def _noise(result: Progress, count: int) -> Tensor | None:
    """The likelihood's parameters of each run, [runs, ...]: the same for all its networks, and for
    particles their mean."""
    noise = result.state.get("noise")
    if noise is None:
        return None
    each = noise.unflatten(0, (-1, count)).mean(1)
    return each.mean(1, keepdim=True) if each.ndim == 3 else each
