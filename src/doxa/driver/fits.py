"""The fits behind one call of `doxa.fit`.

A call with the default settings may need several fits: one of networks that each leave out a part
of the rows, one with each of the alternatives (`alternatives.py`), and one of all rows. `Fits`
makes them in this order:

    evaluated     a fit with some settings, with the score of its held-out rows
    on_all_rows   the chosen ones, fitted to all rows if each was trained without a part of them

Without parts and without an order in time, what was evaluated is what is returned. With them, some
networks are trained to be evaluated, and then a fit uses all rows (`CrossFit`):

**One network with few rows or few groups.** With fewer than 600 rows, the part that a single
network could hold out has fewer than sixty rows. They are too few to distinguish a bad network from
chance. With fewer than 50 rows, or with a part of fewer than ten groups, they are also too few for
early stopping, and every row is needed for training. So the rows are divided into K parts, and K
networks are trained at once, each without one part. (Between 50 and 600 rows, this is done only for
networks of at most 20,000 weights, for which K networks take little longer than one.) Together, the
held-out rows of the K networks are all rows. They are used for

    stopping      the step at which the sum of the K held-out scores is largest
    noise         one estimate of the likelihood's parameters, and its calibration
    evaluation    scores and status, where each network predicts its own part

The returned posterior is trained on all rows. Its training ends at the same step, and its
likelihood has the estimated parameters. The evaluation is slightly pessimistic, because the K
networks are trained on fewer rows. It is also slightly optimistic, because the step and the noise
are chosen on the rows that are scored.

**Rows in order of time.** If a posterior will predict later rows, it must be evaluated on later
rows. But the latest rows are also the most useful for training. So all members are first trained
on the first rows. The next rows are used for early stopping and to estimate the noise, and the last
rows for the evaluation (`setup.later_rows`). Then all members are trained on all rows, each up to
the step at which it was stopped. The evaluation is pessimistic if the latest rows improve the fit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from doxa.driver.blocks import Block, others
from doxa.driver.calibration import adopt_likelihood
from doxa.driver.finish import blocks_of, run_fit
from doxa.driver.loop import Progress
from doxa.driver.runs import RunSpec
from doxa.driver.setup import fingerprint
from doxa.method import FitSettings, Method, Run
from doxa.model.model import Problem
from doxa.posterior import Posterior

log = logging.getLogger("doxa")

PARTS = "parts"  # the subfolder of checkpoints of the networks that evaluate


class LogOnce(logging.Filter):
    """A context in which this thread logs each message once. The fit to the parts and the fit to
    all rows are prepared from the same data and network, and would log the same messages. One
    object may be entered several times, and remembers what was logged before."""

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
    """The results of the evaluated networks, which the fit to all rows uses.

    Parameters
    ----------
    evaluated : sequence of Posterior
        One posterior per run, with the calibrated likelihood, the scores and the status.
    stop_at : dict of int to list of int
        For each stage with early stopping, the step at which it ends for each member of the fit to
        all rows.
    noise : Tensor of shape [M, ...] or None
        The estimated parameters of the likelihood.
    parts : int
        K, or 0 for rows in order of time.
    """

    evaluated: Sequence[Posterior]
    stop_at: dict[int, list[int]]
    noise: Tensor | None
    parts: int

    def settings(self, settings: FitSettings) -> FitSettings:
        """The settings of the fit to all rows."""
        return replace(settings, stop_at=self.stop_at, held_out_noise=self.noise)

    def of_runs(self, runs: Sequence[int]) -> CrossFit:
        """The results for some of the runs. If there are parts, each run has one member."""
        count = len(next(iter(self.stop_at.values()), self.evaluated)) // len(self.evaluated)
        members = [r * count + m for r in runs for m in range(count)]
        return CrossFit(
            [self.evaluated[r] for r in runs],
            {stage: [steps[m] for m in members] for stage, steps in self.stop_at.items()},
            None if self.noise is None else self.noise[members], self.parts,
        )  # fmt: skip

    def apply(self, posteriors: Sequence[Posterior]) -> None:
        """Store the scores, the status and the calibrated likelihood in the posteriors of the fit
        to all rows, one per run."""
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
    """Train the networks of each run, each without its own part of the rows, and evaluate them.

    `checkpoint` is the folder of the fit. Checkpoints of the parts are in its subfolder `parts`."""
    count = run.size // len(specs)
    log.info(
        "%d networks are trained without a part of the rows each: these rows stop the training, "
        "estimate the noise and evaluate the fit, which is then trained on all rows", count
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint) / PARTS
    evaluated, result = run_fit(run, method, specs, began, folder, digest, parts=True)
    return CrossFit(evaluated, _stops(result, count), _noise(result, count), count)


def fit_in_order(
    run: Run, method: Method, specs: Sequence[RunSpec], began: float,
    checkpoint: str | Path | None, digest: str,
) -> CrossFit:  # fmt: skip
    """Train the members of each run on the first rows, and evaluate them on the last rows. The
    arguments are those of `cross_fit`."""
    log.info(
        "rows in order of time: the members are first trained on the first %d rows; %d later rows "
        "stop the training, and the last %d evaluate it; the fit is then trained on all rows",
        len(run.rows.rows[0]), len(run.rows.held_out_rows().rows[0]), len(run.rows.evaluated(0)),
    )  # fmt: skip
    folder = None if checkpoint is None else Path(checkpoint) / PARTS
    evaluated, result = run_fit(run, method, specs, began, folder, digest)
    return CrossFit(evaluated, result.stops, result.state.get("noise"), 0)


def _stops(result: Progress, count: int) -> dict[int, list[int]]:
    """The median of the steps at which the networks of each run ended. These steps differ only if
    a network has diverged."""
    return {
        stage: [
            sorted(steps[start : start + count])[count // 2]
            for start in range(0, len(steps), count)
        ]
        for stage, steps in result.stops.items()
    }


def _noise(result: Progress, count: int) -> Tensor | None:
    """The likelihood's parameters of each run, [runs, ...]. All networks of a run have the same
    ones. Those of particles are averaged."""
    noise = result.state.get("noise")
    if noise is None:
        return None
    each = noise.unflatten(0, (-1, count)).mean(1)
    return each.mean(1, keepdim=True) if each.ndim == 3 else each


@dataclass(frozen=True)
class Variant:
    """The settings of a fit: those of the call, or alternatives to them.

    Parameters
    ----------
    problem : Problem
        What is fitted, with its prior.
    settings : FitSettings
    specs : sequence of RunSpec
    times : int, default 1
        The factor of the number of steps.
    name : str, default ""
        Its folder in the folder of checkpoints; "" for the settings of the call.
    """

    problem: Problem
    settings: FitSettings
    specs: Sequence[RunSpec]
    times: int = 1
    name: str = ""


Prepare = Callable[[Variant, list[int], Any, bool], Run]


@dataclass
class Fits:
    """The fits of one call.

    Parameters
    ----------
    prepare : callable
        Stacks members: (variant, members, validation, pooled) -> Run. `pooled`: the held-out rows
        of all members choose one step and one noise.
    check : callable
        Checks the network on the first run that is prepared.
    method : Method
    ids : list of int
        The members.
    validation : object
        What is held out, as in `doxa.fit`.
    parts : int
        The number of parts if one network is cross-fitted, else 0.
    in_order : bool
        Whether the last rows evaluate.
    folder : str, optional
        The folder of checkpoints.
    began : float
        When the call began, in seconds of the monotonic clock.
    """

    prepare: Prepare
    check: Callable[[Run], None]
    method: Method
    ids: list[int]
    validation: Any
    parts: int
    in_order: bool
    folder: str | None
    began: float
    log_once: LogOnce = field(default_factory=LogOnce)
    output: Any = None  # the shape of the network's outputs, from the first run
    crossed: list[tuple[Variant, CrossFit]] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = others.get()
        if world is not None and self.folder is not None:
            world.log.put_in(Path(self.folder))

    def evaluated(self, variant: Variant) -> list[Posterior]:
        """One posterior per run, with the score of its held-out rows, if there are any."""
        if not (self.parts or self.in_order):
            return self._fit(variant, self.validation)
        run = self._evaluating(variant)
        digest = self._digest(run, variant)
        with self.log_once:
            fit_parts = cross_fit if self.parts else fit_in_order
            crossed = fit_parts(
                run, self.method, variant.specs, self.began, self._folder(variant), digest
            )
        self.crossed.append((variant, crossed))
        return list(crossed.evaluated)

    def blocks(self, variant: Variant) -> list[Block]:
        """The blocks of the fit that evaluates, or of the only one."""
        folder, run = self._folder(variant), self._evaluating(variant)
        assert folder is not None
        folder = folder / PARTS if self.parts or self.in_order else folder
        return blocks_of(run, self.method, folder, self._digest(run, variant))

    def _evaluating(self, variant: Variant) -> Run:
        """The run of the fit whose held-out rows evaluate."""
        settings, ids, validation = variant.settings, self.ids, self.validation
        if self.parts:
            ids, validation = list(range(self.parts)), "auto"
            if settings.begin is not None:
                begin = settings.begin.repeat_interleave(self.parts, 0)
                settings = replace(settings, begin=begin)
        return self._prepared(
            replace(variant, settings=settings), ids, validation, bool(self.parts)
        )

    def on_all_rows(self, chosen: Sequence[Posterior]) -> list[Posterior]:
        """The posteriors that are returned, for the evaluated ones that were chosen."""
        if not self.crossed:
            return list(chosen)
        found: dict[int, Posterior] = {}
        for variant, crossed in self.crossed:
            own = {
                r: i for r, posterior in enumerate(chosen)
                for i, evaluated in enumerate(crossed.evaluated) if posterior is evaluated
            }  # fmt: skip
            if not own:
                continue
            some = crossed.of_runs(list(own.values()))
            specs = [variant.specs[i] for i in own.values()]
            settings = some.settings(variant.settings)
            fitted = self._fit(replace(variant, settings=settings, specs=specs), None)
            some.apply(fitted)
            found |= dict(zip(own, fitted, strict=True))
        return [found[r] for r in range(len(chosen))]

    def _fit(self, variant: Variant, validation: Any) -> list[Posterior]:
        run = self._prepared(variant, self.ids, validation, False)
        digest = self._digest(run, variant)
        if run.by_tensor:  # the initial weights would be another copy during the fit
            run = replace(run, initial=None)
        posteriors, _ = run_fit(
            run, self.method, variant.specs, self.began, self._folder(variant), digest
        )
        if run.problem.model is not None:
            run.problem.model.own()
        return posteriors

    def _prepared(self, variant: Variant, ids: list[int], validation: Any, pooled: bool) -> Run:
        """The stacked members. A later fit of the same data repeats no message."""
        with self.log_once:
            run = self.prepare(variant, ids, validation, pooled)
        if self.output is None:
            self.check(run)
            self.output = run.output
        return run

    def _folder(self, variant: Variant) -> Path | None:
        return None if self.folder is None else Path(self.folder) / variant.name

    def _digest(self, run: Run, variant: Variant) -> str:
        needed = self.folder is not None or others.get() is not None
        return fingerprint(run, self.method, variant.specs) if needed else ""
