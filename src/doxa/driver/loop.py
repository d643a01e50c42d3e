"""The loop: stages, steps, validation, the non-finite guard, checkpoints, progress.

The driver knows no method. It hands each stage its batches and clock, keeps draws, watches each
member, and can stop at any instant: everything that changes is in the checkpoint, and everything
else (data order, noise) is a function of the seed and the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch, Data, Feed, Pass, halved
from doxa.driver.bar import Shown, shown
from doxa.driver.interrupts import Interrupts
from doxa.driver.options import Options
from doxa.driver.progress import Progress, chosen, copied, finite_members, storage
from doxa.engine import Engine
from doxa.engine.ahead import Ahead, worthwhile
from doxa.engine.execute import Executor
from doxa.engine.rule import choose_executor
from doxa.engine.threads import threads_for
from doxa.errors import MethodError, StoreError
from doxa.method import Clock, Info, Method, Run, Stage, State, slice_state
from doxa.optim import schedule

log = logging.getLogger("doxa")


class Driver:
    """Runs a method's stages on stacked members."""

    def __init__(self, run: Run, method: Method, options: Options) -> None:
        self.run = run
        self.method = method
        self.options = options
        self.product = 0.0  # the largest matrix product of the method's own
        self._saved_at = time.monotonic()
        self._interrupts = Interrupts()

    def drive(self) -> Progress:
        found = self.options.found
        at = self._resume(found) if found else Progress(dict(self.method.init(self.run)))
        stages = list(self.method.stages(self.run))
        self.product = max((stage.product or 0.0 for stage in stages), default=0.0)
        draws = sum(stage.steps // stage.keep for stage in stages if stage.keep)
        if draws:
            theta, checkpoint = self.method.parameters(self.run, at.state), self.options.checkpoint
            folder = None if checkpoint is None else checkpoint.path
            at.shape = tuple(theta.shape[1:]) if theta.ndim > 2 else ()
            at.kept = storage(theta.flatten(1), draws, self.options.draws_budget, folder, at.saved)
        feeds = [self.run.open(stage.source, stage.name, stage.steps) for stage in stages]
        lengths = [
            stage.steps if feed.steps is None else feed.steps
            for stage, feed in zip(stages, feeds, strict=True)
        ]
        told = shown(self.method.name, sum(lengths), at.done) if self.options.progress else None
        saves = self.options.checkpoint is not None
        waits = self._interrupts.deferred() if saves else nullcontext()
        with told or nullcontext() as bar, waits:
            for i, (stage, feed, steps) in enumerate(zip(stages, feeds, lengths, strict=True)):
                if i < at.stage:
                    continue
                if stage.recorded is not None and i == at.stage and at.recorded is not None:
                    stage.recorded.resume(at.recorded)
                    at.recorded = None
                with threads_for(self._product(stage, feed)):
                    self._run_stage(i, stage, feed, steps, at, bar)
                at.stage, at.t = i + 1, 0
            if self._interrupts.pending:
                self._stop(at)
        return at

    def _product(self, stage: Stage, feed: Feed) -> float:
        """Multiplications in the largest matrix product of a stage."""
        if stage.product is not None:
            return stage.product
        return self.run.engine.product * getattr(feed, "size", self.run.settings.batch_size)

    def _run_stage(
        self, number: int, stage: Stage, feed: Feed, steps: int, at: Progress, bar: Shown | None
    ) -> None:
        run = self.run
        if at.t == 0:
            if stage.enter is not None:
                at.state = stage.enter(run, at.state)
            at.good = copied(at.state)
            at.best, at.best_score, at.waited = {}, [], []
        if steps == 0:
            return
        rates = self._rates(steps) if stage.rates is None else stage.rates
        ticks = torch.arange(steps, dtype=torch.int32, device=run.device)
        noise: Any = run.noise(f"stage/{number}")
        near = run.device.type == "cpu" and worthwhile(run.size * run.layout.size, steps)
        ahead = Ahead(noise) if near else None

        def step(
            state: State, batch: Any, t: Tensor, rate: Tensor, owned: bool = False
        ) -> tuple[State, Info]:
            return stage.step(run, state, batch, Clock(t, rate, steps, ahead or noise, owned))

        executor = self._executor(stage, at, step, feed, ticks, rates, ahead)
        every = max(1, min(steps, max(10, steps // 100)))
        validate = self._validation_intervals(stage, steps)
        while at.t < steps:
            t = at.t
            if t in stage.marks:
                at.state = stage.marks[t](run, at.state)
            tick = t == 0 or (t + 1) % every == 0 or t + 1 == steps
            before = copied(at.state) if tick else {}
            new, info = executor(at.state, feed.batch(t), ticks[t], rates[t])
            keeps = stage.keep and (t + 1) % stage.keep == 0
            at.state, at.t, at.done, at.mode = new, t + 1, at.done + 1, executor.mode
            if keeps:
                at.keep(self.method.parameters(run, new), info)
            stop = False
            if tick:
                self._guard(stage, at, before, info)
                stop = self._tick(stage, at, info, bar)
            due = [at.t == steps or at.t % interval == 0 for interval in validate]
            if any(due) and self._validate(at, due):
                log.info("%s: stopped early at step %d, no member improves", stage.name, at.t)
                break
            if stop and feed.steps is None:  # what was added up over half the rows is of no use
                break
            waited = time.monotonic() - self._saved_at
            if self.options.checkpoint and waited >= self.options.checkpoint_seconds:
                self._save(at, stage)
            if self._interrupts.pending:
                self._stop(at, stage)
        mode = executor.mode if stage.recorded is None else stage.recorded.mode
        at.modes[stage.name] = [steps, mode]
        if at.best:
            at.state = at.best
        if bar is not None:
            bar.advance_to(at.done)

    def _executor(
        self, stage: Stage, at: Progress, step: Any, feed: Feed, ticks: Tensor, rates: Tensor,
        ahead: Ahead | None,
    ) -> Executor:  # fmt: skip
        """As asked for, as the checkpoint says, or by the rule about the work."""
        if at.t > 0 and at.mode is not None:
            return Executor(step, at.mode, ahead)
        if not stage.capturable:
            return Executor(step)
        if self.run.engine.mode is not None:
            return Executor(step, self.run.engine.mode, ahead)
        trial = lambda: (dict(at.state), feed.batch(0), ticks[0], rates[0])  # noqa: E731
        return choose_executor(step, trial, self.run, len(ticks), ahead)

    def _rates(self, steps: int) -> Tensor:
        """The learning rate of each step: [steps], or [steps, M, 1] where runs differ."""
        run = self.run
        shape = schedule(self.options.schedule, steps).to(run.device)
        return run.rates(shape).to(run.dtype)

    def _tick(self, stage: Stage, at: Progress, info: Info, bar: Shown | None) -> bool:
        """Record for people and tell callbacks; True to end the stage.

        Later stages still run, as far as they must for a posterior to come out.
        """
        values = {name: value.detach().cpu().tolist() for name, value in info.items()}
        at.history.setdefault("step", []).append(at.done)
        at.history.setdefault("stage", []).append(stage.name)
        for name, value in values.items():
            at.history.setdefault(name, []).append([at.done, value])
        if bar is not None:
            bar.show(at.done, stage.name, values)
        stop = len(at.diverged) == self.run.size
        if stop:
            at.stopped = "every member became non-finite"
        for callback in self.options.callbacks:
            try:
                if callback(at.done, values):
                    stop = True
                    at.stopped = at.stopped or f"a callback stopped the run at step {at.done}"
            except KeyboardInterrupt:
                self._interrupts.pending = True  # as if pressed: stop once this step is complete
        return stop

    def _guard(self, stage: Stage, at: Progress, before: State, info: Info) -> None:
        """Members whose trained tensors went non-finite go back to their last good state, and are
        named.

        The state `before` the step is the good one: its loss is what `info` says, while the new
        state may be finite and its loss not."""
        fine = finite_members(at.state, stage.over)
        for name in ("loss", "log_density"):
            if name in info:
                fine = fine & torch.isfinite(info[name]).to(fine.device)
        fine[list(at.diverged)] = False  # it stays where it was, as it would alone
        if bool(fine.all()):
            at.good = before
            return
        for m in (~fine).nonzero().flatten().tolist():
            if m not in at.diverged:
                at.diverged[m] = at.done
                log.warning("member %d became non-finite by step %d; its last good state is kept",
                            self.run.members[m], at.done)  # fmt: skip
        at.state = chosen(fine, at.state, at.good)
        at.good = chosen(fine, before, at.good)

    def _validation_intervals(self, stage: Stage, steps: int) -> list[int]:
        """Steps between validations: an epoch of each member's rows, and a hundredth of the stage
        at least; none where there is nothing."""
        data = self.run.data
        if not stage.validates or not isinstance(data, Data) or data.validation is None:
            return []
        least = math.ceil(steps / 100)
        epochs = [max(least, len(rows) // self.run.settings.batch_size) for rows in data.rows]
        return [epochs[s] for s in self.run.split_of]

    def _validate(self, at: Progress, due: Sequence[bool]) -> bool:
        """Score the current parameters on the held-out rows; True when no member may improve.
        A member that is not due, has waited long enough or diverged keeps its best."""
        run = self.run
        held = run.rows.held_out_rows()
        rows = Pass(held, run.split_of, 4096)
        total = torch.zeros(run.size, device=run.device, dtype=run.dtype)
        with torch.no_grad():
            for t in range(rows.count):
                batch = rows.batch(t)
                total += self._score(at.state, halved(batch) if held.tasks else batch)
        scores = total.cpu().tolist()
        if not at.best:
            at.best = copied(at.state)
            at.best_score, at.waited = [-math.inf] * run.size, [0] * run.size
            at.best_step = [at.done] * run.size
        better = [
            due[m] and scores[m] > at.best_score[m]
            and at.waited[m] < self.options.patience and m not in at.diverged
            for m in range(run.size)
        ]  # fmt: skip
        at.best = chosen(torch.tensor(better, device=run.device), at.state, at.best)
        at.best_score = [
            s if b else o for s, o, b in zip(scores, at.best_score, better, strict=True)
        ]
        at.best_step = [at.done if b else t for t, b in zip(at.best_step, better, strict=True)]
        at.waited = [0 if b else w + d for b, w, d in zip(better, at.waited, due, strict=True)]
        at.history.setdefault("validation", []).append([at.done, scores])
        return min(at.waited) >= self.options.patience

    def _score(self, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of some rows under each member's current weights, [M]."""
        run, score, scores = self.run, self.method.score, []
        for part in run.engine.chunks(run.size):
            scores.append(score(run.part(part), slice_state(state, part), batch.members(part)))
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def _stop(self, at: Progress, stage: Stage | None = None) -> NoReturn:
        """Act on Ctrl-C: between steps, so that what is saved resumes bit for bit."""
        if self.options.checkpoint is not None:
            try:
                self._save(at, stage)
                log.warning("stopped at step %d; checkpoint written, fit again to resume", at.done)
            except StoreError as error:
                log.error("stopped at step %d without a checkpoint: %s", at.done, error)
        raise KeyboardInterrupt

    def _save(self, at: Progress, stage: Stage | None = None) -> None:
        assert self.options.checkpoint is not None
        recorded = None if stage is None else stage.recorded
        at.recorded = None if recorded is None else recorded.memory()
        if isinstance(at.kept, store.DrawsFile):
            at.kept.sync()  # before the checkpoint that counts on them
        tensors, meta = at.to_checkpoint()
        meta = {
            "fingerprint": self.options.fingerprint, "progress": meta,
            "engine": engine_facts(self.run.engine),
        }  # fmt: skip
        self.options.checkpoint.save(at.done, tensors, meta)
        self._saved_at = time.monotonic()

    def _resume(self, found: store.Checkpoint) -> Progress:
        log.info("resuming at step %d", found.step)
        tensors = {k: v.to(self.run.device) for k, v in found.tensors.items()}
        return Progress.from_checkpoint(tensors, found.meta["progress"])


def engine_facts(engine: Engine) -> dict[str, Any]:
    """What of an engine decides the bits of a result."""
    return {"kind": engine.kind, "native": engine.native, "chunk": engine.chunk}


def own_checkpoint(checkpoint: store.Checkpoints, fingerprint: str) -> store.Checkpoint | None:
    """The newest checkpoint, if there is one; another fit's is an error."""
    found = checkpoint.latest()
    if found is not None and found.meta["fingerprint"] != fingerprint:
        raise MethodError(
            "the checkpoint belongs to another fit (other data, method, seed or members): "
            "use another folder, or remove it to start over"
        )
    return found
