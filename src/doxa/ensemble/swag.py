"""SWAG: a Gaussian around the mean of the points that SGD visits at a high rate.

    θ̄ = (1/T) Σ_i θ_i,   Σ_diag = diag((1/T) Σ_i θ_i² − θ̄²),   D̂ = [θ_i − θ̄], the last K of the T
    q(θ) = N(θ̄, ½ Σ_diag + D̂ D̂ᵀ / (2 (K − 1)))

Maddox, Izmailov, Garipov, Vetrov & Wilson (2019), on the trajectory of SWA. The rate and the batch
size determine how far the points are from the optimum, and so the width of the Gaussian: a larger
`swa_lr` makes it wider. In the paper, the deviation of a point is relative to the mean of the
points so far (`deviations="running"`). By default it is relative to the mean of all points, which
gives a sample covariance. With `rank=0` there is only Σ_diag (SWAG-diagonal). With members it is
MultiSWAG (Wilson & Izmailov, 2020). Learned noise is the mean of the trajectory, without
uncertainty. If the network has BatchNorm, networks are drawn once, at the end, and the statistics
are recomputed for every draw. Without BatchNorm, if rows are held out, the trajectory ends where
its mean predicts them best, but after two points at least: on a small table, later points overfit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from doxa import linalg, store
from doxa.ensemble.swa import SWA
from doxa.errors import MethodError
from doxa.method import (
    Hook,
    Run,
    Stage,
    State,
    log_joint,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
    statistics_of_draws,
)
from doxa.method.method import Workload, drawn_bytes, one_of, positive, whole
from doxa.posterior import GaussianPosterior, Posterior, SamplePosterior, Status

_LEAST = 2  # points: a trajectory of one has no spread


@store.register("swag")
@dataclass(frozen=True)
class SWAG(SWA):
    """A Gaussian from the trajectory of stochastic weight averaging.

    Parameters
    ----------
    rank : int
        K, the number of points whose deviations form the low-rank part; 0: only the diagonal.
    deviations : str
        Deviations from the "final" mean or, as in the paper, from the "running" mean.
    scale : float
        The covariance is multiplied by it; 1 is the paper's.
    samples : int
        With BatchNorm, the number of networks that are drawn; each has its own statistics.
    average, cycle, schedule, swa_lr, lowest
        As in `SWA`.
    """

    name: ClassVar[str] = "swag"
    predicted_draws: ClassVar[int] = 100

    rank: int = whole(20, least=0)
    deviations: str = one_of("final", "running")
    scale: float = positive(1.0, per_run=True)
    samples: int = whole(30, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank == 1:
            raise MethodError("rank=1 has no sample covariance: 0 is the diagonal, 2 the least")

    def planned_bytes(self, work: Workload) -> int:
        """With the deviations, and C, and the low-rank part of each draw, as measured."""
        drawn = int(0.55 * drawn_bytes(self.predicted_draws, work))
        return super().planned_bytes(work) + 2 * self.rank * work.copy + drawn

    def stages(self, run: Run) -> Iterable[Stage]:
        points = self.averaging_steps(run) // self.cycle
        steps = points * self.cycle
        if points < self.rank:
            raise MethodError(
                f"SWAG of rank {self.rank} needs as many points, and its trajectory has {points} "
                f"(steps {run.steps} × average {self.average:g} / cycle {self.cycle}): train for "
                "longer, or lower rank or cycle"
            )
        if run.steps > steps:
            yield optimise(log_joint, run.steps - steps, name="train")
        yield from self._trajectory(run, points)
        yield from refresh_batch_norm(run, "mean")
        yield from noise_on_held_out(self.score, run, "mean")

    def _trajectory(self, run: Run, points: int) -> Iterable[Stage]:
        """The trajectory. With early stopping on held-out rows, its first two points are collected
        before the first evaluation, and its last point, after which there is none, is not used."""
        rates, c = self.rates(run, points * self.cycle), self.cycle
        watched = run.stops_early and not run.net.momenta and points > _LEAST
        cuts = [0, _LEAST, points] if watched else [0, points]
        for first, last in pairwise(cuts):
            training = optimise(
                log_joint, (last - first) * c, name=f"points {first + 1} to {last}",
                validates=first > 0,
            )  # fmt: skip
            yield replace(
                training, rates=rates[first * c : last * c],
                enter=self._entered(first, training.enter),
                hooks={(i - first) * c: self._add(i) for i in range(first + 1, last)},
            )  # fmt: skip
        if not watched:
            yield Stage("last point", training.step, 0, over=("mean",), enter=self._add(points))

    def _entered(self, done: int, begin: Hook | None) -> Hook:
        """The start of the trajectory, after `done` points."""
        assert begin is not None
        take = self._add(done) if done else lambda run, state: state | self._empty(run)
        return lambda run, state: begin(run, take(run, state))

    def _empty(self, run: Run) -> State:
        zeros = run.n.new_zeros(run.size, self.rank + 1, run.subset_size)
        mean = run.n.new_zeros(run.size, run.layout.size)
        return {
            "mean": mean, "squares": zeros[:, 0].clone(), "deviations": zeros[:, 1:].clone(),
            "points": torch.zeros_like(run.n),
        }  # fmt: skip

    def _add(self, i: int) -> Hook:
        """Add the i-th point to the moments (Welford, 1962)."""

        def add(run: Run, state: State) -> State:
            theta, before = state["theta"], state["mean"]
            mean = torch.lerp(before, theta, 1.0 / i)
            own = run.subset_index
            away = (theta - mean)[:, own]
            new = {**state, "mean": mean, "points": torch.full_like(run.n, i)}
            if i > 1:
                new["squares"] = state["squares"] + (theta - before)[:, own] * away
            if self.rank:
                # for the final mean: the point itself, which is centred at the end
                column = away if self.deviations == "running" else theta[:, own]
                new["deviations"] = state["deviations"].clone()
                new["deviations"][:, i % self.rank] = column
            return new

        return add

    def parameters(self, run: Run, state: State) -> Tensor:
        return state.get("mean", state["theta"])

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        gaussian = GaussianPosterior(
            mean=state["mean"], covariance=self._covariance(run, state),
            **run.common(self), **run.shared(state),
        )  # fmt: skip
        posterior = self._drawn(run, gaussian, state) if run.net.momenta else gaussian
        posterior.record.diagnostics["points"] = state["points"].int().tolist()
        if bool((state["points"] < 2).any()):
            reason = "one point has no spread: train for longer, or lower cycle"
            posterior.record.status = Status("not-converged", reason)
        return posterior

    def _covariance(self, run: Run, state: State) -> linalg.Structure:
        points, scale = state["points"].unsqueeze(1), run.field(self, "scale")
        variance = state["squares"].clamp(min=0) / points
        if self.rank == 0:
            return linalg.Diagonal(variance).scaled(scale)
        columns = state["deviations"]  # [M, K, P]: the point i is in the place i mod K
        if self.deviations == "final":
            columns = columns - state["mean"][:, None, run.subset_index]
        place = torch.arange(self.rank, device=run.device)
        filled = (points >= self.rank) | ((place > 0) & (place <= points))  # [M, K]
        columns = columns * filled.unsqueeze(2)
        count = points.clamp(2, self.rank).unsqueeze(2)
        return linalg.LowRankPlusDiagonal(
            0.5 * variance, columns.mT / (2 * (count - 1)) ** 0.5
        ).scaled(scale)

    def _drawn(self, run: Run, gaussian: GaussianPosterior, state: State) -> Posterior:
        """Draws of the Gaussian, each with its own BatchNorm statistics."""
        k, covariance = self.samples, gaussian.covariance
        eps = (
            run.expand_particles(k)
            .noise("draws")
            .normal((covariance.numbers,))
            .unflatten(0, (-1, k))
        )
        away = covariance.sample(eps.transpose(0, 1)).transpose(0, 1)  # [M, K, subset]
        draws = gaussian.mean.unsqueeze(1).repeat(1, k, 1)
        draws[..., run.subset_index] += away
        own = run.common(self) | run.shared(state)
        own["buffers"] = statistics_of_draws(run, draws, state)
        if own["layers"] is not None:
            own["layers"] = own["layers"].unsqueeze(1).expand(-1, k, -1).contiguous()
        return SamplePosterior(samples=draws, chain=False, per_draw=True, **own)
