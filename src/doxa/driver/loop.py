"""The training loop: stages, steps, early stopping, checkpoints and progress.

`Driver` runs the stages of any method. It passes batches and a clock to each step, keeps draws, and
checks that each member stays finite. A fit can be interrupted between any two steps and resumed bit
for bit: everything that changes is in the checkpoint, and everything else (the order of the rows,
the noise) is a function of the seed and the step.

    DrawsInMemory, storage   where kept draws are stored: in memory or in a file
    Progress                 everything that changes during a fit; the content of a checkpoint
    EarlyStopping            scores on held-out rows, and the best state of each member
    Interrupts               Ctrl-C, deferred to the end of a step
    FitCheckpoints, save, …  checkpoints of a fit
    StepInfo                 what callbacks see
    Part                     the block of a fit that a driver trains
    Driver                   the loop itself
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch, Data, Feed, Pass, condition_on_half, free_memory
from doxa.driver.bar import Shown, shown
from doxa.driver.watch import Seen, Watch
from doxa.engine import Engine
from doxa.engine.engine import threads_for, threads_outside
from doxa.engine.execute import Executor, choose_executor
from doxa.errors import CorruptedArtefact, MethodError, StoreError
from doxa.linalg.layout import LARGE
from doxa.method import Clock, Info, Method, Run, Stage, State, release_memory, slice_state
from doxa.noise import PrefetchedNoise, worthwhile
from doxa.optim import schedule
from doxa.store import DrawsFile

log = logging.getLogger("doxa")

# The number of the content of a checkpoint: the entries of a method's state, and `Progress`. It is
# raised when an entry changes its name, shape or meaning, and never used again.
CHECKPOINT_FORMAT = 2
LOOK = 0.5  # seconds between looks at the other processes of a fit


class DrawsInMemory:
    """Draws in memory, in the layout of posteriors: [members, capacity, size], filled in order."""

    def __init__(self, capacity: int, theta: Tensor) -> None:
        self.values = theta.new_empty(theta.shape[0], capacity, theta.shape[1])
        self.count = 0

    @classmethod
    def of(cls, draws: Tensor) -> DrawsInMemory:
        """Draws [members, count, size] that are there already."""
        found = cls.__new__(cls)
        found.values, found.count = draws, draws.shape[1]
        return found

    def __len__(self) -> int:
        return self.count

    def append(self, theta: Tensor) -> None:
        self.values[:, self.count] = theta
        self.count += 1

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The draws so far of some members, [K, count, size]. A subset of the members is a copy,
        so that it does not keep the memory of the others alive."""
        part = self.values[rows, : self.count]
        return part if len(part) == len(self.values) else part.clone()


def storage(
    theta: Tensor, draws: int, budget: int | None, folder: Path | None, saved: Sequence[int] | None
) -> DrawsInMemory | DrawsFile:
    """Storage for a number of draws of theta [M, P].

    Draws within the budget are kept in memory, and larger ones in a file. The default budget is a
    quarter of the free memory. If there is a folder for checkpoints, draws are always in a file in
    that folder, so that checkpoints do not write them again. `saved` is the position in the file
    at the time of the checkpoint.
    """
    size = draws * theta.nbytes
    if budget is None:
        budget = free_memory(theta.device) // 4
    if size <= budget and folder is None:
        return DrawsInMemory(draws, theta)
    shape = (len(theta), draws, theta.shape[1])
    try:
        file = DrawsFile(shape, theta.dtype, folder, budget, saved, theta.device)
    except CorruptedArtefact:
        raise
    except StoreError as error:
        raised = StoreError(
            f"{draws} draws of {len(theta)} chains take {size / 2**30:.3g} GiB on disk: {error}"
            "; keep fewer (draws, thin, members), or use a larger disk: that of checkpoint=, "
            "else of the environment's TMPDIR"
        )
        raised.errno = error.errno
        raise raised from error
    if size > budget:
        log.info("%.3g GiB of draws are kept on disk, in %s", size / 2**30, file.path)
    return file


