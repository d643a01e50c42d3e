"""Tasks: sets of points of different sizes, for meta-learning methods.

A row of the data set is a task. Tasks are padded to the longest one and masked. The input of a
network is a dict,

    context_x [B, N, D], context_y [B, N, O], context [B, N] (1 where a point is in the context),
    target_x [B, N, D]

and the network predicts the points outside the context, the mask `Batch.points` [B, N]. The context
is drawn at each step: between one point and all points but one.

    Tasks          a list of tasks, or a folder of CSV files (one file per task, one line per point)
    TaskSampler    new tasks at each step, drawn by a function
    pixel_tasks    images as tasks: a pixel is a point, x its position and y its value

`TaskSampler` draws the tasks of a block of steps together, with a generator seeded by (seed, stage,
member, block). The tasks of step t are always the same, so that a fit can be resumed bit for bit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.data.batches import SOURCES, Batch, Batches, BatchRequest, Feed, Source
from doxa.data.rows import as_tensor, cast, check_finite
from doxa.data.scaling import Standardisation, standardise
from doxa.data.text_files import read_bytes, unescape
from doxa.errors import DataError, ShapeError
from doxa.noise import Noise, digest


def read_folder(
    folder: str | Path, target: str | Sequence[str], drop: Sequence[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """(x, y) of each file, in the order of the file names. The first line has the names of the
    columns, which must be the same in all files and numeric. All columns except targets and dropped
    columns are inputs."""
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise DataError(f"{folder} holds no .csv file")
    targets = [target] if isinstance(target, str) else list(target)
    names = _rows(files[0])[0]
    absent = [name for name in (*targets, *drop) if name not in names]
    if absent:
        raise DataError(f"{files[0].name} has no column {absent[0]!r}; there are {names}")
    inputs = [name for name in names if name not in targets and name not in drop]
    if not inputs:
        raise DataError(f"{files[0].name} has no input column besides {targets}")
    tasks = []
    for file in files:
        header, *rows = _rows(file)
        if sorted(header) != sorted(names):
            raise DataError(f"{file.name} has the columns {header}, {files[0].name} {names}")
        place = {name: i for i, name in enumerate(header)}
        x, y = (
            torch.tensor(
                [[_number(row, place[name], name, file, i) for name in columns]
                 for i, row in enumerate(rows, 2)], dtype=torch.float64,
            ).reshape(len(rows), len(columns))
            for columns in (inputs, targets)
        )  # fmt: skip
        if len(x) < 2:
            raise DataError(
                f"{file.name} has {len(x)} rows: a task needs at least two, one for the context "
                "and one to predict"
            )
        tasks.append((x, y))
    return tasks


def _rows(file: Path) -> list[list[str]]:
    try:
        text = read_bytes(file).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file.name} cannot be read as a table: {error}") from error
    if not rows:
        raise DataError(f"{file.name} is empty")
    return [[unescape(name) for name in rows[0]], *rows[1:]]


def _number(row: Sequence[str], at: int, name: str, file: Path, line: int) -> float:
    try:
        return float(row[at])
    except (IndexError, ValueError) as error:
        cell = repr(row[at]) if at < len(row) else "missing"
        raise DataError(f"{file.name}, line {line}: {name} is {cell}, not a number") from error


class Tasks:
    """A list of tasks (x [n, D], y [n, O]), each with at least two points."""

    def __init__(self, tasks: Iterable[tuple[Any, Any]]) -> None:
        self.tasks = [_task(i, *task) for i, task in enumerate(tasks)]
        if not self.tasks:
            raise DataError("there are no tasks")
        widths = {(x.shape[1], y.shape[1]) for x, y in self.tasks}
        if len(widths) > 1:
            raise ShapeError(f"tasks have different columns of x and y: {sorted(widths)}")

    @classmethod
    def from_folder(
        cls, folder: str | Path, target: str | Sequence[str], drop: Sequence[str] = ()
    ) -> Tasks:
        """Each CSV file of a folder as a task: see `doxa.data.tasks`."""
        return Tasks(read_folder(folder, target, drop))

    def __len__(self) -> int:
        return len(self.tasks)

    def some(self, kept: Tensor) -> Tasks:
        """The tasks selected by a mask."""
        return Tasks(task for task, own in zip(self.tasks, kept.tolist(), strict=True) if own)

    def feed(self, request: BatchRequest) -> Feed:
        """Batches of tasks for a stage."""
        return TaskBatches(request)

    def padded(self) -> tuple[dict[str, Tensor], Tensor]:
        """The network's input x with all points in the context, and y [T, N, O]."""
        longest = max(len(x) for x, _ in self.tasks)
        x, y = (torch.stack([_pad_to(task[i], longest) for task in self.tasks]) for i in range(2))
        real = torch.stack([_pad_to(x.new_ones(len(own)), longest) for own, _ in self.tasks])
        return {"context_x": x, "context_y": y, "context": real, "target_x": x}, y

    def scales(
        self, rows: Sequence[Tensor], scale_y: bool, weight: Tensor | None = None
    ) -> list[Standardisation]:
        """The scales of each run's tasks, over all points; `weight` has one entry per task."""
        found = []
        for index in rows:
            own = [self.tasks[int(i)] for i in index]
            x, y = (torch.cat([task[i] for task in own]) for i in range(2))
            points = torch.tensor([len(task[0]) for task in own])
            each = None if weight is None else weight.cpu()[index].repeat_interleave(points)
            (one,) = standardise(x, y, [torch.arange(len(x))], scale_y, each)
            found.append(padded_scales(one))
        return found


