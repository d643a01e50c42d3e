"""What a fit came to: the posterior of each run, its record, and whether it can be trusted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from doxa import store
from doxa.data import Data
from doxa.driver.loop import Driver, Options, own_checkpoint
from doxa.driver.progress import Progress
from doxa.driver.runs import RunSpec
from doxa.engine.threads import threads_for
from doxa.method import Method, Run, slice_state
from doxa.posterior import Posterior, Status


def launch(
    run: Run, method: Method, options: Options, specs: Sequence[RunSpec],
    checkpoint: str | Path | None, began: float,
) -> tuple[list[Posterior], Progress]:  # fmt: skip
    """Drive a method to its posteriors, one a run; from its checkpoint, where there is one, and
    then by the engine that wrote it."""
    if checkpoint is not None:
        options.checkpoint = store.Checkpoints(checkpoint)
        options.found = own_checkpoint(options.checkpoint, options.fingerprint)
    if options.found is not None:
        run = replace(run, engine=replace(run.engine, **options.found.meta["engine"]))
    driver = Driver(run, method, options)
    result = driver.drive()
    count = run.size // len(specs)
    seconds = time.monotonic() - began
    with threads_for(driver.product):
        return posteriors_of(run, method, result, specs, count, seconds), result


def posteriors_of(
    run: Run,
    method: Method,
    result: Progress,
    specs: Sequence[RunSpec],
    count: int,
    seconds: float,
) -> list[Posterior]:
    posteriors = []
    for r, spec in enumerate(specs):
        rows = slice(r * count, (r + 1) * count)
        part = run.part(rows)
        posterior = method.finish(part, slice_state(result.state, rows), result.draws(rows))
        record = posterior.record
        record.seed = spec.seed
        record.history = _history(result.history, rows)
        record.diagnostics |= {
            "engine": run.engine.kind, "mode": _main_mode(result),
            "engine_reason": run.engine.reason, "seconds": seconds, "steps": result.done,
        }  # fmt: skip
        record.stats = {
            name: torch.stack(values, 1)[rows] for name, values in result.stats.items()
            if len(values) == len(result.kept or ())
        }  # fmt: skip
        if spec.hyper:
            record.metadata["hyper"] = {k: repr(v) for k, v in spec.hyper.items()}
        _judge(posterior, result, rows)
        if isinstance(run.data, Data):
            record.diagnostics["rows"] = len(run.data.rows[r])
            if run.data.validation is not None and not run.data.tasks:
                record.validation = _validation_score(posterior, run, r)
        posteriors.append(posterior)
    return posteriors


def _main_mode(result: Progress) -> str | None:
    """How the longest stage was executed."""
    longest = max(result.modes.values(), key=lambda each: each[0], default=None)
    return None if longest is None else str(longest[1])


def _history(history: dict[str, list[Any]], rows: slice) -> dict[str, Any]:
    """The record of one run's members."""
    plain = {k: list(v) for k, v in history.items() if k in ("step", "stage")}
    series = {
        k: [[t, v[rows]] for t, v in values] for k, values in history.items() if k not in plain
    }
    return plain | series


def _judge(posterior: Posterior, result: Progress, rows: slice) -> None:
    """Say so when members broke down, or the loss ended far above where it began."""
    gone = {m - rows.start: t for m, t in result.diverged.items() if rows.start <= m < rows.stop}
    if gone:
        first = min(gone.values())
        advice = "try a smaller learning rate"
        if first == 1:  # nothing can be said of a rate yet
            advice = "are the outputs finite where the fit starts? If so, a smaller learning rate"
        reason = (
            f"{len(gone)} of {rows.stop - rows.start} members became non-finite, the first by step "
            f"{first}; their last finite state is used; {advice}"
        )
        posterior.record.status = Status("diverged", reason)
        return
    losses = posterior.record.history.get("loss")
    if losses and posterior.record.status == "ok":
        start, end = max(losses[0][1]), max(losses[-1][1])
        best = min(max(v) for _, v in losses)
        if end > start + 1.0 and end > best + 10.0:
            posterior.record.status = Status(
                "diverged",
                f"the loss rose from {start:.3g} to {end:.3g}; try a smaller learning rate",
            )
    if result.stopped and posterior.record.status == "ok":
        posterior.record.status = Status("stopped", result.stopped)


def _validation_score(posterior: Posterior, run: Run, r: int) -> float:
    """Mean log predictive of the held-out rows, in the units of y."""
    x, y = run.rows.held_out(r)
    scales = run.rows.scales[r].to(run.device, torch.float64)
    if scales.x_loc is not None:
        x = tree_map(
            lambda t, loc, scale: t.double() * scale + loc if t.is_floating_point() else t,
            x, scales.x_loc, scales.x_scale,
        )  # fmt: skip
    if scales.y_loc is not None:
        y = y.double() * scales.y_scale + scales.y_loc
    p = posterior.predict(x)
    if isinstance(y, tuple | list):  # the heads' own scores, added up
        each = [head.log_prob(t) for head, t in zip(p.heads, y, strict=True)]
        return float(torch.stack(each).sum(0).mean())
    return float(p.log_prob(y).mean())
