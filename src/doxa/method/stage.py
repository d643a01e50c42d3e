"""`Stage`: a step that the driver repeats, and the stages that several methods share.

`optimise` ascends an objective, `noise_on_held_out` re-estimates the noise on held-out rows, and
`refresh_batch_norm` recomputes BatchNorm statistics in a pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from doxa.data import Batch, Source, batch_rows
from doxa.linalg.layout import Params
from doxa.method.run import AT_REST, Run
from doxa.method.state import (
    Clock,
    Info,
    Objective,
    State,
    TensorGradient,
    average_name,
    buffer_name,
    gradients_by_tensor,
    network_part,
    unflatten_particles,
)
from doxa.method.trace import Gradient, full_gradient
from doxa.optim import Adam, Optimizer

if TYPE_CHECKING:
    from doxa.engine.execute import Recorded


Hook = Callable[[Run, State], State]
Hooks = Mapping[int, Hook]
Step = Callable[[Run, State, Batch, Clock], tuple[State, Info]]


@dataclass
class Stage:
    """A phase of a method: a step that is repeated.

    Parameters
    ----------
    name : str
        The name of the stage, for logs and data order.
    step : callable
        The function (run, state, batch, clock) to (state, info).
    steps : int
        The number of steps.
    source : str or Source, default "mini"
        The rows of each step: "mini", "dealt", "independent", "all", "pass", "held-out", "tasks",
        or a `Source`.
    keep : int, default 0
        Store the current parameters every `keep` steps; 0 means never.
    over : tuple of str, default ("theta",)
        The names of the state that the step changes. The driver checks that they are finite.
    enter : callable, default None
        A function of (run, state) that changes the state at the start of the stage.
    validates : bool, default False
        Whether the driver may stop the stage early, on held-out rows.
    capturable : bool, default True
        Whether the step is a fixed sequence of tensor operations that never synchronise a GPU with
        the host.
    hooks : dict of int to callable
        Functions of (run, state) that change the state before step t. They run outside the part
        that is recorded or compiled.
    rates : Tensor, default None
        The value of `clock.rate` at each step, [steps] or [steps, M, 1]. None means the learning
        rate and schedule of `fit`.
    recorded : Recorded, default None
        How parts of the step are executed, if only parts of it are recorded.
    passing : tuple of str, default ()
        Names of the state that only the steps of this stage read, as they read the moments of an
        optimiser: a large network keeps no second copy of them.
    product : float, default None
        Multiplications in the largest matrix product of the stage, for the choice of the number of
        threads. None means that of the network's gradient.
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
    passing: tuple[str, ...] = ()
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
    combine: Callable[[Run, Tensor], Tensor] | None = None,
) -> Stage:
    """A stage that ascends an objective: φ ← φ + optimiser step on its gradient / n, for each name.

    Parameters
    ----------
    objective : callable
        Returns the value of each member, [M], the state entries that it changed (BatchNorm), and
        optionally an `AnalyticGradient`.
    steps : int
        The number of steps.
    over : sequence of str, default ("theta",)
        The names of the state that are trained.
    average : float, default 0.0
        The fraction of the steps, at the end, over which each name is averaged into
        the entry `average_name(name)` (Polyak & Juditsky, 1992): see `averaged`.
    every : int, default 1
        Every how many of these steps one enters the average.
    optimizer : Optimizer, default None
        None means the optimiser of `fit`.
    name : str, default "optimise"
        As in `Stage`.
    source : str or Source, default "mini"
        As in `Stage`.
    validates : bool, default True
        As in `Stage`.
    capturable : bool, default True
        As in `Stage`.
    combine : callable, default None
        Changes a gradient, as a function of (run, gradient): members may share a gradient.
    """
    first = first_averaged(average, steps)

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        chosen = optimizer or run.settings.optimizer
        if run.by_tensor and tuple(over) == ("theta",) and combine is None:
            found = step_by_tensor(run, objective, state, batch, clock, chosen)
            if found is not None:
                new, value = found
                if average:
                    new |= average_from(first, {"theta": new["theta"]}, state, clock, every)
                info = {"loss": value * run.per_example} if clock.reported else {}
                return {**state, **new}, info
        value, grads, changed = run.value_and_grad(objective, state, batch, clock, over)
        params = {name: state[name] for name in over}
        if combine is not None:
            grads = {name: combine(run, grad) for name, grad in grads.items()}
        descent = {name: run.descent(grad) for name, grad in grads.items()}
        if clock.trace is not None:
            params = {name: value.clone() for name, value in params.items()}
            full = full_gradient(run, state, batch, clock, objective) if "theta" in over else None
        new = chosen.update(params, descent, state, clock.rate, clock.t, clock.owned)
        if clock.trace is not None and "theta" in over:
            theta, velocity = state["theta"], new.get("optim.u.theta")
            moved = new["theta"] - theta
            clock.trace.append(Gradient(theta, grads["theta"], full, moved, velocity))
        if average:
            new |= average_from(first, {key: new[key] for key in over}, state, clock, every)
        return {**state, **changed, **new}, {"loss": value * run.per_example}

    def enter(run: Run, state: State) -> State:
        params = {name: state[name] for name in over}
        own = {average_name(k): v.clone() for k, v in params.items()} if average else {}
        return {**state, **own, **(optimizer or run.settings.optimizer).init(params)}

    return Stage(
        name, step, steps, source, over=tuple(over), enter=enter, validates=validates,
        capturable=capturable,
    )  # fmt: skip


