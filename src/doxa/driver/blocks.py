"""The blocks of a fit: whole members that are trained together, apart from all others.

The noise, the order of the rows and the end of the training of a member are functions of its own
seed. So the M = runs × members of a fit can be divided into blocks, and each block is trained as if
it were a fit of its own. The results are joined in the order of the members, and everything that
members have in common (status, noise of the mixture, evaluation, selection) is computed from the
joined results, once per run (`finish.py`).

    cut               the blocks of a fit, by a rule on the method, the network and the numbers of
                      rows and members
    Work              trains the blocks, one after the other, or those that no other process has
    Joined            the results of the blocks, as one `Progress`

**The rule** (`block_size`). A loop over members has blocks of one member: nothing is gained by
training two together, and a process that trains one has the state of one in memory. A stack of
members is cut only where a block is enough work for the overhead of its steps to be small: by the
number of weights times rows per step. What cannot be cut is one block: a method that says so
(`Method.shares`), members that pool their held-out rows (`Run.pooled_rows`), a fit whose callbacks
see all members (unless the size of a block is given). The rule reads neither the number of
processes nor the free memory, so that any number of processes trains the same blocks, and a stored
recipe says which they were.

**Folders.** A fit of one block has its checkpoints in the folder itself, which is locked. A fit of
several blocks has a subfolder `blocks` with one folder per block, whose results stay there
(`store/claims.py`). Several processes, or several calls of the same fit, divide these blocks among
themselves.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.data import free_memory
from doxa.driver import bar as bars
from doxa.driver.loop import (
    CHECKPOINT_FORMAT,
    DrawsInMemory,
    Driver,
    FitCheckpoints,
    Part,
    Progress,
    own_checkpoint,
    saved_engine,
    without_moments,
)
from doxa.driver.setup import divisible
from doxa.driver.watch import Watch
from doxa.engine.engine import default_modes, threads, threads_for
from doxa.errors import MethodError, ProcessError, StoreError
from doxa.linalg.layout import LARGE
from doxa.method import FitSettings, Method, Run, State
from doxa.method.row_sums import divided_by, together
from doxa.model.model import Problem
from doxa.posterior import Posterior
from doxa.store import claims
from doxa.store.claims import FOLDER

log = logging.getLogger("doxa")

others: ContextVar[Any] = ContextVar("doxa_others", default=None)  # `processes.World` of this call
# Weights × rows × members of a step of one block of stacked members: from here on, the overhead of
# a step is less than a twentieth of it. Measured on a CPU by benchmarks/processes.py; on other
# devices, where a step has to be larger to fill the device, an estimate.
WORK, WORK_ON_DEVICE = 2e8, 1e10


def block_size(run: Run, method: Method) -> int:
    """The largest number of members of a block, by the rule above, or as the user has set it."""
    rows = max(map(len, run.rows.rows))
    pooled = run.pooled_rows is not None
    return size_by_rule(
        method, run.problem, run.settings, run.size, run.engine.kind, rows, run.device, pooled
    )


def size_by_rule(
    method: Method, problem: Problem, settings: FitSettings, members: int, kind: str, rows: int,
    device: torch.device, pooled: bool,
) -> int:  # fmt: skip
    """The rule, on numbers that are known before a member is initialised.

    Parameters
    ----------
    method, problem, settings : Method, Problem, FitSettings
    members : int
        Runs × members.
    kind : str
        The kind of engine.
    rows : int
        The most rows that a member is fitted to.
    device : torch.device
    pooled : bool
        Whether members pool their held-out rows.
    """
    if not divisible(problem, method, settings) or pooled or members == 1:
        return members
    if settings.block_size is not None:
        return settings.block_size
    if kind == "loop":
        return 1
    each = problem.layout.size * max(1, method.num_particles_on(problem))
    least = WORK if device.type == "cpu" else WORK_ON_DEVICE
    return min(members, max(2, math.ceil(least / max(1, each * min(settings.batch_size, rows)))))


def cut(members: int, size: int) -> list[slice]:
    """The blocks: as few as possible, of at most `size` members each, and as equal as possible."""
    count = -(-members // size)
    ends = [members * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def name_of(block: slice) -> str:
    """The name of the folder of a block."""
    return f"{block.start:05d}-{block.stop:05d}"


@dataclass
class Trained:
    """What `Work.train` gives: the joined progress, the largest matrix product of the method, and
    facts for the record."""

    progress: Progress
    product: float
    facts: Mapping[str, Any]


@contextmanager
def opened(
    run: Run, method: Method, checkpoint: str | Path | None, digest: str, divided: bool = False
) -> Iterator[Work]:
    """The blocks of a fit, and where its checkpoints are. The folder of a fit of one block is
    locked within the context, unless several processes share it, or blocks are trained alone
    (`divided`)."""
    size, world = block_size(run, method), others.get()
    if world is not None:
        _compare(run, method, checkpoint, digest, size, world)
        if size >= run.size and run.row_blocks > 1 and not divided:
            with _dividing_rows(run, method, checkpoint, digest, world) as work:
                yield work
            return
        checkpoint = world.folder(checkpoint)
    if checkpoint is None:
        yield Work(run, method, cut(run.size, size))
        return
    folder = Path(checkpoint)
    with ExitStack() as stack:
        shared = divided or world is not None or size < run.size or (folder / FOLDER).is_dir()
        if not shared:
            stack.enter_context(store.exclusive(folder))
        checkpoints = store.Checkpoints(folder)
        found = own_checkpoint(checkpoints, digest)
        if found is not None:
            run, size = replace(run, engine=saved_engine(run.engine, found, folder)), run.size
        blocks, places = cut(run.size, size), None
        if shared:
            engine = {name: getattr(run.engine, name) for name in ("kind", "native", "chunk")}
            agreed = claims.agreed_cut(folder / FOLDER, digest, {"size": size, "engine": engine})
            blocks = cut(run.size, agreed["size"])
            run = replace(run, engine=replace(run.engine, **agreed["engine"]))
            first = folder if found is not None and len(blocks) == 1 else None
            places = [
                claims.Place(folder / FOLDER / name_of(block), digest, first) for block in blocks
            ]
        yield Work(run, method, blocks, FitCheckpoints(checkpoints, digest, found), places)


def _compare(
    run: Run, method: Method, checkpoint: str | Path | None, digest: str, size: int, world: Any
) -> None:
    """Check that all processes have the same data, network and settings."""
    from doxa.driver import processes

    more = {"checkpoint": checkpoint, "engine": repr(run.engine), "torch": torch.__version__,
            "block_size": size, "threads": threads()}  # fmt: skip
    world.compare(processes.digests(run, method, digest, more))


@contextmanager
def _dividing_rows(
    run: Run, method: Method, checkpoint: str | Path | None, digest: str, world: Any
) -> Iterator[Work]:
    """The one block of a fit that all processes train in step, dividing sums over rows
    (`method/row_sums.py`). The folder of checkpoints is that of process 0. The others begin from
    copies of the newest one, and write no checkpoints that anybody needs."""
    with ExitStack() as stack:
        found = checkpoints = None
        if checkpoint is not None:
            folder = Path(checkpoint)
            if world.rank == 0:
                stack.enter_context(store.exclusive(folder))
            world.exchange("locked", "")
            if world.rank:
                aside = tempfile.TemporaryDirectory(prefix="doxa-", ignore_cleanup_errors=True)
                folder = store.copy_newest(folder, Path(stack.enter_context(aside)))
            found = own_checkpoint(store.Checkpoints(folder), digest)
            if len(set(world.exchange("found", None if found is None else found.step))) > 1:
                raise ProcessError(
                    f"not every process sees the checkpoints in {checkpoint}: pass checkpoint= "
                    "with a folder that all of them see"
                )
            checkpoints = FitCheckpoints(store.Checkpoints(folder), digest, found)
        if found is not None:
            run = replace(run, engine=saved_engine(run.engine, found, checkpoint))
        if world.rank:
            quiet = replace(run.settings, progress=False, checkpoint_seconds=math.inf)
            run = replace(run, settings=quiet)
        stack.enter_context(divided_by(world.dividing_rows()))
        yield Work(run, method, [slice(0, run.size)], checkpoints)


def compare_results(posteriors: Sequence[Posterior]) -> None:
    """An error that names the processes whose posteriors differ from those of process 0."""
    world = others.get()
    if world is not None:
        from doxa.driver import processes

        world.compare(processes.result_digests(posteriors), processes.SAME_MACHINES)


@dataclass
class Work:
    """The blocks of a fit that are to be trained.

    Parameters
    ----------
    run : Run
        The run of all members, with the engine of the blocks.
    method : Method
    blocks : list of slice
        The members of each block.
    checkpoints : FitCheckpoints, optional
        Those of the whole fit.
    places : list of claims.Place, optional
        The folder of each block, where several processes may divide them.
    """

    run: Run
    method: Method
    blocks: list[slice]
    checkpoints: FitCheckpoints | None = None
    places: list[claims.Place] | None = None

    def train(self, follow: Callable[[Driver], None] | None = None) -> Trained:
        """Train all blocks, and join their results. `follow` makes the steps of a driver that
        yields them; then there is one block."""
        size = max(b.stop - b.start for b in self.blocks)
        if follow is not None and len(self.blocks) > 1:  # another call has cut them
            raise MethodError(
                "Snapshots show all members together, and the folder of checkpoints has the "
                "members in several blocks, of a fit without Snapshots: use another folder"
            )
        facts: dict[str, Any] = {
            "blocks": {"count": len(self.blocks), "members": size}, "threads": threads(),
        }  # fmt: skip
        if self.run.row_blocks > 1:
            facts["row_blocks"] = {"count": self.run.row_blocks}
        if self.places is not None:
            return self._divided(facts, follow)
        if len(self.blocks) == 1:
            driver = self._drive(self.run, self.checkpoints, bars.shown, Part(), follow)
            world, group = others.get(), together.get()
            if world is not None and group is not None:
                done = world.exchange("blocks of rows", group.blocks)
                facts["processes"] = {
                    "count": world.size, "blocks_by": [], "row_blocks_by": done,
                }  # fmt: skip
            return Trained(driver.at, driver.product, facts)
        joined, product = Joined(self.run.size, self.run.settings.draws_budget), 0.0
        with Bar(len(self.blocks)) as bar:
            for i, block in enumerate(self.blocks):
                with members_of(self.run, block) as run:
                    driver = self._drive(run, None, bar.of(i), self.part(i))
                    joined.add(block, driver.at)
                    product = max(product, driver.product)
        return Trained(joined.progress(), product, facts)

    def part(self, i: int, look: Callable[[], None] | None = None) -> Part:
        """What the driver of a block knows of the fit."""
        run = self.run
        who = list(zip(run.run_of, run.members, strict=True))[self.blocks[i]]
        return Part(i, len(self.blocks), who, look)

    def _drive(
        self, run: Run, checkpoints: FitCheckpoints | None, bar: Any, part: Part,
        follow: Callable[[Driver], None] | None = None,
    ) -> Driver:  # fmt: skip
        """The driver of a block, after all of its steps."""
        watch = None if follow is None else Watch()
        driver = Driver(run, self.method, checkpoints, watch, bar, part)
        (follow or Driver.drive)(driver)
        return driver

    def listed(self) -> list[Block]:
        """The blocks, to be trained one by one."""
        assert self.places is not None
        who = list(zip(self.run.run_of, self.run.members, strict=True))
        return [
            Block(name_of(block), who[block], place.path, self, i)
            for i, (block, place) in enumerate(zip(self.blocks, self.places, strict=True))
        ]

    def train_one(self, i: int) -> bool:
        """Train one block, unless another process does. Whether its result is there."""
        assert self.places is not None
        with Bar(1) as bar, self.run.engine.rounding():
            return self.places[i].done or self._train(i, bar, 0, claims.Seen(), None)

    def _divided(self, facts: dict[str, Any], follow: Callable[[Driver], None] | None) -> Trained:
        """Train the blocks that no other process has, wait for the others, and read all results."""
        assert self.places is not None
        world = others.get()
        self._train_free(world, follow)
        joined = Joined(self.run.size, self.run.settings.draws_budget)
        products, by = [], []
        for block, place in zip(self.blocks, self.places, strict=True):
            at, meta = _result(place, self.run.device)
            joined.add(block, at)
            products.append(float(meta["product"]))
            by.append(meta["rank"])
        if world is not None:
            facts["processes"] = {"count": world.size, "blocks_by": by}
        if len(self.blocks) == 1:
            return Trained(at, products[0], facts)
        return Trained(joined.progress(), max(products), facts)

    def _train_free(self, world: Any, follow: Callable[[Driver], None] | None) -> None:
        assert self.places is not None
        seen, count, done = claims.Seen(), len(self.blocks), 0
        with Bar(count) as bar:

            def attempt(i: int) -> bool:
                nonlocal done
                assert self.places is not None
                there = self.places[i].done or self._train(i, bar, done, seen, world, follow)
                done += there
                return there

            if world is None:
                claims.divide(count, attempt)
            else:
                claims.divide(count, attempt, world.rank * count // world.size, world.check)

    def _train(
        self, i: int, bar: Bar, done: int, seen: Any, world: Any,
        follow: Callable[[Driver], None] | None = None,
    ) -> bool:  # fmt: skip
        """Train a block, if no other process has it. Whether its result is there."""
        assert self.places is not None
        place, rank = self.places[i], 0 if world is None else world.rank
        lease = place.claim(seen)
        if lease is None:
            return False
        with lease:
            if place.done:
                return True
            look, named = None, nullcontext()
            if world is not None:
                look, named = world.check, world.training(name_of(self.blocks[i]))
            try:
                with named, members_of(self.run, self.blocks[i]) as run:
                    if rank:  # the bar is that of process 0
                        run = replace(run, settings=replace(run.settings, progress=False))
                    folder = store.Checkpoints(place.checkpoints(lease))
                    found = own_checkpoint(folder, place.digest)
                    checkpoints = FitCheckpoints(folder, place.digest, found)
                    part = self.part(i, look)
                    driver = self._drive(run, checkpoints, bar.of(done), part, follow)
                    tensors, meta = _published(driver.at)
                    place.publish(lease, tensors, meta | {"rank": rank, "product": driver.product})
            except BaseException:
                place.release(lease)
                raise
        return True


def _published(at: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the facts of the result of a block: without the moments of the optimiser of a
    large network, and without what only a step needs."""
    kept = at.kept
    plain = replace(at, state=_lasting(at.state), good={}, best={}, kept=None)
    tensors, progress = plain.to_checkpoint()
    if kept is not None:
        tensors["draws"] = kept.tensor()
    return tensors, {
        "format": CHECKPOINT_FORMAT, "progress": progress, "shape": list(at.shape),
    }  # fmt: skip


