"""The predictions of one head at one set of rows, and what happened there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.diagnose.significance import REPLICAS
from doxa.errors import DataError, Unavailable
from doxa.likelihoods import Affine, Bernoulli, Categorical, Likelihood
from doxa.noise import generator
from doxa.predictive import Predictive

_MOST_REPLICATED = 1 << 25  # numbers


def family(likelihood: Likelihood) -> Likelihood:
    """The likelihood itself, whatever the units of y."""
    while isinstance(likelihood, Affine):
        likelihood = likelihood.base
    return likelihood


class Scored:
    """Quantities of one head at N rows, on the CPU and in double precision.

    Tests need rows that are independent of each other. Of a target with several elements (pixels,
    outputs), which are not, one is drawn for each row; `y`, `mean` and the rest are then [N].
    """

    def __init__(
        self, p: Predictive, y: Any, seed: int, functions: Callable[[int], Tensor] | None = None
    ) -> None:
        self.p = p
        self.seed = seed
        self.functions = functions  # draws jointly over the rows, where p is of marginals
        self.likelihood: Likelihood = p.likelihood
        self.targets = p.targets(y)  # as they are, [N, *event]
        targets = self.targets.cpu()
        self.event = tuple(targets.shape[1:])
        flat = targets.reshape(len(targets), -1)
        counted = self._counted(flat)
        self.rows = counted.any(1).nonzero().squeeze(1)
        if len(self.rows) == 0:
            raise DataError("every target is ignored: there is nothing to judge")
        dice = torch.rand(flat.shape, generator=generator(seed, "doctor", "element"))
        self.element = torch.where(counted, dice, -1.0).argmax(1)[self.rows]
        self.y = flat[self.rows, self.element]

    def _counted(self, flat: Tensor) -> Tensor:
        base = family(self.likelihood)
        if isinstance(base, Categorical) and base.ignore_index is not None:
            return flat != base.ignore_index
        return torch.ones_like(flat, dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.rows)

    def one(self, values: Tensor, lead: int = 0) -> Tensor:
        """[*lead, N, *event] to [*lead, N], the drawn element of each row, in double precision."""
        flat = values.detach().cpu().double().reshape(*values.shape[: lead + 1], -1)
        return flat[..., self.rows, self.element]

    @property
    def classifies(self) -> bool:
        return self.likelihood.classifies

    @cached_property
    def mean(self) -> Tensor:
        return self.one(self.p.mean)

    @cached_property
    def variance(self) -> Tensor:
        return self.one(self.p.variance)

    @cached_property
    def aleatoric(self) -> Tensor:
        return self._of_moments("aleatoric")

    @cached_property
    def epistemic(self) -> Tensor:
        """Of a class, summed over its probabilities."""
        return self._of_moments("epistemic")

    def _of_moments(self, name: str) -> Tensor:
        values = getattr(self.p, name)
        if isinstance(family(self.likelihood), Categorical):
            values = values.sum(1)
        return self.one(values)

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities: [N, C]."""
        probs = self.p.probs
        if isinstance(self.likelihood, Bernoulli):
            yes = self.one(probs)
            return torch.stack([1.0 - yes, yes], 1)
        table = probs.detach().cpu().double().reshape(*probs.shape[:2], -1)[self.rows]
        index = self.element.reshape(-1, 1, 1).expand(-1, table.shape[1], 1)
        return table.gather(2, index)[..., 0]

    @cached_property
    def z(self) -> Tensor:
        """(y − E[y]) / std[y]."""
        return (self.y.double() - self.mean) / self.variance.sqrt()

    @cached_property
    def replicas(self) -> Tensor:
        """Targets that the posterior itself would make at these rows, [R, N]: each replica is one
        function and its noise, so that errors which rows share are shared here too."""
        size = max(1, self.p.mean.numel())
        if size * REPLICAS > _MOST_REPLICATED:
            raise Unavailable(f"{REPLICAS} replicas of {size} targets do not fit")
        if self.functions is None:
            return self.one(self.p.sample(REPLICAS, seed=self.seed), 1)
        f = self.one(self.functions(REPLICAS), 1)
        dice = torch.randn(f.shape, generator=generator(self.seed, "doctor", "noise")).double()
        return f + self.aleatoric.sqrt() * dice

    @cached_property
    def log_prob(self) -> Tensor:
        """log p(y) of each row, over all its elements."""
        return self.p.log_prob(self.targets).detach().cpu().double()[self.rows]
