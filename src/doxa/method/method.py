"""The protocol every method follows.

A method is a frozen dataclass of hyper-parameters. It says what it fits (`prepare`), where it
starts (`init`), which `Stage`s it runs, and what comes out (`finish`); each stage's step advances
all members at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.method.clock import State, folded, network_part
from doxa.method.fields import check_fields, rules
from doxa.method.keywords import check_settings
from doxa.method.memory import Workload
from doxa.method.run import Run
from doxa.method.stage import Stage
from doxa.model.problem import Problem
from doxa.registry import get_method

if TYPE_CHECKING:
    from doxa.posterior import Posterior


class Method:
    """Base of all methods: subclasses are frozen dataclasses, whose fields declare what they may
    hold (`doxa.method.fields`)."""

    name: ClassVar[str]
    default_members: ClassVar[int] = 1
    default_steps: ClassVar[int] = 2000
    default_rate: ClassVar[float] = 1e-2
    default_batch: ClassVar[int] = 128
    overfits: ClassVar[bool] = False  # it learns rows by heart, if it is let
    shrinks: ClassVar[bool] = False  # it may end at its prior: training rows tell
    needs_network: ClassVar[bool] = True
    uses_rate: ClassVar[bool] = True  # a grid over lr changes something
    regression_only: ClassVar[bool] = False
    half_precision: ClassVar[bool] = False  # its network may compute in bfloat16
    modules_stack: ClassVar[bool] = False  # modules that it brings run under vmap
    copies: ClassVar[float] = 24.0  # of all weights that a fit holds at its peak, as measured
    predicted_draws: ClassVar[int] = 0  # weights drawn at once to predict held-out rows
    # What to do where memory is short:
    smaller: ClassVar[str] = (
        "fit fewer members or runs at a time, a smaller network, or subset='last_layer'"
    )

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        check_settings(cls, values, settings)
        return super().__new__(cls)

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

    def width_on(self, problem: Problem) -> int:
        """The same for a problem that was prepared, where it depends on that."""
        return self.width

    @property
    def gradients(self) -> tuple[int, int] | None:
        """The least and the most gradients on all rows that a chain takes: what the cost of such a
        method is. None where the number of steps says it."""
        return None

    @property
    def holds_out(self) -> bool:
        """Whether rows are held out of a fit, unless the user says which."""
        return self.overfits

    @property
    def kept_draws(self) -> int:
        """How many times the stages keep `parameters`, at most."""
        return 0

    def planned_bytes(self, work: Workload) -> int:
        """What a fit holds at its peak, to a factor of two: its state, gradients, copies and kept
        draws. See `doxa.method.memory` for what is not counted."""
        particles = work.copy * self.width
        kept = min(self.kept_draws * particles, work.draws_budget)
        predicting = self.predicted_draws * work.weights * work.itemsize
        return int(self.copies * particles) + kept + predicting

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
        inner = folded(network_part(state), k)
        each = run.times(k).log_likelihoods(theta.flatten(0, 1), batch.times(k), inner)
        mixed = torch.logsumexp(each.unflatten(0, (-1, k)), 1) - math.log(k)  # [M, B]
        weight = 1.0 if batch.weight is None else batch.weight
        return (mixed * weight).sum(-1) * batch.scale

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        """The posterior of one run: state and run hold that run's members only."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


def as_method(spec: str | Method | type[Method]) -> Method:
    """A method from its name, its class, or itself."""
    if isinstance(spec, str):
        return get_method(spec)()
    if isinstance(spec, type) and issubclass(spec, Method):
        return spec()
    if isinstance(spec, Method):
        return spec
    raise MethodError(f"method must be a name or a method object, not {spec!r}")
