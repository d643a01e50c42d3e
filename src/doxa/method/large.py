"""Large networks on a CPU: gradients and updates that make no copy of a row of weights.

A new row of 21 million weights takes longer to allocate than to compute: its pages are mapped at
the first write. So for a network of `LARGE` weights or more, whose members are computed one at a
time (`Run.by_tensor`), a step

- takes the gradient by the tensors of the network, which are views of the row. The gradient by the
  row itself would be the same tensors concatenated (`each_gradient`);
- has the factor of the gradient, such as −1/n, in its backward pass;
- adds the gradient of the prior in place, or as the weight decay of a fused optimiser, which is
  the same for Gaussians centred at 0 (`Part.decay`);
- overwrites the state (`Clock.owned`), in the fused optimiser or in blocks of columns that stay in
  the cache (`blocks`).

States, checkpoints and posteriors have rows as for any network. An objective needs nothing for
this, as long as it uses a row of weights through the network and `Run.known_prior` only: any other
use of the row raises `NeedsRow`, and the gradient is then taken by the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.errors import MethodError
from doxa.linalg.layout import NeedsRow, SplitRow
from doxa.method.state import AnalyticGradient, Clock, Objective, State
from doxa.optim import Optimizer
from doxa.priors import BoundPrior

if TYPE_CHECKING:
    from doxa.method.run import Run

BLOCK = 1 << 15  # columns of a block: a few such vectors fit the cache of a core


@dataclass(frozen=True)
class Part:
    """The gradient of one tensor of one member, without that of the prior."""

    member: int
    where: slice  # its columns
    grad: Tensor  # [p]
    prior: BoundPrior | None  # the prior whose gradient is to be added

    def of(self, rows: Tensor) -> Tensor:
        """The view [p] of rows [M, P] that this is the gradient of."""
        return rows[self.member, self.where]

    @property
    def decay(self) -> float | None:
        """The precision of the prior, where it is a Gaussian centred at 0 with one precision, so
        that its gradient is −precision · θ; 0 without a prior; else None."""
        return 0.0 if self.prior is None else self.prior.decay(self.where)

    def add_prior(self, theta: Tensor, factor: float) -> None:
        """Add the gradient of the prior to `grad` in place, times a factor."""
        if self.prior is not None:
            self.prior.add_score_(self.grad, theta, self.where, factor)


@dataclass(frozen=True)
class Gradient:
    """The gradient of one member's objective."""

    value: Tensor  # [1]; without the log prior, unless the clock says that values are reported
    parts: list[Part]
    changed: State  # the entries of the state that the pass changed, [1, ...]


def each_gradient(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, per_row: bool
) -> Iterator[Gradient] | None:
    """The gradients by θ of one member after the other, each to be used before the next is
    computed; `per_row`: of the loss, −1/n times the objective. None if the objective needs rows
    of weights as tensors."""
    key = ("needs rows", objective)
    if not run.by_tensor or key in run.cached:
        return None
    called = list(clock.calls)

    def gradients() -> Iterator[Gradient]:
        nonlocal first
        for m, part in enumerate(run.engine.chunks(run.size)):
            if m == 0:
                at, found = clock_of_first, first
                first = None  # not kept alive
            else:
                at = clock.select_members(part)
                found = _gradient(run, objective, params, batch, at, part, per_row)
            assert found is not None
            yield found
            del found
        clock.continue_from(at)

    start = slice(0, 1)
    clock_of_first = clock.select_members(start)
    try:
        first: Gradient | None = _gradient(
            run, objective, params, batch, clock_of_first, start, per_row
        )
    except NeedsRow:
        run.cached[key] = True
        clock.calls[:] = called
        return None
    return gradients()


def _gradient(
    run: Run, objective: Objective, params: State, batch: Batch, clock: Clock, part: slice,
    per_row: bool,
) -> Gradient:  # fmt: skip
    own, batch = run.select_members(part), batch if run.size == 1 else batch.members(part)
    params = {k: v[part] for k, v in params.items()}
    theta = params["theta"].detach()
    with torch.enable_grad():
        row = SplitRow.of(theta, run.layout)
        value, changed, *rest = objective(own, {**params, "theta": row}, batch, clock)
        known: AnalyticGradient | None = rest[0] if rest else None
        if value.shape != (1,):
            raise MethodError(
                f"an objective must return one value per member, [1], not {list(value.shape)}"
            )
        if known is not None and "theta" in known.add and not known.of_prior:
            raise NeedsRow
        factor = own.per_example if per_row else torch.ones_like(value)
        leaves = list(row.parts.values())
        grads = torch.autograd.grad(value, leaves, factor.to(value.dtype), allow_unused=True)
    prior = None
    if known is not None and known.of_prior:
        prior = own.prior[0] if own.prior.runs else own.prior
    if prior is None and all(grad is None for grad in grads):
        raise MethodError("the objective does not depend on 'theta', which it should train")
    parts = []
    for where, leaf, grad in zip(run.layout.slices.values(), leaves, grads, strict=True):
        grad = torch.zeros_like(leaf) if grad is None else grad
        # fused optimisers ignore strides
        parts.append(Part(part.start, where, grad.contiguous().view(-1), prior))
    value = value.detach()
    if known is not None and clock.reported:
        value = value + (own.prior.log_prob(theta) if known.of_prior else known.value)
    return Gradient(value, parts, changed)


def optimiser_step(
    run: Run, objective: Objective, state: State, batch: Batch, clock: Clock, optimizer: Optimizer
) -> tuple[State, Tensor] | None:
    """The new entries of a state after a step of an optimiser on θ, and the value of the objective,
    [M]; None if the objective needs rows."""
    found = each_gradient(run, objective, state, batch, clock, per_row=True)
    if found is None:
        return None
    names = [f"optim.{kind}.theta" for kind in optimizer.moments]
    new = {name: _own(state[name], clock) for name in ("theta", *names)}
    values, changes = [], []
    for m, gradient in enumerate(found):
        n = float(run.n[m])
        groups: dict[float, list[Part]] = {}
        for part in gradient.parts:
            decay = part.decay
            if decay is None:
                part.add_prior(part.of(new["theta"]), -1.0 / n)
            groups.setdefault((decay or 0.0) / n, []).append(part)
        rate = clock.rate[m] if clock.rate.ndim else clock.rate
        for decay, parts in groups.items():
            theta, *moments = ([part.of(rows) for part in parts] for rows in new.values())
            grads = [part.grad for part in parts]
            optimizer.update_(theta, grads, moments, rate.reshape(()), clock.t, decay)
        values.append(gradient.value)
        changes.append(gradient.changed)
        del gradient, groups, part, parts, grads
    changed = {k: torch.cat([one[k] for one in changes]) for k in changes[0]}
    return {**changed, **new}, torch.cat(values)


def _own(value: Tensor, clock: Clock) -> Tensor:
    return value if clock.owned else value.clone()
