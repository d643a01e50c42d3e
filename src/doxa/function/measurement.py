"""Where functions are compared: some rows of a batch, and points drawn in a box around the data."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch, batch_rows
from doxa.errors import DataError
from doxa.function.glance import glance
from doxa.method import Clock, Run, State

LOOKED_AT = 1024  # rows that the box, and a kernel's first lengthscales, are read from


class Measured(NamedTuple):
    """Inputs at which functions are computed, and which of them are measurement points.

    x: the batch's rows and then the box's points, [N, ...] where all members share them, else
    [M, N, ...]. where: positions in x, [M, K].
    """

    x: Any
    shared: bool
    where: Tensor

    def inputs(self) -> Tensor:
        """The measurement points themselves, [M, K, ...]; x is one array then."""
        if self.shared:
            return self.x[self.where]
        return self.x[torch.arange(len(self.x), device=self.x.device).unsqueeze(1), self.where]

    def values(self, f: Tensor) -> Tensor:
        """Of functions at x, [M, S, N, O], those at the measurement points, [M, S, K, O]."""
        index = self.where[:, None, :, None].expand(-1, f.shape[1], -1, f.shape[3])
        return f.gather(2, index)


def box(run: Run, margin: float) -> State:
    """Each member's box: the range of every number of x, wider by a share of it on each side."""
    x = glance(run, LOOKED_AT).x
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError(
            "measurement points are drawn in a box around x, which has to be one array of real "
            "numbers; with points=0 functions are compared at the rows of a batch alone"
        )
    least, most = x.amin(1), x.amax(1)
    wider = margin * (most - least)
    return {"low": (least - wider).to(run.device), "high": (most + wider).to(run.device)}


def measured(params: State, batch: Batch, clock: Clock, rows: int, points: int) -> Measured:
    """So many rows of the batch, as often as they weigh, by systematic sampling (each once where
    there are as many, and rows of weight 0 never), and so many uniform points of the box."""
    members = len(batch.scale)
    x, count = batch.x, batch_rows(batch)
    weight = batch.scale.new_ones(count) if batch.weight is None else batch.weight
    upto = weight.cumsum(-1).expand(members, -1).contiguous()
    place = torch.arange(rows, device=upto.device, dtype=upto.dtype) + clock.uniform(1)  # [M, rows]
    where = torch.searchsorted(upto, place / rows * upto[:, -1:]).clamp_max(count - 1)
    if not points:
        return Measured(x, batch.shared, where)
    low, high = params["low"].unsqueeze(1), params["high"].unsqueeze(1)
    drawn = torch.lerp(low, high, clock.uniform(points, *low.shape[2:]))
    own = x.expand(members, *x.shape) if batch.shared else x
    more = torch.arange(count, count + points, device=where.device).expand(members, -1)
    x, where = torch.cat([own, drawn], 1), torch.cat([where, more], 1)
    return Measured(x[0], True, where) if members == 1 else Measured(x, False, where)
