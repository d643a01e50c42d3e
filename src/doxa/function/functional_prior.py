"""A functional prior: weights believed to be such that the network's functions look like a process.

Standard normal weights say little that a person means: functions of a wide network under them are
large and steep, the more so the more units. Tran, Rossi, Milios & Filippone (2022) choose the prior
of each tensor so that functions drawn from it are as near as possible to those of a Gaussian
process, whose lengthscale and variance one can argue for; only inputs are looked at, never targets.
The posterior is then sampled as under any other prior.

`functional_prior` gives the prior, for any method; `FunctionalPrior` tunes it to the rows of a fit
and samples by SGHMC. How both are matched: `matching.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from doxa import store
from doxa.data.scaling import standardise
from doxa.errors import DataError, MethodError
from doxa.function.evidence_prior import prior_variance
from doxa.function.matching import Matched, Matching
from doxa.mcmc.sghmc import SGHMC
from doxa.method import Run, Stage, State
from doxa.method.fields import one_of, positive, whole
from doxa.model import Model
from doxa.posterior import Posterior, SamplePosterior
from doxa.priors import Prior, bind, stack_bound
from doxa.priors.functions import KERNELS, FunctionPrior, GPPrior
from doxa.priors.hierarchical_gp import HierarchicalGP

_ROWS = 1024  # of a run, evenly spaced, at which functions are compared


class TunedPrior(dict[str, Prior]):
    """{tensor: prior}, as `prior=` takes it, with the distances on the way, [steps]."""

    distances: Tensor
    target: FunctionPrior


def functional_prior(
    model: Model | nn.Module,
    x: Any,
    target: str | FunctionPrior = "rbf",
    *,
    kind: str = "gaussian",
    lengthscale: float | None = None,
    variance: float | None = None,
    spread: float | None = None,
    distance: str = "energy",
    steps: int = 300,
    functions: int = 128,
    points: int = 48,
    standardize: bool = False,
    seed: int = 0,
) -> TunedPrior:
    """The prior of each tensor under which a network's functions are nearest to a target's.

    Parameters
    ----------
    model: a network, or a `Model`, whose own prior is not looked at.
    x: inputs, [N, ...]: functions are compared at their rows and in their range.
    target: "rbf", "matern", "periodic" or "linear", a Gaussian process with that kernel, or a
        `doxa.GPPrior` or `doxa.ImplicitPrior`; in the units that the network is fitted in.
    kind: "gaussian": `Normal` with a scale for each tensor. "hierarchical": `Hierarchical` with a
        log-normal scale, whose width is tuned, too: functions may then have heavier tails. "flow":
        `FlowPrior`, weights with tails that are tuned.
    lengthscale, variance: of a target that is named; √(2D) for D columns unless given, at which
        two standardised rows have correlation e^(−½), and 1, or 8 for the logits of a `Model` of
        classes (the paper's): logits of variance 1 say that labels are mostly chance.
    spread: every function of a target that is named has a lengthscale of its own for each column
        and a variance of its own, whose logarithms have this standard deviation: see
        `doxa.HierarchicalGP`. None: they are known.
    distance: "energy", or "sliced", a Wasserstein distance: see `matching.py`.
    functions, points: how many functions of each side are compared in a step, and where.
    standardize: x is scaled as `fit(standardize=True)` does it.

    Returns
    -------
    {name of a tensor: prior}, for `Model` and `fit`, with `.distances` [steps] and `.target`.

    Examples
    --------
    >>> import doxa, torch
    >>> x = torch.linspace(-2, 2, 50).reshape(-1, 1)
    >>> prior = doxa.functional_prior(doxa.nets.mlp(1, 1), x, lengthscale=0.5, steps=5)
    >>> model = doxa.Model(doxa.nets.mlp(1, 1), "gaussian", prior)
    """
    method = FunctionalPrior(
        target=target, kind=kind, lengthscale=lengthscale, variance=variance, spread=spread,
        distance=distance, tuning=steps, functions=functions, points=points,
    )  # fmt: skip
    believed = model if isinstance(model, Model) else Model(model)
    rows = torch.as_tensor(x).to(believed.device)
    if rows.ndim == 0 or len(rows) == 0:
        raise DataError("functions are compared at the rows of x: there are none")
    if rows.is_floating_point():
        rows = rows.unsqueeze(1) if rows.ndim == 1 else rows
        if not bool(torch.isfinite(rows).all()):
            raise DataError("x has values that are not finite")
        if standardize:
            (scales,) = standardise(rows, None, [torch.arange(len(rows))], scale_y=False)
            rows = scales.x(rows)
        rows = rows.to(believed.dtype)
    matching = method.matching(math.prod(rows.shape[1:]), prior_variance(believed.likelihood))
    few = rows[_evenly(len(rows)).to(rows.device)]
    found = matching(believed.build(rows), [_distinct(few)], [seed])
    prior = TunedPrior(found.priors(0))
    prior.distances, prior.target = found.distances[0].cpu(), matching.target
    return prior


def _evenly(rows: int) -> Tensor:
    """Numbers of up to 1,024 rows, evenly spaced."""
    return torch.linspace(0, rows - 1, min(rows, _ROWS)).long()


def _distinct(x: Any) -> Tensor:
    """Each row once: a row that is there twice is no other place to look at functions."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DataError("a functional prior needs x as one array of real numbers")
    return torch.unique(x.cpu(), dim=0).to(x.device)


@store.register("functional-prior")
@dataclass(frozen=True)
class FunctionalPrior(SGHMC):
    """SGHMC under a prior that is tuned to a process before: see `doxa.functional_prior`, which
    gives the prior alone, for any other method. The model's own prior is replaced.

    Parameters
    ----------
    target, kind, lengthscale, variance, spread, distance, functions, points: as there.
    tuning: steps that tune the prior.
    draws, burn_in, thin, step, friction, gradient_noise, temperature: as in `SGHMC`.
    """

    name: ClassVar[str] = "functional-prior"

    target: str | FunctionPrior = one_of(
        *KERNELS, or_a=FunctionPrior, called="a GPPrior or an ImplicitPrior"
    )
    kind: str = one_of("gaussian", "hierarchical", "flow")
    lengthscale: float | None = positive(None)
    variance: float | None = positive(None)
    spread: float | None = positive(None)
    distance: str = one_of("energy", "sliced")
    tuning: int = whole(300, least=1)
    functions: int = whole(128, least=2)
    points: int = whole(48, least=2)

    def matching(self, columns: int, size: float = 1.0) -> Matching:
        """How the prior of a network with so many numbers in a row of x is tuned; `size` is the
        variance of a target that is named, unless it is given."""
        target, size = self.target, size if self.variance is None else self.variance
        if not isinstance(target, FunctionPrior):
            length = math.sqrt(2.0 * columns) if self.lengthscale is None else self.lengthscale
            target = GPPrior(target, length, size)
            if self.spread is not None:
                each = (length,) * columns
                target = HierarchicalGP(target.kernel, each, size, spread=self.spread)
        elif (self.lengthscale, self.variance, self.spread) != (None, None, None):
            raise MethodError("lengthscale, variance and spread are of a target that is named: set "
                              "them in the target itself")  # fmt: skip
        return Matching(
            target, self.kind, self.distance, self.tuning, self.functions, self.points,
        )  # fmt: skip

    def _tuned(self, run: Run) -> Matched:
        """Tuned for each run of a fit, the same whichever of its members are fitted."""
        return run.once("functional prior", lambda: self._tune(run))

    def _tune(self, run: Run) -> Matched:
        first = _first_of_runs(run)
        rows = []
        for m in first:
            index, weight = run.rows.rows[run.split_of[m]], run.rows.weight
            if weight is not None:
                own = weight if weight.ndim == 1 else weight[m]
                index = index[own.cpu()[index] > 0]
            few = index[_evenly(len(index))]
            rows.append(_distinct(run.rows.take(few, torch.tensor(run.run_of[m]))[0]))
        matching = self.matching(math.prod(rows[0].shape[1:]), prior_variance(run.likelihood))
        return matching(run.net, rows, [run.seeds[m] for m in first])

    def _under_it(self, run: Run) -> Run:
        """The run under the tuned priors."""

        def made() -> Run:
            found = self._tuned(run)
            bound = [bind(found.priors(r), run.layout) for r in range(len(found.log_scale))]
            place = {run.run_of[m]: r for r, m in enumerate(_first_of_runs(run))}
            one = len(bound) == 1
            prior = bound[0] if one else stack_bound([bound[place[r]] for r in run.run_of])
            return replace(run, prior=prior.to(run.device, run.dtype))

        return run.once("under a functional prior", made)

    def init(self, run: Run) -> State:
        state, found = super().init(run), self._tuned(run)
        place = {run.run_of[m]: r for r, m in enumerate(_first_of_runs(run))}
        each = [place[r] for r in run.run_of]
        state["prior.log_scale"] = found.log_scale[each]
        state["prior.distances"] = found.distances[each]
        if found.log_shape is not None:
            state["prior.log_shape"] = found.log_shape[each]
        return state

    def stages(self, run: Run) -> Iterable[Stage]:
        own = self._under_it(run)
        for stage in super().stages(own):
            stage.step = _always(own, stage.step)
            yield stage

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        names = tuple(n for n in run.layout.names if not n.startswith("likelihood."))
        distances = state["prior.distances"]
        scale, shape = state["prior.log_scale"], state.get("prior.log_shape")
        found = Matched(names, scale, shape, distances, self.kind)
        posterior = super().finish(run, state, kept)
        assert isinstance(posterior, SamplePosterior)
        posterior.priors = [found.priors(m) for m in range(run.size)]
        posterior.record.diagnostics["prior_distances"] = distances[0].tolist()
        return posterior


def _always(own: Run, step: Any) -> Any:
    """A step under the run with the tuned prior, whichever run it is called with."""
    return lambda run, state, batch, clock: step(own, state, batch, clock)


def _first_of_runs(run: Run) -> list[int]:
    """The first member of each run."""
    return [run.run_of.index(r) for r in dict.fromkeys(run.run_of)]