def padded_scales(one: Standardisation) -> Standardisation:
    """The scales of points in the shape of padded tasks."""
    zero, unit = torch.zeros(()).double(), torch.ones(()).double()
    y_loc, y_scale = (zero, unit) if one.y_loc is None else (one.y_loc, one.y_scale)
    loc = {"context_x": one.x_loc, "context_y": y_loc, "context": zero, "target_x": one.x_loc}
    scale = {"context_x": one.x_scale, "context_y": y_scale, "context": unit,
             "target_x": one.x_scale}  # fmt: skip
    outer = (None, None) if one.y_loc is None else (y_loc[None], y_scale[None])  # of points [N, O]
    return Standardisation(loc, scale, *outer)


def _task(i: int, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    x, y = as_tensor(x, f"x of task {i}"), as_tensor(y, f"y of task {i}")
    x, y = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (x, y))
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise ShapeError(
            f"task {i} has x of shape {list(x.shape)} and y of shape {list(y.shape)}: they must be "
            "[n, D] and [n, O], of one length"
        )
    if len(x) < 2:
        raise DataError(
            f"task {i} has {len(x)} points: a task needs at least two, one for the context and one "
            "to predict"
        )
    check_finite(x, f"x of task {i}")
    check_finite(y, f"y of task {i}")
    return x, y


def _pad_to(t: Tensor, length: int) -> Tensor:
    return torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])])


def cut(batch: Batch, context: Tensor) -> Batch:
    """A batch with all points in the context, split by the mask `context`: the other points are the
    targets."""
    real = batch.x["context"]
    context = real * context
    seen = context.unsqueeze(-1)
    x = batch.x | {
        "context": context, "context_x": batch.x["context_x"] * seen,
        "context_y": batch.x["context_y"] * seen,
    }  # fmt: skip
    return replace(batch, x=x, points=real - context)


def condition_on_half(batch: Batch) -> Batch:
    """The batch with the first half of each task as its context, for deterministic scores."""
    real = batch.x["context"]
    half = (real.sum(-1, keepdim=True) / 2).ceil()
    return cut(batch, (real.cumsum(-1) <= half).to(real.dtype))


class TaskBatches:
    """Random tasks, each with a context drawn for this step."""

    steps: int | None = None

    def __init__(self, request: BatchRequest) -> None:
        data = request.data
        self.base = Batches(
            data, request.split_of, request.keys, request.size, request.stage, most=request.steps
        )
        self.size = self.base.size
        self.noise = Noise(
            0, f"context/{request.stage}", list(request.keys), data.device, data.dtype
        )

    def batch(self, t: int) -> Batch:
        batch = self.base.batch(t)
        real = batch.x["context"]  # [(M,) B, N]
        return cut(batch, random_context(real, self.noise, t, batch.shared))