def _result(place: claims.Place, device: torch.device) -> tuple[Progress, dict[str, Any]]:
    """The result of a block, as it was published, and its facts."""
    tensors, meta = place.result()
    if meta.get("format") != CHECKPOINT_FORMAT:
        raise StoreError(
            f"the result in {place.path} has format {meta.get('format')!r}, of another version of "
            f"doxa; this version reads format {CHECKPOINT_FORMAT}. Remove it to start over"
        )
    with store.decoding(place.path):
        draws = tensors.pop("draws", None)
        moved = {name: value.to(device) for name, value in tensors.items()}
        at = Progress.from_checkpoint(moved, meta["progress"])
        kept = None if draws is None else DrawsInMemory.of(draws)
        return replace(at, kept=kept, shape=tuple(meta["shape"])), meta


def _lasting(state: State) -> State:
    """The state that a result keeps."""
    large = any(v[0].numel() >= LARGE for v in state.values() if v.ndim > 1)
    return without_moments(state) if large else state


@dataclass(frozen=True)
class Block:
    """A block of a fit, as `doxa.blocks` lists it.

    Parameters
    ----------
    name : str
        Its name: the first member, and the one after the last, counted over all runs.
    members : list of tuple of (int, int)
        The run and the id of each of its members.
    folder : Path
        Where its result is, or will be.
    """

    name: str
    members: list[tuple[int, int]]
    folder: Path
    _work: Work = field(repr=False)
    _number: int = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        assert self._work.places is not None
        found: bool = self._work.places[self._number].done
        return found

    def run(self) -> bool:
        """Train this block, and write its result. It goes on from checkpoints that a process has
        left.

        Returns
        -------
        bool
            Whether the result is there. False if another process is training this block.
        """
        with default_modes(train=True), threads_for(0.0):
            return self._work.train_one(self._number)


