"""The end of a fit: the posterior of each run, with its record and its status."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from doxa.data import Data
from doxa.driver import blocks
from doxa.driver.blocks import Work
from doxa.driver.calibration import calibrate_on_held_out
from doxa.driver.loop import Driver, Progress, copied
from doxa.driver.runs import RunSpec
from doxa.driver.underfit import compare_with_yardsticks
from doxa.driver.validation import (
    Choices,
    check_prior_collapse,
    evaluate_held_out,
    posteriors_by_split,
)
from doxa.driver.watch import Seen, Snapshots
from doxa.engine.engine import threads_for
from doxa.errors import MethodError
from doxa.method import Method, Run, State, slice_state
from doxa.method.row_sums import divided_by
from doxa.posterior import Posterior, SamplePosterior, Status, Stopping


def run_fit(
    run: Run, method: Method, specs: Sequence[RunSpec], began: float,
    checkpoint: str | Path | None = None, digest: str = "", parts: bool = False,
) -> tuple[list[Posterior], Progress]:  # fmt: skip
    """Run a method's stages and return its posteriors, one per run.

    If the folder `checkpoint` contains a checkpoint, the fit resumes from it with the engine that
    wrote it. `digest` is the fingerprint of the fit, which must be that of the checkpoint. The
    folder is locked until the fit ends. `parts`: each posterior is that of one member alone, and
    the members are evaluated alone (`fits.py`).
    """
    # A fit within a step of another one divides its own rows, or none.
    with divided_by(None), blocks.opened(run.trained(method), method, checkpoint, digest) as work:
        return _run_fit(work, method, specs, began, parts)


def blocks_of(run: Run, method: Method, checkpoint: str | Path, digest: str) -> list[blocks.Block]:
    """The blocks of a fit, each of which can be trained alone."""
    with blocks.opened(run.trained(method), method, checkpoint, digest, divided=True) as work:
        return work.listed()


def _run_fit(
    work: Work, method: Method, specs: Sequence[RunSpec], began: float, parts: bool
) -> tuple[list[Posterior], Progress]:
    run = work.run
    callbacks = () if parts else run.settings.callbacks
    watching = [callback for callback in callbacks if isinstance(callback, Snapshots)]
    for snapshots in watching:
        snapshots.fits += 1

    def follow(driver: Driver) -> None:
        """Make all steps, and show those that are asked for."""
        for seen in driver.steps():
            for snapshots in watching:
                if snapshots.due(seen.number):
                    snapshots.see(seen, _unfinished(run, method, driver, specs, seen))

    with run.engine.rounding():
        trained = work.train(follow if watching else None)
    result = trained.progress
    with threads_for(trained.product):
        posteriors = posteriors_of(run, method, result, specs, began, parts)
    for posterior in posteriors:
        posterior.record.diagnostics |= trained.facts
    blocks.compare_results(posteriors)
    return posteriors, result


def posteriors_of(
    run: Run, method: Method, result: Progress, specs: Sequence[RunSpec], began: float,
    parts: bool = False,
) -> list[Posterior]:  # fmt: skip
    """The posteriors of what the driver has done, one per run."""
    count = run.size // len(specs)
    seconds = time.monotonic() - began
    with run.evaluation():
        return [
            _posterior(run, method, result, spec, slice(r * count, (r + 1) * count), seconds, parts)
            for r, spec in enumerate(specs)
        ]


def _unfinished(
    run: Run, method: Method, driver: Driver, specs: Sequence[RunSpec], seen: Seen
) -> Callable[[], list[tuple[Posterior, RunSpec]]]:
    """A function that makes the posteriors of the current state, one per run. The state is copied
    here, as the next step may overwrite it."""
    at, count = driver.at, run.size // len(specs)
    state, draws = copied(at.state), len(at.kept or ())

    def make() -> list[tuple[Posterior, RunSpec]]:
        found = []
        for r, spec in enumerate(specs):
            rows = slice(r * count, (r + 1) * count)
            kept = at.draws(rows)
            kept = None if kept is None or not draws else kept[:draws]
            own, part = slice_state(state, rows), run.select_members(rows)
            why = f"the state after step {seen.number}"
            try:
                posterior = part.posterior(method, own, kept)
            except KeyError as error:  # an entry of a later stage
                if part.problem.model is None or "theta" not in own:
                    raise MethodError(
                        f"{method.name} has no posterior after step {seen.number}, in its stage "
                        f"{seen.stage!r}: a later stage makes it"
                    ) from error
                posterior = _points(part, method, own)
                why += ", as a point: a later stage makes the posterior of this method"
            posterior.record.seed = spec.seed
            posterior.record.status = Status("unfinished", why)
            posterior.record.diagnostics["steps"] = seen.number
            found.append((posterior, spec))
        return found

    return make


def _points(run: Run, method: Method, state: State) -> Posterior:
    """The current weights, as points."""
    theta = method.parameters(run, state)
    found = SamplePosterior(
        samples=theta.unsqueeze(1) if theta.ndim == 2 else theta, chain=False,
        **run.common(method), **run.shared(state),
    )  # fmt: skip
    if run.whole is not run:
        own = run.whole.common(method)
        found.of_network(own["model"], own["inputs"], own["scales"])
    return found


def _posterior(
    run: Run, method: Method, result: Progress, spec: RunSpec, rows: slice, seconds: float,
    parts: bool,
) -> Posterior:  # fmt: skip
    """The posterior of one run, whose members are `rows`, with its record."""
    part = run.select_members(rows)
    posterior = part.posterior(method, slice_state(result.state, rows), result.draws(rows))
    whole, part = run.whole, part.whole  # what follows evaluates on the user's rows
    record = posterior.record
    record.seed = spec.seed
    record.history = _history(result.history, rows)
    longest = max(result.modes.values(), key=itemgetter(0), default=[0, None])
    record.diagnostics |= {
        **run.computed_by(), "mode": longest[1], "seconds": seconds, "steps": result.done,
    }  # fmt: skip
    record.stats = {
        name: torch.stack(values, 1)[rows] for name, values in result.stats.items()
        if len(values) == len(result.kept or ())
    }  # fmt: skip
    if spec.hyper:
        record.metadata["hyper"] = {k: repr(v) for k, v in spec.hyper.items()}
    _check_divergence(posterior, part, result, rows)
    if isinstance(whole.data, Data):
        first, held_out = part.split_of[0], whole.data.validation
        record.diagnostics["rows"] = whole.data.counts[first]
        if held_out is not None and len(set(part.split_of)) > 1:  # together they have all rows
            record.diagnostics["rows"] += len(held_out[first])
        if whole.data.validation is not None and not whole.data.tasks:
            each = posteriors_by_split(posterior, method, run, rows, result)
            if parts:
                posterior = each[0][0]
                posterior.record = record
            stopped = bool(result.best_step)
            gain, noise = calibrate_on_held_out(posterior, each, method, part, stopped, parts)
            choices = _choices(posterior, whole, result, rows)
            choices = choices._replace(calibration=gain, noise=noise)
            scores = evaluate_held_out(posterior, each, whole, choices, parts)
            compare_with_yardsticks(posterior, scores, whole)
        if method.shrinks and not parts and not whole.data.tasks:
            check_prior_collapse(posterior, part)
        if result.best_step and whole.data.validation is not None:
            # needed to interpret the sums over held-out rows in the history
            held = whole.data.held_out_rows().total_weight(whole.split_of)
            stopping: Stopping = {
                "kept_step": result.best_step[rows], "rows": held.tolist()[rows],
            }  # fmt: skip
            record.diagnostics["stopping"] = stopping
    return posterior


def _choices(posterior: Posterior, run: Run, result: Progress, rows: slice) -> Choices:
    """What the held-out rows have chosen for each member of this fit."""
    learned = result.state["noise"].shape[-1] if "noise" in result.state else 0
    own = posterior.diagnostics.get("chosen_on_held_out", 0)
    scored = {step: scores[rows] for step, scores in result.history.get("validation", [])}
    if not scored or not result.best_step:
        return Choices(parameters=learned + own)
    held = run.rows.held_out_rows().total_weight(run.split_of)[rows]
    total = held.sum().expand_as(held) if run.pooled_rows is not None else held
    first, last = scored[min(scored)], scored[max(scored)]
    steps = []
    for m, kept in enumerate(result.best_step[rows]):
        ends = [end for end in (first[m], last[m]) if math.isfinite(end)]
        best = scored[kept][m] if kept in scored else -math.inf
        gain = best - max(ends, default=-math.inf) if math.isfinite(best) else 0.0
        steps.append(max(0.0, gain) / float(total[m]))
    return Choices(steps, learned + own)


def _history(history: dict[str, list[Any]], rows: slice) -> dict[str, Any]:
    """The history of one run's members."""
    plain = {k: list(v) for k, v in history.items() if k in ("step", "stage")}
    series = {
        k: [[t, v[rows]] for t, v in values] for k, values in history.items() if k not in plain
    }
    return plain | series


