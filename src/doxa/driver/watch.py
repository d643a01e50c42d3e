"""A fit or a chain that is watched while it runs: steps, changes between steps, and snapshots.

The driver yields a `Seen` after every step if it has a `Watch`. The generator of `doxa.transitions`
and the intermediate posteriors of `doxa.fit` (`Snapshots`) are made of these steps, so that there
is one loop. What is seen never changes a bit: only `Watch.change` and `Watch.restart` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from doxa.driver.runs import RunSpec
from doxa.errors import MethodError
from doxa.method import Info, Method, Run, State
from doxa.method.trace import changed
from doxa.posterior import Posterior

RESTART = "restart"

Complete = Callable[[Posterior, RunSpec], None]


@dataclass(frozen=True)
class Seen:
    """A step that was made.

    Parameters
    ----------
    number : int
        Steps done, of all stages.
    stage : str
    t : int
        Steps done of the stage.
    kept : bool
        Whether the current weights were stored as a draw.
    info : dict of Tensor
        The statistics of the step.
    trace : list
        The records of the step (`doxa.method.trace`), if they were asked for.
    """

    number: int
    stage: str
    t: int
    kept: bool
    info: Info
    trace: list[Any]


@dataclass
class Watch:
    """Somebody who watches: whether steps leave records, and the changes that are asked for.

    Parameters
    ----------
    trace : bool
        Whether steps leave records.
    planned : list
        Changes to make, and after how many steps.
    points : callable
        The weights [M, P] that a restart asks for.
    """

    trace: bool = False
    planned: list[tuple[int, str, Any]] = field(default_factory=list)  # (steps done, name, value)
    points: Callable[[Any], Any] = field(default=lambda value: value)
    pending: list[tuple[str, Any]] = field(default_factory=list)
    made: list[tuple[int, str, Any]] = field(default_factory=list)  # (steps done, name, value)

    def apply(self, method: Method, run: Run, state: State, done: int) -> tuple[Run, State]:
        """The run and the state after the changes that are asked for."""
        asked = [(name, value) for at, name, value in self.planned if at == done] + self.pending
        self.pending = []
        for name, value in asked:
            if name == RESTART:
                state = method.restart(run, state, self.points(value))
            else:
                run, state = changed(method, run, state, name, value)
            self.made.append((done, name, value))
        return run, state


class Snapshot:
    """The state of a fit after a step. The posterior is built when it is read.

    Attributes
    ----------
    step : int
        Steps done, of all stages.
    stage : str
        The stage of the fit.
    fit : int
        Which fit of the call: one call of `doxa.fit` may try several settings.
    last : bool
        Whether this is the result of the call itself.
    """

    def __init__(
        self, step: int, stage: str, fit: int, make: Callable[[], Sequence[Posterior]],
        last: bool = False,
    ) -> None:  # fmt: skip
        self.step, self.stage, self.fit, self.last = step, stage, fit, last
        self._make = make
        self._made: Sequence[Posterior] | None = None

    @property
    def posteriors(self) -> Sequence[Posterior]:
        """One posterior per run."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def posterior(self) -> Posterior:
        """The posterior, of a fit of one run. Its status is "unfinished", but for the last."""
        return self.posteriors[0]

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}, stage={self.stage!r}, last={self.last})"


class Snapshots:
    """A callback of `doxa.fit` that gives intermediate posteriors.

    Parameters
    ----------
    show : callable
        A function of a `Snapshot`. If it returns True, the run stops, as with any callback.
    steps : sequence of int
        The steps after which it is called.
    every : int, optional
        Call it every so many steps besides.

    Notes
    -----
    It is called for the fits that may become the result, and at the end with the result itself,
    `snapshot.last`. Fits to a part of the rows, which only evaluate, are not shown. A fit with
    snapshots has the same bits as one without.

    Examples
    --------
    >>> import doxa, torch
    >>> x = torch.linspace(-1, 1, 32)[:, None]
    >>> seen = []
    >>> posterior = doxa.fit(
    ...     doxa.nets.mlp(1, 1, hidden=(8,)), (x, x), "map", steps=30, validation=None,
    ...     callbacks=[doxa.Snapshots(seen.append, steps=[10, 20])],
    ... )
    >>> [snapshot.step for snapshot in seen], str(seen[0].posterior.status)
    ([10, 20, 30], 'unfinished')
    >>> seen[-1].posterior is posterior
    True
    """

    def __init__(
        self, show: Callable[[Snapshot], Any], steps: Iterable[int] = (), every: int | None = None
    ) -> None:
        if not callable(show):
            raise MethodError(f"show must be a function of a snapshot, not {show!r}")
        self.show = show
        self.steps = frozenset(int(step) for step in steps)
        if every is not None and (not isinstance(every, int) or every < 1):
            raise MethodError(f"every must be a whole number, at least 1, not {every!r}")
        self.every = every
        self.fits = 0  # of this call of `fit`
        self.stopped = False
        self._complete: Complete = lambda posterior, spec: None

    def __call__(self, step: int, info: Any) -> bool:
        """As any callback: it stops the run if `show` asked for that."""
        return self.stopped

    def due(self, step: int) -> bool:
        """Whether a snapshot is made after this step."""
        return step in self.steps or (self.every is not None and step % self.every == 0)

    def begin(self, complete: Complete) -> None:
        """A call of `fit` begins, which adds to each posterior what it knows about its data."""
        self.fits, self.stopped, self._complete = 0, False, complete

    def see(self, seen: Seen, make: Callable[[], list[tuple[Posterior, RunSpec]]]) -> None:
        """Show the state after a step."""
        complete = self._complete

        def made() -> list[Posterior]:
            pairs = make()
            for posterior, spec in pairs:
                complete(posterior, spec)
            return [posterior for posterior, _ in pairs]

        self._show(Snapshot(seen.number, seen.stage, self.fits, made))

    def end(self, posteriors: Sequence[Posterior]) -> None:
        """Show the result."""
        steps = int(posteriors[0].diagnostics.get("steps", 0))
        self._show(Snapshot(steps, "end", self.fits, lambda: posteriors, last=True))

    def _show(self, snapshot: Snapshot) -> None:
        self.stopped = bool(self.show(snapshot)) or self.stopped
