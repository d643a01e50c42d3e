"""A stage: a step repeated, and what the driver must know to repeat it.

Stages that several methods share: ascent of an objective, and BatchNorm recomputed by a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from doxa.data import Batch, Source, batch_rows
from doxa.data.rows import number_of_rows
from doxa.linalg.layout import Params
from doxa.method.run import AT_REST, Run
from doxa.method.state import Clock, Info, Objective, State, network_part, unflatten_particles
from doxa.optim import Adam, Optimizer

if TYPE_CHECKING:
    from doxa.engine.execute import Recorded


Hook = Callable[[Run, State], State]
Hooks = Mapping[int, Hook]
Step = Callable[[Run, State, Batch, Clock], tuple[State, Info]]


@dataclass
class Stage:
    """A phase of a method: a step repeated.

    Parameters
    ----------
    source: which rows each step sees: "mini", "dealt", "independent", "all", "pass", "held-out",
        "tasks", or a `Source`.
    keep: store the current parameters every `keep` steps.
    over: the names that the step moves: what the non-finite guard watches.
    enter: what happens to the state when the stage begins.
    validates: the driver may stop the stage early, on held-out rows.
    capturable: the step is a fixed sequence of tensor operations, none of which waits for the host
        where the run is on a GPU.
    marks: {t: what happens to the state before step t}, outside what is recorded or compiled.
    rates: what `clock.rate` is at each step, [steps] or [steps, M, 1]; None: as `fit` was asked.
    recorded: how parts of the step are executed, where that is not the whole step.
    product: multiplications in the largest matrix product of the stage, for the number of threads;
        None: that of the network's gradient.
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
    hooks: Hooks = field(default_factory=dict)
    rates: Tensor | None = None
    recorded: Recorded | None = None
    product: float | None = None


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
    first = first_averaged(average, steps)

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        chosen = optimizer or run.settings.optimizer
        value, grads, changed = run.value_and_grad(objective, state, batch, clock, over)
        params = {name: state[name] for name in over}
        descent = {name: run.descent(grad) for name, grad in grads.items()}
        new = chosen.update(params, descent, state, clock.rate, clock.t, clock.owned)
        if average:
            new |= average_from(first, {key: new[key] for key in over}, state, clock, every)
        return {**state, **changed, **new}, {"loss": value * run.per_example}

    def enter(run: Run, state: State) -> State:
        params = {name: state[name] for name in over}
        own = {f"average.{k}": v.clone() for k, v in params.items()} if average else {}
        return {**state, **own, **(optimizer or run.settings.optimizer).init(params)}

    return Stage(
        name, step, steps, source, over=tuple(over), enter=enter, validates=validates,
        capturable=capturable,
    )  # fmt: skip


