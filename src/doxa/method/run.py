"""`Run`: the interface of a method to a fit, with initial values, rows, densities and gradients.

A fit has M = runs × members stacked rows. `Run` holds the facts about each of them (seed, member,
run, split of the data, hyper-parameters and prior) and computes with all of them at once
(log-likelihoods, gradients, passes over the data). A `State` is a dict of tensors with leading
axis M; a `Clock` has the step, the learning rate and the noise. `scaled_priors` returns Gaussian
priors with learned scales, in the form that a posterior keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from doxa.data import Batch, BatchRequest, Data, Feed, NoData, Pass, batch_rows, source
from doxa.engine import Engine
from doxa.errors import MethodError
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import LARGE, Layout, Params, SplitRow
from doxa.method.row_sums import rows_of_block, summed
from doxa.method.state import (
    AnalyticGradient,
    Clock,
    NoClock,
    Objective,
    PieceClock,
    State,
    accumulated,
    as_buffers,
    buffer_name,
    buffers_of,
    differentiated,
    joined,
    network_part,
    refuse_changed,
    target,
)
from doxa.model import Model, likelihood_parameters
from doxa.model.functional import recomputing
from doxa.model.model import LogDensity, Problem
from doxa.model.trunk import remembered
from doxa.noise import Noise
from doxa.optim import Adam, Optimizer
from doxa.priors import BoundPrior, Normal, Prior

if TYPE_CHECKING:
    from doxa.method.method import Method
    from doxa.posterior import Posterior


PASS_BYTES = 256 << 20  # of the rows of a batch of a pass that is computed in blocks
FEWEST_HELD_OUT = 10  # effective number of held-out rows; fewer do not stop a member's training

T = TypeVar("T")
V = TypeVar("V")
Number = float | Tensor  # a float if all members share it, else [M, 1]
Callback = Callable[[int, dict[str, Any]], Any]


log = logging.getLogger("doxa")

AT_REST = NoClock()


class Trained(NamedTuple):
    """The log-likelihood of a batch, in training or with buffers frozen.

    Its value [M]; the state entries that the pass changed (BatchNorm and other buffers); the
    additional terms of layers, {name: [M, ...]}; and the outputs f."""

    value: Tensor
    changed: State
    terms: Params
    f: Any


@dataclass(frozen=True)
class FitSettings:
    """The settings of `fit` that concern training and its loop, checked and with defaults filled
    in."""

    steps: int = 1
    rate: float = 1e-2
    batch_size: int = 1
    microbatch: int | None = None  # the most rows whose gradient is computed at once
    # Sums over rows (`row_sums.py`): whether a rule divides those of all rows into blocks, and the
    # number of blocks of each batch that the user has set; the rows of a block are a multiple of
    # the last number.
    divides_rows: bool = False
    microbatches: int | None = None
    row_multiple: int = 1
    row_work: int | None = None  # multiplications per row and member; None: one for each weight
    epoch_steps: int = 1
    optimizer: Optimizer = field(default_factory=Adam)
    fresh: bool = True  # re-initialise the weights for each member, else use the network's weights
    # Half of the width in which particles start around their member; None: the method's own rule.
    spread: float | None = None
    begin: Tensor | None = None  # initial weights of each member from elsewhere, [M, P]
    schedule: Any = "cosine"
    patience: int = 20
    callbacks: Sequence[Callback] = ()
    progress: bool = False
    checkpoint_seconds: float = 30.0
    draws_budget: int | None = None  # bytes of kept draws in memory; None: a quarter of free memory
    engine: Any = "auto"  # the engine that was requested
    channels_last: bool = False  # the memory format of images in training
    trunk_outputs: Any = None  # computes those of a frozen trunk once (`driver/trunk.py`)
    block_size: int | None = None  # members that are trained together; None: `driver/blocks.py`
    # Results of cross-fitting, for a fit to all rows (`driver/fits.py`):
    stop_at: Mapping[int, Sequence[int]] = field(default_factory=dict)  # {stage: last step, [M]}
    held_out_noise: Tensor | None = None  # the likelihood's parameters, [M, ...]

    def select_members(self, rows: slice) -> FitSettings:
        """The settings for some of the members."""
        begin, noise = self.begin, self.held_out_noise
        if begin is None and noise is None and not self.stop_at:
            return self
        return replace(
            self, begin=None if begin is None else begin[rows],
            stop_at={stage: steps[rows] for stage, steps in self.stop_at.items()},
            held_out_noise=None if noise is None else noise[rows],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Run:
    """The interface of a method to a fit: its stacked rows, one for each run and member, and the
    computations with them. Immutable."""

    problem: Problem
    likelihood: Likelihood
    data: Data | NoData
    engine: Engine
    members: Sequence[int]  # member id of each row
    run_of: Sequence[int]  # run of each row
    split_of: Sequence[int]  # split of the data that each row is fitted to
    seeds: Sequence[int]  # seed of each row
    n: Tensor  # [M], the sum of weights
    prior: BoundPrior
    initial: Tensor | None  # [M, P]; None: computed again where it is needed
    hyper: Mapping[str, Tensor] = field(default_factory=dict)  # {field: [M]}, if runs differ
    constants: Params = field(default_factory=dict)  # fixed likelihood parameters, [M, ...]
    settings: FitSettings = field(default_factory=FitSettings)
    inputs: Any = None  # the shape of one row of x
    output: Any = ()  # the shape of f at a row
    likelihoods: Sequence[Likelihood] = ()  # of each run, if they differ
    particle_of: Sequence[str] = ()  # particle of its member that each row is
    # The effective number of held-out rows of each run, if its members hold out different rows that
    # are too few for one member: they share a stopping step and a noise estimate. Otherwise None.
    pooled_rows: Sequence[float] | None = None
    shortened_from: Self | None = None  # the run of the whole network, if this one has no trunk
    size: int = field(init=False)  # M
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    layout: Layout = field(init=False)  # positions of the weights in a flat row
    starts: list[tuple[int, object]] = field(init=False)  # (seed, who): keys of initial values
    keys: list[str] = field(init=False)  # the same as strings: keys of noise and data order
    per_example: Tensor = field(init=False)  # −1/n, [M]: factor from an objective to the loss
    cached: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        particles = self.particle_of or [""] * len(self.members)
        who = [f"{m}{particle}" for m, particle in zip(self.members, particles, strict=True)]
        starts = list(zip(self.seeds, who, strict=True))
        vars(self).update(
            size=len(self.members), device=self.n.device, dtype=self.n.dtype,
            layout=self.problem.layout, starts=starts,
            keys=[f"{seed}/{one}" for seed, one in starts], per_example=-1.0 / self.n,
        )  # fmt: skip
        if self.problem.model is not None:
            vars(self)["net"] = self.problem.model
        if isinstance(self.data, Data):
            vars(self)["rows"] = self.data

    @cached_property
    def net(self) -> Model:
        """The network; an error if there is none."""
        return self.problem.net

    @cached_property
    def by_tensor(self) -> bool:
        """Whether gradients are taken by the tensors of a large network, and not by rows of all
        its weights (`gradients_by_tensor`)."""
        network = self.problem.model is not None and not self.particle_of
        return network and self.layout.size >= LARGE and self.engine.takes_tensors(self.device)

    @cached_property
    def numbers_of_rows(self) -> list[float]:
        """`n` as numbers: a CUDA graph cannot wait for a value."""
        found: list[float] = self.n.tolist()
        return found

    def row_block(self, rows: int) -> int:
        """The rows of a block, where sums over so many rows are computed in blocks
        (`row_sums.py`); all of them if they are not."""
        if not isinstance(self.data, Data) or self.data.stream is not None:
            return rows
        return rows_of_block(
            self.settings, rows, self.size, self.layout.size, self.engine.mode, self.device
        )

    @cached_property
    def row_blocks(self) -> int:
        """The number of blocks of a sum over all rows; of a batch, where `microbatches` divides
        them."""
        if isinstance(self.data, NoData) or self.data.stream is not None:
            return 1
        rows: int = max(self.data.counts)
        if self.settings.microbatches is not None and not self.settings.divides_rows:
            rows = min(rows, self.settings.batch_size)
        return -(-rows // self.row_block(rows))

    @cached_property
    def pass_rows(self) -> int:
        """The rows of a batch of a pass over all rows: those of a step, or if they are computed in
        blocks, as many as have `PASS_BYTES`."""
        if self.row_blocks == 1 or not self.settings.divides_rows:
            return self.settings.batch_size
        first = self.rows.take(self.rows.rows[0][:1], torch.tensor(0))
        each: int = sum(leaf.nbytes for leaf in tree_flatten(first)[0])
        return max(self.settings.batch_size, PASS_BYTES // max(1, each))

    @property
    def whole(self) -> Self:
        """The run of the whole network on the user's rows: this one, unless it is the run of the
        part after a frozen trunk."""
        return self if self.shortened_from is None else self.shortened_from

    def trained(self, method: Method) -> Self:
        """The run that is trained: this one, or that of the part after a frozen trunk, on the
        outputs of the trunk. Its `whole` is this one."""
        if self.problem.model is None or not self.net.at_rest:
            return self
        found: Self = self.settings.trunk_outputs.trained(self, method)
        return found

    def posterior(self, method: Method, state: State, kept: Tensor | None) -> Posterior:
        """The posterior of a method at a state of the training, for inputs of the whole network."""
        found = method.finish(self, state, kept)
        if self.shortened_from is not None:
            own = self.shortened_from.common(method)
            found.of_network(own["model"], own["inputs"], own["scales"])
        return found

    def evaluation(self) -> AbstractContextManager[None]:
        """A context for predictions of the same rows by several posteriors."""
        return nullcontext() if self.shortened_from is None else remembered()

    def computed_by(self) -> dict[str, Any]:
        """How the fit was computed, for its record."""
        engine = self.engine
        facts = {
            "engine": engine.kind, "engine_reason": engine.reason, "precision": engine.precision,
        }  # fmt: skip
        model = self.whole.problem.model
        if model is not None and model.at_rest:
            facts["trunk"] = "in every pass" if self.shortened_from is None else "once"
        return facts

    @property
    def steps(self) -> int:
        """The number of optimisation steps, an argument of `fit`."""
        return self.settings.steps

    @cached_property
    def rows(self) -> Data:
        """The data set; an error if there is none."""
        raise MethodError("this method needs data, and a bare log density has none")

    @property
    def stops_early(self) -> bool:
        """Whether held-out rows stop the training, here or in the cross-fitting before."""
        return self.data.validation is not None or bool(self.settings.stop_at)

    def recomputing(self) -> AbstractContextManager[None]:
        """The context of an objective whose gradient is taken: the backward pass computes the parts
        of the network again that `fit(recompute=)` names."""
        model = self.problem.model
        return nullcontext() if model is None or not model.recomputed else recomputing()

    def over_run(self, values: Tensor) -> Tensor:
        """The mean of the values [M, ...] over the members of each run, for each member.

        Runs have equally many members, one after the other. A step of a graph may call this."""
        each: Tensor = values.unflatten(0, (len(set(self.run_of)), -1))
        return each.mean(1, keepdim=True).expand_as(each).flatten(0, 1)

    @property
    def tempered(self) -> bool:
        """Whether the likelihood is weighted, by rows or by classes. It is then not a density, and
        neither an evidence nor a bound on it is defined."""
        return self.data.weight is not None or self.likelihood.tempered

    @cached_property
    def _same_n(self) -> float | None:
        return float(self.n[0]) if bool((self.n == self.n[0]).all()) else None

    def descent(self, grad: Tensor) -> Tensor:
        """−grad/n: the gradient of the loss, [M, ...]."""
        if self._same_n is not None:  # a scalar is faster than a column
            return grad * (-1.0 / self._same_n)
        return grad * self.per_example.reshape(-1, *(1,) * (grad.ndim - 1))

    def over_n(self, value: float, name: str = "lr") -> Number:
        """A rate for the mean loss as a step on the full-data potential, value/n. If a grid varies
        `name`, its values are used."""
        if name in self.hyper:
            return (self.hyper[name] / self.n).unsqueeze(1)
        if self._same_n is not None:
            return value / self._same_n
        return (value / self.n).unsqueeze(1)

    def rates(self, shape: Tensor) -> Tensor:
        """The learning rate of `fit` times a shape [steps]: [steps], or [steps, M, 1] if a grid
        varies the rate."""
        if "lr" in self.hyper:
            return shape[:, None, None] * self.hyper["lr"].to(shape.dtype)[None, :, None]
        return shape * self.settings.rate

    def field(self, method: Method, name: str) -> Tensor:
        """A hyper-parameter as [M]: the values of the grid, if a grid varies it."""
        if name in self.hyper:
            return self.hyper[name]
        value = float(getattr(method, name))
        return torch.full((self.size,), value, device=self.device, dtype=self.dtype)

    def setting(self, method: Method, name: str) -> Number:
        """A hyper-parameter as a number, or [M, 1] if a grid varies it."""
        return self.hyper[name].unsqueeze(1) if name in self.hyper else float(getattr(method, name))

    def noise(self, purpose: str) -> Noise:
        return Noise(0, purpose, self.keys, self.device, self.dtype)

    @cached_property
    def free(self) -> Tensor | None:
        """1 for uncertain weights, 0 for the others, [P]; None if all are uncertain. Learned
        parameters of the likelihood count as uncertain."""
        if not self.problem.partial:
            return None
        fixed = set(self.layout.names) - set(self.net.subset_names)
        fixed = {name for name in fixed if not name.startswith("likelihood.")}
        free = torch.ones(self.layout.size, device=self.device, dtype=self.dtype)
        free[self.layout.index(fixed).to(self.device)] = 0.0
        return free

    @cached_property
    def subset_size(self) -> int:
        """The number of uncertain weights."""
        return self.layout.select(self.net.subset_names).size

    @cached_property
    def subset_index(self) -> Tensor:
        """Positions of the uncertain weights in the flat vector: of a large network two copies of a
        row of weights, for methods that need more than `subset_size` and `subset_where`."""
        return self.layout.index(self.net.subset_names).to(self.device)

    @cached_property
    def subset_where(self) -> slice | Tensor:
        """The same as a slice if the positions are contiguous, which avoids copies."""
        spans = [self.layout.slices[name] for name in self.net.subset_names]
        start, stop = spans[0].start, spans[-1].stop
        together = stop - start == sum(span.stop - span.start for span in spans)
        return slice(start, stop) if together else self.subset_index

    @cached_property
    def subset_prior(self) -> BoundPrior:
        """The prior of the uncertain weights alone, as an evidence or a bound on it needs it."""
        where = self.subset_where
        if isinstance(where, Tensor):
            return self.prior.of(where)
        return self.prior if where == slice(0, self.layout.size) else self.prior.of_slice(where)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """A value that a method computes from this run, cached at the first call. It must be a
        function of the run alone, because a resumed fit computes it again."""
        if what not in self.cached:
            self.cached[what] = make()
        found: T = self.cached[what]
        return found

    def select_members(self, rows: slice) -> Self:
        """The same run for some of its members."""
        if rows == slice(0, self.size):
            return self
        key = (rows.start, rows.stop)
        if key not in self.cached:
            self.cached[key] = replace(
                self, members=self.members[rows], run_of=self.run_of[rows],
                split_of=self.split_of[rows], seeds=self.seeds[rows], n=self.n[rows],
                hyper={k: v[rows] for k, v in self.hyper.items()},
                constants={k: v[rows] for k, v in self.constants.items()},
                prior=self.prior[rows] if self.prior.runs else self.prior,
                initial=None if self.initial is None else self.initial[rows],
                data=self.data.members(rows), particle_of=self.particle_of[rows],
                shortened_from=self.shortened_from and self.shortened_from.select_members(rows),
                settings=self.settings.select_members(rows),
            )  # fmt: skip
        part: Self = self.cached[key]
        return part

    def expand_particles(self, k: int) -> Self:
        """The run with k particles in place of each member: M·k rows, each with its own noise."""
        if k not in self.cached:

            def again(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
                return {name: v.repeat_interleave(k, 0) for name, v in tree.items()}

            def many(values: Sequence[V]) -> list[V]:
                return [values[m] for m in each.tolist()]

            each = torch.arange(self.size).repeat_interleave(k)
            before = self.particle_of or [""] * self.size
            self.cached[k] = replace(
                self, members=many(self.members), run_of=many(self.run_of),
                split_of=many(self.split_of), seeds=many(self.seeds),
                n=self.n.repeat_interleave(k, 0), hyper=again(self.hyper),
                constants=again(self.constants), data=self.data.members(each),
                prior=self.prior[each] if self.prior.runs else self.prior,
                initial=None if self.initial is None else self.initial.repeat_interleave(k, 0),
                particle_of=[f"{own}/{j}" for own in before for j in range(k)],
            )  # fmt: skip
        wide: Self = self.cached[k]
        return wide

    def start(self) -> Tensor:
        """Initial weights, [M, P]. Particles have different initial weights, unless the network's
        given weights are used."""
        if self.particle_of and self.settings.fresh:
            return self.net.fresh(self.starts)
        return self.initial_weights() if self.initial is None else self.initial.clone()

    def initial_weights(self) -> Tensor:
        """The initial weights of each member, [M, P], computed anew."""
        model, begin = self.problem.model, self.settings.begin
        if model is None:
            return torch.zeros(self.size, 0, device=self.device, dtype=self.dtype)
        if begin is not None:
            if begin.shape != (self.size, self.layout.size):
                raise MethodError(
                    f"init: the posteriors have {begin.shape[0]} points of {begin.shape[1]} "
                    f"weights, but the fit has {self.size} members (of all runs) of "
                    f"{self.layout.size} weights"
                )
            return begin.to(self.device, self.dtype).clone()
        if not self.settings.fresh:
            return model.given().expand(self.size, -1).clone() if self.size > 1 else (
                model.given().unsqueeze(0)
            )  # fmt: skip
        distinct = list(dict.fromkeys(self.starts))
        rows = model.fresh(distinct)
        if distinct == self.starts:
            return rows
        return rows[[distinct.index(start) for start in self.starts]]

    def init_network(self) -> State:
        """The initial state of a network: weights, parameters of rewritten layers, and for each
        member a copy of the buffers that training changes."""
        state, model = {"theta": self.start()}, self.problem.model
        if model is None:
            return state
        if model.layers.entries:
            state["layers"] = model.fresh_layers(self.starts)
        for name in model.tracked:
            value = model.fixed[name]
            state[buffer_name(name)] = value.expand(self.size, *value.shape).clone()
        return state

    def say_frozen(self, name: str) -> None:
        """Log a warning that buffers keep their given values, for methods that do not train the
        network."""
        if self.problem.batch_norm:
            log.warning("%s: BatchNorm is frozen at the network's own statistics", name)
        model = self.problem.model
        if model is not None and model.written:
            names = ", ".join(model.written[:5])
            log.warning("%s: these buffers keep the values of the given network: %s", name, names)

    def init_modules(self, given: bool = False) -> State:
        """Initial parameters [M, P] of each module of the method: newly initialised for each
        member, or as given."""
        return {
            name: module.given().expand(self.size, -1).clone() if given
            else module.fresh(self.starts)
            for name, module in self.problem.modules.items()
        }  # fmt: skip

    def buffers(self, state: State) -> Params:
        """The buffers of the network in a state, by their names in the network."""
        return buffers_of(state)

    def call(self, name: str, params: State, *args: Any, dims: Any = 0) -> Any:
        """Call a module of the method with each member's parameters from `params`. `dims` is 0 for
        arguments with a member axis, and None for arguments that all members share."""
        return self.engine.call(self.problem.modules[name], params[name], *args, dims=dims)

    def open(self, rows: Any, stage: str, steps: int | None = None) -> Feed:
        """Batches for a stage with this number of steps: see `doxa.data.batches`."""
        if isinstance(self.data, NoData):
            return self.data.open(rows, stage, self.keys)
        size = self.pass_rows if rows == "pass" else self.settings.batch_size
        request = BatchRequest(self.data, self.split_of, self.keys, size, stage, steps)
        return source(rows).open(request)

    def all_rows(self) -> Batch:
        """Every row as one batch."""
        return self.open("all", "").batch(0)

    def passes(self, size: int = 4096) -> Pass:
        """Every row once, `size` at a time."""
        if self.rows.stream is not None:
            feed: Pass = self.rows.stream.one_pass(self.split_of, self.keys, size)
            return feed
        return Pass(self.rows, self.split_of, size)

    def common(self, method: Method) -> dict[str, Any]:
        """The arguments that all posteriors have in common (for one run only)."""
        r = self.run_of[0]
        scales = self.data.scales[r] if isinstance(self.data, Data) else None
        return {
            "model": self.problem.model, "method": method,
            "likelihood": self.likelihoods[r] if self.likelihoods else self.likelihood,
            "scales": scales, "inputs": self.inputs, "ids": list(self.members),
        }  # fmt: skip

    def shared(self, state: State) -> dict[str, Any]:
        """The parts of a weight posterior besides weights: fixed noise, BatchNorm buffers, and
        parameters of rewritten layers."""
        constants = {k: v[0] for k, v in self.constants.items()}
        return {
            "constants": constants, "buffers": self.buffers(state), "layers": state.get("layers"),
        }  # fmt: skip

    def units_log_jacobian(self) -> Tensor:
        """log |d fitted / dy|, summed over each member's rows, [M]: it converts densities to the
        units of y."""
        each = []
        for m, r in enumerate(self.run_of):
            scale = self.rows.scales[r].y_scale
            if scale is None:
                each.append(0.0)
                continue
            event = self.rows.y[0].numel()
            logs = torch.as_tensor(scale).double().log()
            each.append(-float(self.n[m]) * float(logs.sum()) * (event / max(1, logs.numel())))
        return torch.tensor(each, dtype=torch.float64, device=self.device)

    def _applied(
        self, theta: Tensor, batch: Batch, params: State, buffers: Params, training: bool,
        who: Sequence[str] | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """log p(y_i | θ_m) of each row, [M, B], and the pass itself."""
        weights = self.layout.unflatten(theta)
        own = self.net.layers.unflatten(params["layers"]) if "layers" in params else {}
        applied = self.engine.apply(
            self.net, {**weights, **own}, batch.x, shared=batch.shared,
            buffers={**self.buffers(params), **buffers}, training=training,
            who=who,
        )  # fmt: skip
        return self._each(applied.f, weights, batch), applied

    def _each(self, f: Tensor, weights: Params, batch: Batch) -> Tensor:
        given = likelihood_parameters(weights) | self.constants
        if batch.points is None:
            return self.likelihood.log_prob(f, batch.y, given, lead=1)
        return _of_points(self.likelihood, f, batch, given)

    def outputs(self, theta: Tensor, x: Any, params: State, shared: bool = True) -> Tensor:
        """f at any inputs, [M, N, ...], with dropout off and the BatchNorm statistics of `params`.
        `shared` inputs have no member axis."""
        weights = self.layout.unflatten(theta)
        own = self.net.layers.unflatten(params["layers"]) if "layers" in params else {}
        buffers = self.buffers(params)
        found = self.engine.apply(self.net, {**weights, **own}, x, shared=shared, buffers=buffers)
        f: Tensor = found.f
        return f

    def log_likelihoods_of(self, f: Tensor, theta: Tensor, batch: Batch) -> Tensor:
        """log p(y | f) per row, [M, B], for given outputs [M, B, ...]. The parameters of the
        likelihood are taken from the weights θ."""
        return self._each(f, self.layout.unflatten(theta), batch)

    def likelihood_theta(self, theta: Tensor) -> Params:
        """The likelihood's parameters, {name: [M, ...]}, as its methods take them: learned ones
        from the weights θ [M, P], and fixed ones."""
        return likelihood_parameters(self.layout.unflatten(theta)) | dict(self.constants)

    def total(self, each: Tensor, batch: Batch) -> Tensor:
        """(rows/B) Σ w_i v_i of a value per row of a batch, [M, B] to [M]."""
        return _summed(each, batch)

    def log_likelihood(self, theta: Tensor, batch: Batch, params: State | None = None) -> Tensor:
        """(rows/B) Σ_batch w_i log p(y_i | θ_m) for each member, [M]. Dropout is off; BatchNorm
        statistics and parameters of rewritten layers are those in `params`."""
        return _summed(self.log_likelihoods(theta, batch, params), batch)

    def log_likelihoods(self, theta: Tensor, batch: Batch, params: State | None = None) -> Tensor:
        """log p(y_i | θ_m) per row, without weights and scale, [M, B]."""
        return self._applied(theta, batch, params or {}, {}, False)[0]

    def train(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock | None, **buffers: Tensor
    ) -> Trained:
        """The log-likelihood with the network in training mode. Layers take their noise from the
        clock (None: no noise), and BatchNorm updates its statistics. `buffers` are additional
        buffers for layers."""
        noise: Params = {}
        if clock is not None and self.net.sites:
            noise = self.layer_noise(clock, batch_rows(batch))
        training = clock is not None or bool(self.net.tracked)
        who = self._who(params, batch, clock) if training and self.net.draws else None
        each, applied = self._applied(theta, batch, params, {**noise, **buffers}, training, who)
        changed = as_buffers({k: v.detach() for k, v in applied.buffers.items()})
        return Trained(_summed(each, batch), changed, applied.terms, applied.f)

    def _who(self, params: State, batch: Batch, clock: Clock | None) -> list[str]:
        """A key for each member at this step, for random numbers that a network draws itself. The
        key must not depend on rounding, which differs with the number of members. Without a clock,
        it consists of the integer buffers and the first row."""
        if clock is not None:
            numbers = clock.uniform(1).tolist()
        else:
            counts = [v for v in self.buffers(params).values() if not v.is_floating_point()]
            firsts = [t[0] if batch.shared else t[:, 0] for t in tree_flatten(batch.x)[0]]
            numbers = [
                [v[m].tolist() for v in counts]
                + [(t if batch.shared else t[m]).tolist() for t in firsts]
                for m in range(self.size)
            ]
        return [f"{key}/{own}" for key, own in zip(self.keys, numbers, strict=True)]

    def batch_statistics(self, theta: Tensor, params: State, batch: Batch) -> State:
        """The BatchNorm buffers that this batch alone would give, {name: [M, ...]}."""
        shares = {buffer_name(k): share for k, share in self.net.momenta.items()}
        before = {k: torch.zeros_like(params[k]) for k in shares}
        fit = self.train(theta, {**params, **before}, batch, None)
        own = {k: fit.changed[k] for k in shares}
        return {k: v if not v.is_floating_point() else v / shares[k] for k, v in own.items()}

    def evaluate(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock | None = None,
        **buffers: Tensor,
    ) -> Trained:  # fmt: skip
        """As `train`, with BatchNorm and all other buffers frozen at their values in `params`:
        nothing is `changed`. For the terms of layers (a KL, activations) in the pass of a sampler
        or of a curvature. Layers have no noise without a clock."""
        noise = {} if clock is None else self.layer_noise(clock, batch_rows(batch))
        each, applied = self._applied(theta, batch, params, {**noise, **buffers}, False)
        return Trained(_summed(each, batch), {}, applied.terms, applied.f)

    def masked_log_likelihood(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock, **buffers: Tensor
    ) -> Tensor:
        """The log-likelihood with the noise of layers and with BatchNorm frozen, [M]."""
        return self.evaluate(theta, params, batch, clock, **buffers).value

    def layer_noise(self, clock: Clock, rows: int) -> Params:
        """The noise of layers in training, one draw per row: {buffer: [M, rows, ...]}."""
        return {
            name: clock.rows(site.kind, *site.drawn(rows))
            for name, site in self.net.sites.items()
            if site.use != "prediction"
        }

    def density(
        self, theta: Tensor, params: State, batch: Batch, clock: Clock | None, training: bool
    ) -> tuple[Any, ...]:
        """log p(θ, D) as an objective, or the density itself if the problem is a log density."""
        if isinstance(self.problem, LogDensity):
            return self.problem.at(theta, batch), {}
        if not training:
            return self.log_likelihood(theta, batch, params), {}, self.known_prior(theta)
        fit = self.train(theta, params, batch, clock)
        return fit.value, fit.changed, self.known_prior(theta)

    def known_prior(self, theta: Tensor, name: str = "theta") -> AnalyticGradient:
        """log p(θ), with its gradient in closed form."""
        at = theta.detach()
        if isinstance(theta, SplitRow):  # `gradients_by_tensor` adds it
            return AnalyticGradient(self.n, {}, of_prior=True)
        return AnalyticGradient(
            self.prior.log_prob(at), {name: lambda grad: self.prior.add_score(grad, at)}
        )

    def value_and_grad(
        self,
        objective: Objective,
        params: State,
        batch: Batch,
        clock: Clock,
        over: Sequence[str] = ("theta",),
    ) -> tuple[Tensor, State, State]:
        """The value of an objective, [M], its gradient with respect to each name, and the state
        entries that it changed. The engine decides how many members are computed at a time."""
        rows = batch_rows(batch) if self.data.has_rows else 1
        if self.row_block(rows) >= rows:
            return self._in_pieces(objective, params, batch, clock, over)

        def part(where: slice, share: float, piece: Batch) -> State:
            at = PieceClock(clock, where, rows)
            value, grads, changed = self._in_pieces(objective, params, piece, at, over)
            refuse_changed(changed)
            calls[:] = at.calls
            return {"value": value * share, **{f"of {k}": v * share for k, v in grads.items()}}

        calls = list(clock.calls)
        found = summed(self, batch, part)
        clock.calls[:] = calls
        return found.pop("value"), {name: found[f"of {name}"] for name in over}, {}

    def _in_pieces(
        self, objective: Objective, params: State, batch: Batch, clock: Clock, over: Sequence[str]
    ) -> tuple[Tensor, State, State]:
        """As `value_and_grad`, of all rows of a block."""
        size = self.settings.microbatch
        if size is not None and size < batch_rows(batch):
            return accumulated(
                self, params, batch, clock, size,
                lambda own, piece, at: self._whole(objective, own, piece, at, over),
            )  # fmt: skip
        return self._whole(objective, params, batch, clock, over)

    def _whole(
        self, objective: Objective, params: State, batch: Batch, clock: Clock, over: Sequence[str]
    ) -> tuple[Tensor, State, State]:
        """As `value_and_grad`, of all rows of the batch at once."""
        parts = list(self.engine.chunks(self.size))
        if len(parts) == 1:
            return differentiated(self, objective, params, batch, clock, over)
        each = []
        for part in parts:
            own = {k: v[part] for k, v in params.items()}
            at = clock.select_members(part)
            rows = batch.members(part)
            each.append(differentiated(self.select_members(part), objective, own, rows, at, over))
        clock.continue_from(at)
        values, grads, changed = zip(*each, strict=True)
        return torch.cat(values), joined(grads), joined(changed)

    def joint(self, theta: Tensor, batch: Batch, state: State) -> tuple[Tensor, Tensor]:
        """log p(θ, D) of each member and its gradient, [M] and [M, P], with dropout off and
        BatchNorm frozen: the target of samplers."""
        params = {"theta": theta, **network_part(state)}
        value, grads, _ = self.value_and_grad(target, params, batch, AT_REST)
        return value, grads["theta"]

    def value(self, theta: Tensor, batch: Batch, state: State) -> Tensor:
        """log p(θ, D) of each member without its gradient, [M], for proposals without gradients."""
        rows = batch_rows(batch) if self.data.has_rows else 1
        if self.row_block(rows) >= rows:
            return self._value(theta, batch, state)

        def part(where: slice, share: float, piece: Batch) -> State:
            return {"value": self._value(theta, piece, state) * share}

        return summed(self, batch, part)["value"]

    def _value(self, theta: Tensor, batch: Batch, state: State) -> Tensor:
        params = {"theta": theta, **network_part(state)}
        each = []
        with torch.no_grad():
            for part in self.engine.chunks(self.size):
                own = {k: v[part] for k, v in params.items()}
                value, _, *known = target(
                    self.select_members(part), own, batch.members(part), AT_REST
                )
                each.append(value + known[0].value if known else value)
        return each[0] if len(each) == 1 else torch.cat(each)


def _of_points(likelihood: Likelihood, f: Tensor, batch: Batch, given: Params) -> Tensor:
    """Σ log p(y | f) over the target points of each task, [M, B]."""
    assert batch.points is not None
    y = batch.y.expand(len(f), *batch.y.shape) if batch.shared else batch.y
    given = {k: v[:, 0] if v.ndim == 3 else v for k, v in given.items()}  # the same at all points
    each = {k: v.unsqueeze(1).expand(-1, f.shape[1], *v.shape[1:]) for k, v in given.items()}
    return (likelihood.log_prob(f, y, each, lead=2) * batch.points).sum(-1)


def _summed(each: Tensor, batch: Batch) -> Tensor:
    """(rows/B) Σ w_i v_i, [M], of a value per row of a batch, [M, B]."""
    if batch.weight is not None:
        each = each * batch.weight
    return each.sum(-1) * batch.scale


def scaled_priors(run: Run, wider: Mapping[str, Tensor]) -> list[Prior | dict[str, Prior]]:
    """The Gaussian prior of each member, with the standard deviation of some weights (by name)
    multiplied by a factor [M]. The prior of other weights is unchanged."""
    entries = [e for e in run.layout.entries if not e.name.startswith("likelihood.")]
    like = run.n.new_zeros(1, 1).expand(run.size, run.layout.size)
    std = run.prior.curvature(like).double().rsqrt()  # [M, P], the same within an entry
    found: list[Prior | dict[str, Prior]] = []
    for m in range(run.size):
        own: dict[str, Prior] = {}
        for e in entries:
            factor = float(wider[e.name][m]) if e.name in wider else 1.0
            own[e.name] = Normal(factor * float(std[m, run.layout.slices[e.name].start]))
        alike = len(set(own.values())) == 1
        found.append(own[entries[0].name] if alike else own)
    return found
