"""The reference posterior: a long HMC run, its convergence, and the Monte Carlo error of distances.

Agreement, total variation and W2 measure the distance of a method to the posterior only if the
reference has converged. So the function-space R-hat of the reference is reported (below 1.05 it
counts as converged), and so is its floor: the distances between two halves of its chains, which are
two independent samples of the same posterior. Each half has half of the draws, so the floor is an
overestimate.

Cost: `doxa.app.fitting` estimates the time of one leapfrog step of all chains, and there are
(burn-in + draws) × leapfrog of them. "auto" runs the reference if that takes at most three minutes:
with the default settings, for parameters × rows up to about 700,000.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import doxa
from doxa.app.fitting import gradient_seconds
from doxa.driver.processes import all_of
from doxa.errors import MethodError
from doxa.evaluate.reference_distance import Closeness, closeness
from doxa.evaluate.scores import log_likelihood_each
from doxa.posterior import SamplePosterior
from doxa.posterior.chains import ess_bulk, rhat
from doxa.predictive import Predictive
from doxa.tables.files import Array

if TYPE_CHECKING:
    from doxa.app.comparison.compare import Task

CONVERGED = 1.05
AFFORDABLE_SECONDS = 180.0
DRAWS = 1000
MOST_ROWS = 200  # held-out rows at which distances are computed: a random part


@dataclass(frozen=True)
class Reference:
    """The settings of the reference.

    Parameters
    ----------
    draws : int
        Draws per chain, as in `doxa.HMC`.
    burn_in : int
        Burn-in transitions per chain.
    leapfrog : int
        Leapfrog steps per transition.
    chains : int
        The number of chains, at least two.
    splits : int
        The number of splits with a reference; distances are averaged over them.
    if_affordable : bool
        Run it only if it takes three minutes at most.
    """

    draws: int = 1000
    burn_in: int = 1000
    leapfrog: int = 40
    chains: int = 4
    splits: int = 1
    if_affordable: bool = False

    def __post_init__(self) -> None:
        if self.chains < 2 or self.draws < 4 or self.splits < 1:
            raise MethodError("a reference needs two chains, four draws and a split at least")

    @property
    def method(self) -> Any:
        return doxa.HMC(draws=self.draws, burn_in=self.burn_in, leapfrog=self.leapfrog)

    def seconds(self, parameters: int, rows: int) -> float:
        """The approximate time on one core; see the module's docstring."""
        gradients = (self.burn_in + self.draws) * self.leapfrog
        return gradient_seconds(gradients, self.chains * self.splits, parameters, rows)


@dataclass(frozen=True)
class Referred:
    """The result of a reference run."""

    reference: Reference
    rhat: float  # the largest over held-out rows and outputs, of the worst split
    ess: float  # independent draws that the functions are worth, where they are fewest
    accept: float  # the least of a chain
    floor: Closeness
    seconds: float
    rows: int  # at which distances are computed, in each split
    each: tuple[Array, ...]  # its held-out log likelihood of each row, split by split

    @property
    def converged(self) -> bool:
        return self.rhat < CONVERGED

    @property
    def words(self) -> str:
        r = self.reference
        message = (
            f"reference: HMC, {r.chains} chains × {r.draws} draws of {r.leapfrog} leapfrog steps, "
            f"R-hat of the functions {self.rhat:.3f} (effective sample size {self.ess:.0f}), "
            f"{self.seconds:.0f} s"
        )
        if self.converged:
            return message
        return f"{message}; NOT converged (above {CONVERGED}): distances to it are not reliable"


def reference_of(
    asked: str | Reference | None,
    draws: int | None = None,
    leapfrog: int | None = None,
    chains: int | None = None,
) -> Reference | None:
    """The reference for "auto", "hmc" or "none", with given settings; `draws` is also the
    burn-in."""
    if asked is None or isinstance(asked, Reference):
        return asked
    if asked not in ("auto", "hmc", "none"):
        raise MethodError(f"the reference is 'auto', 'hmc' or 'none', not {asked!r}")
    given = {"draws": draws, "burn_in": draws, "leapfrog": leapfrog, "chains": chains}
    settings = {name: value for name, value in given.items() if value is not None}
    return None if asked == "none" else Reference(if_affordable=asked == "auto", **settings)


def too_dear(reference: Reference, parameters: int, rows: int) -> str:
    """Why a reference is not affordable and not run; "" if it is run."""
    seconds = reference.seconds(parameters, rows)
    if not reference.if_affordable or seconds <= AFFORDABLE_SECONDS:
        return ""
    return (
        f"no reference posterior: HMC with {parameters} parameters on {rows} rows would take "
        f"about {seconds / 60:.0f} minutes; --reference hmc runs it anyway"
    )


def refer(task: Task, asked: Reference) -> tuple[Referred, list[Predictive]]:
    """HMC on the first splits, with a seed of its own: independent of every compared method."""
    start = time.perf_counter()
    some = task.splits[: asked.splits]
    posteriors = task.fit(
        asked.method, [split.train for split in some], members=asked.chains, seed=task.seed + 7919
    )
    seconds = all_of("reference", time.perf_counter() - start)[0]
    rows = [task.held_out(k)[0][:MOST_ROWS] for k in range(len(some))]
    answers = [posterior.predict(held) for posterior, held in zip(posteriors, rows, strict=True)]
    met = [convergence(*pair) for pair in zip(posteriors, answers, strict=True)]
    referred = Referred(
        reference=asked,
        rhat=max(rhat for rhat, _ in met),
        ess=min(ess for _, ess in met),
        accept=min(min(posterior.diagnostics["accept"]) for posterior in posteriors),
        floor=mean_closeness([floor_of(p, held) for p, held in zip(posteriors, rows, strict=True)]),
        seconds=seconds,
        rows=len(rows[0]),
        each=tuple(_each(task, k, posterior) for k, posterior in enumerate(posteriors)),
    )
    return referred, answers


def convergence(posterior: SamplePosterior, p: Predictive) -> tuple[float, float]:
    """The largest R-hat and the smallest effective sample size of the functions at p's rows."""
    chains, draws = posterior.samples.shape[:2]
    functions = p.samples.reshape(chains, draws, -1)
    return float(rhat(functions).max()), float(ess_bulk(functions).min())


def predict_closely(posterior: Any, x: Any) -> Predictive:
    """Predict with enough draws that Monte Carlo error does not dominate a distance: all kept
    draws, or `DRAWS` if the posterior generates them."""
    if isinstance(posterior, SamplePosterior):
        return posterior.predict(x)
    return posterior.predict(x, n=DRAWS)


def floor_of(posterior: SamplePosterior, x: Any) -> Closeness:
    """The distances between the first and the second half of the chains."""
    half = posterior.members // 2
    return closeness(
        posterior.select_members(slice(0, half)).predict(x),
        posterior.select_members(slice(half, 2 * half)).predict(x),
    )


def mean_closeness(each: list[Closeness]) -> Closeness:
    def mean(name: str) -> Any:
        values = [getattr(one, name) for one in each]
        return None if values[0] is None else float(torch.tensor(values).double().mean())

    return Closeness(*(mean(name) for name in Closeness._fields))


def _each(task: Task, k: int, posterior: Any) -> Array:
    """The log likelihood of each held-out row of split k."""
    x, y = task.held_out(k)
    return log_likelihood_each(posterior.predict(x), y).cpu().numpy()
