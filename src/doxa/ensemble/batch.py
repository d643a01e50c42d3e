"""Batch ensembles: one set of weights, and a rank-one factor in every layer for each component.

    W_k = W ∘ (r_k s_kᵀ),   k = 1 … K;   component k sees the k-th part of every batch
    p(y | x) = (1/K) Σ_k p(y | x, W_k)

Wen, Tran & Ba (2020). K networks for little more than the memory of one: a component adds an entry
for each input and output of a layer. In training a batch is cut into K parts, one a component, so a
step costs about what one network's does. Factors start at random signs, without which components
would be one network; they have no prior. W, biases and everything else are shared, but for
BatchNorm's statistics. Linear and convolutional layers have factors; others are shared as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError, ModelError
from doxa.method import (
    Clock,
    Method,
    Problem,
    Run,
    Stage,
    State,
    folded,
    network_part,
    noise_on_held_out,
    optimise,
    unfolded,
)
from doxa.method.fields import between, whole
from doxa.model.problem import Network
from doxa.model.rank_one import SCALED, with_rank_one
from doxa.posterior import Posterior, SamplePosterior


@store.register("batch-ensemble")
@dataclass(frozen=True)
class BatchEnsemble(Method):
    """Networks that share their weights but for rank-one factors.

    Parameters
    ----------
    size: K, the components.
    spread: the standard deviation with which factors start around one; 0: random signs.
    """

    name: ClassVar[str] = "batch-ensemble"
    overfits: ClassVar[bool] = True

    size: int = whole(4, least=1)
    spread: float = between(0.0, 0, 10, "[]")

    @property
    def width(self) -> int:
        return self.size

    def prepare(self, problem: Problem) -> Problem:
        assert isinstance(problem, Network)
        uncertain = set(problem.net.subset_names)

        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            takes = type(layer) in SCALED and f"{name}.weight".lstrip(".") in uncertain
            return with_rank_one(name, layer, self.spread) if takes else None

        if all(rule(name, layer) is None for name, layer in problem.net.net.named_modules()):
            raise ModelError(
                "the network, or its subset, has no linear or convolutional layer to give factors "
                "to: all components would be one"
            )
        return problem.rewrite(rule)

    def init(self, run: Run) -> State:
        many = unfolded(run.times(self.size).init_network(), self.size)
        return {**many, "theta": run.start()}

    def stages(self, run: Run) -> Iterable[Stage]:
        if run.settings.batch_size < self.size:
            raise MethodError(
                f"a batch of {run.settings.batch_size} rows cannot be cut into {self.size} parts"
            )
        yield optimise(self._objective, run.steps, over=("theta", "layers"), source="dealt")
        yield from noise_on_held_out(self.score, run)

    def _objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        k = self.size
        theta = params["theta"].repeat_interleave(k, 0)  # [M·K, P]
        inner = folded(network_part(params), k)
        fit = run.times(k).train(theta, inner, batch.split(k), clock.times(k))
        value = fit.value.unflatten(0, (-1, k)).mean(1)
        return value, unfolded(fit.changed, k), run.known_prior(params["theta"])

    def parameters(self, run: Run, state: State) -> Tensor:
        """[M, K, P]: the same weights for every component; what parts them are the layers' own."""
        return state["theta"].unsqueeze(1).expand(-1, self.size, -1)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return SamplePosterior(
            samples=self.parameters(run, state).contiguous(), chain=False, per_draw=True,
            **run.common(self), **run.shared(state),
        )  # fmt: skip
