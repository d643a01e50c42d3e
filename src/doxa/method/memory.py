"""An estimate of the memory of a fit, before it is allocated.

`fit` compares the method's `planned_bytes` for the `Workload` with the available memory, and raises
an error with the figure if it is larger. At that time, nothing of the size of all members has been
allocated. The estimate counts memory that grows with members and weights, or with rows if a method
stores a matrix of them. It does not count the activations of a batch, nor Python and torch
themselves. The estimate only decides whether a fit starts; it does not change the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from doxa.data import Data, free_memory
from doxa.errors import MemoryBudgetError
from doxa.model.model import Problem

if TYPE_CHECKING:
    from doxa.method.method import Method


@dataclass(frozen=True)
class Workload:
    """The size of a fit.

    Parameters
    ----------
    members : int
        Runs × members.
    weights : int
        Trained weights of one network, with the learned noise.
    uncertain : int
        The number of weights in the model's subset.
    brought : int
        Parameters of the method's own modules and layers, for one member.
    rows : int
        The largest number of rows that a member is fitted to.
    columns : int
        Numbers in one row of x.
    outputs : int
        Outputs of the network, or of the method's own functions, for one row.
    features : int
        Inputs of the network's last layer; 0 without a network.
    batch : int
        Rows per step.
    itemsize : int
        Bytes per number.
    draws_budget : int
        Bytes of kept draws in memory; the rest is on disk.
    """

    members: int
    weights: int
    uncertain: int
    brought: int
    rows: int
    columns: int
    outputs: int
    features: int
    batch: int
    itemsize: int
    draws_budget: int

    @classmethod
    def of(
        cls, problem: Problem, data: Data, members: int, batch: int, output: Any, inputs: Any,
        draws_budget: int | None,
    ) -> Workload:  # fmt: skip
        model = problem.model
        brought = sum(module.layout.size for module in problem.modules.values())
        uncertain = weights = problem.layout.size
        features = 0
        if model is not None:
            brought += model.layers.size
            uncertain = problem.layout.select(model.subset_names).size
            last = [e.shape for e in problem.layout.entries if e.name == f"{model.head}.weight"]
            features = last[0][-1] if last else 0
        if draws_budget is None:
            draws_budget = free_memory(data.device) // 4
        return cls(
            members, weights, uncertain, brought, max(map(len, data.rows)), _count(inputs),
            _count(output), features, batch, torch.finfo(data.dtype).bits // 8, draws_budget,
        )  # fmt: skip

    @property
    def copy(self) -> int:
        """Bytes of one copy of all members' weights."""
        return self.members * (self.weights + self.brought) * self.itemsize


def check_planned(method: Method, work: Workload, device: torch.device) -> int:
    """The estimated bytes of a fit; an error if they are not available."""
    need = method.planned_bytes(work)
    what = f"{work.members} members" if work.members > 1 else "one member"
    if work.weights:
        what += f" of {work.weights:,} weights"
    require(need, device, f"{method.name} with {what}", method.smaller)
    return need


def require(need: int, device: torch.device, what: str, smaller: str) -> None:
    """Raise an error with the figures if `need` bytes are not available."""
    free = free_memory(device)
    if need > free:
        raise MemoryBudgetError(
            f"{what} takes about {need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB "
            f"are available on {device}: {smaller}"
        )


def _count(shapes: Any) -> int:
    """Numbers in a row whose shape is a list of sizes, or a tree of such lists."""
    if isinstance(shapes, dict):
        return sum(map(_count, shapes.values()))
    if isinstance(shapes, list | tuple | torch.Size):
        if all(isinstance(size, int) for size in shapes):
            return math.prod(shapes)
        return sum(map(_count, shapes))
    return sum(leaf for leaf in tree_flatten(shapes)[0] if isinstance(leaf, int)) or 1
