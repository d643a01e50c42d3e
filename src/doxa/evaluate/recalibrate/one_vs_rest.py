"""Recalibration by one curve a class, from a probability to a probability.

With two classes (and Bernoulli) one curve on the second does it exactly. With more, each class has
a curve against the rest, and the results are divided by their sum; where all are 0 the row keeps
its own probabilities. The division means that several classes together carry no guarantee.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from doxa.evaluate.recalibrate.rows import ClassMap


class OneVsRest(ClassMap):
    """Curves, counted from 0; with two classes there is only curve 0."""

    @abstractmethod
    def curve(self, c: int, probs: Tensor) -> Tensor:
        """Any shape to the same shape."""

    def map(self, table: Tensor) -> Tensor:
        probs = table.exp()
        if probs.shape[1] == 2:
            yes = self.curve(0, probs[:, 1])
            return torch.stack([1.0 - yes, yes], 1).log()
        each = torch.stack([self.curve(c, probs[:, c]) for c in range(probs.shape[1])], 1)
        total = each.sum(1, keepdim=True)
        return torch.where(total > 0, (each / total).log(), table)


def curves_of(log_probs: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(probability, 0 or 1) of each curve to fit."""
    probs = log_probs.exp()
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    return [(probs[:, c].contiguous(), (y == c).double()) for c in classes]