def _check_divergence(posterior: Posterior, run: Run, result: Progress, rows: slice) -> None:
    """Set the status "diverged" if members became non-finite or the loss ended far above its start.

    Draws of a sampler are expected to have a higher loss than the optimum: on average, the log
    joint of p weights is p/2 below its maximum. Twice that is allowed, because of step sizes."""
    gone = {m - rows.start: t for m, t in result.diverged.items() if rows.start <= m < rows.stop}
    if gone:
        first = min(gone.values())
        advice = "try a smaller learning rate"
        if first == 1:  # the learning rate may not be the cause
            advice = (
                "check that the network's outputs are finite at the start; if they are, try a "
                "smaller learning rate"
            )
        reason = (
            f"{len(gone)} of {rows.stop - rows.start} members became non-finite, the first by step "
            f"{first}; their last finite state is used; {advice}"
        )
        posterior.record.status = Status("diverged", reason)
        return
    losses = posterior.record.history.get("loss")
    looks = posterior.record.history.get("validation")
    # With early stopping, the best state is kept, and not the last one.
    best = bool(losses and looks and looks[-1][0] >= losses[-1][0])
    if losses and not best and posterior.record.status == "ok":
        start, end = max(losses[0][1]), max(losses[-1][1])
        least = min(max(v) for _, v in losses)
        rise = 0.0 if result.kept is None else float(run.layout.size / run.n.min())
        if end > start + 1.0 and end > least + 10.0 + rise:
            posterior.record.status = Status(
                "diverged",
                f"the loss rose from {start:.3g} to {end:.3g}; try a smaller learning rate",
            )
    if result.stopped and posterior.record.status == "ok":
        posterior.record.status = Status("stopped", result.stopped)