@dataclass
class Progress:
    """Everything that changes during a fit. All of it is in the checkpoint."""

    state: State
    kept: DrawsInMemory | DrawsFile | None = None  # None if no stage keeps draws
    shape: tuple[int, ...] = ()  # (K, P) if a draw is K particles
    stats: dict[str, list[Tensor]] = field(default_factory=dict)  # Info beside each kept draw, [M]
    stage: int = 0
    t: int = 0
    done: int = 0
    mode: str | None = None  # how the current stage is executed
    modes: dict[str, list[Any]] = field(default_factory=dict)  # {stage: [steps, mode]}
    history: dict[str, list[Any]] = field(default_factory=dict)
    good: State = field(default_factory=dict)  # the last state known to be finite
    best: State = field(default_factory=dict)  # the best state of this stage on held-out rows
    best_score: list[float] = field(default_factory=list)
    best_step: list[int] = field(default_factory=list)  # when each member was best
    waited: list[int] = field(default_factory=list)  # validations since then
    diverged: dict[int, int] = field(default_factory=dict)  # member row: step
    stops: dict[int, list[int]] = field(default_factory=dict)  # {stage: best step, [M]}
    lengths: list[int] = field(default_factory=list)  # steps that were done of each stage
    stopped: str = ""
    saved: list[int] | None = None  # in a checkpoint: the position in the file of draws
    recorded: dict[str, Any] | None = None  # in a checkpoint: how parts of a step are executed

    def keep(self, theta: Tensor, info: Info) -> None:
        """Store a draw, and the statistics of the step that produced it."""
        assert self.kept is not None
        self.kept.append(theta.flatten(1))
        for name, value in info.items():
            if value.shape == theta.shape[:1]:
                self.stats.setdefault(name, []).append(value.detach().clone())

    def draws(self, rows: slice) -> Tensor | None:
        """The kept draws of some members: [T, K, P], a view of the layout [K, T, P] of posteriors,
        or [T, K, particles, P]. They are on disk if they exceed the memory budget."""
        if not self.kept:
            return None
        drawn = self.kept.tensor(rows)
        return (
            drawn.unflatten(2, self.shape).transpose(0, 1) if self.shape else drawn.transpose(0, 1)
        )

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        for name in ("state", "good", "best"):
            tensors |= {f"{name}.{k}": v for k, v in getattr(self, name).items()}
        tensors |= {f"stats.{k}": torch.stack(v) for k, v in self.stats.items()}
        plain = (
            "stage",
            "t",
            "done",
            "mode",
            "modes",
            "history",
            "best_score",
            "best_step",
            "waited",
            "diverged",
            "stops",
            "lengths",
            "stopped",
            "recorded",
        )
        saved = self.kept.at if isinstance(self.kept, DrawsFile) else None
        return tensors, {name: getattr(self, name) for name in plain} | {"saved": saved}

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Progress:
        def under(name: str) -> State:
            prefix = f"{name}."
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        stats = {k: list(v.unbind()) for k, v in under("stats").items()}
        return cls(under("state"), stats=stats, good=under("good"), best=under("best"), **meta)


def copied(state: State) -> State:
    return {k: v.clone() for k, v in state.items()}


def without_moments(state: State, passing: Sequence[str] = ()) -> State:
    """A state without the moments of the optimiser, as large networks keep it: each is another copy
    of the weights. `passing` names more such entries."""
    return {k: v for k, v in state.items() if not (k.startswith("optim.") or k in passing)}


def separate(state: State) -> State:
    """The state without two entries in the same memory, so that steps may overwrite each."""
    seen: set[int] = set()
    found: State = {}
    for name, value in state.items():
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone() if place in seen or not value.is_contiguous() else value
        seen.add(place)
    return found


def put_rows(mask: Tensor, source: State, target: State) -> None:
    """Overwrite the rows of `target` where the mask holds by those of `source`."""
    for k, v in target.items():
        if bool(mask.all()):
            v.copy_(source[k])
        else:
            for m in mask.nonzero().flatten().tolist():
                v[m].copy_(source[k][m])