def random_context(real: Tensor, noise: Noise, t: int, shared: bool) -> Tensor:
    """A mask of 1 … count − 1 of each task's real points, [(M,) B, N]; the number is uniform."""
    draws = noise.uniform((real.shape[-2], real.shape[-1] + 1), t)  # [M, B, N + 1]
    draws = draws[0] if shared else draws
    count = real.sum(-1, keepdim=True)
    size = 1 + ((1 - draws[..., :1]) * (count - 1)).floor()
    order = torch.where(real > 0, draws[..., 1:], 2.0).argsort(-1).argsort(-1)
    return (order < size).to(real.dtype)


@dataclass(frozen=True)
class RandomTasks(Source):
    """Random tasks, each task once per epoch, split into context and targets."""

    def open(self, request: BatchRequest) -> Feed:
        if not request.data.tasks:
            raise DataError("this method learns from tasks: pass doxa.data.Tasks([(x, y), ...])")
        return (
            request.data.tasks.feed(request)
            if isinstance(request.data.tasks, Tasks)
            else TaskBatches(request)
        )


SOURCES["tasks"] = RandomTasks()


# A function of a generator, on whose device the tensors must be, and the number of tasks. It
# returns x [T, N, D], y [T, N, O], and optionally the masks [T, N] of the context and the targets.
Draw = Callable[[torch.Generator, int], Sequence[Tensor]]

_BLOCK = 64  # steps that are drawn at once
_NO_WEIGHTS = "sampled tasks have no weights: do not pass sample_weight"


class TaskSampler(Tasks):
    """New tasks at each step.

    Parameters
    ----------
    draw : callable
        A function f(generator, count) that returns (x [count, N, D], y [count, N, O]), whose points
        are split into context and targets at random; or (x, y, context, targets) with masks
        [count, N] of ones and zeros, if the split is part of the task. It must use only the
        generator for random numbers, on the generator's device (`generator.device`).
    seed : int
        The seed of the tasks, in addition to the seed of the fit.
    look : int
        The number of tasks that are drawn in advance, to find shapes and scales.
    """

    def __init__(self, draw: Draw, seed: int = 0, look: int = 256) -> None:
        self.draw, self.seed, self.look = draw, seed, look
        self.first = self.drawn(("look",), look, torch.device("cpu"))

    def __len__(self) -> int:
        return self.look

    def drawn(self, key: tuple[object, ...], count: int, device: torch.device) -> list[Tensor]:
        """x, y, and the masks if the function returns them; always the same for a key."""
        g = torch.Generator(device)
        g.manual_seed(digest("tasks", self.seed, *key) & 0xFFFFFFFF)
        parts = list(self.draw(g, count))
        ranks = [part.ndim for part in parts]
        if ranks not in ([3, 3], [3, 3, 2, 2]) or any(len(part) != count for part in parts):
            shapes = [list(part.shape) for part in parts]
            raise DataError(
                f"a sampler of tasks returned {shapes} for {count} tasks: it must return "
                "x [tasks, N, D], y [tasks, N, O] and optionally masks [tasks, N] of the context "
                "and of the targets"
            )
        return parts

    def some(self, kept: Tensor) -> Tasks:
        raise DataError(_NO_WEIGHTS)

    def feed(self, request: BatchRequest) -> Feed:
        return SampledTasks(request)

    def padded(self) -> tuple[dict[str, Tensor], Tensor]:
        x, y, *masks = self.first
        real = masks[0] + masks[1] if masks else torch.ones_like(x[..., 0])
        seen = real.unsqueeze(-1)
        return {"context_x": x * seen, "context_y": y * seen, "context": real, "target_x": x}, y

    def scales(
        self, rows: Sequence[Tensor], scale_y: bool, weight: Tensor | None = None
    ) -> list[Standardisation]:
        x, y = self.padded()
        real = x["context"] > 0
        points = x["target_x"][real]
        (one,) = standardise(points, y[real], [torch.arange(len(points))], scale_y)
        return [padded_scales(one)] * len(rows)


