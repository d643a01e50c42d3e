"""The protocol every method follows.

A method is a frozen dataclass of hyper-parameters. It says which `Stage`s it runs; each stage's
step advances all members at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.fields import check_fields, rules
from doxa.model import Model
from doxa.registry import get_method
from doxa.run import Clock, Info, Run, State, batch_rows, slice_state

if TYPE_CHECKING:
    from doxa.posterior import Posterior

__all__ = [
    "Clock", "Info", "Mark", "Marks", "Method", "Objective", "Run", "Stage", "State",
    "as_method", "batch_rows", "log_joint", "optimise", "slice_state",
]  # fmt: skip


Mark = Callable[[Run, State], State]
Marks = Mapping[int, Mark]


@dataclass
class Stage:
    """A phase of a method: a step repeated.

    batch: "mini" (random rows, every row once an epoch), "independent" (random rows with
        replacement: batches that know nothing of each other), "all" (every row, every step),
        "pass" (every row once; `steps` is then ignored).
    keep: store the current parameters every `keep` steps.
    marks: {t: what happens to the state before step t}, outside what is traced or compiled.
    rates: what `clock.rate` is at each step, [steps] or [steps, M, 1]; None: as `fit` was asked.
    """

    name: str
    step: Callable[[Run, State, Batch, Clock], tuple[State, Info]]
    steps: int
    batch: str = "mini"
    keep: int = 0
    enter: Callable[[Run, State], State] | None = None
    validates: bool = False  # the driver may stop this stage early
    capturable: bool = True  # the step is a fixed sequence of tensor operations
    marks: Marks = field(default_factory=dict)
    rates: Tensor | None = None


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
    stackable: ClassVar[bool] = True
    regression_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """A method that compares two of its fields does so after super().__post_init__()."""
        check_fields(self)

    @property
    def per_run(self) -> tuple[str, ...]:
        """The fields that a grid of runs may vary."""
        return tuple(name for name, rule in rules(self).items() if rule.per_run)

    def prepare(self, model: Model) -> Model:
        """Rewrite the network, on a copy."""
        return model

    def stages(self, run: Run, steps: int) -> Iterable[Stage]:
        raise NotImplementedError

    def init(self, run: Run) -> State:
        raise NotImplementedError

    def parameters(self, run: Run, state: State) -> Tensor:
        """The current parameters of each member, flat [M, P]: what keep and validation see."""
        return state["theta"]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        """The posterior of one run: state and run hold that run's members only."""
        raise NotImplementedError

    def total_steps(self, steps: int) -> int:
        """Steps of all stages together, for progress and cost."""
        return steps

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


Objective = Callable[[Run, State, Batch, Clock], tuple[Tensor, Tensor, State]]


def optimise(
    objective: Objective,
    steps: int,
    name: str = "optimise",
    batch: str = "mini",
    key: str = "theta",
) -> Stage:
    """A stage that ascends an objective: θ ← θ + optimiser step on its gradient / n.

    `objective` gives each member's value [M], its gradient with respect to state[key], and the
    state entries that changed (BatchNorm buffers).
    """

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        value, grad, changed = objective(run, state, batch, clock)
        descent = run.descent(grad)
        theta, optim = run.optimizer.update(
            state[key], descent, state, clock.rate, clock.t, clock.owned
        )
        return {**state, **changed, **optim, key: theta}, {"loss": value * run.per_example}

    def enter(run: Run, state: State) -> State:
        return {**state, **run.optimizer.init(state[key])}

    return Stage(name, step, steps, batch, enter=enter, validates=True)


def log_joint(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[Tensor, Tensor, State]:
    """log p(θ) + (n/B) Σ log p(y|θ) and its gradient: MAP's objective, with dropout layers and
    BatchNorm in training mode."""
    theta = state["theta"]
    changed = {k: v.clone() for k, v in state.items() if k.startswith("buffer.")}
    masks = run.dropout_masks(clock, batch_rows(batch)) if run.net.sites else None
    value, grad = run.grad(
        theta, batch, masks=masks, buffers=run.buffers(changed) or None, training=True
    )
    return value + run.prior.log_prob(theta), run.prior.add_score(grad, theta), changed


def as_method(spec: str | Method | type[Method]) -> Method:
    """A method from its name, its class, or itself."""
    if isinstance(spec, str):
        return get_method(spec)()
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")
