"""The state of a stage, its clock (step, learning rate, noise), and objectives with gradients.

An objective is a differentiable function from (run, params, batch, clock) to (value [M], changed
state[, analytic gradient]). `params` is the state of the run's members. The run may contain only
some members of the fit, so an objective must read per-member tensors from its arguments only. A
gradient in closed form (`AnalyticGradient`) is added to the gradient from autograd.

A state is a flat dict of named tensors, so that particles, chunks of members, checkpoints and
recording are one loop over its entries. These names have a meaning for all methods; every other
name belongs to the method that made it, or to the optimiser.

    "theta"                 the weights, [M, P]
    "layers"                extra parameters of rewritten layers, [M, Q]
    buffer_name(name)       a buffer of the network that training changes, [M, ...]
    average_name(name)      the average of the entry `name` over the last steps
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from doxa.data import Batch, batch_rows
from doxa.errors import MethodError
from doxa.linalg.layout import LARGE, NeedsRow, SplitRow
from doxa.method.row_sums import summed
from doxa.noise import Alternating, Noise, PrefetchedNoise
from doxa.priors import BoundPrior

if TYPE_CHECKING:
    from doxa.method.run import Run


State = dict[str, Tensor]  # named tensors with leading axis M
Info = dict[str, Tensor]  # statistics of a step, for the history and progress: [M] each


class Clock:
    """The step, learning rate and noise of a stage. Everything that changes from step to step is a
    tensor, so that a step can be recorded, compiled or captured.

    Attributes
    ----------
    t : Tensor of shape []
        The step within the stage.
    rate : Tensor of shape [] or [M, 1]
        The current learning rate.
    steps : int
        The number of steps of the stage.
    source : Noise or PrefetchedNoise
        The source of random numbers.
    owned : bool
        Whether the tensors of the state may be overwritten, because nothing else refers to them.
    reported : bool
        Whether the statistics of this step are read. For a large network, they take time.
    trace : list or None
        Where a step puts its records (`doxa.method.trace`), if somebody watches it. None otherwise:
        nothing is then computed for them.
    """

    def __init__(
        self,
        t: Tensor,
        rate: Tensor,
        steps: int,
        source: Noise | PrefetchedNoise,
        owned: bool = False,
        calls: list[int] | None = None,
        reported: bool = True,
        trace: list[Any] | None = None,
    ) -> None:
        self.t, self.rate, self.steps, self.source, self.owned = t, rate, steps, source, owned
        self.calls = [0] if calls is None else calls  # requests for numbers within this step
        self.reported = reported
        self.trace = trace

    def noise(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape]; each call within a step returns different ones."""
        self.calls[0] += 1
        return self.source.normal(shape, self.t, self.calls[0])

    def alternating(self, *shape: int) -> Tensor:
        """Standard normals [M, *shape]. At every second step they are the negated normals of the
        step before: this halves the cost, and odd functions of them cancel over two steps."""
        self.calls[0] += 1
        return self.source.alternating(shape, self.t, self.calls[0])

    def alternating_row(self, size: int) -> Alternating:
        """The same numbers as `alternating` [M, size], for a step that reads them in blocks of
        columns."""
        self.calls[0] += 1
        if isinstance(self.source, PrefetchedNoise):
            return self.source.alternating_row(size, self.t, self.calls[0])
        return Alternating(self.source.alternating((size,), self.t, self.calls[0]))

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in (0, 1], [M, *shape]."""
        self.calls[0] += 1
        return self.source.uniform(shape, self.t, self.calls[0])

    def rows(self, kind: str, *shape: int) -> Tensor:
        """Noise per row, "normal" or "uniform", [M, rows, ...]. Padding rows do not change the
        noise of the others."""
        self.calls[0] += 1
        return self.source.rowwise(kind, shape, self.t, self.calls[0])

    def continue_from(self, other: Clock) -> None:
        """Count the calls that another clock has made in this step as calls of this one."""
        self.calls[:] = other.calls

    def select_members(self, members: slice) -> Clock:
        """The clock of some members. Their random numbers do not depend on the selection."""
        rate = self.rate[members] if self.rate.ndim else self.rate
        calls = list(self.calls)
        return Clock(
            self.t, rate, self.steps, self.source.select_members(members), self.owned, calls,
            self.reported,
        )  # fmt: skip

    def expand_particles(self, k: int) -> Clock:
        """The clock of k particles per member, each with its own random numbers."""
        rate = self.rate.repeat_interleave(k, 0) if self.rate.ndim else self.rate
        return Clock(
            self.t, rate, self.steps, self.source.expand_particles(k), self.owned, self.calls,
            self.reported,
        )  # fmt: skip


class ColumnClock(Clock):
    """The clock of one member, for a step that is computed in blocks of columns: a call of `noise`
    returns the normals of the columns of one block, and the next blocks have those after them.

    Parameters
    ----------
    clock : Clock
        The clock of all members.
    member : int
        The row of the member.
    size : int
        The number of columns of a row.
    """

    def __init__(self, clock: Clock, member: int, size: int) -> None:
        rate = clock.rate[member : member + 1] if clock.rate.ndim else clock.rate
        super().__init__(clock.t, rate, clock.steps, clock.source, clock.owned, list(clock.calls))
        self.member, self.size, self._first = member, size, clock.calls[0]
        self._streams: dict[int, Callable[[int], Tensor]] = {}

    def begin_block(self) -> None:
        """Calls from here on are for the next columns."""
        self.calls[0] = self._first

    def noise(self, *shape: int) -> Tensor:
        self.calls[0] += 1
        call = self.calls[0]
        if call not in self._streams:
            assert isinstance(self.source, PrefetchedNoise)
            self._streams[call] = self.source.stream(self.member, self.size, self.t, call)
        return self._streams[call](*shape).unsqueeze(0)


class PieceClock(Clock):
    """The clock of a piece of a batch (`Batch.pieces`): the noise of its rows is that which they
    have in the whole batch, and all other noise is the same for all pieces.

    Parameters
    ----------
    clock : Clock
        The clock of the batch.
    where : slice
        The place of the piece.
    rows : int
        The number of rows of the batch.
    """

    def __init__(self, clock: Clock, where: slice, rows: int) -> None:
        super().__init__(
            clock.t, clock.rate, clock.steps, clock.source, clock.owned, list(clock.calls),
            clock.reported,
        )  # fmt: skip
        self.where, self.of = where, rows

    def rows(self, kind: str, *shape: int) -> Tensor:
        own = self.where.stop - self.where.start
        if shape[0] % own:  # not one entry or several per row
            return super().rows(kind, *shape)
        each = shape[0] // own
        drawn = super().rows(kind, each * self.of, *shape[1:])  # [M, rows, ...]
        return drawn[:, each * self.where.start : each * self.where.stop]

    def select_members(self, members: slice) -> Clock:
        return PieceClock(super().select_members(members), self.where, self.of)

    def expand_particles(self, k: int) -> Clock:
        wide = PieceClock(super().expand_particles(k), self.where, self.of)
        wide.calls = self.calls
        return wide


class NoClock(Clock):
    """A clock for objectives without noise."""

    def __init__(self) -> None:
        super().__init__(torch.tensor(0), torch.tensor(0.0), 1, Noise(0, "none", []))

    def select_members(self, members: slice) -> Clock:
        return self


def slice_state(state: State, part: slice) -> State:
    return {k: v[part] for k, v in state.items()}


def flatten_particles(state: State, k: int) -> State:
    """[M, k, ...] to [M·k, ...]: particles as the rows of `run.expand_particles(k)`."""
    return {name: v.flatten(0, 1) for name, v in state.items()}


def unflatten_particles(state: State, k: int) -> State:
    """[M·k, ...] back to [M, k, ...]."""
    return {name: v.unflatten(0, (-1, k)) for name, v in state.items()}


_BUFFER, _AVERAGE = "buffer.", "average."  # they are in saved checkpoints: not to be renamed


def buffer_name(name: str) -> str:
    """The key of a network's buffer in a state."""
    return _BUFFER + name


