"""SWAG: a Gaussian around the mean of the points that SGD visits at a high rate.

    θ̄ = (1/T) Σ_i θ_i,   Σ_diag = diag((1/T) Σ_i θ_i² − θ̄²),   D̂ = [θ_i − θ̄], the last K of the T
    q(θ) = N(θ̄, ½ Σ_diag + D̂ D̂ᵀ / (2 (K − 1)))

Maddox, Izmailov, Garipov, Vetrov & Wilson (2019), on the trajectory of SWA. The points wander
around an optimum on a scale that the rate and the batch set, so the Gaussian's width is theirs too:
a larger `rate` makes it wider. In the paper a point's deviation is taken from the mean of those
until then (`deviations="running"`); from the mean of all, as here by default, it is a sample
covariance. `rank=0` leaves Σ_diag alone (SWAG-diagonal). With members it is MultiSWAG (Wilson &
Izmailov, 2020). Learned noise is the trajectory's mean, without uncertainty. A network with
BatchNorm is drawn from once, at the end, and the statistics are recomputed for every draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.ensemble.swa import SWA
from doxa.errors import MethodError
from doxa.method import (
    Mark,
    Run,
    Stage,
    State,
    log_joint,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
    statistics_of_draws,
)
from doxa.method.fields import one_of, positive, whole
from doxa.posterior import GaussianPosterior, Posterior, SamplePosterior, Status


@store.register("swag")
@dataclass(frozen=True)
class SWAG(SWA):
    """A Gaussian from the trajectory of stochastic weight averaging, whose settings it shares.

    Parameters
    ----------
    rank: K, the points whose deviations make the low-rank part; 0 for the diagonal alone.
    deviations: from the "final" mean, or, as in the paper, from the "running" one.
    scale: the covariance is multiplied by it; 1 is the paper's.
    samples: with BatchNorm, the networks that are drawn, each given statistics of its own.
    """

    name: ClassVar[str] = "swag"

    rank: int = whole(20, least=0)
    deviations: str = one_of("final", "running")
    scale: float = positive(1.0, per_run=True)
    samples: int = whole(30, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank == 1:
            raise MethodError("rank=1 has no sample covariance: 0 is the diagonal, 2 the least")

    def stages(self, run: Run) -> Iterable[Stage]:
        points = self.averaging_steps(run) // self.cycle
        steps = points * self.cycle
        if points < self.rank:
            raise MethodError(
                f"SWAG of rank {self.rank} needs as many points, and its trajectory has {points} "
                f"(steps {run.steps} × share {self.share:g} / cycle {self.cycle}): train for "
                "longer, or lower rank or cycle"
            )
        if run.steps > steps:
            yield optimise(log_joint, run.steps - steps, name="train")
        marks = {i * self.cycle: self._add(i, points) for i in range(1, points)}
        walk = optimise(log_joint, steps, name="trajectory", validates=False)
        begin = walk.enter
        assert begin is not None
        yield replace(
            walk, rates=self.rates(run, steps), marks=marks,
            enter=lambda run, state: begin(run, state | self._empty(run)),
        )  # fmt: skip
        yield Stage("last point", walk.step, 0, over=("mean",), enter=self._add(points, points))
        yield from refresh_batch_norm(run, "mean")
        yield from noise_on_held_out(self.score, run, "mean")

    def _empty(self, run: Run) -> State:
        zeros = run.n.new_zeros(run.size, self.rank + 1, len(run.subset_index))
        mean = run.n.new_zeros(run.size, run.layout.size)
        return {"mean": mean, "squares": zeros[:, 0].clone(), "deviations": zeros[:, 1:].clone()}

    def _add(self, i: int, points: int) -> Mark:
        """Take the i-th point in (Welford, 1962)."""

        def add(run: Run, state: State) -> State:
            theta, before = state["theta"], state["mean"]
            mean = torch.lerp(before, theta, 1.0 / i)
            own = run.subset_index
            away = (theta - mean)[:, own]
            new = {**state, "mean": mean}
            if i > 1:
                new["squares"] = state["squares"] + (theta - before)[:, own] * away
            if i > points - self.rank:
                # from the final mean: the point itself, which is centred in the end
                column = away if self.deviations == "running" else theta[:, own]
                new["deviations"] = state["deviations"].clone()
                new["deviations"][:, i % self.rank] = column
            return new

        return add

    def parameters(self, run: Run, state: State) -> Tensor:
        return state.get("mean", state["theta"])

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        points = self.averaging_steps(run) // self.cycle
        gaussian = GaussianPosterior(
            mean=state["mean"], covariance=self._covariance(run, state, points),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        posterior = self._drawn(run, gaussian, state) if run.net.tracked else gaussian
        if points == 1:
            reason = "one point has no spread: train for longer, or lower cycle"
            posterior.record.status = Status("not-converged", reason)
        return posterior

    def _covariance(self, run: Run, state: State, points: int) -> linalg.Structure:
        variance, scale = state["squares"].clamp(min=0) / points, run.field(self, "scale")
        if self.rank == 0:
            return linalg.Diagonal(variance).scaled(scale)
        columns = state["deviations"]  # [M, K, P]
        if self.deviations == "final":
            columns = columns - state["mean"][:, None, run.subset_index]
        factor = columns.mT / (2 * (self.rank - 1)) ** 0.5
        return linalg.LowRankPlusDiagonal(0.5 * variance, factor).scaled(scale)

    def _drawn(self, run: Run, gaussian: GaussianPosterior, state: State) -> Posterior:
        """Draws of the Gaussian, each with statistics of its own."""
        k, covariance = self.samples, gaussian.covariance
        eps = run.times(k).noise("draws").normal((covariance.numbers,)).unflatten(0, (-1, k))
        away = covariance.sample(eps.transpose(0, 1)).transpose(0, 1)  # [M, K, subset]
        draws = gaussian.mean.unsqueeze(1).repeat(1, k, 1)
        draws[..., run.subset_index] += away
        own = run.common(self) | run.shared(state)
        own["buffers"] = statistics_of_draws(run, draws, state)
        if own["layers"] is not None:
            own["layers"] = own["layers"].unsqueeze(1).expand(-1, k, -1).contiguous()
        return SamplePosterior(samples=draws, chain=False, per_draw=True, **own)
