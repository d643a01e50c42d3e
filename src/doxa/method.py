"""The protocol every method follows.

A method is a frozen dataclass of hyper-parameters. It says what it fits (`prepare`), where it
starts (`init`), which `Stage`s it runs, and what comes out (`finish`); each stage's step advances
all members at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from doxa.data import Batch, Source, batch_rows
from doxa.errors import MethodError
from doxa.fields import check_fields, rules
from doxa.optim import Optimizer
from doxa.problem import Problem
from doxa.registry import get_method
from doxa.run import (
    Clock,
    Info,
    Known,
    Number,
    Objective,
    Run,
    State,
    folded,
    log_joint,
    network_part,
    potential,
    slice_state,
    unfolded,
)

if TYPE_CHECKING:
    from doxa.posterior import Posterior
    from doxa.recorded import Recorded

__all__ = [
    "Clock", "Info", "Known", "Mark", "Marks", "Method", "Number", "Objective", "Problem", "Run",
    "Stage", "State", "Step", "as_method", "averaged", "folded", "log_joint",
    "network_part", "optimise", "potential", "refresh_batch_norm", "slice_state", "unfolded",
]  # fmt: skip


Mark = Callable[[Run, State], State]
Marks = Mapping[int, Mark]
Step = Callable[[Run, State, Batch, Clock], tuple[State, Info]]


@dataclass
class Stage:
    """A phase of a method: a step repeated.

    Parameters
    ----------
    source: which rows each step sees: "mini", "independent", "all", "pass", "tasks", or a `Source`.
    keep: store the current parameters every `keep` steps.
    over: the names that the step moves: what the non-finite guard watches.
    enter: what happens to the state when the stage begins.
    validates: the driver may stop the stage early, on held-out rows.
    capturable: the step is a fixed sequence of tensor operations.
    marks: {t: what happens to the state before step t}, outside what is recorded or compiled.
    rates: what `clock.rate` is at each step, [steps] or [steps, M, 1]; None: as `fit` was asked.
    recorded: how parts of the step are executed, where that is not the whole step.
    """

    name: str
    step: Step
    steps: int
    source: str | Source = "mini"
    keep: int = 0
    over: tuple[str, ...] = ("theta",)
    enter: Callable[[Run, State], State] | None = None
    validates: bool = False
    capturable: bool = True
    marks: Marks = field(default_factory=dict)
    rates: Tensor | None = None
    recorded: Recorded | None = None


class Method:
    """Base of all methods: subclasses are frozen dataclasses, whose fields declare what they may
    hold (`doxa.fields`)."""

    name: ClassVar[str]
    default_members: ClassVar[int] = 1
    default_steps: ClassVar[int] = 2000
    default_rate: ClassVar[float] = 1e-2
    default_batch: ClassVar[int] = 128
    default_validation: ClassVar[float] = 0.0  # of a table's rows, held out to stop in time
    needs_network: ClassVar[bool] = True
    regression_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """A method that compares two of its fields does so after super().__post_init__()."""
        check_fields(self)

    @property
    def per_run(self) -> tuple[str, ...]:
        """The fields that a grid of runs may vary."""
        return tuple(name for name, rule in rules(self).items() if rule.per_run)

    @property
    def width(self) -> int:
        """Parameter vectors inside a member: the engine is chosen for members × width."""
        return 1

    def prepare(self, problem: Problem) -> Problem:
        """Rewrite the network on a copy, or bring modules of the method's own."""
        return problem

    def row_weights(self, run: Run) -> Tensor | None:
        """Weights of the data set's rows for each member, [M, N], on top of the user's."""
        return None

    def stages(self, run: Run) -> Iterable[Stage]:
        raise NotImplementedError

    def init(self, run: Run) -> State:
        """Named tensors, each with leading axis M."""
        return run.init_network()

    def parameters(self, run: Run, state: State) -> Tensor:
        """The current weights of each member, [M, P], or [M, K, P] of its particles: what `keep`
        stores and validation scores."""
        return state["theta"]

    def score(self, run: Run, state: State, batch: Batch) -> Tensor:
        """The log-likelihood of held-out rows, [M]: what early stopping watches. Particles are
        averaged as in a prediction."""
        theta = self.parameters(run, state)
        if theta.ndim == 2:
            return run.log_likelihood(theta, batch, state)
        k = theta.shape[1]
        inner = folded({n: v for n, v in state.items() if n == "layers" or "buffer." in n}, k)
        each = run.times(k).log_likelihoods(theta.flatten(0, 1), batch.times(k), inner)
        mixed = torch.logsumexp(each.unflatten(0, (-1, k)), 1) - math.log(k)  # [M, B]
        weight = 1.0 if batch.weight is None else batch.weight
        return (mixed * weight).sum(-1) * batch.scale

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        """The posterior of one run: state and run hold that run's members only."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def optimise(
    objective: Objective,
    steps: int,
    over: Sequence[str] = ("theta",),
    *,
    average: float = 0.0,
    every: int = 1,
    optimizer: Optimizer | None = None,
    name: str = "optimise",
    source: str | Source = "mini",
    validates: bool = True,
    capturable: bool = True,
) -> Stage:
    """A stage that ascends an objective: φ ← φ + optimiser step on its gradient / n, for each name.

    Parameters
    ----------
    objective: gives each member's value [M], the state entries that it changed (BatchNorm), and
        what is known of it in closed form.
    over: the names of the state that are trained.
    average: the share of the last steps over which each name is averaged, into "average.NAME"
        (Polyak & Juditsky, 1992): see `averaged`. every: of these steps, which are counted.
    optimizer: default: the one that `fit` was asked for.
    """
    first = steps - max(1, math.ceil(average * steps))  # of the steps that are averaged

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        chosen = optimizer or run.settings.optimizer
        value, grads, changed = run.value_and_grad(objective, state, batch, clock, over)
        params = {name: state[name] for name in over}
        descent = {name: run.descent(grad) for name, grad in grads.items()}
        new = chosen.update(params, descent, state, clock.rate, clock.t, clock.owned)
        if average:
            count = clock.t - first + 1  # of steps that are averaged, below 1 before them
            weight = 1.0 / (count.clamp(min=every) // every).to(run.dtype)
            if every > 1:
                weight = torch.where((count < 1) | (count % every == 0), weight, 0.0)
            for key in over:
                new[f"average.{key}"] = torch.lerp(state[f"average.{key}"], new[key], weight)
        return {**state, **changed, **new}, {"loss": value * run.per_example}

    def enter(run: Run, state: State) -> State:
        params = {name: state[name] for name in over}
        own = {f"average.{k}": v.clone() for k, v in params.items()} if average else {}
        return {**state, **own, **(optimizer or run.settings.optimizer).init(params)}

    return Stage(
        name, step, steps, source, over=tuple(over), enter=enter, validates=validates,
        capturable=capturable,
    )  # fmt: skip


def refresh_batch_norm(run: Run, name: str = "theta") -> Iterable[Stage]:
    """A pass over the data that recomputes BatchNorm's statistics for the weights under a name:
    those of points that were averaged, or drawn, belong to no point that was visited. No stage
    where there is no BatchNorm. The statistics of batches are averaged by their rows."""

    def enter(run: Run, state: State) -> State:
        empty = {k: torch.zeros_like(v) for k, v in state.items() if k.startswith("buffer.")}
        return {**state, **empty, "refreshed": torch.zeros_like(run.n)}

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        rows = batch_rows(batch)
        count = state["refreshed"] + rows
        with torch.no_grad():
            seen = run.batch_statistics(state[name], state, batch)
        new = {}
        for key, value in seen.items():
            share = (rows / count).reshape(-1, *(1,) * (value.ndim - 1)).to(value.dtype)
            counted = key.endswith("num_batches_tracked")
            new[key] = state[key] + 1 if counted else torch.lerp(state[key], value, share)
        return {**state, **new, "refreshed": count}, {}

    if run.problem.tracked:
        yield Stage("batch norm", step, 0, "pass", over=(name,), enter=enter, capturable=False)


def averaged(state: State, name: str) -> Tensor:
    """What `optimise` averaged, or the last iterate where it did not."""
    return state.get(f"average.{name}", state[name])


def as_method(spec: str | Method | type[Method]) -> Method:
    """A method from its name, its class, or itself."""
    if isinstance(spec, str):
        return get_method(spec)()
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")
