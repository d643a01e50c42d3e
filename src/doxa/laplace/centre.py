"""The Gaussian nearest to the posterior of a linearised classifier, not the one at its mode.

Rows that are told apart with hardly a doubt stop pushing: their posterior is skewed, away from
doubt, and a Gaussian at the maximum θ* reaches as far to the other side. Its average gradient is
not zero there. Of the linearised network, f + J(m + δ) with δ ~ N(0, Σ), it is at the minimum of

    F(m) = Σ_i E[−log p(y_i | f_i + J_i(m + δ))] + sᵀJm + ½ mᵀΛm,    s = ∂ log p(y | f)/∂f at θ*

which is the Kullback–Leibler divergence to that network's posterior as a function of the Gaussian's
mean, but for s, which leaves θ* where there is no spread, whether or not it is a maximum. F is
convex. The average is over fixed draws ±δ, and conjugate gradients preconditioned by Σ go down: a
product with J and one with Jᵀ a round, and a line search on outputs alone. The width of the nearest
Gaussian is that of its average curvature,

    Σ⁻¹ = Λ + Σ_i J_iᵀ E[C(f_i + J_i(m + δ))] J_i,

so that m and Σ are found in turns (Khan et al. 2019; Immer, Korzepa & Bauer 2021).

Products with the Jacobian J of all rows, for directions of the weights, without J.

Forward derivatives give Jv at about the price of two passes of the network, and backward ones Jᵀv.
Memory bounds how many rows, or directions, go together.

Is θ* a maximum of the log joint, and is it worth while to make it one?

    λ² = gᵀ H⁻¹ g,    g = ∇ log p(θ*, D)

is the Newton decrement squared: a Newton step from θ* gains λ²/2 nats, and moves by λ posterior
standard deviations. Were θ* a draw from the posterior itself, λ² would be χ² with p degrees of
freedom. Where it is above all but a thousandth of those, the Gaussian stands in a place that it
would hardly visit, and the status says so. Training that was stopped by held-out rows ended
before the maximum on purpose; there λ is recorded and nothing is said.

The evidence is an integral over the quadratic at θ*, whose largest value is λ²/2 above
log p(θ*, D): for a linear network with Gaussian noise it is exact wherever θ* is. As far as the
Gaussian itself reaches, Laplace's method takes the log joint for a quadratic anyway. Where held-out
rows stopped training farther from the maximum, one Newton step shows whether it is one: where its
gain is not λ²/2, to a nat, the status says that the evidence is not to be trusted.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows
from doxa.errors import MethodError
from doxa.laplace import forms
from doxa.laplace.curvature import Jacobians, Outputs, chunk_bytes, flatten_outputs, output_size
from doxa.laplace.forms import Matrix, Scales, prior_curvature, some_rows
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg import Embedded, Structure
from doxa.linalg.layout import Params
from doxa.method import Clock, Info, Run, State, slice_state
from doxa.model import Model
from doxa.posterior import Status


@dataclass(frozen=True)
class Linearised:
    """Products with J at all rows, some at a time, without J."""

    jacobians: Jacobians
    batch: Batch

    def along(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [M, B, O] and Jδ [M, S, B, O] for draws [M, S, p], as many together as memory allows:
        they share f, and a layer's products with all of them are one."""
        most = max(1, chunk_bytes(delta.device) // self._row_bytes)
        pushed = [self._together(some) for some in delta.split(most, 1)]
        return pushed[0][0], torch.cat([away for _, away in pushed], 1)

    def push(self, direction: Tensor) -> Tensor:
        """J v for v [M, p]: [M, B, O]."""
        return self._pushed(direction, _pushed)[1]

    def _together(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        if delta.shape[1] > 1:
            with contextlib.suppress(RuntimeError, ValueError):  # an operation without a rule
                f, away = self._pushed(delta, _pushed_together, delta.shape[1])
                return f, away.transpose(1, 2)
        pushed = [self._pushed(delta[:, s], _pushed) for s in range(delta.shape[1])]
        return pushed[0][0], torch.stack([away for _, away in pushed], 1)

    def _pushed(self, direction: Tensor, product: Any, draws: int = 1) -> tuple[Tensor, Tensor]:
        own = self.jacobians.layout.unflatten(direction.to(self._like.dtype))
        try:
            parts = [self._members(product, rows, own) for rows in self._parts(draws)]
        except NotImplementedError as error:
            raise MethodError(
                "centre='mean' needs forward derivatives, which an operation of the network has "
                f"none of ({str(error).splitlines()[0][:120]}): use centre='mode'"
            ) from error
        f, away = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return f, away

    def back(self, pulls: Tensor) -> Tensor:
        """Σ_i J_iᵀ v_i for v [M, B, O]: [M, p]."""
        slopes = [
            self.jacobians.layout.flatten(self._members(_pulled, rows, pulls[:, rows]))
            for rows in self._parts()
        ]
        return torch.stack(slopes).sum(0)

    @property
    def _like(self) -> Tensor:
        return next(iter(self.jacobians.own.values()))

    @property
    def _row_bytes(self) -> int:
        """What layers give for one row of all members, its tangent, and a copy."""
        numbers = max(1, sum(width for _, width in self.jacobians.model.widths))
        return 3 * self.jacobians.members * numbers * self._like.dtype.itemsize

    def _parts(self, draws: int = 1) -> list[slice]:
        """Pieces of the rows: no J is held, only what layers give."""
        count = batch_rows(self.batch)
        step = max(1, chunk_bytes(self._like.device) // (draws * self._row_bytes))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _members(self, product: Any, rows: slice, other: Any) -> Any:
        """A product of each member with what it is given, at some rows."""
        j, part = self.jacobians, some_rows(self.batch, rows)
        one = lambda tree: tree_map(lambda t: t[0], tree)  # noqa: E731
        own = (j.own, j.rest, j.buffers)
        if j.members == 1:  # convolutions of several members at once are grouped, and slower
            x = part.x if part.shared else one(part.x)
            found = product(j.model, *map(one, own), x, one(other))
            return tree_map(lambda t: t.detach().unsqueeze(0), found)
        places = (None, 0, 0, 0, None if part.shared else 0, 0)
        return tree_map(Tensor.detach, vmap(product, places)(j.model, *own, part.x, other))


def _outputs(model: Model, rest: Params, buffers: Params, x: Any) -> Callable[[Params], Tensor]:
    """One member's f [B, O] as a function of its uncertain weights."""
    return lambda own: flatten_outputs(model.forward({**rest, **own}, x, buffers=buffers), 0)


def _pushed(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv."""
    found = jvp(_outputs(model, rest, buffers, x), (own,), (v,))
    return found[0], found[1]


def _pushed_together(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv [B, S, O] for several v, each [S, ...]."""
    outputs = _outputs(model, rest, buffers, x)
    found = vmap(lambda one: jvp(outputs, (own,), (one,)), out_dims=(0, 1))(v)
    return found[0][0], found[1]


def _pulled(model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Tensor) -> Params:
    """Jᵀv, by name."""
    pull = vjp(_outputs(model, rest, buffers, x), own)[1]
    slopes: Params = pull(v)[0]
    return slopes


log = logging.getLogger("doxa")

_WIDTHS = 1  # how often the width is found again
_DRAWS = 256  # half of them the other half's negatives
_NUMBERS = 1 << 24  # of outputs over rows and draws, at the most
_ROUNDS = 100
_TRIES = 12  # of a step's length
_FLAT = 0.1  # of the slope at its start
_LONGEST = 4.0  # in steps of Newton's method at θ*
_ARRIVED = 1e-6  # of gᵀΣg, of that at θ*,
_NEAR = 1e-3  # or of gᵀΣg itself: to a thirtieth of a standard deviation

# Σ with the curvature averaged over outputs f + d, by d [M, S, B, O]
Width = Callable[[Tensor], Structure]


def move(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None, asked: bool
) -> None:
    """Moves its Gaussians; those without a `width` to be found stay as wide as they are. Where
    nobody asked, and the network has no forward derivatives, they stay in their place, too."""
    try:
        m, spread = nearest(run, posterior, prior, width)
    except MethodError as error:
        if asked:
            raise
        log.info("laplace: the Gaussian stays at the mode: %s", error)
        return
    posterior.at, posterior.covariance = posterior.mean, spread
    posterior.mean = posterior.mean.index_add(1, run.subset_index, m.to(run.dtype))


def nearest(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None
) -> tuple[Tensor, Structure]:
    """m of each member, [M, p] over the uncertain weights, and Σ; `prior` are Λ's entries."""
    batch = Pass(run.rows, run.split_of).batch(0)
    line = Linearised(posterior._jacobians(), batch)
    outputs = Outputs(run.likelihood, run.constants, batch, run.net.output, "ggn")
    spread = posterior.covariance
    if isinstance(spread, Embedded):  # weights that are points do not move
        prior = spread.put(prior)
    count = batch_rows(batch) * line.jacobians.outputs
    half = max(1, min(_DRAWS, _NUMBERS // (count * run.size)) // 2)
    keys = [f"{k}/{j}" for k in posterior.ids for j in range(half)]
    m = torch.zeros_like(prior, dtype=torch.float64)
    for left in reversed(range(1 if width is None else 1 + _WIDTHS)):
        f, away = line.along(posterior._away(spread, keys, seed=0))
        average = _Average(outputs, f, torch.cat([away, -away], 1))
        m, at = _lowest(line, average, spread, prior, m)
        if left and width is not None:
            spread = width(average.away + at.unsqueeze(1))
    return m, spread


def _lowest(
    line: Linearised, average: _Average, spread: Structure, prior: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Where F is least, [M, p], from a start, and Jm there, [M, B, O]."""

    def slopes(m: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """−∇F, the step of Newton's method at θ*, and their product."""
        downhill = line.back(average.pull(at)).double() - prior * m
        natural = spread.matmul(downhill.to(at.dtype)).double()
        return downhill, natural, (downhill * natural).sum(1)

    m, at = torch.zeros_like(start), torch.zeros_like(average.f)
    downhill, step, first = slopes(m, at)
    size = first
    if bool(start.any()):
        m, at = start, line.push(start)
        downhill, step, size = slopes(m, at)
    for _ in range(_ROUNDS):
        away = size > (_ARRIVED * first).clamp_min(_NEAR)
        if not bool(away.any()):
            break
        turn = line.push(step)
        length = _length(average, at, turn, prior, m, step)
        length = torch.where(away, length, 0.0)  # who has arrived stays
        m, at = m + length[:, None] * step, at + length[:, None, None].to(at.dtype) * turn
        before, last = downhill, size
        downhill, natural, size = slopes(m, at)
        share = (size - (before * natural).sum(1)) / last.clamp_min(1e-300)  # Polak & Ribière
        step = natural + share.clamp_min(0.0)[:, None] * step
    return m, at


def _length(
    average: _Average, at: Tensor, turn: Tensor, prior: Tensor, m: Tensor, step: Tensor
) -> Tensor:
    """[M]: how far to go until F stops falling along the step, to a tenth of its slope at the
    start: between lengths at which it falls and rises, where a line through both slopes is zero."""
    linear, square = (prior * m * step).sum(1), (prior * step.square()).sum(1)

    def falls(t: Tensor) -> Tensor:
        here = at + t[:, None, None].to(at.dtype) * turn
        return (average.pull(here) * turn).double().sum((1, 2)) - linear - t * square

    low, high = torch.zeros_like(m[:, 0]), torch.full_like(m[:, 0], math.inf)
    start = falling = falls(low)
    rising, t = torch.full_like(low, -math.inf), torch.ones_like(low)
    before = torch.zeros_like(low)
    for _ in range(_TRIES):
        slope = falls(t)
        more = slope > 0
        low, high = torch.where(more, t, low), torch.where(more, high, t)
        # an end that stays a second time counts half, so that the other comes nearer (Illinois)
        stays = 0.5 * (slope * before > 0) + 1.0 * (slope * before <= 0)
        falling = torch.where(more, slope, falling * stays)
        rising = torch.where(more, rising * stays, slope)
        before = slope
        near = slope.abs() <= _FLAT * start
        between = low + (high - low) * falling / (falling - rising)
        t = torch.where(near, t, torch.where(high.isinf(), 2.0 * t, between)).clamp(max=_LONGEST)
        if bool(near.all()):
            break
    return t


@dataclass(frozen=True)
class _Average:
    """Scores averaged over the draws Jδ, `away` [M, S, B, O], about f [M, B, O]."""

    outputs: Outputs
    f: Tensor
    away: Tensor

    def pull(self, at: Tensor) -> Tensor:
        """w E[s(f + Jm + Jδ)] − w s(f) for Jm [M, B, O]: [M, B, O]."""
        members, draws = self.away.shape[:2]
        drawn = ((self.f + at).unsqueeze(1) + self.away).flatten(0, 1)
        several = self.outputs.times(draws).score(drawn)
        change = several.unflatten(0, (members, draws)).mean(1) - self.outputs.score(self.f)
        weight = self.outputs.part.weight
        return change if weight is None else change * weight[..., None].to(change.dtype)


_COUNT = 10  # Gauss–Newton steps, where nobody said how many
_SHORT = 100  # steps of training: what is polished is nearly there
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.02)  # of a step that are tried
_WORK = 4e9  # multiplications that they may take for a member: a second or so of one core
_RARE = 3.09  # standard normals: once in a thousand
_NAT = 1.0  # by which a Newton step may gain more or less than of a quadratic
_ROUNDING = 1e-3  # of that gain, beside it


def default_newton_steps(run: Run, trained: bool) -> int:
    """How many Gauss–Newton steps follow training by default: a few where they are cheap, none
    where held-out rows stopped the training, it was too short to come near a maximum, or the
    weights were to be taken as they are. A member's own: how many others run decides nothing."""
    if not trained or run.rows.validation is not None or run.steps < _SHORT:
        return 0
    size, rows = len(run.subset_index), max(len(own) for own in run.rows.rows)
    matrices = 2 * rows * output_size(run.net.output) * size**2 + size**3  # two sums and a factor
    return _COUNT if _COUNT * matrices <= _WORK else 0


def gauss_newton_step(
    run: Run, state: State, batch: Batch, clock: Clock, tunes: bool
) -> tuple[State, Info]:
    """θ ← θ + t H⁻¹ ∇ log p(θ, D), with the best t; then noise, and the prior's scale where that is
    free."""
    index, theta = run.subset_index, state["theta"]
    sums = forms.Sums(Matrix(diagonal=False))  # positive wherever it is
    local = sums.add(run, state | sums.empty(run), batch)
    prior, _ = prior_curvature(run, state)
    tau = Scales.of(run, state).each(state["tau"])
    slope = gradient(run, local)
    direction = sums.form.covariance(run, local, tau * prior).matmul(slope)
    with torch.no_grad():
        best, chosen = _log_joint(run, state, theta, batch, tunes), theta
        for share in _SHARES:
            tried = theta.index_add(1, index, (share * direction).to(theta.dtype))
            reached = _log_joint(run, state, tried, batch, tunes)
            better = reached > best
            best = torch.where(better, reached, best)
            chosen = torch.where(better[:, None], tried, chosen)
    new = {**state, "theta": chosen}
    if sums.learns_noise(run) or tunes:
        settled = sums.settle(run, sums.add(run, new | sums.empty(run), batch), tunes)
        new |= {"theta": settled["theta"], "tau": settled["tau"]}
    return new, {"loss": -best / run.n, "gradient": slope.norm(dim=1)}


def _log_joint(run: Run, state: State, theta: Tensor, batch: Batch, tunes: bool) -> Tensor:
    """Up to a constant, with the prior's precision times τ where that is free: [M]."""
    fit = torch.zeros(run.size, device=run.device, dtype=torch.float64)
    for part in run.engine.chunks(run.size):
        own, rows = slice_state(state, part), batch.members(part)
        fit[part] = run.select_members(part).log_likelihood(theta[part], rows, own).double()
    if not tunes:
        return fit + run.prior.log_prob(theta).double()
    return fit - 0.5 * (state["tau"] * prior_curvature(run, {**state, "theta": theta})[1]).sum(1)


def gradient(run: Run, state: State) -> Tensor:
    """∇ log p(θ*, D) of the uncertain weights, as the pass added it up, under the prior that was
    found: [M, p]."""
    index, theta = run.subset_index, state["theta"]
    scales = replace(Scales.of(run, state), chosen=None)
    own = scales.each(state["tau"]) * run.prior.score(theta)[:, index].double()
    return state["slope"].sum(1) + own


def newton_step(run: Run, state: State, inverse: Structure) -> tuple[Tensor, Tensor]:
    """H⁻¹g, [M, p] over the uncertain weights, and λ² = gᵀ H⁻¹ g, [M]. Of weights of which only
    some have a matrix, the others stay."""
    g = gradient(run, state)
    if not isinstance(inverse, Embedded):
        step = inverse.matmul(g)
        return step, (g * step).sum(1)
    own = inverse.picked(g)
    step = inverse.inner.matmul(own)
    return inverse.put(step), (own * step).sum(1)


def _gained(run: Run, state: State, step: Tensor) -> Tensor:
    """By how much the log joint is larger after a step of the uncertain weights, [M, p]: [M]."""
    theta, batches = state["theta"], run.passes()
    moved = theta.index_add(1, run.subset_index, step.to(theta.dtype))
    gain = torch.zeros(run.size, device=run.device, dtype=torch.float64)
    with torch.no_grad():
        for t in range(batches.count):
            for part in run.engine.chunks(run.size):
                own, rows = slice_state(state, part), batches.batch(t).members(part)
                before, after = (
                    run.select_members(part).log_likelihood(at[part], rows, own).double()
                    for at in (theta, moved)
                )
                gain[part] += after - before
    if not run.prior.is_gaussian:
        return gain + (run.prior.log_prob(moved) - run.prior.log_prob(theta)).double()
    before, after = (prior_curvature(run, {**state, "theta": at})[1] for at in (theta, moved))
    return gain - 0.5 * (state["tau"] * (after - before)).sum(1)


def check_maximum(
    run: Run, state: State, posterior: LaplacePosterior, spread: Structure, heat: Tensor
) -> None:
    """λ of each member as a diagnostic, and in the status where θ* was to be a maximum and is far
    from one, or the evidence rests on a quadratic that the log joint is not; `heat` is the
    temperature T [M] of the covariance T H⁻¹ at θ*, `spread`."""
    spread = spread.to(dtype=torch.float64)
    step, squares = newton_step(run, state, spread)
    step, squares = step / heat.double()[:, None], squares / heat.double()
    spread = spread.inner if isinstance(spread, Embedded) else spread
    posterior.record.diagnostics["newton_decrement"] = squares.clamp_min(0.0).sqrt().tolist()
    size = spread.size
    cube = 1.0 - 2.0 / (9.0 * size) + _RARE * (2.0 / (9.0 * size)) ** 0.5
    most = size * max(cube, 0.0) ** 3  # of χ² (Wilson & Hilferty 1931)
    worst = float(squares.max())
    if worst <= most:
        return
    if run.rows.validation is not None:
        if posterior.log_evidence is not None:
            _check_quadratic(run, state, posterior, step, squares)
        return
    if posterior.record.status != "ok":
        return
    posterior.record.status = Status(
        "not-converged",
        f"the weights are no maximum of the log joint: it lies {worst**0.5:.3g} posterior standard "
        f"deviations away, where a draw of {size} weights is {size**0.5:.3g} away: train for "
        "longer, or give polish= Gauss–Newton steps (structure='full')",
    )


def _check_quadratic(
    run: Run, state: State, posterior: LaplacePosterior, step: Tensor, squares: Tensor
) -> None:
    """What a Newton step gains beside what it would of a quadratic, as a diagnostic, and in the
    status where they differ."""
    expected, found = 0.5 * squares, _gained(run, state, step)
    told = {"expected": expected.tolist(), "found": found.tolist()}
    posterior.record.diagnostics["newton_gain"] = told
    off = (found - expected).abs()
    worst = int(torch.where(off.isfinite(), off, math.inf).argmax())
    if posterior.record.status != "ok" or float(off[worst]) <= _NAT + _ROUNDING * expected[worst]:
        return
    reason = posterior.record.status.reason
    said = (
        "log_evidence is not to be trusted: it takes the log joint for a quadratic, by which a "
        f"Newton step from where training ended gains {float(expected[worst]):.3g} nats, and it "
        f"gains {float(found[worst]):.3g}; compare models by held-out rows, or train to the "
        "maximum (validation=None)"
    )
    posterior.record.status = Status("ok", f"{reason}; {said}" if reason else said)
