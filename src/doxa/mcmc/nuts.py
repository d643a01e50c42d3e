"""The no-U-turn sampler: Hamiltonian Monte Carlo that finds its own trajectory length.

    grow the trajectory by doubling, forwards or backwards at random, until it turns back;
    take one of its points z with probability proportional to exp(−H(z))

Hoffman & Gelman (2014), with multinomial draws and the generalised U-turn of Betancourt (2017), as
in Stan; `doxa.mcmc.tree` has the trajectory. All chains advance together, and each transition lasts
as long as its longest tree: no trajectory length to choose, at the price of waiting. Burn-in finds
step size and mass as `doxa.mcmc.adaptation` says. Full-data gradients; dropout is off and BatchNorm
frozen. A transition is no fixed sequence of operations, so that only its parts are recorded or
compiled, never the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from doxa import store
from doxa.data import Batch
from doxa.engine.parts import Recorded
from doxa.mcmc.hamiltonian import Hamiltonian
from doxa.mcmc.kernel import Move
from doxa.mcmc.mass import KINDS
from doxa.mcmc.tree import Parts, close, grow, join, plant, sprout
from doxa.method import Clock, Info, Run, State
from doxa.method.fields import between, one_of, positive, whole

_EARLY = 7  # depth before a first mass is known, when long trees cost much and lead nowhere


@store.register("nuts")
@dataclass(frozen=True)
class NUTS(Hamiltonian):
    """Multinomial no-U-turn sampler.

    Parameters
    ----------
    draws: transitions kept from each chain (after `thin`), `burn_in` transitions before them.
    target_accept: what the step size is adapted towards; nearer to 1 where transitions diverge.
    max_depth: at most 2^max_depth − 1 leapfrog steps a transition; 2^7 − 1 until burn-in has
        learned a first mass.
    mass: "diagonal" (a scale a parameter) or "dense" (a covariance; up to some hundreds of them).
    thin: keep every `thin`-th draw. temperature: T.
    """

    name: ClassVar[str] = "nuts"
    default_members: ClassVar[int] = 4
    tallied: ClassVar[tuple[str, ...]] = (*Hamiltonian.tallied, "depth", "saturated")

    draws: int = whole(500, least=1)
    burn_in: int = whole(500, least=0)
    target_accept: float = between(0.8, 0, 1, "()", per_run=True)
    max_depth: int = whole(10, least=1, most=20)
    mass: str = one_of(*KINDS)
    thin: int = whole(1, least=1)
    temperature: float = positive(1.0, per_run=True)

    @property
    def gradients(self) -> tuple[int, int]:
        """Trees that turn back at once, and trees that never do."""
        return self.transitions, self.transitions * (2**self.max_depth - 1)

    def captures(self, run: Run) -> bool:
        return False

    def move(self, run: Run) -> tuple[Move, Recorded | None]:
        def leaf(state: State, batch: Batch, branch: State) -> State:
            return sprout(self.density(run, state, batch), branch)

        recorded = Recorded(run, leaf, self.transitions * 2 ** min(self.max_depth, 4))
        plants, closes, joins = (recorded.part(each) for each in (self._plant, close, join))

        def move(state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            leaves = lambda branch: recorded(state, batch, clock, branch)  # noqa: E731
            parts = Parts(plants, leaves, closes, joins)
            found = self._transition(state, clock, parts)
            recorded.end_transition()
            return found

        return move, recorded

    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        density = self.density(run, state, batch)
        leaf = lambda branch: sprout(density, branch)  # noqa: E731
        return self._transition(state, clock, Parts(self._plant, leaf, close, join))

    def _plant(self, values: State) -> State:
        return plant(values, self.max_depth)

    def _transition(self, state: State, clock: Clock, parts: Parts) -> tuple[State, Info]:
        start = self.depart(state, clock)
        early = _EARLY if bool(state["early"].any()) else None
        found = grow(parts, start, state["metric"], state["step"], clock, self.max_depth, early)
        new = {**state, **{name: found.pop(name) for name in ("theta", "grad", "log_density")}}
        return new, {**found, "step_size": state["step"]}

    def report(self, state: State) -> dict[str, Any]:
        return {
            **super().report(state),
            "tree_depth": self.share(state, "depth").tolist(),
            "saturated_share": float(self.share(state, "saturated").mean()),
        }