def buffers_of(state: State) -> State:
    """The buffers of the network, by their names in the network."""
    return {k[len(_BUFFER) :]: v for k, v in state.items() if k.startswith(_BUFFER)}


def as_buffers(buffers: Mapping[str, Tensor]) -> State:
    """The entries of a state for buffers, given by their names in the network."""
    return {_BUFFER + name: value for name, value in buffers.items()}


def network_part(state: State) -> State:
    """The entries of a state that a network needs besides its weights."""
    return {k: v for k, v in state.items() if k == "layers" or k.startswith(_BUFFER)}


def average_name(name: str, averages: float = 1.0) -> str:
    """The key of the average of the entry `name`: the entry itself where `averages`, the fraction
    of the steps that is averaged, is 0."""
    return _AVERAGE + name if averages else name


def averaged(state: State, name: str) -> Tensor:
    """The average computed by `optimise`, or the last iterate if there is no average."""
    return state.get(_AVERAGE + name, state[name])


Objective = Callable[[Any, State, Batch, Clock], Any]


@dataclass(frozen=True)
class AnalyticGradient:
    """A part of an objective with a gradient in closed form: its value [M], and for each name a
    function that adds its gradient. `of_prior`: it is the log prior of θ, and nothing else."""

    value: Tensor
    add: Mapping[str, Callable[[Tensor], Tensor]]
    of_prior: bool = False


