"""`transitions`: the steps of a chain one after the other, each with what it did.

The generator runs the loop of the driver that `sample` runs to its end: the draws are the same to
the bit, whether steps leave records or not. Between two steps, a setting may be changed, or a chain
put elsewhere. The list of changes (step, name, value) and the seed determine the run.

Records are made by the step itself (`doxa.method.trace`). A step that is executed from a recording
(`doxa.engine`) leaves none. It is then executed a second time without the recording, with the same
random numbers, for its records alone. These agree with the draws to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.density.density import Written
from doxa.density.draws import Draws
from doxa.density.sample import Sampling, parse_init, prepare
from doxa.driver.finish import posteriors_of
from doxa.driver.loop import Driver, copied
from doxa.driver.runs import RunSpec
from doxa.driver.watch import RESTART, Seen, Watch
from doxa.engine import Engine
from doxa.engine.engine import default_modes, threads_for
from doxa.errors import DataError, MethodError
from doxa.linalg.layout import Params
from doxa.method import FitSettings, Method
from doxa.method.method import keywords
from doxa.method.trace import Record, controls_of, setting_value
from doxa.optim import Optimizer


@dataclass(frozen=True, eq=False)
class Transition:
    """One step of all chains.

    Attributes
    ----------
    number : int
        Steps done, of all stages.
    stage : str
        The stage: "burn-in", "sample", …
    t : int
        Steps done of this stage.
    draw : dict of Tensor
        The current point of each chain, {name: [members, *shape]} in natural space, or of each
        particle, [members, particles, *shape].
    theta : Tensor
        The same in free (unconstrained) space, [members, P] or [members, particles, P].
    kept : bool
        Whether it is one of the draws that `sample` returns.
    info : dict of Tensor
        Statistics of the step, [members] each: "accept", "energy", "step_size", "divergent",
        "depth", … as far as the method has them.
    trace : tuple of Record
        What the step did, with `trace=True`: see `doxa.method.trace`.
    """

    number: int
    stage: str
    t: int
    draw: Params
    theta: Tensor
    kept: bool
    info: dict[str, Tensor]
    trace: tuple[Record, ...] = ()


class Transitions(Iterator[Transition]):
    """The steps of a chain: the result of `doxa.transitions`."""

    def __init__(self, sampling: Sampling, watch: Watch) -> None:
        self._sampling, self._watch = sampling, watch
        watch.points = self._points
        self._began = time.monotonic()
        self._driver = Driver(sampling.run, sampling.method, watch=watch)
        self._context = copy_context()  # variables that the driver sets stay its own
        self._steps = self._made()

    def _made(self) -> Iterator[Transition]:
        with threads_for(0.0):
            for seen in self._driver.steps():
                yield self._transition(seen)

    def __next__(self) -> Transition:
        with default_modes(train=True):
            return self._context.run(next, self._steps)

    def close(self) -> None:
        """End the run here. `draws()` still returns what was kept."""
        self._context.run(self._steps.close)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            self.close()

    @property
    def method(self) -> Method:
        """The sampler with its settings."""
        return self._sampling.method

    @property
    def traced(self) -> bool:
        """Whether steps leave records. It may be set between two steps: draws do not depend on
        it, and steps without records are faster."""
        return self._watch.trace

    @traced.setter
    def traced(self, value: bool) -> None:
        self._watch.trace = checks.flag("traced", value)

    @property
    def controls(self) -> tuple[str, ...]:
        """The settings that `change` takes."""
        return controls_of(self.method, self._sampling.run)

    @property
    def changes(self) -> list[tuple[int, str, Any]]:
        """The changes that were made, as they were asked for: (steps done, name, value), where the
        name of a restart is "restart". `changes=` of `transitions` repeats them."""
        return list(self._watch.made)

    def change(self, name: str, value: Any) -> None:
        """Change a setting from the next step on.

        Parameters
        ----------
        name : str
            One of `controls`: "step_size", "temperature", "mass", "lr", "batch_size", …
        value : float, int or sequence of float
            The value, or one for each chain. A mass m is the same for all parameters.

        Notes
        -----
        Burn-in adapts a new step size and a new mass further. A step size that is changed before
        the first step of a burn-in has no effect: the burn-in looks for one of its own.
        """
        setting_value(self.method, self._sampling.run, name, value)  # an error here, not later
        self._watch.pending.append((name, value))

    def restart(self, init: Any) -> None:
        """Put every chain at a point before the next step. What was adapted, and the draws that
        were kept, stay.

        Parameters
        ----------
        init : dict, or list of dict
            One point for all chains, or one for each, in natural space. The particles of a chain
            start around its point, as far as at the beginning.
        """
        self._points(init)  # an error here, not later
        self._watch.pending.append((RESTART, init))

    def _points(self, init: Any) -> Tensor:
        density, run = self._sampling.density, self._sampling.run
        given = parse_init(init, run.size, run.dtype, run.device)
        shapes = {name: tuple(value.shape) for name, value in given[0].items()}
        if shapes != density.shapes:
            raise DataError(f"restart: the parameters are {density.shapes}, not {shapes}")
        free = torch.stack([density.free(values) for values in given])
        if not bool(torch.isfinite(free).all()):
            raise DataError("restart: the point lies outside the constraints of its parameters")
        return free.expand(run.size, -1).clone()

    def natural(self, theta: Tensor) -> Params:
        """Points in natural space, {name: [..., *shape]}, of free ones [..., P]: for records."""
        return self._sampling.density.natural(theta)[0]

    def draws(self) -> Draws:
        """The draws that were kept so far. At the end they are those of `sample`."""
        run, method = self._sampling.run, self.method
        at = replace(self._driver.at, state=copied(self._driver.at.state))
        if not at.done:
            raise MethodError("no step was made: there are no draws")
        with default_modes(train=True), threads_for(self._driver.product):
            spec = RunSpec(seed=run.seeds[0])
            (posterior,) = posteriors_of(run, method, at, [spec], self._began)
            return self._sampling.draws(posterior, at)

    def _transition(self, seen: Seen) -> Transition:
        driver = self._driver
        theta = driver.method.parameters(driver.run, driver.at.state).detach().clone()
        info = {name: value.detach().clone() for name, value in seen.info.items()}
        return Transition(
            seen.number, seen.stage, seen.t, self.natural(theta), theta, seen.kept, info,
            tuple(seen.trace),
        )  # fmt: skip


@keywords()
@default_modes(train=True)
@threads_for(0.0)
def transitions(
    log_density: Written,
    init: Any,
    method: str | Method | type[Method] = "nuts",
    members: int | Sequence[int] = 4,
    *,
    trace: bool = False,
    changes: Iterable[tuple[int, str, Any]] = (),
    constraints: Mapping[str, Any] | None = None,
    seed: int = 0,
    jitter: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str | None = None,
    draws_budget: int | None = None,
    engine: str | Engine = "auto",
    batch_size: int | None = None,
    steps: int | None = None,
    lr: float | None = None,
    schedule: Any = "constant",
    optimizer: str | Optimizer = "adam",
) -> Transitions:
    """The steps of `sample` one after the other, to be watched and changed.

    Parameters
    ----------
    log_density : callable
        As in `sample`.
    init : dict, or list of dict
        As in `sample`. A list of dicts, one per chain, is used without jitter.
    method : str or Method
        As in `sample`.
    members : int or sequence of int
        The number of chains, or the list of their ids.
    trace : bool
        Whether every step has records of what it did: proposals, trajectories, trees, gradients,
        forces (`doxa.method.trace`). The draws are the same to the bit.
    changes : iterable of (int, str, value)
        Changes to make, as `Transitions.changes` lists them: a setting has the value from the step
        after this number of steps on. The same list gives the same bits.
    constraints, seed, jitter, dtype, device, draws_budget, engine
        As in `sample`.
    batch_size, steps, lr, schedule, optimizer
        As in `sample`.

    Returns
    -------
    Transitions
        An iterator of `Transition`, with `change`, `restart` and `draws`.

    Examples
    --------
    >>> import doxa, torch
    >>> def log_density(p):
    ...     return -0.5 * p["x"].square().sum()
    >>> method = doxa.HMC(draws=5, burn_in=5, leapfrog=3)
    >>> chain = doxa.transitions(log_density, {"x": torch.zeros(2)}, method, members=3, trace=True)
    >>> for step in chain:
    ...     path, proposal = step.trace
    >>> step.number, step.stage, step.draw["x"].shape, path.positions.shape
    (10, 'sample', torch.Size([3, 2]), torch.Size([4, 3, 2]))
    >>> torch.equal(chain.draws()["x"][:, -1], step.draw["x"])
    True
    """
    sampling = prepare(
        log_density, init, method, members, constraints=constraints, seed=seed, jitter=jitter,
        dtype=dtype, device=device, engine=engine, batch_size=batch_size, steps=steps, lr=lr,
        schedule=schedule, optimizer=optimizer,
        settings=FitSettings(draws_budget=checks.budget("draws_budget", draws_budget)),
    )  # fmt: skip
    return Transitions(sampling, Watch(trace=checks.flag("trace", trace), planned=list(changes)))
