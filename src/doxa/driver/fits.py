"""The fits behind one call of `doxa.fit`.

A call with the default settings may need several fits: one of networks that each leave out a part
of the rows, one with each of the alternatives, and one of all rows (`cross_fit.py`,
`alternatives.py`). `Fits` makes them in this order:

    evaluated     a fit with some settings, with the score of its held-out rows
    on_all_rows   the chosen ones, fitted to all rows if each was trained without a part of them

Without parts and without an order in time, what was evaluated is what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from doxa.driver.cross_fit import CrossFit, LogOnce, cross_fit, fit_in_order
from doxa.driver.finish import run_fit
from doxa.driver.runs import RunSpec
from doxa.driver.setup import fingerprint
from doxa.method import FitSettings, Method, Run
from doxa.model.model import Problem
from doxa.posterior import Posterior


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

    def evaluated(self, variant: Variant) -> list[Posterior]:
        """One posterior per run, with the score of its held-out rows, if there are any."""
        if not (self.parts or self.in_order):
            return self._fit(variant, self.validation)
        settings, ids, validation = variant.settings, self.ids, self.validation
        if self.parts:
            ids, validation = list(range(self.parts)), "auto"
            if settings.begin is not None:
                begin = settings.begin.repeat_interleave(self.parts, 0)
                settings = replace(settings, begin=begin)
        run = self._prepared(replace(variant, settings=settings), ids, validation, bool(self.parts))
        digest = self._digest(run, variant)
        with self.log_once:
            fit_parts = cross_fit if self.parts else fit_in_order
            crossed = fit_parts(
                run, self.method, variant.specs, self.began, self._folder(variant), digest
            )
        self.crossed.append((variant, crossed))
        return list(crossed.evaluated)

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
        return "" if self.folder is None else fingerprint(run, self.method, variant.specs)
