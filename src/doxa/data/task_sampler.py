"""Tasks without end: a function draws them, anew at every step.

Tasks are drawn some steps ahead, by a generator seeded with (seed, stage, member, block of steps):
the tasks of step t are the same whenever they are asked for, so that a fit is resumed bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.data.batches import Batch
from doxa.data.rows import cast
from doxa.data.scaling import Standardisation, standardise
from doxa.data.sources import Ask, Feed
from doxa.data.tasks import Tasks, cut, padded_scales, random_context
from doxa.errors import DataError
from doxa.noise import Noise, digest

# From a generator, on whose device tensors are to be, and how many tasks: x [T, N, D] and
# y [T, N, O], and if it likes the masks [T, N] of the context and of the targets.
Draw = Callable[[torch.Generator, int], Sequence[Tensor]]

_BLOCK = 64  # steps that are drawn at once
_NO_WEIGHTS = "fresh tasks have no weights: leave sample_weight out"


class TaskSampler(Tasks):
    """Fresh tasks by the step.

    Parameters
    ----------
    draw: f(generator, count) gives (x [count, N, D], y [count, N, O]), whose points are cut into
        context and targets at random; or (x, y, context, targets) with masks [count, N] of ones
        and zeros, where the cut is part of the task. It draws from the generator alone, on its
        device (`generator.device`).
    seed: of the tasks, besides that of the fit.
    look: how many tasks are drawn beforehand, to learn shapes and scales from.
    """

    def __init__(self, draw: Draw, seed: int = 0, look: int = 256) -> None:
        self.draw, self.seed, self.look = draw, seed, look
        self.first = self.drawn(("look",), look, torch.device("cpu"))

    def __len__(self) -> int:
        return self.look

    def drawn(self, key: tuple[object, ...], count: int, device: torch.device) -> list[Tensor]:
        """x, y, and the masks where the function gives them; always the same for a key."""
        g = torch.Generator(device)
        g.manual_seed(digest("tasks", self.seed, *key) & 0xFFFFFFFF)
        parts = list(self.draw(g, count))
        ranks = [part.ndim for part in parts]
        if ranks not in ([3, 3], [3, 3, 2, 2]) or any(len(part) != count for part in parts):
            shapes = [list(part.shape) for part in parts]
            raise DataError(
                f"a sampler of tasks was asked for {count} and gave {shapes}: it must be "
                "x [tasks, N, D], y [tasks, N, O] and, if at all, masks [tasks, N] of the context "
                "and of the targets"
            )
        return parts

    def some(self, kept: Tensor) -> Tasks:
        raise DataError(_NO_WEIGHTS)

    def feed(self, ask: Ask) -> Feed:
        return SampledTasks(ask)

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
    """Batches of fresh tasks for stacked members."""

    steps: int | None = None

    def __init__(self, ask: Ask) -> None:
        self.ask, self.size = ask, ask.size
        if ask.data.weight is not None:
            raise DataError(_NO_WEIGHTS)
        self.tasks: TaskSampler = ask.data.tasks
        data = ask.data
        rows = torch.tensor([float(len(data.rows[s])) for s in ask.split_of])
        self.scale = (rows / ask.size).to(data.device, data.dtype)
        self.noise = Noise(0, f"context/{ask.stage}", list(ask.keys), data.device, data.dtype)
        self._block: tuple[int, list[Tensor]] = (-1, [])

    def batch(self, t: int) -> Batch:
        number, step = divmod(t, _BLOCK)
        if self._block[0] != number:
            each = [self._own(m, number) for m in range(len(self.ask.keys))]
            self._block = (number, [torch.stack(parts, 1) for parts in zip(*each, strict=True)])
        shared = len(self.ask.keys) == 1
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
        data, key = self.ask.data, (self.ask.stage, self.ask.keys[m], number)
        x, y, *masks = self.tasks.drawn(key, _BLOCK * self.size, data.device)
        scales = data.scales[data.run_of(self.ask.split_of[m])]
        if scales.x_loc is not None:
            loc, scale = scales.x_loc["target_x"], scales.x_scale["target_x"]
            x = (x.double() - loc.to(x.device)) / scale.to(x.device)
        parts = [x, scales.y(y, data.dtype), *masks]
        placed: list[Any] = [cast(part, data.device, data.dtype) for part in parts]
        return [part.unflatten(0, (_BLOCK, self.size)) for part in placed]
