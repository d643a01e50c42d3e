"""The loop: stages, steps, validation, the non-finite guard, checkpoints, progress.

The driver knows no method. It hands each stage its batches and clock, keeps draws, watches each
member, and can stop at any instant: everything that changes is in the checkpoint, and everything
else (data order, noise) is a function of the seed and the step.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from doxa.data import Feed
from doxa.driver import checkpoints
from doxa.driver.bar import Shown, shown
from doxa.driver.interrupts import Interrupts
from doxa.driver.options import Options
from doxa.driver.progress import Progress, chosen, copied, finite_members, storage
from doxa.driver.stopping import EarlyStopping
from doxa.engine.ahead import Ahead, worthwhile
from doxa.engine.execute import Executor
from doxa.engine.rule import choose_executor
from doxa.engine.threads import threads_for
from doxa.method import Clock, Info, Method, Run, Stage, State
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
        if self.options.found is not None:
            at = checkpoints.resumed(self.run, self.options.found)
        else:
            at = Progress(dict(self.method.init(self.run)))
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
                product = stage.product  # multiplications in the largest matrix product
                if product is None:
                    size = getattr(feed, "size", self.run.settings.batch_size)
                    product = self.run.engine.product * size
                with threads_for(product):
                    self._run_stage(i, stage, feed, steps, at, bar)
                at.stage, at.t = i + 1, 0
            if self._interrupts.pending:
                checkpoints.stop(self.run, self.options, at)
        return at

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
        stopping = (
            EarlyStopping.of(run, self.method, steps, self.options.patience)
            if stage.validates else None
        )  # fmt: skip
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
            if stopping is not None and stopping.ends(at):
                log.info("%s: stopped early at step %d, no member improves", stage.name, at.t)
                break
            if stop and feed.steps is None:  # what was added up over half the rows is of no use
                break
            waited = time.monotonic() - self._saved_at
            if self.options.checkpoint and waited >= self.options.checkpoint_seconds:
                checkpoints.save(run, self.options, at, stage)
                self._saved_at = time.monotonic()
            if self._interrupts.pending:
                checkpoints.stop(run, self.options, at, stage)
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