class SampledTasks:
    """Batches of newly sampled tasks for stacked members."""

    steps: int | None = None

    def __init__(self, request: BatchRequest) -> None:
        self.request, self.size = request, request.size
        if request.data.weight is not None:
            raise DataError(_NO_WEIGHTS)
        self.tasks: TaskSampler = request.data.tasks
        data = request.data
        rows = torch.tensor([float(len(data.rows[s])) for s in request.split_of])
        self.scale = (rows / request.size).to(data.device, data.dtype)
        self.noise = Noise(
            0, f"context/{request.stage}", list(request.keys), data.device, data.dtype
        )
        self._block: tuple[int, list[Tensor]] = (-1, [])

    def batch(self, t: int) -> Batch:
        number, step = divmod(t, _BLOCK)
        if self._block[0] != number:
            each = [self._own(m, number) for m in range(len(self.request.keys))]
            self._block = (number, [torch.stack(parts, 1) for parts in zip(*each, strict=True)])
        shared = len(self.request.keys) == 1
        pick: Callable[[Tensor], Tensor] = lambda v: v[step, 0] if shared else v[step]  # noqa: E731
        x, y, *masks = (pick(part) for part in self._block[1])
        real = masks[0] + masks[1] if masks else torch.ones_like(x[..., 0])
        inputs = {"context_x": x, "context_y": y, "context": real, "target_x": x}
        batch = Batch(inputs, y, self.scale, None, shared)
        if not masks:
            return cut(batch, random_context(real, self.noise, t, shared))
        return replace(cut(batch, masks[0]), points=masks[1])

    def _own(self, m: int, number: int) -> list[Tensor]:
        """A member's tasks of a block of steps, in fitted units, [steps, B, ...]."""
        data, key = self.request.data, (self.request.stage, self.request.keys[m], number)
        x, y, *masks = self.tasks.drawn(key, _BLOCK * self.size, data.device)
        scales = data.scales[data.run_of(self.request.split_of[m])]
        if scales.x_loc is not None:
            loc, scale = scales.x_loc["target_x"], scales.x_scale["target_x"]
            x = (x.double() - loc.to(x.device)) / scale.to(x.device)
        parts = [x, scales.y(y, data.dtype), *masks]
        placed: list[Any] = [cast(part, data.device, data.dtype) for part in parts]
        return [part.unflatten(0, (_BLOCK, self.size)) for part in placed]


def places(height: int, width: int, spacing: float = 1.0) -> Tensor:
    """Row and column of each pixel, [height·width, 2], at distance `spacing`, relative to the
    middle pixel: a lattice with 1/spacing points per unit."""
    rows, columns = (torch.arange(n) - n // 2 for n in (height, width))
    return spacing * torch.cartesian_prod(rows, columns).float()


def pixel_tasks(
    images: Tensor, points: int, context: tuple[int, int], spacing: float = 1.0
) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A function for `doxa.data.TaskSampler` from images [N, H, W] (bytes or numbers). A task is
    `points` pixels of an image. The first of them are the context, a number between the two of
    `context`; the others are the targets."""
    _, height, width = images.shape
    table, at = images.flatten(1), places(height, width, spacing)
    there: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def draw(g: torch.Generator, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if g.device not in there:
            there[g.device] = table.to(g.device), at.to(g.device)
        values, place = there[g.device]
        which = torch.randint(len(values), (count,), generator=g, device=g.device)
        chance = torch.rand(count, values.shape[1], generator=g, device=g.device)
        pixels = chance.argsort(1)[:, :points]
        low, high = context
        share = torch.rand(count, 1, generator=g, device=g.device)
        seen = low + (share * (high - low + 1)).floor()
        mask = (torch.arange(points, device=g.device) < seen).float()
        return place[pixels], values[which].gather(1, pixels).float().unsqueeze(2), mask, 1 - mask

    return draw
