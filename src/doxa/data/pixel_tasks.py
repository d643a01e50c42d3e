"""Images as tasks: a pixel is a point, its place is x and its value y."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def places(height: int, width: int, spacing: float = 1.0) -> Tensor:
    """Row and column of every pixel, [height·width, 2], `spacing` apart, about the middle one: so
    they lie on a lattice of 1/spacing points a unit."""
    rows, columns = (torch.arange(n) - n // 2 for n in (height, width))
    return spacing * torch.cartesian_prod(rows, columns).float()


def pixel_tasks(
    images: Tensor, points: int, context: tuple[int, int], spacing: float = 1.0
) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What `doxa.data.TaskSampler` draws with, of images [N, H, W] (bytes, or numbers): `points`
    pixels of an image, of which the first are the context, between the two numbers of `context`,
    and the others the targets."""
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
