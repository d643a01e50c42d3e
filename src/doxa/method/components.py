"""Common base of methods whose components share weights up to rank-one factors, W ∘ (r_k s_kᵀ).

The factors are points in batch ensembles, and uncertain in rank-1 Bayesian networks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from doxa.data import Batch
from doxa.errors import ModelError
from doxa.method.method import Alternatives, Method, between, whole
from doxa.method.run import Run
from doxa.method.stage import Stage, noise_on_held_out, optimise
from doxa.method.state import Clock, State, flatten_particles, network_part, unflatten_particles
from doxa.model.model import Network, Problem
from doxa.model.rank_one import SCALED, with_rank_one
from doxa.model.spread import exact_noise


@dataclass(frozen=True)
class Components(Method):
    """K networks with one W. A step splits its batch into K parts, one per component.

    Parameters
    ----------
    components : int, default 4
        K, the number of components.
    initial_factor_std : float, default 0.0
        The standard deviation of the initial factors around one. 0 means random signs.
    """

    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()
    half_precision: ClassVar[bool] = True
    renamed: ClassVar[Mapping[str, str]] = {"size": "components", "spread": "initial_factor_std"}

    components: int = whole(4, least=1)
    initial_factor_std: float = between(0.0, 0, 10, "[]")

    @property
    def width(self) -> int:
        return self.components

    def piece_rows(self, size: int) -> int:
        """A multiple of K: the rows of a piece are those of the same components as in the batch."""
        return max(1, size // self.components) * self.components

    @property
    def factor_std(self) -> float | None:
        """The initial standard deviation of the factors; None if they are points."""
        return None

    def prepare(self, problem: Problem) -> Problem:
        """Add factors to the linear and convolutional layers of the subset."""
        assert isinstance(problem, Network)
        uncertain = set(problem.net.subset_names)

        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            takes = type(layer) in SCALED and f"{name}.weight".lstrip(".") in uncertain
            if not takes:
                return None
            by_row = exact_noise(problem.net, name) is not None
            return with_rank_one(name, layer, self.initial_factor_std, self.factor_std, by_row)

        if all(rule(name, layer) is None for name, layer in problem.net.net.named_modules()):
            raise ModelError(
                "the network, or its subset, has no linear or convolutional layer for rank-one "
                "factors: all components would be equal, and nothing uncertain"
            )
        return problem.rewrite(rule)

    def init(self, run: Run) -> State:
        many = unflatten_particles(
            run.expand_particles(self.components).init_network(), self.components
        )
        return {**many, "theta": run.start()}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self.objective, run.steps, over=("theta", "layers"), source="dealt")
        yield from noise_on_held_out(self.score, run)

    @abstractmethod
    def objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        """The objective that is maximised: see `doxa.method.state`."""

    def trained(self, run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
        """The mean over components of the log-likelihood on their parts of the batch, [M], and the
        state entries that changed. One product with W is enough for all components, if rows are the
        first axis in each layer and no layer mixes rows. Otherwise each component has its own
        forward pass."""
        k = self.components
        if run.net.rows_first and not run.problem.joins_rows:
            fit = run.train(params["theta"], network_part(params), batch.padded(k), clock)
            return fit.value, fit.changed
        theta = params["theta"].repeat_interleave(k, 0)  # [M·K, P]
        inner = flatten_particles(network_part(params), k)
        each = run.expand_particles(k).train(
            theta, inner, batch.split(k), clock.expand_particles(k)
        )
        return each.value.unflatten(0, (-1, k)).mean(1), unflatten_particles(each.changed, k)

    def parameters(self, run: Run, state: State) -> Tensor:
        """[M, K, P]: the same weights for all components, which differ in the layers' factors."""
        return state["theta"].unsqueeze(1).expand(-1, self.components, -1)