def noise_on_held_out(
    score: Callable[[Run, State, Batch], Tensor], run: Run, name: str = "theta", steps: int = 100
) -> Iterable[Stage]:
    """A short stage that re-estimates the likelihood's own parameters, which are among the weights
    under a name, on the rows held out: on the rows that were fitted the noise looks smaller than
    it is. `score` gives the log-likelihood of rows, [M]. No stage where nothing is held out, or
    nothing learned.

    Gaussian noise is σ² = Σ e²/(m − 2) of m errors, not Σ e²/m: a new row has the largest expected
    log-likelihood under it where σ is known from m rows alone, and intervals hold what they say.
    Rows of weights w are as many as their effective number m, and count so much against the prior:
    σ² = Σ w e²/Σ w · m/(m − 2)."""
    learned = [own for own in run.layout.names if own.startswith("likelihood.")]
    if run.data.validation is None or not learned:
        return
    index = run.layout.index(learned).to(run.device)
    weights = [run.rows.weight_of(rows) for rows in run.data.validation]
    held = list(zip(run.data.validation, weights, strict=True))
    sizes = [number_of_rows(rows, w) for rows, w in held]
    spared = min(run.likelihood.spared, 0.5 * min(sizes))
    sums = [float(len(rows) if w is None else w.double().sum()) for rows, w in held]
    shares = torch.tensor(sizes, dtype=torch.float64) / torch.tensor(sums, dtype=torch.float64)

    def put(state: State) -> State:
        return {**state, name: state[name].index_copy(-1, index, state["noise"])}

    def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
        own = put(params)
        theta, wider = own[name], spared * params["noise"].sum(-1)  # log σ, as if rows were fewer
        fit = score(run, own, batch) * params["per_row"]
        if theta.ndim == 2:
            return fit + run.prior.log_prob(theta) + wider, {}
        k = theta.shape[1]  # particles, whose mean density is what predicts
        each = run.expand_particles(k).prior.log_prob(theta.flatten(0, 1)).unflatten(0, (-1, k))
        return fit + (each + wider).mean(1), {}

    stage = optimise(
        objective, steps, ("noise",), optimizer=Adam(), name="noise", source="held-out",
        validates=False,
    )  # fmt: skip
    begin, advance = stage.enter, stage.step
    assert begin is not None

    def enter(run: Run, state: State) -> State:
        per_row = shares[list(run.split_of)].to(run.n)  # m/Σw, [M]
        return begin(run, {**state, "noise": state[name][..., index], "per_row": per_row})

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        return put(advance(run, state, batch, clock)[0]), {}

    falling = 0.1 * torch.linspace(1.0, 0.0, steps + 1, device=run.device, dtype=run.dtype)[:-1]
    yield replace(stage, step=step, enter=enter, rates=falling)


def refresh_batch_norm(run: Run, name: str = "theta") -> Iterable[Stage]:
    """A pass over the data that recomputes BatchNorm's statistics for the weights under a name:
    those of points that were averaged, or drawn, belong to no point that was visited. No stage
    where there is no BatchNorm. The statistics of batches are averaged by their rows. Other buffers
    that training changes stay as they were at its end: only their layer knows what they mean."""

    def enter(run: Run, state: State) -> State:
        empty = {f"buffer.{k}": torch.zeros_like(state[f"buffer.{k}"]) for k in run.net.momenta}
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

    if run.problem.model is not None and run.net.momenta:
        yield Stage("batch norm", step, 0, "pass", over=(name,), enter=enter, capturable=False)


def statistics_of_draws(run: Run, draws: Tensor, state: State) -> Params:
    """BatchNorm's statistics for each draw of the weights, [M, S, P], by a pass over the data:
    {buffer: [M, S, ...]}; nothing where there is no BatchNorm."""
    k = draws.shape[1]
    many = run.expand_particles(k)
    rows = many.passes(run.settings.batch_size)
    own = {name: v.repeat_interleave(k, 0) for name, v in network_part(state).items()}
    own["theta"] = draws.flatten(0, 1)
    for stage in refresh_batch_norm(many):
        assert stage.enter is not None
        own = stage.enter(many, own)
        for t in range(rows.count):
            own, _ = stage.step(many, own, rows.batch(t), AT_REST)
    return unflatten_particles(run.buffers(own), k)


def first_averaged(share: float, steps: int) -> int:
    """The first of the steps that are averaged, a share of them at the end."""
    return steps - max(1, math.ceil(share * steps))


def average_from(first: int, new: State, state: State, clock: Clock, every: int = 1) -> State:
    """The mean of each entry over every `every`th step from the first on, as "average.NAME"."""
    count = clock.t - first + 1  # of steps that are averaged, below 1 before them
    averages: State = {}
    for name, value in new.items():
        weight = 1.0 / (count.clamp(min=every) // every).to(value.dtype)
        if every > 1:
            weight = torch.where((count < 1) | (count % every == 0), weight, 0.0)
        key = f"average.{name}"
        own = state[key]
        averages[key] = (own.lerp_ if clock.owned else own.lerp)(value, weight)
    return averages


def averaged(state: State, name: str) -> Tensor:
    """What `optimise` averaged, or the last iterate where it did not."""
    return state.get(f"average.{name}", state[name])
