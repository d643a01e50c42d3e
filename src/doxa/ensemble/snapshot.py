"""Snapshot ensembles: several networks from one training run with a cyclic rate.

    α(t) = (α₀ / 2) (cos(π (t mod c) / c) + 1),   c = steps / K;   keep θ at each cycle's end
    p(y | x) = (1/K) Σ_k p(y | x, θ_k),   K = snapshots

Huang, Li, Pleiss, Liu, Hopcroft & Weinberger (2017); Loshchilov & Hutter (2017). The rate falls to
zero in each cycle, so that every snapshot is a trained network. Then the rate starts again at α₀,
with a new state of the optimiser, and the weights leave their mode. If rows are held out, a cycle
is one training with early stopping: the snapshot is the point that predicts them best, and the next
cycle starts there. Without held-out rows, every snapshot overfits a small table. This is an
ensemble at the cost of one network; its members are nearer to each other than those of a deep
ensemble. Each snapshot keeps the BatchNorm statistics of its training. With `members`, each member
is such a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method import (
    Hook,
    Method,
    Objective,
    Run,
    Stage,
    State,
    log_joint,
    network_part,
    noise_on_held_out,
    of_subset,
    optimise,
)
from doxa.method.method import Alternatives, whole
from doxa.posterior import Posterior, SamplePosterior

_KEPT = "snapshot."


@store.register("snapshot")
@dataclass(frozen=True)
class SnapshotEnsemble(Method):
    """Snapshots of one run.

    Parameters
    ----------
    snapshots : int
        The number of cycles per member, and of its networks.
    skip : int
        The number of first snapshots that are dropped, because they are the least trained.
    """

    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    name: ClassVar[str] = "snapshot"
    renamed: ClassVar[Mapping[str, str]] = {"size": "snapshots"}
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()

    snapshots: int = whole(5, least=1)
    skip: int = whole(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip >= self.snapshots:
            raise MethodError(f"skip={self.skip} of snapshots={self.snapshots} leaves none")

    @property
    def kept_draws(self) -> int:
        return self.snapshots

    def stages(self, run: Run) -> Iterable[Stage]:
        if run.steps < self.snapshots:
            raise MethodError(f"{self.snapshots} snapshots need as many steps, not {run.steps}")
        cycle = run.steps // self.snapshots
        objective: Objective = log_joint
        if run.free is not None:  # weights outside the subset are points: find them first
            yield optimise(log_joint, run.steps, name="maximum")
            objective = of_subset(log_joint)
        for k in range(self.snapshots):
            training = optimise(objective, cycle, name=f"cycle {k + 1}")
            begin = training.enter
            assert begin is not None
            yield replace(training, rates=self.rates(run, cycle), enter=self._entered(k, begin))
        yield Stage("last snapshot", training.step, 0, enter=self._take)
        yield from noise_on_held_out(self._mixed, run, f"{_KEPT}theta")

    def _entered(self, k: int, begin: Hook) -> Hook:
        """Start cycle k, and keep the final weights of the cycle before."""

        def enter(run: Run, state: State) -> State:
            if k == 0:
                state = state | self._empty(run, state)
            elif k > self.skip:
                state = self._take(run, state)
            return begin(run, state)

        return enter

    def rates(self, run: Run, cycle: int) -> Tensor:
        """α(t) of each step of a cycle: [c], or [c, M, 1] where runs differ."""
        at = torch.arange(cycle, dtype=run.dtype, device=run.device) / cycle
        return run.rates(0.5 * (torch.cos(torch.pi * at) + 1))

    def _empty(self, run: Run, state: State) -> State:
        count = self.snapshots - self.skip
        room = {
            _KEPT + name: v.unsqueeze(1).repeat(1, count, *(1,) * (v.ndim - 1))
            for name, v in _network(state).items()
        }
        return room | {"taken": torch.zeros_like(run.n)}

    def _take(self, run: Run, state: State) -> State:
        """Store the current network as this snapshot and as all later ones, so that a run that is
        stopped has valid snapshots."""
        count, taken = self.snapshots - self.skip, state["taken"]
        free = torch.arange(count, device=run.device) >= taken.unsqueeze(1)  # [M, K]
        new = {"taken": taken + 1}
        for name, v in _network(state).items():
            where = free.reshape(*free.shape, *(1,) * (v.ndim - 1))
            new[_KEPT + name] = torch.where(where, v.unsqueeze(1), state[_KEPT + name])
        return state | new

    def _mixed(self, run: Run, state: State, batch: Batch) -> Tensor:
        """The score of the mixture of all snapshots on rows, [M]."""
        return self.score(run, _snapshots(state), batch)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        own = _snapshots(state)
        return SamplePosterior(
            samples=own["theta"], chain=False, per_draw=True,
            **run.common(self), **run.shared(own),
        )  # fmt: skip


def _network(state: State) -> State:
    return {"theta": state["theta"], **network_part(state)}


def _snapshots(state: State) -> State:
    """The stored networks, as a state of particles: {name: [M, K, ...]}."""
    return {n.removeprefix(_KEPT): v for n, v in state.items() if n.startswith(_KEPT)}
