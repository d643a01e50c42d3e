"""What HMC and NUTS share: momentum, and a burn-in that finds step size and mass.

They differ only in how far a trajectory goes and which of its points is taken.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa.mcmc.adaptation import average, seek_step, start_dual, windows
from doxa.mcmc.kernel import Kernel
from doxa.mcmc.leapfrog import Point, free
from doxa.mcmc.mass import learn_mass, observe, start_mass, window_marks
from doxa.method import Clock, Info, Mark, Marks, Run, State


class Hamiltonian(Kernel):
    """Base of HMC and NUTS."""

    tallied: ClassVar[tuple[str, ...]] = ("accept", "divergent", "leapfrogs")
    copies: ClassVar[float] = 36.0

    target_accept: float
    mass: str

    def own_state(self, run: Run, unfixed: Tensor) -> State:
        moving = unfixed.sum(1).clamp(min=1)
        step = 0.1 * moving**-0.25
        early = torch.full_like(step, float(bool(windows(self.burn_in))))
        own = {**start_mass(unfixed, self.mass), **start_dual(step)}
        return {**own, "early": early}  # 1 until burn-in has learned a first mass

    def adapt(self, run: Run, state: State, info: Info) -> State:
        new = average(state, info["accept"], run.field(self, "target_accept"))
        return {**state, **new, **observe(state)}

    def marks(self) -> Marks:
        return window_marks(self.burn_in, self._window_end)

    def _window_end(self, t: int) -> Mark:
        def mark(run: Run, state: State) -> State:
            learned = {**learn_mass(state), "early": torch.zeros_like(state["early"])}
            return self._seek(run, learned, t)

        return mark

    def begin(self, run: Run, state: State) -> State:
        return self._seek(run, state, 0)

    def _seek(self, run: Run, state: State, t: int) -> State:
        density = self.density(run, state, run.all_rows())
        return {**state, **start_dual(seek_step(density, state, run.noise(f"step size/{t}")))}

    def settle(self, run: Run, state: State) -> State:
        """The averaged step size; after too few updates no larger than the one that was sought."""
        averaged, sought = state["dual.log_step"].exp(), state["dual.centre"].exp() / 10
        few = state["dual.count"] < 10
        return {**state, "step": torch.where(few, torch.minimum(sought, averaged), averaged)}

    def depart(self, state: State, clock: Clock) -> Point:
        """The current draw with a fresh momentum."""
        theta = state["theta"]
        momentum = clock.noise(theta.shape[1]) * free(state["metric"])
        return Point(theta, momentum, state["log_density"], state["grad"])

    def report(self, state: State) -> dict[str, Any]:
        spread = state["energy.square"]
        ratio = torch.where(spread > 0, state["energy.jumps"] / spread, torch.nan)
        return {
            "step_size": state["step"].tolist(),
            "divergences": int(state["sum.divergent"].sum()),
            "divergent_share": float(self.share(state, "divergent").mean()),
            "leapfrogs": self.share(state, "leapfrogs").tolist(),
            "ebfmi": ratio.tolist(),
            "transitions": int(state["transitions"].max()),
        }
