"""Tasks: sets of points of uneven size, for methods that learn to learn.

A row of the data set is a task. Tasks are padded to the longest and masked; what a network is given
is a dict,

    context_x [B, N, D], context_y [B, N, O], context [B, N] (1 where a point is in the context),
    target_x [B, N, D]

and what it must predict are the points outside the context: `Batch.points` [B, N] says which.
Which points are the context is drawn anew at every step, between one point and all but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa.data.batches import Batch
from doxa.data.rows import as_tensor, check_finite
from doxa.data.scaling import Standardisation, standardise
from doxa.data.sources import SOURCES, Ask, Batches, Feed, Source
from doxa.data.task_files import read_folder
from doxa.errors import DataError, ShapeError
from doxa.noise import Noise


class Tasks:
    """A list of tasks (x [n, D], y [n, O]), each with two points or more."""

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
        """Every CSV file of a folder as a task: see `doxa.data.task_files`."""
        return Tasks(read_folder(folder, target, drop))

    def __len__(self) -> int:
        return len(self.tasks)

    def some(self, kept: Tensor) -> Tasks:
        """Those that a mask says."""
        return Tasks(task for task, own in zip(self.tasks, kept.tolist(), strict=True) if own)

    def feed(self, ask: Ask) -> Feed:
        """Batches of them for a stage."""
        return TaskBatches(ask)

    def padded(self) -> tuple[dict[str, Tensor], Tensor]:
        """x as the network is given it, with all points in the context, and y [T, N, O]."""
        longest = max(len(x) for x, _ in self.tasks)
        x, y = (torch.stack([_longer(task[i], longest) for task in self.tasks]) for i in range(2))
        real = torch.stack([_longer(x.new_ones(len(own)), longest) for own, _ in self.tasks])
        return {"context_x": x, "context_y": y, "context": real, "target_x": x}, y

    def scales(
        self, rows: Sequence[Tensor], scale_y: bool, weight: Tensor | None = None
    ) -> list[Standardisation]:
        """Of each run's tasks, over all of their points together; weight: of each task."""
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
    """Scales of points as those of padded tasks."""
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
        raise DataError(f"task {i} has {len(x)} points: one for the context and one to predict")
    check_finite(x, f"x of task {i}")
    check_finite(y, f"y of task {i}")
    return x, y


def _longer(t: Tensor, length: int) -> Tensor:
    return torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])])


def cut(batch: Batch, context: Tensor) -> Batch:
    """A batch whose points all lie in the context, cut by the mask `context`: what is left are the
    targets."""
    real = batch.x["context"]
    context = real * context
    seen = context.unsqueeze(-1)
    x = batch.x | {
        "context": context, "context_x": batch.x["context_x"] * seen,
        "context_y": batch.x["context_y"] * seen,
    }  # fmt: skip
    return replace(batch, x=x, points=real - context)


def halved(batch: Batch) -> Batch:
    """Every task's first half as its context: for scores that should not depend on chance."""
    real = batch.x["context"]
    half = (real.sum(-1, keepdim=True) / 2).ceil()
    return cut(batch, (real.cumsum(-1) <= half).to(real.dtype))


class TaskBatches:
    """Random tasks, each with a context drawn for this step."""

    steps: int | None = None

    def __init__(self, ask: Ask) -> None:
        data = ask.data
        self.base = Batches(data, ask.split_of, ask.keys, ask.size, ask.stage, most=ask.steps)
        self.noise = Noise(0, f"context/{ask.stage}", list(ask.keys), data.device, data.dtype)

    def batch(self, t: int) -> Batch:
        batch = self.base.batch(t)
        real = batch.x["context"]  # [(M,) B, N]
        return cut(batch, random_context(real, self.noise, t, batch.shared))


def random_context(real: Tensor, noise: Noise, t: int, shared: bool) -> Tensor:
    """A mask of 1 … count − 1 of each task's real points, [(M,) B, N]; any number is as likely."""
    draws = noise.uniform((real.shape[-2], real.shape[-1] + 1), t)  # [M, B, N + 1]
    draws = draws[0] if shared else draws
    count = real.sum(-1, keepdim=True)
    size = 1 + ((1 - draws[..., :1]) * (count - 1)).floor()
    order = torch.where(real > 0, draws[..., 1:], 2.0).argsort(-1).argsort(-1)
    return (order < size).to(real.dtype)


@dataclass(frozen=True)
class RandomTasks(Source):
    """Random tasks, every task once an epoch, each cut into context and targets."""

    def open(self, ask: Ask) -> Feed:
        if not ask.data.tasks:
            raise DataError("this method learns from tasks: pass doxa.data.Tasks([(x, y), ...])")
        return ask.data.tasks.feed(ask) if isinstance(ask.data.tasks, Tasks) else TaskBatches(ask)


SOURCES["tasks"] = RandomTasks()