def log_joint(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """log p(θ) + (n/B) Σ log p(y|θ), with the network in training: MAP's objective."""
    return run.density(params["theta"], params, batch, clock, training=True)


def potential(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """−Û: the same with dropout off, for stochastic-gradient samplers."""
    return run.density(params["theta"], params, batch, None, training=True)


def target(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
    """The same with BatchNorm frozen as well: the target of samplers with an acceptance test."""
    return run.density(params["theta"], params, batch, None, training=False)


def of_subset(objective: Objective, name: str = "theta") -> Objective:
    """The objective with zero gradient for the weights outside the model's subset."""

    def restricted(run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        value, changed, *rest = objective(run, params, batch, clock)
        known = rest[0] if rest else AnalyticGradient(torch.zeros_like(value.detach()), {})
        add = known.add.get(name, lambda grad: grad)
        own = {name: lambda grad: add(grad) * run.free}
        return value, changed, AnalyticGradient(known.value, {**known.add, **own})

    return restricted


def differentiated(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, over: Sequence[str]
) -> tuple[Tensor, State, State]:
    with torch.enable_grad(), run.recomputing():
        leaves = {name: params[name].detach().requires_grad_() for name in over}
        value, changed, *rest = objective(run, {**params, **leaves}, batch, clock)
        known: AnalyticGradient | None = rest[0] if rest else None
        if value.shape != (run.size,):
            raise MethodError(
                f"an objective must return one value per member, [{run.size}], not "
                f"{list(value.shape)}"
            )
        large = run.layout.size >= LARGE
        # With weights of the outputs, autograd imports symbolic shapes, which take 30 MiB.
        output, weights = (value.sum(), None) if large else (value, torch.ones_like(value))
        grads = torch.autograd.grad(output, list(leaves.values()), weights, allow_unused=True)
    found = dict(zip(over, grads, strict=True))
    add = {} if known is None else known.add
    for name, grad in found.items():
        if grad is None and name not in add:
            raise MethodError(f"the objective does not depend on {name!r}, which it should train")
        grad = torch.zeros_like(params[name]) if grad is None else grad
        found[name] = add[name](grad) if name in add else grad
    value = value.detach()
    return value if known is None else value + known.value, found, changed


def accumulated(
    run: Run, params: State, batch: Batch, clock: Clock, size: int,
    each: Callable[[State, Batch, Clock], tuple[Tensor, State, State]],
) -> tuple[Tensor, State, State]:  # fmt: skip
    """The value and the gradients of a batch, from `each` of pieces of at most `size` rows: only
    the activations of one piece are in memory. Buffers that a pass changes go from piece to
    piece."""
    rows, changed = batch_rows(batch), State()
    value: Tensor | None = None
    grads: State = {}
    for where, share, piece in batch.pieces(size):
        at = PieceClock(clock, where, rows)
        own, found, more = each({**params, **changed}, piece, at)
        changed |= more
        if value is None:
            value, grads = own * share, {name: grad * share for name, grad in found.items()}
            continue
        value = value + own * share
        for name, grad in found.items():
            grads[name].add_(grad, alpha=share)
    assert value is not None
    clock.continue_from(at)
    return value, grads, changed


def joined(parts: Sequence[State]) -> State:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


_BLOCK = 1 << 16  # columns


@dataclass(frozen=True)
class TensorGradient:
    """The gradient of one tensor of one member, without that of the prior."""

    member: int
    where: slice  # its columns
    grad: Tensor  # [p]
    prior: BoundPrior | None  # the prior whose gradient is to be added
    name: str = "theta"  # the rows that it is the gradient of

    def of(self, rows: Tensor) -> Tensor:
        """The view [p] of rows [M, P] that this is the gradient of."""
        return rows[self.member, self.where]

    @property
    def decay(self) -> float | None:
        """The precision of the prior, where it is a Gaussian centred at 0 with one precision: its
        gradient is −precision · θ. 0 without a prior, None for any other."""
        return 0.0 if self.prior is None else self.prior.decay(self.where)

    def add_prior(self, theta: Tensor, factor: float) -> None:
        """Add the gradient of the prior at θ [p], times a factor, to `grad` in place."""
        if self.prior is not None:
            self.prior.add_score_(self.grad, theta, self.where, factor)

    def blocks(self) -> Iterator[TensorGradient]:
        """The same in blocks of columns that stay in the cache, with all that is computed there."""
        for start in range(0, len(self.grad), _BLOCK):
            grad = self.grad[start : start + _BLOCK]
            first = self.where.start + start
            yield replace(self, where=slice(first, first + len(grad)), grad=grad)


class _Linear(torch.autograd.Function):
    """A linear layer whose gradient by the weight is written to memory that exists already."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out: Callable[[], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.out = out
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows, grad = x.flatten(0, -2), grads[0].flatten(0, -2)
        by_x = grad.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        by_weight = torch.mm(grad.t(), rows, out=ctx.out())
        return by_x, by_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None


class GradientMemory(TorchFunctionMode):
    """The memory of the gradients of large linear layers, used again in each step.

    Most of the time of a product of 32 rows that makes a gradient of 64 MiB is that of its new
    pages. Within this context, such gradients are written to the memory of those of the step
    before. The products, and so their bits, are the same. A weight that is used twice in a pass
    has new memory for its second gradient, because autograd adds the two."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Hashable, Tensor] = {}
        self.weights: dict[int, Hashable] = {}  # of this pass, by the place of their values
        self.used: set[Hashable] = set()

    def of(self, parts: Mapping[Any, Tensor]) -> GradientMemory:
        """The memory for a pass with these weights, [1, ...] each."""
        large = {name: v for name, v in parts.items() if v.ndim == 3 and v.numel() >= _REUSED}
        self.weights = {value.data_ptr(): name for name, value in large.items()}
        self.used.clear()
        return self

    def _out(self, name: Hashable, like: Tensor) -> Tensor:
        if name in self.used:
            return like.new_empty(like.shape)
        self.used.add(name)
        if name not in self.held:
            self.held[name] = like.new_empty(like.shape)
        return self.held[name].view(like.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            x, weight, bias = _linear(*args, **(kwargs or {}))
            name = self._name(x, weight)
            if name is not None:
                out = lambda: self._out(name, weight)  # noqa: E731
                return _Linear.apply(x, weight, bias, out)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def _name(self, x: Tensor, weight: Tensor) -> Hashable | None:
        """The name of the weight, if its gradient may be written to this memory."""
        if not (type(x) is type(weight) is Tensor and x.ndim > 1 and weight.requires_grad):
            return None
        if torch.is_autocast_enabled(x.device.type) or _in_transform() or _in_checkpoint():
            return None
        name = self.weights.get(weight.data_ptr())
        return name if weight.is_contiguous() and x.dtype == weight.dtype else None


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _in_transform() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _in_checkpoint() -> bool:
    """Whether saved tensors have hooks, as in a part that the backward pass computes again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


_REUSED = 1 << 18  # numbers of a tensor from which the memory of its gradient is used again
_OF_STEPS = "steps: "  # begins the names of what steps keep in `run.cached` until their stage ends
_MEMORY = _OF_STEPS + "memory of gradients"


def release_memory(run: Run) -> None:
    """Free the memory that the steps of a stage have used again and again."""
    for name in [k for k in run.cached if isinstance(k, str) and k.startswith(_OF_STEPS)]:
        del run.cached[name]


def gradients_by_tensor(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock,
    use: Callable[[list[TensorGradient]], None], loss: bool = False,
    over: Sequence[str] = ("theta",),
) -> tuple[Tensor, State] | None:  # fmt: skip
    """The gradients of a large network by θ (`Run.by_tensor`), without a copy of a row of weights.

    A new row of 21 million weights takes longer to allocate than to compute, because its pages are
    mapped at the first write. So the leaves of the graph are views of the row. `use` is called with
    the gradients of one member after the other, of the objective, or of the `loss`, −1/n times
    the objective. It adds the gradient of the prior, and may overwrite θ. `over` names all rows in
    the layout of θ that have gradients.

    Returns the value of each member, [M], without the log prior if the clock does not report it,
    and the entries of the state that the pass changed. None if the objective uses rows of weights
    other than through the network and `Run.known_prior`.
    """
    key = ("needs rows", objective)
    if not run.by_tensor or key in run.cached:
        return None
    called, values, changes = list(clock.calls), [], []
    size = run.settings.microbatch
    memory: GradientMemory | None = None
    if run.device.type == "cpu":  # elsewhere new memory costs nothing
        memory = run.once(_MEMORY, GradientMemory)
    for part in run.engine.chunks(run.size):
        at = clock.select_members(part)
        try:
            if run.row_block(batch_rows(batch)) < batch_rows(batch):
                found, value, changed = _of_blocks(
                    run, objective, params, batch, at, part, loss, over, size
                )
            elif size is None or size >= batch_rows(batch):
                found, value, changed = _gradient(
                    run, objective, params, batch, at, part, loss, over, memory
                )
            else:
                found, value, changed = _of_pieces(
                    run, objective, params, batch, at, part, loss, over, size
                )
        except NeedsRow:  # the gradient is taken by rows, here and in all further steps
            run.cached[key] = True
            clock.calls[:] = called
            return None
        use(found)
        del found
        values.append(value)
        changes.append(changed)
    clock.continue_from(at)
    return torch.cat(values), joined(changes)


def _of_blocks(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, part: slice,
    loss: bool, over: Sequence[str], size: int | None,
) -> tuple[list[TensorGradient], Tensor, State]:  # fmt: skip
    """As `_gradient`, summed over fixed blocks of rows (`row_sums.py`)."""
    rows, first = batch_rows(batch), list[TensorGradient]()

    def of_block(where: slice, share: float, piece: Batch) -> State:
        at = PieceClock(clock, where, rows)
        if size is None or size >= batch_rows(piece):
            found, value, changed = _gradient(run, objective, params, piece, at, part, loss, over)
        else:
            found, value, changed = _of_pieces(
                run, objective, params, piece, at, part, loss, over, size
            )
        refuse_changed(changed)
        calls[:] = at.calls
        first[:] = first or found
        return {
            "value": value * share,
            **{str(i): one.grad.mul_(share) for i, one in enumerate(found)},
        }

    calls = list(clock.calls)
    total = summed(run, batch, of_block)
    clock.calls[:] = calls
    found = [replace(one, grad=total[str(i)]) for i, one in enumerate(first)]
    return found, total["value"], {}


def refuse_changed(changed: State) -> None:
    """Raise an error if a pass over a block of rows changes buffers."""
    if changed:
        names = ", ".join(sorted(buffers_of(changed) or changed))
        raise MethodError(
            f"the network changes {names} in training, so that the rows of a step cannot be "
            "divided: do not set microbatches"
        )


def _of_pieces(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, part: slice,
    loss: bool, over: Sequence[str], size: int,
) -> tuple[list[TensorGradient], Tensor, State]:  # fmt: skip
    """As `_gradient`, accumulated over pieces of at most `size` rows."""
    found: list[TensorGradient] = []

    def each(params: State, piece: Batch, at: Clock) -> tuple[Tensor, State, State]:
        share = batch_rows(piece) / batch_rows(batch)
        own, value, changed = _gradient(run, objective, params, piece, at, part, loss, over)
        if not found:
            for one in own:
                one.grad.mul_(share)
            found.extend(own)
        else:
            for total, one in zip(found, own, strict=True):
                total.grad.add_(one.grad, alpha=share)
        whole = {name: params[name].clone() for name in changed} if run.size > 1 else {}
        for name, rows in whole.items():  # `params` has all members, `changed` those of `part`
            rows[part] = changed[name]
        return value, {}, whole or changed

    value, _, changed = accumulated(run, params, batch, clock, size, each)
    return found, value, {name: rows[part] for name, rows in changed.items()} if (
        run.size > 1
    ) else changed  # fmt: skip


def _gradient(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, part: slice,
    loss: bool, over: Sequence[str], memory: GradientMemory | None = None,
) -> tuple[list[TensorGradient], Tensor, State]:  # fmt: skip
    own, rows = run.select_members(part), batch if run.size == 1 else batch.members(part)
    theta = params["theta"][part].detach()
    with torch.enable_grad(), run.recomputing():
        rows_of = {name: SplitRow.of(params[name][part].detach(), run.layout) for name in over}
        given = {**slice_state(params, part), **rows_of}
        leaves = {(k, name): leaf for k, row in rows_of.items() for name, leaf in row.parts.items()}
        with nullcontext() if memory is None else memory.of(leaves):
            value, changed, *rest = objective(own, given, rows, clock)
        known: AnalyticGradient | None = rest[0] if rest else None
        if value.shape != (1,):
            raise MethodError(
                f"an objective must return one value per member, [1], not {list(value.shape)}"
            )
        if known is not None and not known.of_prior and "theta" in known.add:
            raise NeedsRow
        output = (value * own.per_example if loss else value).sum()
        grads = torch.autograd.grad(output, list(leaves.values()), allow_unused=True)
    prior = None
    if known is not None and known.of_prior:
        prior = own.prior[0] if own.prior.runs else own.prior
    elif all(grad is None for grad in grads):
        raise MethodError("the objective does not depend on 'theta', which it should train")
    value = value.detach()
    if known is not None and clock.reported:
        value = value + (own.prior.log_prob(theta) if known.of_prior else known.value)
    found = []
    for ((k, name), leaf), grad in zip(leaves.items(), grads, strict=True):
        where, own_prior = run.layout.slices[name], prior if k == "theta" else None
        grad = torch.zeros_like(leaf) if grad is None else grad
        # contiguous, because fused optimisers ignore strides
        flat = grad.contiguous().view(-1)
        found.append(TensorGradient(part.start, where, flat, own_prior, k))
    return found, value, changed
