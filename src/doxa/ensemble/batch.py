"""Batch ensembles: one set of weights, and a rank-one factor in every layer for each component.

    W_k = W ∘ (r_k s_kᵀ),   k = 1 … K;   component k sees the k-th part of every batch
    p(y | x) = (1/K) Σ_k p(y | x, W_k)

Wen, Tran & Ba (2020). K networks for little more than the memory of one: a component adds an entry
for each input and output of a layer. In training a batch is split into K parts, one per component.
Factors multiply activations, so that all parts share one product with W: a step costs little more
than a step of one network on the same rows. (It takes K passes where a layer mixes rows, as
BatchNorm does, or where the rows are not its first axis.) Factors start at random signs, because
otherwise all components would be the same network; they have no prior. W, biases and all other
weights are shared, except for BatchNorm's statistics. Linear and convolutional layers have factors;
others are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.method import Clock, Run, State
from doxa.method.components import Components
from doxa.posterior import Posterior, SamplePosterior


@store.register("batch-ensemble")
@dataclass(frozen=True)
class BatchEnsemble(Components):
    """Networks that share their weights, except for rank-one factors.

    Parameters
    ----------
    components : int
        K, the number of components.
    initial_factor_std : float
        The standard deviation of the initial factors around one; 0: random signs.
    """

    name: ClassVar[str] = "batch-ensemble"

    def objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed = self.trained(run, params, batch, clock)
        return value, changed, run.known_prior(params["theta"])

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return SamplePosterior(
            samples=self.parameters(run, state).contiguous(), chain=False, per_draw=True,
            **run.common(self), **run.shared(state),
        )  # fmt: skip
