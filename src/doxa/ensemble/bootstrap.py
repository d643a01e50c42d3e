"""The Bayesian bootstrap: MAP fits under random weights of the rows.

    w_m ~ n · Dirichlet(1, …, 1);   θ_m = argmax Σ_i w_mi log p(y_i | θ) + log p(θ)

Rubin (1981); Newton & Raftery (1994). The weights are draws from the posterior over the
distribution of the rows, under a noninformative prior. So the points θ_m are draws from a posterior
over the fitted parameters: with a flat prior on θ, over the best fit to the unknown population.
Members also differ in their initial weights and in the order of rows, as in a deep ensemble. Unlike
in the ordinary bootstrap, no row is ever excluded. The method does not assume that the model is
correct, so its spread is valid also where the likelihood is wrong. For a network, the initial
weights usually matter more than the row weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data.dependence import group_sizes
from doxa.ensemble.map import MAP
from doxa.method import Run
from doxa.noise import Noise


@store.register("bootstrap")
@dataclass(frozen=True)
class BayesianBootstrap(MAP):
    """MAP fits, each with its own draw of Dirichlet weights; ten members by default. The rows of a
    group have one weight."""

    name: ClassVar[str] = "bootstrap"
    default_members: ClassVar[int] = 10

    def streamed_row_weights(self, keys: Sequence[str], numbers: Tensor) -> Tensor:
        """Row weights [M, N] of rows of a stream, Exp(1): those of `row_weights`, but for the
        division by their mean over all rows, which is 1 up to 1/√N."""
        noise = Noise(0, "bootstrap", list(keys), dtype=torch.float64)
        return -noise.uniform_at(numbers).log()

    def row_weights(self, run: Run) -> Tensor:
        """Row weights [M, N]: their mean over the rows of a member is 1; rows outside its training
        set keep their weight."""
        drawn = -run.noise("bootstrap").uniform((run.rows.total,)).log()  # Exp(1), by place
        weights = torch.ones_like(drawn)
        for m, split in enumerate(run.split_of):
            own = run.rows.rows[split].to(run.device)
            each = drawn[m, : len(own)]
            if (group := run.rows.groups_of(run.rows.rows[split])) is not None:
                each = drawn[m, group_sizes(group)[0].to(run.device)]
            weights[m, own] = each / each.mean()
        return weights