@contextmanager
def members_of(run: Run, block: slice) -> Iterator[Run]:
    """The run of a block. What it has cached is forgotten at the end, with its place in memory."""
    part = run.select_members(block)
    budget = run.settings.draws_budget
    if budget is None:
        budget = free_memory(run.device) // 4  # of draws in memory: not of any number in them
    own = replace(part.settings, draws_budget=budget * part.size // run.size)
    yield replace(part, settings=own)
    run.cached.pop((block.start, block.stop), None)


class Bar:
    """One progress bar for the blocks that a process trains.

    Parameters
    ----------
    count : int
        The number of blocks.
    """

    def __init__(self, count: int) -> None:
        self.count, self._shown = count, ExitStack()
        self._bar: bars.Shown | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        self._shown.__exit__(*error)

    def of(self, block: int) -> Callable[[str, int, int], Any]:
        """What the driver of a block opens in place of a bar of its own."""

        def opened(name: str, steps: int, done: int) -> Any:
            if self._bar is None:
                start = block * steps + done
                self._bar = bars.shown(name, self.count * steps, start)
                self._shown.enter_context(self._bar)
            return nullcontext(_Shifted(self._bar, block * steps))

        return opened


@dataclass
class _Shifted:
    """The bar of all blocks, as the driver of one of them sees it."""

    bar: bars.Shown
    start: int

    def show(self, done: int, stage: str, values: Mapping[str, Any]) -> None:
        self.bar.show(self.start + done, stage, values)

    def advance_to(self, done: int) -> None:
        self.bar.advance_to(self.start + done)


@dataclass
class JoinedDraws:
    """The kept draws of all blocks: [members, count, size].

    Parameters
    ----------
    budget : int
        Draws of some members that take more bytes are kept in a file without a name.
    parts : dict of slice to object
        The draws of each block, as its `Progress` has them.
    """

    budget: int
    parts: dict[int, tuple[slice, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return min(len(kept) for _, kept in self.parts.values())

    def tensor(self, rows: slice = slice(None)) -> Tensor:
        """The draws of some members. Those of a block alone are not copied."""
        members = max(block.stop for block, _ in self.parts.values())
        first, last, _ = rows.indices(members)
        found: list[Tensor] = []
        for start in sorted(self.parts):
            block, kept = self.parts[start]
            a, b = max(first, block.start), min(last, block.stop)
            if a < b:
                own = slice(a - block.start, b - block.start)
                found.append(kept.tensor(own)[:, : len(self)])
        if len(found) == 1:
            return found[0]
        shape = (last - first, *found[0].shape[1:])
        if sum(part.nbytes for part in found) > self.budget:
            file = store.DrawsFile(shape, found[0].dtype, None, self.budget)
            file.put(found)
            return file.tensor()
        return torch.cat(found)


class Joined:
    """The results of blocks, joined one by one in any order.

    The tensors of all members are allocated with the first block, so that a fit never has more than
    the joined state and the state of one block in memory.

    Parameters
    ----------
    members : int
        The number of members of all blocks.
    budget : int, optional
        Bytes of draws in memory, as in `doxa.fit`.
    """

    def __init__(self, members: int, budget: int | None = None) -> None:
        self.members, self.budget = members, budget
        self.state: State = {}
        self.parts: dict[int, tuple[slice, Progress]] = {}

    def add(self, block: slice, at: Progress) -> None:
        """Take the result of a block. Its own state is dropped."""
        for name, value in _lasting(at.state).items():
            if name not in self.state:
                self.state[name] = value.new_empty((self.members, *value.shape[1:]))
            self.state[name][block] = value
        self.parts[block.start] = block, replace(at, state={}, good={}, best={})

    def progress(self) -> Progress:
        """All members' progress. A member whose block ended a stage earlier keeps its last values
        in the history."""
        parts = [self.parts[start] for start in sorted(self.parts)]
        one, each = parts[0][1], [at for _, at in parts]
        kept: Any = None
        if one.kept is not None:
            budget = self.budget
            if budget is None:
                budget = free_memory(next(iter(self.state.values())).device) // 4
            kept = JoinedDraws(budget, {b.start: (b, at.kept) for b, at in parts})
        draws = 0 if kept is None else len(kept)
        lengths = [max(of) for of in zip(*(at.lengths for at in each), strict=True)]
        moved = [_Moved(at.lengths, lengths) for at in each]
        scored = all(at.best_step for at in each)
        stops = [stage for stage in one.stops if all(stage in at.stops for at in each)]
        every = list(zip(parts, moved, strict=True))
        return Progress(
            self.state, kept, one.shape,
            stats={
                name: [torch.cat([at.stats[name][t] for at in each]) for t in range(draws)]
                for name in one.stats
            },
            stage=one.stage, done=sum(lengths), modes=one.modes, lengths=lengths,
            history=_history(parts, moved, self.members),
            best_step=[to(s) for (_, at), to in every for s in at.best_step] if scored else [],
            best_score=[s for at in each for s in at.best_score] if scored else [],
            diverged={b.start + m: to(s) for (b, at), to in every for m, s in at.diverged.items()},
            stops={stage: [s for at in each for s in at.stops[stage]] for stage in stops},
            stopped=next((at.stopped for at in each if at.stopped), ""),
        )  # fmt: skip


class _Moved:
    """From a step of a block, counted over its stages, to the step of the joined fit.

    Parameters
    ----------
    own, joined : list of int
        The numbers of steps of each stage, in the block and in the joined fit.
    """

    def __init__(self, own: Sequence[int], joined: Sequence[int]) -> None:
        self.own, self.joined = own, joined

    def __call__(self, done: int) -> int:
        start = moved = 0
        for own, joined in zip(self.own, self.joined, strict=True):
            if done <= start + own:
                break
            start, moved = start + own, moved + joined
        return moved + done - start


def _history(
    parts: Sequence[tuple[slice, Progress]], moved: Sequence[_Moved], members: int
) -> dict[str, list[Any]]:
    """The history of all members, at the steps of any of the blocks."""
    stages: dict[int, str] = {}
    series: dict[str, dict[int, list[tuple[slice, list[Any]]]]] = {}
    for (block, at), to in zip(parts, moved, strict=True):
        for step, stage in zip(
            at.history.get("step", []), at.history.get("stage", []), strict=True
        ):
            stages[to(step)] = stage
        for name, values in at.history.items():
            if name not in ("step", "stage"):
                own = series.setdefault(name, {})
                for step, value in values:
                    own.setdefault(to(step), []).append((block, value))
    found: dict[str, list[Any]] = {}
    if stages:
        found = {"step": sorted(stages), "stage": [stages[step] for step in sorted(stages)]}
    for name, steps in series.items():
        last = [math.nan] * members
        found[name] = []
        for step in sorted(steps):
            for block, value in steps[step]:
                last[block] = value
            found[name].append([step, list(last)])
    return found
