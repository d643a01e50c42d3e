"""What networks share that have weights in common but for rank-one factors, W ∘ (r_k s_kᵀ): batch
ensembles, whose factors are points, and rank-1 Bayesian networks, whose factors are uncertain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from doxa.data import Batch
from doxa.errors import ModelError
from doxa.method.method import Method, between, whole
from doxa.method.run import Run
from doxa.method.stage import Stage, noise_on_held_out, optimise
from doxa.method.state import Clock, State, flatten_particles, network_part, unflatten_particles
from doxa.model.model import Network, Problem
from doxa.model.rank_one import SCALED, with_rank_one
from doxa.model.spread import exact_noise


@dataclass(frozen=True)
class Components(Method):
    """K networks with one W; a step cuts its batch into K parts, one a component.

    Parameters
    ----------
    size: K. spread: the standard deviation with which factors start around one; 0: random signs.
    """

    overfits: ClassVar[bool] = True
    half_precision: ClassVar[bool] = True

    size: int = whole(4, least=1)
    spread: float = between(0.0, 0, 10, "[]")

    @property
    def width(self) -> int:
        return self.size

    @property
    def factor_std(self) -> float | None:
        """The standard deviation that factors start with; None where they are points."""
        return None

    def prepare(self, problem: Problem) -> Problem:
        """Linear and convolutional layers of the subset have factors."""
        assert isinstance(problem, Network)
        uncertain = set(problem.net.subset_names)

        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            takes = type(layer) in SCALED and f"{name}.weight".lstrip(".") in uncertain
            if not takes:
                return None
            by_row = exact_noise(problem.net, name) is not None
            return with_rank_one(name, layer, self.spread, self.factor_std, by_row)

        if all(rule(name, layer) is None for name, layer in problem.net.net.named_modules()):
            raise ModelError(
                "the network, or its subset, has no linear or convolutional layer to give factors "
                "to: all components would be one, and nothing uncertain"
            )
        return problem.rewrite(rule)

    def init(self, run: Run) -> State:
        many = unflatten_particles(run.expand_particles(self.size).init_network(), self.size)
        return {**many, "theta": run.start()}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self.objective, run.steps, over=("theta", "layers"), source="dealt")
        yield from noise_on_held_out(self.score, run)

    @abstractmethod
    def objective(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        """What is ascended: see `doxa.method.state`."""

    def trained(self, run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
        """The log-likelihood, each component's on its part of the batch and their mean, [M], and
        what the pass changed. One product with W serves all components, where each layer sees the
        rows themselves and none of them mixes them; else each has a pass of its own."""
        k = self.size
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
        """[M, K, P]: the same weights for every component; what parts them are the layers' own."""
        return state["theta"].unsqueeze(1).expand(-1, self.size, -1)
