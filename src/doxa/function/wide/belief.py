"""What is believed of functions before the data: a kernel, where its scales start, its evidence.

`Analytic` is an architecture's kernel of infinite width. Its scales are log σ_w and log σ_b.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import DataError
from doxa.function.evidence import Problem, Solved
from doxa.function.wide.classes import as_numbers
from doxa.function.wide.function import WideFunction
from doxa.function.wide.posterior import WidePosterior
from doxa.method import Run

if TYPE_CHECKING:
    from doxa.function.wide.fitting import InfinitelyWide


class Scales(Problem):
    """The evidence and a prior on θ: log σ_w, log σ_b and log σ of fitted units, around
    1.5, 0.3 and 1."""

    def value(self, theta: Tensor, solved: Solved) -> Tensor:
        return super().value(theta, solved) - 0.5 * self._away(theta).square().sum(-1)

    def gradient(self, theta: Tensor, solved: Solved) -> Tensor:
        return super().gradient(theta, solved) - self._away(theta)

    def _away(self, theta: Tensor) -> Tensor:
        centre = torch.zeros_like(theta)
        centre[..., 0], centre[..., 1] = math.log(1.5), math.log(0.3)
        return theta - centre


class Belief(ABC):
    """The kernel of a run, as `fitting.py` asks for it; `function` is k(hyper, a, b)."""

    function: Any

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        self.method, self.run = method, run

    @property
    def posterior(self) -> type[WidePosterior]:
        return self.method.posterior

    @abstractmethod
    def start(self) -> Tensor:
        """Where the logarithms of its scales start, [M, H]; an error where rows do not fit."""

    @abstractmethod
    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        """The evidence of all rows, times a prior on θ."""

    @abstractmethod
    def rows(self, x: Any, lead: int = 1) -> Tensor:
        """Inputs as vectors [..., N, D], with `lead` axes up to the rows."""

    def hyper(self, scales: Tensor) -> Tensor:
        """What `function` is given, for fitted scales [M, H]."""
        return scales

    def settled(self, scales: Tensor) -> dict[str, Any]:
        """What else a posterior is given."""
        return {}

    def _seen(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Targets as numbers, weights, and their sum."""
        y = as_numbers(self.run, batch.y, 1 if batch.shared else 2)
        weight = None if batch.weight is None else batch.weight.double()
        return y, weight, self.run.n.double()


class Analytic(Belief):
    """Of an architecture, at infinite width."""

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        super().__init__(method, run)
        if not isinstance(run.rows.x, Tensor):
            raise DataError(f"{method.name} needs x as one array")
        network = None if run.problem.model is None else run.net.net
        shape = tuple(run.rows.x.shape[1:])
        self.function = WideFunction(method.architecture(network), shape, method.kind)

    def start(self) -> Tensor:
        one = self.rows(self.run.rows.x[:1].double())
        self.function(one.new_zeros(2), one, one)
        names = ("weight_std", "bias_std")
        return torch.stack([self.run.field(self.method, n).double().log() for n in names], 1)

    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        x = self.rows(batch.x, 1 if batch.shared else 2).double()
        return Scales(self.function, x, *self._seen(batch), log_noise)

    def rows(self, x: Tensor, lead: int = 1) -> Tensor:
        return x.unsqueeze(-1) if x.ndim == lead else x.flatten(lead)
