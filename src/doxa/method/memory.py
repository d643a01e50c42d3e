"""How much memory a fit takes, planned before it is taken.

`fit` asks the method for `planned_bytes` of the `Workload` and refuses, with the figure, what is
larger than the memory that is available. Nothing of the size of all members has been allocated by
then. The plan counts what grows with members and weights, or with rows where a method holds a
matrix of them; activations of a batch and what Python and torch take themselves come on top. It
decides whether a fit starts, and nothing about its result.
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
    """How large a fit is.

    Parameters
    ----------
    members: runs × members.
    weights: trained weights of one network, with learned noise.
    uncertain: those of them in the model's subset.
    brought: parameters of the modules and layers that the method brings, for one member.
    rows: the most rows that a member is fitted to.
    columns: numbers in one row of x.
    outputs: outputs of the network at one row, or of a method's own functions.
    features: inputs of the network's last layer; 0 without a network.
    batch: rows of a step.
    itemsize: bytes of a number.
    draws_budget: bytes of kept draws that stay in memory; the rest is on disk.
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
        """Bytes of all members' weights, once."""
        return self.members * (self.weights + self.brought) * self.itemsize


def check_planned(method: Method, work: Workload, device: torch.device) -> int:
    """The bytes that a fit will take; an error where they are not available."""
    need = method.planned_bytes(work)
    what = f"{work.members} members" if work.members > 1 else "one member"
    if work.weights:
        what += f" of {work.weights:,} weights"
    require(need, device, f"{method.name} with {what}", method.smaller)
    return need


def require(need: int, device: torch.device, what: str, smaller: str) -> None:
    """An error that gives the figure, where so many bytes are not available."""
    free = free_memory(device)
    if need > free:
        raise MemoryBudgetError(
            f"{what} takes about {need / 2**30:.3g} GiB ({need} bytes), and {free / 2**30:.3g} GiB "
            f"are available on {device}: {smaller}"
        )


def _count(shapes: Any) -> int:
    """Numbers in a row whose shape is a list of sizes, or in a tree of such."""
    if isinstance(shapes, dict):
        return sum(map(_count, shapes.values()))
    if isinstance(shapes, list | tuple | torch.Size):
        if all(isinstance(size, int) for size in shapes):
            return math.prod(shapes)
        return sum(map(_count, shapes))
    return sum(leaf for leaf in tree_flatten(shapes)[0] if isinstance(leaf, int)) or 1