def step_by_tensor(
    run: Run, objective: Objective, state: State, batch: Batch, clock: Clock, optimizer: Optimizer
) -> tuple[State, Tensor] | None:
    """A step of an optimiser on θ of a large network: the new entries of the state, and the value
    of the objective, [M]. None if the objective needs rows. Tensors whose prior is a Gaussian
    centred at 0 have it as the weight decay of the optimiser, which is the same."""
    names = ("theta", *(f"optim.{kind}.theta" for kind in optimizer.moments))
    new: State = {}

    def update(gradients: list[TensorGradient]) -> None:
        if not new:
            new.update((k, state[k] if clock.owned else state[k].clone()) for k in names)
        m = gradients[0].member
        n = run.numbers_of_rows[m]
        groups: dict[float, list[TensorGradient]] = {}
        for one in gradients:
            if one.decay is None:
                one.add_prior(one.of(new["theta"]), -1.0 / n)
            groups.setdefault((one.decay or 0.0) / n, []).append(one)
        rate = (clock.rate[m] if clock.rate.ndim else clock.rate).reshape(())
        for decay, group in groups.items():
            theta, *moments = ([one.of(rows) for one in group] for rows in new.values())
            grads = [one.grad for one in group]
            optimizer.update_(theta, grads, moments, rate, clock.t, decay)

    found = gradients_by_tensor(run, objective, state, batch, clock, update, loss=True)
    return None if found is None else ({**found[1], **new}, found[0])


