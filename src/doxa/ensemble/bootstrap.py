"""The Bayesian bootstrap: MAP fits under random weights of the rows.

    w_m ~ n · Dirichlet(1, …, 1);   θ_m = argmax Σ_i w_mi log p(y_i | θ) + log p(θ)

Rubin (1981); Newton & Raftery (1994). The weights are draws from the posterior over where the rows
came from, under no prior on it, so that the points θ_m are draws from a posterior over what is
fitted: with a flat prior on θ, that of the best fit to the unknown population. Members also start
and are shuffled differently, as in a deep ensemble. Unlike the ordinary bootstrap no row is ever
left out altogether. No model is assumed to be right, so its spread holds up where the likelihood is
wrong; on a network the starts usually matter more than the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.ensemble.map import MAP
from doxa.method import Run


@store.register("bootstrap")
@dataclass(frozen=True)
class BayesianBootstrap(MAP):
    """Ten MAP fits, each under Dirichlet weights of its own, unless `members` says otherwise."""

    name: ClassVar[str] = "bootstrap"
    default_members: ClassVar[int] = 10

    def row_weights(self, run: Run) -> Tensor:
        """[M, N]: the mean over a member's rows is 1; rows that it does not train on count as
        they are."""
        drawn = -run.noise("bootstrap").uniform((run.rows.total,)).log()  # Exp(1), by place
        weights = torch.ones_like(drawn)
        for m, split in enumerate(run.split_of):
            own = run.rows.rows[split].to(run.device)
            weights[m, own] = drawn[m, : len(own)] / drawn[m, : len(own)].mean()
        return weights