def chosen(mask: Tensor, yes: State, no: State) -> State:
    """Rows of `yes` where the mask holds, of `no` elsewhere."""
    return {
        k: torch.where(mask.reshape(-1, *(1,) * (v.ndim - 1)), v, no[k]) for k, v in yes.items()
    }


def finite_members(state: State, names: Sequence[str]) -> Tensor:
    """Which members' tensors of these names are finite: [M]."""
    rows = [state[k].flatten(1) for k in names if k in state and state[k].is_floating_point()]
    if any(v.shape[1] >= LARGE for v in rows):  # a norm reads a row once, and writes nothing
        norms = torch.stack([torch.linalg.vector_norm(v, dim=1) for v in rows])
        if bool(torch.isfinite(norms).all()):
            return torch.ones(len(rows[0]), dtype=torch.bool, device=norms.device)
    fine = [torch.isfinite(state[k]).reshape(len(state[k]), -1).all(1) for k in names if k in state]
    if fine:
        return torch.stack(fine).all(0)
    some = next(iter(state.values()))
    return torch.ones(len(some), dtype=torch.bool, device=some.device)


@dataclass(frozen=True)
class EarlyStopping:
    """Scores the held-out rows at intervals, and keeps the best state of each member.

    A member has finished after `patience` validations without improvement. Training stops when all
    members have finished. If the members of a run hold out few rows each, they share the sum of
    their scores, and are best at the same step (`Run.pooled_rows`).
    """

    run: Run
    method: Method
    patience: int
    intervals: list[int]  # steps between the validations of each member
    steps: int  # of the stage; all members are validated after the last one

    @classmethod
    def of(cls, run: Run, method: Method, steps: int, patience: int) -> EarlyStopping | None:
        """One validation per epoch of each member's rows, or every hundredth of the stage if that
        is longer. None if there are no held-out rows."""
        data = run.data
        if not isinstance(data, Data) or data.validation is None:
            return None
        least = math.ceil(steps / 100)
        epochs = [max(least, count // run.settings.batch_size) for count in data.counts]
        if data.stream is not None:  # an epoch of a stream may be the whole stage
            epochs = [min(epoch, max(least, steps // 10)) for epoch in epochs]
        if run.pooled_rows is not None:  # members are scored at the same steps
            epochs = [max(epochs)] * len(epochs)
        return cls(run, method, patience, [epochs[s] for s in run.split_of], steps)

    def ends(self, at: Progress) -> bool:
        """Score the current parameters on the held-out rows, if a member is due. True when all
        members have finished. A member that is not due, has finished or has diverged keeps its
        best state."""
        due = [at.t == self.steps or at.t % interval == 0 for interval in self.intervals]
        if not any(due):
            return False
        run = self.run
        held = run.rows.held_out_rows()
        rows = Pass(held, run.split_of, 4096)
        total = torch.zeros(run.size, device=run.device, dtype=run.dtype)
        with torch.no_grad():
            for t in range(rows.count):
                batch = rows.batch(t)
                total += self._score(at.state, condition_on_half(batch) if held.tasks else batch)
        if run.pooled_rows is not None:
            total = run.over_run(total)
        scores = total.cpu().tolist()
        if not at.best:
            at.best = copied(at.good)  # the current state may be non-finite
            at.best_score, at.waited = [-math.inf] * run.size, [0] * run.size
            at.best_step = [at.done] * run.size
        better = [
            due[m] and scores[m] > at.best_score[m]
            and at.waited[m] < self.patience and m not in at.diverged
            for m in range(run.size)
        ]  # fmt: skip
        keep_rows = torch.tensor(better, device=run.device)
        if run.by_tensor:
            put_rows(keep_rows, at.state, at.best)
        else:
            at.best = chosen(keep_rows, at.state, at.best)
        at.best_score = [
            s if b else o for s, o, b in zip(scores, at.best_score, better, strict=True)
        ]
        at.best_step = [at.done if b else t for t, b in zip(at.best_step, better, strict=True)]
        at.waited = [0 if b else w + d for b, w, d in zip(better, at.waited, due, strict=True)]
        at.history.setdefault("validation", []).append([at.done, scores])
        return min(at.waited) >= self.patience

    def _score(self, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of some rows under each member's current weights, [M]."""
        run, score, scores = self.run, self.method.score, []
        for part in run.engine.chunks(run.size):
            scores.append(
                score(run.select_members(part), slice_state(state, part), batch.members(part))
            )
        return scores[0] if len(scores) == 1 else torch.cat(scores)


@dataclass(frozen=True)
class StopAt:
    """Keeps the state of each member at a given step of the stage, `steps` [M], and ends there."""

    steps: Sequence[int]

    def ends(self, at: Progress) -> bool:
        now = [at.t == step for step in self.steps]
        if any(now):
            if not at.best:
                at.best, at.best_step = copied(at.good), [at.done] * len(now)
            own = {name: at.state[name] for name in at.best}  # a large network's has no moments
            some = next(iter(own.values()))
            at.best = chosen(torch.tensor(now, device=some.device), own, at.best)
            at.best_step = [at.done if b else t for t, b in zip(at.best_step, now, strict=True)]
        return at.t >= max(self.steps)


class Interrupts:
    """Whether Ctrl-C was pressed; the loop checks it between steps."""

    pending = False

    @contextmanager
    def deferred(self) -> Iterator[Interrupts]:
        """The first Ctrl-C sets `pending`; a second one raises KeyboardInterrupt at once.

        This holds inside the `with` block, in the main thread, and only if Python's default handler
        is installed. A program with its own handler keeps it.
        """
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        ours = main and before is signal.default_int_handler
        if ours:
            signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
        log.warning("interrupted: stopping after this step; press Ctrl-C again to stop at once")


@dataclass(frozen=True)
class FitCheckpoints:
    """The checkpoints of one fit.

    Parameters
    ----------
    folder : store.Checkpoints
        Where they are.
    fingerprint : str
        The digest of everything that must be the same for the fit to be resumed.
    found : store.Checkpoint, default None
        The checkpoint to resume from.
    """

    folder: store.Checkpoints
    fingerprint: str
    found: store.Checkpoint | None = None


def save(run: Run, to: FitCheckpoints, at: Progress, stage: Stage | None = None) -> None:
    """Write a checkpoint: the progress, and how the stage executes the parts it records."""
    recorded = None if stage is None else stage.recorded
    at.recorded = None if recorded is None else recorded.memory()
    if isinstance(at.kept, store.DrawsFile):
        at.kept.sync()  # first: the checkpoint refers to these draws
    tensors, progress = at.to_checkpoint()
    engine = run.engine  # only the fields that affect the bits of a result are saved
    meta = {
        "format": CHECKPOINT_FORMAT, "fingerprint": to.fingerprint, "progress": progress,
        "engine": {"kind": engine.kind, "native": engine.native, "chunk": engine.chunk},
    }  # fmt: skip
    to.folder.save(at.done, tensors, meta)


def stop_with_checkpoint(
    run: Run, to: FitCheckpoints | None, at: Progress, stage: Stage | None = None
) -> NoReturn:
    """Stop after Ctrl-C. This is called between steps, so that the checkpoint resumes bit for
    bit."""
    if to is not None:
        try:
            save(run, to, at, stage)
            log.warning("stopped at step %d; checkpoint written, fit again to resume", at.done)
        except StoreError as error:
            log.error("stopped at step %d without a checkpoint: %s", at.done, error)
    raise KeyboardInterrupt


def resumed(run: Run, found: store.Checkpoint) -> Progress:
    """The progress of a fit, from its checkpoint."""
    log.info("resuming at step %d", found.step)
    tensors = {k: v.to(run.device) for k, v in found.tensors.items()}
    with store.decoding(f"the checkpoint of step {found.step}"):
        return Progress.from_checkpoint(tensors, found.meta["progress"])


def saved_engine(engine: Engine, found: store.Checkpoint, place: object) -> Engine:
    """The engine, with the fields that affect the bits of a result taken from the checkpoint."""
    with store.decoding(place):
        saved = found.meta["engine"]
        if not (
            saved.keys() == {"kind", "native", "chunk"}
            and saved["kind"] in ("stack", "loop")
            and isinstance(saved["native"], bool)
            and (saved["chunk"] is None or (type(saved["chunk"]) is int and saved["chunk"] > 0))
        ):
            raise ValueError(f"{saved!r} is not an engine")
        return replace(engine, **saved)


def own_checkpoint(checkpoint: store.Checkpoints, fingerprint: str) -> store.Checkpoint | None:
    """The newest checkpoint, or None. A checkpoint of another format or of another fit is an error,
    and is left as it is."""
    found = checkpoint.latest()
    if found is None:
        return None
    number = found.meta.get("format", 0)  # the first checkpoints had none
    if type(number) is not int or number != CHECKPOINT_FORMAT:
        later = type(number) is int and number > CHECKPOINT_FORMAT
        raise StoreError(
            f"the checkpoint in {checkpoint.path} has format {number!r}, of "
            f"{'a later' if later else 'an earlier'} version of doxa; this version reads format "
            f"{CHECKPOINT_FORMAT}. It was left as it is: finish the fit with the version that "
            "began it, or start over in another folder"
        )
    if found.meta.get("fingerprint") != fingerprint:
        raise MethodError(
            "the checkpoint belongs to another fit (other data, method, seed or members): "
            "use another folder, or remove it to start over"
        )
    return found


class StepInfo(dict[str, Any]):
    """What a callback of `doxa.fit` gets beside the number of steps: a dictionary of the statistics
    of the step, each a list with one number per member of the block.

    Attributes
    ----------
    members : list of tuple of (int, int)
        The run and the id of each of these members.
    block : int
        The number of the block, from 0.
    blocks : int
        The number of blocks of the fit. With one, `members` are all members of all runs.
    """

    def __init__(
        self, values: Mapping[str, Any], members: Sequence[tuple[int, int]], block: int, blocks: int
    ) -> None:
        super().__init__(values)
        self.members, self.block, self.blocks = list(members), block, blocks


@dataclass(frozen=True)
class Part:
    """Which part of a fit a driver trains.

    Parameters
    ----------
    number, count : int
        The number of the block, and how many there are.
    members : sequence of tuple of (int, int)
        The run and the id of each member; empty for those of the run.
    look : callable, optional
        Called every `LOOK` seconds, between steps. It raises an error if another process that
        trains a part has failed.
    """

    number: int = 0
    count: int = 1
    members: Sequence[tuple[int, int]] = ()
    look: Callable[[], None] | None = None


class Driver:
    """Runs a method's stages on stacked members.

    Parameters
    ----------
    run : Run
        All members of a fit, or those of a block (`blocks.py`).
    method : Method
    checkpoints : FitCheckpoints, optional
    watch : Watch, optional
        Somebody who watches: every step is then yielded (`steps`).
    bar : callable
        Opens the progress bar: (name, steps, steps done) -> context.
    part : Part, optional
        Which members of the fit these are. If not all, a stage does not end early when all of them
        have diverged: the members of all blocks have equally many draws.
    """

    def __init__(
        self, run: Run, method: Method, checkpoints: FitCheckpoints | None = None,
        watch: Watch | None = None, bar: Callable[[str, int, int], Any] = shown,
        part: Part | None = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.method = method
        self.watch = watch
        self.at = Progress({})
        self.settings = run.settings
        self.checkpoints = checkpoints
        self.bar, self.part = bar, part or Part()
        self.product = 0.0  # multiplications in the method's own largest matrix product
        self._saved_at = self._looked_at = time.monotonic()
        self._interrupts = Interrupts()

    def drive(self) -> Progress:
        for _ in self.steps():
            pass
        return self.at

    def steps(self) -> Iterator[Seen]:
        """Run all stages. If there is a `Watch`, every step is yielded when it is complete, and
        changes are made before the next one. Otherwise nothing is yielded."""
        checkpoints = self.checkpoints
        if checkpoints is not None and checkpoints.found is not None:
            at = resumed(self.run, checkpoints.found)
        else:
            at = Progress(dict(self.method.init(self.run)))
        self.at = at
        self._changed()
        stages = list(self.method.stages(self.run))
        self.product = max((stage.product or 0.0 for stage in stages), default=0.0)
        draws = sum(stage.steps // stage.keep for stage in stages if stage.keep)
        if draws:
            theta = self.method.parameters(self.run, at.state)
            folder = None if checkpoints is None else checkpoints.folder.path
            at.shape = tuple(theta.shape[1:]) if theta.ndim > 2 else ()
            at.kept = storage(theta.flatten(1), draws, self.settings.draws_budget, folder, at.saved)
        feeds = self._feeds(stages)
        lengths = [
            stage.steps if feed.steps is None else feed.steps
            for stage, feed in zip(stages, feeds, strict=True)
        ]
        name, total = self.method.name, sum(lengths)
        shows = self.bar(name, total, at.done) if self.settings.progress else None
        waits = nullcontext() if checkpoints is None else self._interrupts.deferred()
        with shows or nullcontext() as bar, waits:
            while at.stage < len(stages):
                i = at.stage
                stage, feed, steps = stages[i], feeds[i], lengths[i]
                if stage.recorded is not None and at.recorded is not None:
                    stage.recorded.resume(at.recorded)
                at.recorded = None
                product = stage.product  # multiplications in the largest matrix product
                if product is None:
                    product = self.run.engine.product * feed.size
                run = self.run
                with threads_for(product):
                    ended = yield from self._run_stage(i, stage, feed, steps, at, bar)
                if ended:
                    at.lengths.append(at.t)
                    at.stage, at.t = i + 1, 0
                elif stage.recorded is not None:
                    at.recorded = stage.recorded.memory()
                if self.run is not run:  # a setting was changed
                    names = [each.name for each in stages]
                    stages = list(self.method.stages(self.run))
                    if [each.name for each in stages] != names:
                        raise MethodError(f"{self.method.name}: a change must keep the stages")
                    feeds = self._feeds(stages)
            if self._interrupts.pending:
                stop_with_checkpoint(self.run, checkpoints, at)

    def _feeds(self, stages: Sequence[Stage]) -> list[Feed]:
        return [self.run.open(stage.source, stage.name, stage.steps) for stage in stages]

    def _changed(self) -> bool:
        """Make the changes that were asked for. True if the run is another one."""
        if self.watch is None or not (self.watch.pending or self.watch.planned):
            return False
        before = self.run
        self.run, self.at.state = self.watch.apply(self.method, before, self.at.state, self.at.done)
        return self.run is not before

    def _run_stage(
        self, number: int, stage: Stage, feed: Feed, steps: int, at: Progress, bar: Shown | None
    ) -> Generator[Seen, None, bool]:
        """False if a change interrupts the stage, which then continues with the new run."""
        run, watch = self.run, self.watch
        if at.t == 0:
            if stage.enter is not None:
                at.state = stage.enter(run, at.state)
            at.good = copied(
                without_moments(at.state, stage.passing) if run.by_tensor else at.state
            )
            at.best, at.best_score, at.waited = {}, [], []
        if steps == 0:
            return True
        rates = self._rates(steps) if stage.rates is None else stage.rates
        ticks = torch.arange(steps, dtype=torch.int32, device=run.device)
        noise: Any = run.noise(f"stage/{number}")
        near = run.device.type == "cpu" and worthwhile(run.size * run.layout.size, steps)
        ahead = PrefetchedNoise(noise) if near else None

        reported = True
        trace: list[Any] | None = None

        def step(
            state: State, batch: Any, t: Tensor, rate: Tensor, owned: bool = False
        ) -> tuple[State, Info]:
            clock = Clock(t, rate, steps, ahead or noise, owned, reported=reported, trace=trace)
            return stage.step(run, state, batch, clock)

        executor = self._executor(stage, at, step, feed, ticks, rates, ahead)
        large = run.by_tensor
        if large:  # no step may copy the state, not even the first
            at.state = executor.ours = separate(at.state)
        every = max(1, min(steps, max(10, steps // 100)))
        stopping: EarlyStopping | StopAt | None = None
        if number in self.settings.stop_at:
            stopping = StopAt(self.settings.stop_at[number])
        elif stage.validates:
            stopping = EarlyStopping.of(run, self.method, steps, self.settings.patience)
        last = {steps} if not isinstance(stopping, StopAt) else {steps, *stopping.steps}
        while at.t < steps:
            t = at.t
            if t in stage.hooks:
                at.state = stage.hooks[t](run, at.state)
            tick = t == 0 or (t + 1) % every == 0 or t + 1 in last
            keeps = stage.keep and (t + 1) % stage.keep == 0
            if large:
                before = self._remembered(stage, at) if tick else {}
                reported = bool(tick or keeps)
            else:
                before = copied(at.state) if tick else {}
            records: list[Any] = []
            trace = None
            if watch is not None and watch.trace:
                trace = records
                if executor.mode != "eager":  # a recording has no trace: the same step once more
                    step(copied(at.state), feed.batch(t), ticks[t], rates[t])
                    trace = None
            new, info = executor(at.state, feed.batch(t), ticks[t], rates[t])
            at.state, at.t, at.done, at.mode = new, t + 1, at.done + 1, executor.mode
            if keeps:
                at.keep(self.method.parameters(run, new), info)
            stop = False
            if tick:
                self._guard(stage, at, before, info, every)
                stop = self._tick(stage, at, info, bar)
            interrupted = False
            if watch is not None:
                with threads_outside():
                    yield Seen(at.done, stage.name, at.t, bool(keeps), info, records)
                interrupted = self._changed()
            if stopping is not None and stopping.ends(at):
                if isinstance(stopping, EarlyStopping):
                    log.info("%s: stopped early at step %d, no member improves", stage.name, at.t)
                break
            if stop and feed.steps is None:  # a pass over all rows must not end halfway
                break
            waited = time.monotonic() - self._saved_at
            if self.checkpoints is not None and waited >= self.settings.checkpoint_seconds:
                save(run, self.checkpoints, at, stage)
                self._saved_at = time.monotonic()
            self._look(at, stage)
            if self._interrupts.pending:
                stop_with_checkpoint(run, self.checkpoints, at, stage)
            if interrupted and at.t < steps:
                return False
        mode = executor.mode if stage.recorded is None else stage.recorded.mode
        at.modes[stage.name] = [steps, mode]
        if run.by_tensor:
            at.state, at.good = without_moments(at.state, stage.passing), {}
            release_memory(run)
        if at.best:
            at.state = at.best
            never = [score == -math.inf for score in at.best_score or [0.0] * len(at.best_step)]
            at.stops[number] = [
                steps if n else step - at.done + at.t
                for n, step in zip(never, at.best_step, strict=True)
            ]
        if bar is not None:
            bar.advance_to(at.done)
        return True

    def _look(self, at: Progress, stage: Stage) -> None:
        """Raise an error if another process of the fit has failed, after a checkpoint. This is
        called between steps, as all that writes checkpoints."""
        look, now = self.part.look, time.monotonic()
        if look is None or now - self._looked_at < LOOK:
            return
        self._looked_at = now
        try:
            look()
        except Exception:
            if self.checkpoints is not None:
                try:
                    save(self.run, self.checkpoints, at, stage)
                except StoreError as error:
                    log.error("stopped at step %d without a checkpoint: %s", at.done, error)
            raise

    def _executor(
        self, stage: Stage, at: Progress, step: Any, feed: Feed, ticks: Tensor, rates: Tensor,
        ahead: PrefetchedNoise | None,
    ) -> Executor:  # fmt: skip
        """The mode of execution: from the checkpoint, from the engine, or by the rule on the amount
        of work."""
        if at.t > 0 and at.mode is not None:
            return Executor(step, at.mode, ahead)
        if not stage.capturable:
            return Executor(step)
        if self.run.engine.mode is not None:
            return Executor(step, self.run.engine.mode, ahead, asked=True)
        trial = lambda: (dict(at.state), feed.batch(0), ticks[0], rates[0])  # noqa: E731
        return choose_executor(step, trial, self.run, len(ticks), ahead)

    def _rates(self, steps: int) -> Tensor:
        """The learning rate of each step: [steps], or [steps, M, 1] if runs differ."""
        run = self.run
        shape = schedule(self.settings.schedule, steps).to(run.device)
        return run.rates(shape).to(run.dtype)

    def _tick(self, stage: Stage, at: Progress, info: Info, bar: Shown | None) -> bool:
        """Record the history, update the bar and call the callbacks. True ends the stage.

        Later stages still run, as far as the posterior needs them.
        """
        values = {name: value.detach().cpu().tolist() for name, value in info.items()}
        at.history.setdefault("step", []).append(at.done)
        at.history.setdefault("stage", []).append(stage.name)
        for name, value in values.items():
            at.history.setdefault(name, []).append([at.done, value])
        if bar is not None:
            bar.show(at.done, stage.name, values)
        stop = self.part.count == 1 and len(at.diverged) == self.run.size
        if stop:
            at.stopped = "every member became non-finite"
        run, part = self.run, self.part
        who = part.members or list(zip(run.run_of, run.members, strict=True))
        for callback in self.settings.callbacks:
            try:
                if callback(at.done, StepInfo(values, who, part.number, part.count)):
                    stop = True
                    at.stopped = at.stopped or f"a callback stopped the run at step {at.done}"
            except KeyboardInterrupt:
                self._interrupts.pending = True  # as for Ctrl-C: stop when this step is complete
        return stop

    def _remembered(self, stage: Stage, at: Progress) -> State:
        """The last good state of a large network, after the current state is copied to it, for
        members whose weights are finite. There is no second copy: if the step finds that the loss
        of these weights is not finite, they are kept nevertheless."""
        fine = finite_members(at.state, stage.over)
        fine[list(at.diverged)] = False
        put_rows(fine, at.state, at.good)
        return at.good

    def _guard(self, stage: Stage, at: Progress, before: State, info: Info, every: int) -> None:
        """Reset members with non-finite tensors to their last good state, and log a warning.

        The good state is the one `before` the step: `info` has the loss of that state. The new
        state may be finite and have a non-finite loss."""
        fine = finite_members(at.state, stage.over)
        for name in ("loss", "log_density"):
            if name in info:
                fine = fine & torch.isfinite(info[name]).to(fine.device)
        fine[list(at.diverged)] = False  # it keeps its state, as it would in a fit of its own
        if bool(fine.all()):
            at.good = before
            return
        unchecked = torch.zeros_like(fine)
        for m in (~fine).nonzero().flatten().tolist():
            if m not in at.diverged:
                at.diverged[m] = at.done
                if at.best and at.best_score and at.best_step[m] >= at.done - every:
                    unchecked[m], at.best_score[m] = True, -math.inf
                log.warning("member %d became non-finite by step %d; its last good state is kept",
                            self.run.members[m], at.done)  # fmt: skip
        if bool(unchecked.any()):  # kept by early stopping after the last good state
            at.best = chosen(unchecked, at.good, at.best)
        if self.run.by_tensor:
            names = set(at.state) - set(at.good)
            put_rows(~fine, at.good, {k: at.state[k] for k in at.good})
            for m in (~fine).nonzero().flatten().tolist():
                for name in names:  # the moments of the optimiser
                    at.state[name][m].zero_()
            return
        at.state = chosen(fine, at.state, at.good)
        at.good = chosen(fine, before, at.good)
