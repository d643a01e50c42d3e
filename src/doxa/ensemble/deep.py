"""Deep ensembles: MAP from several starts, averaged.

    p(y | x) = (1/M) Σ_m p(y | x, θ_m)
    adversarial:  ½ log p(y | x, θ) + ½ log p(y | x′, θ),   x′ = x − ε Δ sign ∇ₓ log p(y | x, θ)

Lakshminarayanan, Pritzel & Blundell (2017). Members differ in their initial weights and in the
order of their data, so that they end in different modes. It is the strongest simple baseline. Its
cost is M fits, which run as one stacked fit here. Adversarial training, an option of the paper,
also fits rows that are moved slightly in the direction of larger loss (the fast gradient sign; Δ is
the range of each input). It smooths the predictions around the data, at twice the cost. An ensemble
of heads shares the features of one trained network. They are computed once and not trained: dropout
is off in them, and BatchNorm uses its running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.ensemble.map import MAP
from doxa.errors import MethodError
from doxa.method import Clock, Run, Stage, State, log_joint, noise_on_held_out, optimise, target
from doxa.method.method import between, one_of
from doxa.model.model import Network, Problem


@store.register("deep-ensemble")
@dataclass(frozen=True)
class DeepEnsemble(MAP):
    """MAP fits from different initial weights; five members by default.

    Parameters
    ----------
    adversarial : float
        ε, the distance by which rows are moved, as a share of the range of each input; 0: off. The
        paper uses 0.01.
    features : str
        "joint" trains all layers of each member. "frozen" shares the layers of a trained network
        (with init="given"): the members are last layers, or the `subset`, each with new initial
        weights.
    """

    name: ClassVar[str] = "deep-ensemble"
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    is_ensemble: ClassVar[bool] = True
    default_members: ClassVar[int] = 5

    adversarial: float = between(0.0, 0, 1, "[)", per_run=True)
    features: str = one_of("joint", "frozen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frozen and self.adversarial > 0:
            raise MethodError("adversarial training changes the features: use features='joint'")

    @property
    def frozen(self) -> bool:
        return self.features == "frozen"

    def prepare(self, problem: Problem) -> Problem:
        if not self.frozen:
            return problem
        assert isinstance(problem, Network)
        subset = problem.model.subset
        return problem.freeze("last_layer" if subset == "all" else subset)

    def init(self, run: Run) -> State:
        state = run.init_network()
        if self.frozen:
            if run.settings.fresh:
                raise MethodError(
                    "features='frozen' does not train the layers before the last: it needs a "
                    "trained network and init='given'"
                )
            return state | {"theta": run.net.fresh(run.starts)}
        if not self._moves_rows(run):
            return state
        span = _range(run)
        epsilon = run.field(self, "adversarial")
        return state | {"step": span * epsilon.reshape(-1, *(1,) * (span.ndim - 1))}

    def stages(self, run: Run) -> Iterable[Stage]:
        if self._moves_rows(run):
            yield optimise(_with_moved_rows, run.steps)
        else:
            yield optimise(target if self.frozen else log_joint, run.steps)
        yield from noise_on_held_out(self.score, run)

    def reads_inputs(self, run: Run) -> bool:
        return self._moves_rows(run)

    def _moves_rows(self, run: Run) -> bool:
        return self.adversarial > 0 or "adversarial" in run.hyper


def _with_moved_rows(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    theta, step = params["theta"], params["step"]
    given = batch.x.unsqueeze(0).expand(run.size, *batch.x.shape) if batch.shared else batch.x
    y = _each(batch.y, run.size) if batch.shared else batch.y
    x = given.detach().requires_grad_()
    here = run.train(theta, params, replace(batch, x=x, y=y, shared=False), clock)
    (slope,) = torch.autograd.grad(here.value.sum(), x, retain_graph=True)
    moved = x.detach() - step.unsqueeze(1) * slope.sign()
    there = run.train(theta, params, replace(batch, x=moved, y=y, shared=False), clock)
    return 0.5 * (here.value + there.value), here.changed, run.known_prior(theta)


def _each(y: Any, members: int) -> Any:
    if isinstance(y, Tensor):
        return y.unsqueeze(0).expand(members, *y.shape)
    return type(y)(_each(part, members) for part in y)


def _range(run: Run) -> Tensor:
    """max − min of each input over the rows of each member, [M, ...]."""
    rows = run.passes()
    low = high = None
    for t in range(rows.count):
        x = rows.batch(t).x
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise MethodError(
                "adversarial training needs one float input, because it moves the rows"
            )
        x = x.unsqueeze(0) if rows.batch(t).shared else x
        least, most = x.amin(1), x.amax(1)
        low = least if low is None else torch.minimum(low, least)
        high = most if high is None else torch.maximum(high, most)
    assert low is not None and high is not None
    return (high - low).expand(run.size, *low.shape[1:])