def noise_on_held_out(
    score: Callable[[Run, State, Batch], Tensor], run: Run, name: str = "theta", steps: int = 100
) -> Iterable[Stage]:
    """A short stage that re-estimates the parameters of the likelihood on the held-out rows.

    The estimate of the noise on training rows is too small. The parameters are among the weights
    `name`; `score` returns the log-likelihood of rows, [M]. There is no stage if no rows are held
    out, or if the likelihood has no learned parameters.

    Gaussian noise is σ² = Σ e²/(m − 2) of m errors, not Σ e²/m. If σ is estimated from m rows
    alone, this estimate maximises the expected log-likelihood of a new row, and intervals have
    their nominal coverage. Rows with weights w count as their effective number m, also relative to
    the prior: σ² = Σ w e²/Σ w · m/(m − 2).

    If each member of a run holds out a few rows only (`run.pooled_rows`), the members share one
    estimate, from the held-out rows of all of them. After cross-fitting, the estimate is known, and
    is put in place."""
    learned = [own for own in run.layout.names if own.startswith("likelihood.")]
    index = run.layout.index(learned).to(run.device)
    known = run.settings.held_out_noise
    if known is not None and learned:

        def put_known(run: Run, state: State) -> State:
            value = known.to(state[name]).expand_as(state[name][..., index])
            return {**state, name: state[name].index_copy(-1, index, value)}

        yield Stage("noise", _no_step, 0, over=(name,), enter=put_known)
        return
    if run.data.validation is None or not learned:
        return
    weights = [run.rows.weight_of(rows) for rows in run.data.validation]
    held = list(zip(run.data.validation, weights, strict=True))
    sizes = [run.rows.effective_rows(rows) for rows, _ in held]
    pooled = run.pooled_rows
    fewer = min(run.likelihood.degrees_of_freedom_correction, 0.5 * min(pooled or sizes))
    share = 1.0 if pooled is None else len(pooled) / run.size
    sums = [float(len(rows) if w is None else w.double().sum()) for rows, w in held]
    shares = torch.tensor(sizes, dtype=torch.float64) / torch.tensor(sums, dtype=torch.float64)

    def put(state: State) -> State:
        return {**state, name: state[name].index_copy(-1, index, state["noise"])}

    def objective(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
        own = put(params)
        # The factor of log σ makes the estimate that of m − 2 rows.
        theta, wider = own[name], fewer * params["noise"].sum(-1)
        fit = score(run, own, batch) * params["per_row"]
        if theta.ndim == 2:
            return fit + share * (run.prior.log_prob(theta) + wider), {}
        k = theta.shape[1]  # particles; the prediction is their mean density
        each = run.expand_particles(k).prior.log_prob(theta.flatten(0, 1)).unflatten(0, (-1, k))
        return fit + share * (each + wider).mean(1), {}

    stage = optimise(
        objective, steps, ("noise",), optimizer=Adam(), name="noise", source="held-out",
        validates=False, combine=None if pooled is None else Run.over_run,
    )  # fmt: skip
    begin, advance = stage.enter, stage.step
    assert begin is not None

    def enter(run: Run, state: State) -> State:
        per_row = shares[list(run.split_of)].to(run.n)  # m/Σw, [M]
        start = state[name][..., index]
        if pooled is not None:
            start = run.over_run(start)
        return begin(run, {**state, "noise": start, "per_row": per_row})

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        return put(advance(run, state, batch, clock)[0]), {}

    falling = 0.1 * torch.linspace(1.0, 0.0, steps + 1, device=run.device, dtype=run.dtype)[:-1]
    yield replace(stage, step=step, enter=enter, rates=falling)


def _no_step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
    return state, {}


def refresh_batch_norm(run: Run, name: str = "theta") -> Iterable[Stage]:
    """A pass over the data that recomputes the BatchNorm statistics for the weights `name`.

    Averaged or sampled weights were never visited in training, so that no statistics belong to
    them. There is no stage without BatchNorm. Statistics of batches are averaged with their numbers
    of rows as weights. Other buffers that training changes keep their last values, because their
    meaning is defined by their layer only."""

    def enter(run: Run, state: State) -> State:
        names = [buffer_name(k) for k in run.net.momenta]
        empty = {name: torch.zeros_like(state[name]) for name in names}
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
    """The BatchNorm statistics for each draw of the weights, [M, S, P], from a pass over the data:
    {buffer: [M, S, ...]}; empty without BatchNorm."""
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
    """The first step that is averaged, if a fraction `share` of the steps at the end is."""
    return steps - max(1, math.ceil(share * steps))


def average_from(first: int, new: State, state: State, clock: Clock, every: int = 1) -> State:
    """The mean of each entry over every `every`th step from the first on, by `average_name`."""
    count = clock.t - first + 1  # number of averaged steps; below 1 before the first
    averages: State = {}
    for name, value in new.items():
        weight = 1.0 / (count.clamp(min=every) // every).to(value.dtype)
        if every > 1:
            weight = torch.where((count < 1) | (count % every == 0), weight, 0.0)
        key = average_name(name)
        own = state[key]
        averages[key] = (own.lerp_ if clock.owned else own.lerp)(value, weight)
    return averages
