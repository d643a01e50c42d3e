"""The mean of the Laplace Gaussian: correction towards the posterior mean, Newton steps, and
checks.

Mean correction (`move`, `nearest`). Rows that the network classifies with near certainty have
almost no gradient. The posterior is therefore skewed, towards larger logits, but a Gaussian at the
maximum θ* is symmetric. Averaged over that Gaussian, the gradient of the log joint is not zero. For
the linearised network f + J(m + δ), δ ~ N(0, Σ), the mean m of the nearest Gaussian minimises

    F(m) = Σ_i E[−log p(y_i | f_i + J_i(m + δ))] + sᵀJm + ½ mᵀΛm,    s = ∂ log p(y | f)/∂f at θ*

F is the Kullback–Leibler divergence to the posterior of the linearised network, as a function of
the mean, except for the term in s. This term makes m = 0 the solution for Σ = 0, whether or not θ*
is a maximum. F is convex. The expectation is an average over fixed draws ±δ. F is minimised by
conjugate gradients with the preconditioner Σ. One iteration takes one product with J, one with Jᵀ,
and a line search on the outputs alone. The covariance of the nearest Gaussian comes from the
average curvature,

    Σ⁻¹ = Λ + Σ_i J_iᵀ E[C(f_i + J_i(m + δ))] J_i,

so that m and Σ are updated in turn (Khan et al. 2019; Immer, Korzepa & Bauer 2021).

Jacobian products (`Linearised`). J is never formed. Those of a last layer come from its features
(`head.py`), without a pass of the network. Otherwise forward-mode derivatives give Jv at the cost
of about two passes of the network, and reverse-mode derivatives Jᵀv. Memory limits the number of
rows, or directions, per call.

Newton steps and the maximum (`gauss_newton_step`, `check_maximum`). The squared Newton decrement is

    λ² = gᵀ H⁻¹ g,    g = ∇ log p(θ*, D)

A Newton step from θ* gains λ²/2 nats and moves by λ posterior standard deviations. If θ* were a
draw from the posterior, λ² would be χ² with p degrees of freedom. Where λ² is above the 99.9 %
quantile of that distribution, the Gaussian is centred where its own draws would hardly ever be, and
the status is "not-converged". Early stopping on held-out rows ends training before the maximum on
purpose; there λ is only recorded.

Evidence (`_check_quadratic`). The evidence is the integral of the quadratic at θ*, whose maximum is
λ²/2 above log p(θ*, D). For a linear network with Gaussian noise it is exact at any θ*. Within the
range of the Gaussian, the Laplace approximation takes the log joint for a quadratic anyway. Where
early stopping ended farther from the maximum, one Newton step tests the quadratic: if its gain
differs from λ²/2 by more than one nat, the status carries a warning about the evidence.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows
from doxa.errors import MethodError
from doxa.laplace import forms
from doxa.laplace.curvature import Jacobians, Outputs, chunk_bytes, output_size, outputs_of
from doxa.laplace.forms import Matrix, Scales, prior_curvature, some_rows
from doxa.laplace.layers import Head
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg import Embedded, Structure
from doxa.linalg.layout import Params
from doxa.method import Clock, Info, Run, State, slice_state
from doxa.model import Model
from doxa.posterior import Status


@dataclass(frozen=True)
class Linearised:
    """Products with the Jacobian J of all rows, in blocks of rows. J itself is never formed."""

    jacobians: Jacobians
    batch: Batch

    @cached_property
    def head(self) -> Head | None:
        """The features of all rows, where only a last layer is uncertain."""
        return Head.of(self.jacobians, self.batch.x, self.batch.shared)

    def along(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [M, B, O] and Jδ [M, S, B, O] for draws δ [M, S, p].

        As many draws as memory allows are computed together: they share f, and each layer needs
        one product for all of them.
        """
        if self.head is not None:
            return self.head.f, self.head.along(delta)
        most = max(1, chunk_bytes(delta.device) // self._row_bytes)
        pushed = [self._together(some) for some in delta.split(most, 1)]
        return pushed[0][0], torch.cat([away for _, away in pushed], 1)

    def push(self, direction: Tensor) -> Tensor:
        """J v for v [M, p]: [M, B, O]."""
        if self.head is not None:
            return self.head.along(direction.unsqueeze(1))[:, 0]
        return self._pushed(direction, _pushed)[1]

    def _together(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        if delta.shape[1] > 1:
            with contextlib.suppress(RuntimeError, ValueError):  # an operation without a vmap rule
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
                "mean_correction=True needs forward-mode derivatives, and an operation of the "
                f"network has none ({str(error).splitlines()[0][:120]}): use mean_correction=False"
            ) from error
        f, away = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return f, away

    def back(self, pulls: Tensor) -> Tensor:
        """Σ_i J_iᵀ v_i for v [M, B, O]: [M, p]."""
        if self.head is not None:
            return self.head.back(pulls)
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
        """Bytes of the layer outputs for one row of all members, their tangents, and one copy."""
        numbers = max(1, sum(width for _, width in self.jacobians.model.widths))
        return 3 * self.jacobians.members * numbers * self._like.dtype.itemsize

    def _parts(self, draws: int = 1) -> list[slice]:
        """Blocks of rows. Their size is limited by the layer outputs, as J is not stored."""
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


def _pushed(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv."""
    found = jvp(outputs_of(model, rest, buffers, x), (own,), (v,))
    return found[0], found[1]


def _pushed_together(
    model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Params
) -> tuple[Tensor, Tensor]:
    """f [B, O] and Jv [B, S, O] for several v, each [S, ...]."""
    outputs = outputs_of(model, rest, buffers, x)
    found = vmap(lambda one: jvp(outputs, (own,), (one,)), out_dims=(0, 1))(v)
    return found[0][0], found[1]


def _pulled(model: Model, own: Params, rest: Params, buffers: Params, x: Any, v: Tensor) -> Params:
    """Jᵀv, by name."""
    pull = vjp(outputs_of(model, rest, buffers, x), own)[1]
    slopes: Params = pull(v)[0]
    return slopes


log = logging.getLogger("doxa")

_WIDTHS = 1  # number of updates of Σ
_DRAWS = 256  # draws δ; the second half are the negatives of the first
_NUMBERS = 1 << 24  # largest number of outputs, over rows and draws
_ROUNDS = 100  # largest number of conjugate-gradient iterations
_TRIES = 12  # largest number of evaluations in the line search
_FLAT = 0.1  # the line search ends at this fraction of the initial slope
_LONGEST = 4.0  # longest step, in Newton steps at θ*
_ARRIVED = 1e-6  # converged: gᵀΣg relative to its value at θ*,
_NEAR = 1e-3  # or gᵀΣg itself: 1/30 of a standard deviation

# from d [M, S, B, O] to the Σ whose curvature is averaged over the outputs f + d
Width = Callable[[Tensor], Structure]


def move(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None, asked: bool
) -> None:
    """Move the Gaussians of `posterior` to the corrected mean, in place.

    `width` updates Σ; with None, Σ stays. `asked` is True where the user set
    mean_correction=True. Then a network without forward-mode derivatives is an error; otherwise the
    Gaussians stay at the mode.
    """
    try:
        m, spread = nearest(run, posterior, prior, width)
    except MethodError as error:
        if asked:
            raise
        log.info("laplace: the mean is not corrected, the Gaussian stays at the mode: %s", error)
        return
    posterior.at, posterior.covariance = posterior.mean, spread
    posterior.mean = posterior.mean.index_add(1, run.subset_index, m.to(run.dtype))


def nearest(
    run: Run, posterior: LaplacePosterior, prior: Tensor, width: Width | None
) -> tuple[Tensor, Structure]:
    """m of each member, [M, p] over the uncertain weights, and Σ; `prior` is the diagonal of Λ."""
    batch = Pass(run.rows, run.split_of).batch(0)
    line = Linearised(posterior.jacobians(), batch)
    outputs = Outputs(run.likelihood, run.constants, batch, run.net.output, "ggn")
    spread = posterior.covariance
    if isinstance(spread, Embedded):  # weights outside the subnetwork do not move
        prior = spread.put(prior)
    count = batch_rows(batch) * line.jacobians.outputs
    half = max(1, min(_DRAWS, _NUMBERS // (count * run.size)) // 2)
    keys = [f"{k}/{j}" for k in posterior.ids for j in range(half)]
    m = torch.zeros_like(prior, dtype=torch.float64)
    for left in reversed(range(1 if width is None else 1 + _WIDTHS)):
        f, away = line.along(posterior.draw_deviations(spread, keys, seed=0))
        average = _Average(outputs, f, torch.cat([away, -away], 1))
        m, at = _lowest(line, average, spread, prior, m)
        if left and width is not None:
            spread = width(average.away + at.unsqueeze(1))
    return m, spread


def _lowest(
    line: Linearised, average: _Average, spread: Structure, prior: Tensor, start: Tensor
) -> tuple[Tensor, Tensor]:
    """The minimiser m of F, [M, p], found from `start`, and Jm, [M, B, O]."""

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
        length = torch.where(away, length, 0.0)  # converged members stay
        m, at = m + length[:, None] * step, at + length[:, None, None].to(at.dtype) * turn
        before, last = downhill, size
        downhill, natural, size = slopes(m, at)
        share = (size - (before * natural).sum(1)) / last.clamp_min(1e-300)  # Polak & Ribière
        step = natural + share.clamp_min(0.0)[:, None] * step
    return m, at


def _length(
    average: _Average, at: Tensor, turn: Tensor, prior: Tensor, m: Tensor, step: Tensor
) -> Tensor:
    """Step length of each member, [M], by regula falsi (Illinois) on the slope of F along the step.

    The search ends where the slope is a tenth of the slope at the start.
    """
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
        # Illinois: the slope at an end of the bracket is halved when that end stays twice
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
    """Likelihood scores at f [M, B, O], averaged over the draws `away` = Jδ [M, S, B, O]."""

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


_COUNT = 10  # Gauss–Newton steps by default
_SHORT = 100  # training steps; after fewer, θ is too far from a maximum for Gauss–Newton steps
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.02)  # step lengths that are tried
_WORK = 4e9  # largest number of multiplications per member: about a second on one core
_RARE = 3.09  # the 99.9 % quantile of a standard normal
_NAT = 1.0  # tolerance of the gain of a Newton step, in nats
_ROUNDING = 1e-3  # relative tolerance of the same, added to it


def default_newton_steps(run: Run, trained: bool) -> int:
    """The default number of Gauss–Newton steps after training: 10 where they are cheap, else 0.

    It is 0 also where held-out rows stop the training, where the training is too short to come near
    a maximum, or where the weights are not trained. It does not depend on the number of members.
    """
    if not trained or run.stops_early or run.steps < _SHORT or run.rows.stream is not None:
        return 0
    size, rows = len(run.subset_index), max(len(own) for own in run.rows.rows)
    matrices = 2 * rows * output_size(run.net.output) * size**2 + size**3  # two sums and a factor
    return _COUNT if _COUNT * matrices <= _WORK else 0


def gauss_newton_step(
    run: Run, state: State, batch: Batch, clock: Clock, tunes: bool
) -> tuple[State, Info]:
    """θ ← θ + t H⁻¹ ∇ log p(θ, D) with the best t; then update the learned noise, and the prior
    scale where it is tuned."""
    index, theta = run.subset_index, state["theta"]
    sums = forms.Sums(Matrix(diagonal=False))  # Gauss–Newton: positive semi-definite at every θ
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
    """The log joint up to a constant, [M]; the prior precision is multiplied by τ where τ is
    tuned."""
    fit = torch.zeros(run.size, device=run.device, dtype=torch.float64)
    for part in run.engine.chunks(run.size):
        own, rows = slice_state(state, part), batch.members(part)
        fit[part] = run.select_members(part).log_likelihood(theta[part], rows, own).double()
    if not tunes:
        return fit + run.prior.log_prob(theta).double()
    return fit - 0.5 * (state["tau"] * prior_curvature(run, {**state, "theta": theta})[1]).sum(1)


def gradient(run: Run, state: State) -> Tensor:
    """∇ log p(θ*, D) of the uncertain weights under the tuned prior, [M, p].

    The likelihood's part is the sum that the pass over the rows has accumulated in `state`.
    """
    index, theta = run.subset_index, state["theta"]
    scales = replace(Scales.of(run, state), chosen=None)
    own = scales.each(state["tau"]) * run.prior.score(theta)[:, index].double()
    return state["slope"].sum(1) + own


def newton_step(run: Run, state: State, inverse: Structure) -> tuple[Tensor, Tensor]:
    """H⁻¹g, [M, p] over the uncertain weights, and λ² = gᵀ H⁻¹ g, [M].

    With a subnetwork, the step of the weights outside it is zero.
    """
    g = gradient(run, state)
    if not isinstance(inverse, Embedded):
        step = inverse.matmul(g)
        return step, (g * step).sum(1)
    own = inverse.picked(g)
    step = inverse.inner.matmul(own)
    return inverse.put(step), (own * step).sum(1)


def _gained(run: Run, state: State, step: Tensor) -> Tensor:
    """The change of the log joint by a step [M, p] of the uncertain weights: [M]."""
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
    """Record λ of each member as a diagnostic, and set the status where λ is too large.

    Without held-out rows a large λ means "not-converged". With them, θ* need not be a maximum, and
    only the quadratic approximation behind the evidence is checked. `spread` is the covariance
    T H⁻¹ at θ*, and `heat` is its temperature T [M].
    """
    spread = spread.to(dtype=torch.float64)
    step, squares = newton_step(run, state, spread)
    step, squares = step / heat.double()[:, None], squares / heat.double()
    spread = spread.inner if isinstance(spread, Embedded) else spread
    posterior.record.diagnostics["newton_decrement"] = squares.clamp_min(0.0).sqrt().tolist()
    size = spread.size
    cube = 1.0 - 2.0 / (9.0 * size) + _RARE * (2.0 / (9.0 * size)) ** 0.5
    most = size * max(cube, 0.0) ** 3  # the 99.9 % quantile of χ² (Wilson & Hilferty 1931)
    worst = float(squares.max())
    if worst <= most:
        return
    if run.stops_early:
        if posterior.log_evidence is not None:
            _check_quadratic(run, state, posterior, step, squares)
        return
    if posterior.record.status != "ok":
        return
    posterior.record.status = Status(
        "not-converged",
        "the weights are not at a maximum of the log joint: the maximum is "
        f"{worst**0.5:.3g} posterior standard deviations away, and a posterior draw of {size} "
        f"weights is only {size**0.5:.3g} away; train longer, or set newton_steps= to a number of "
        "Gauss–Newton steps (structure='full')",
    )


def _check_quadratic(
    run: Run, state: State, posterior: LaplacePosterior, step: Tensor, squares: Tensor
) -> None:
    """Compare the gain of a Newton step with the gain λ²/2 of a quadratic log joint.

    Both are recorded as a diagnostic, and reported in the status where they differ.
    """
    expected, found = 0.5 * squares, _gained(run, state, step)
    gains = {"expected": expected.tolist(), "found": found.tolist()}
    posterior.record.diagnostics["newton_gain"] = gains
    off = (found - expected).abs()
    worst = int(torch.where(off.isfinite(), off, math.inf).argmax())
    if posterior.record.status != "ok" or float(off[worst]) <= _NAT + _ROUNDING * expected[worst]:
        return
    reason = posterior.record.status.reason
    message = (
        "log_evidence is not reliable: it assumes a quadratic log joint, for which a Newton step "
        f"from the trained weights gains {float(expected[worst]):.3g} nats, but the step gains "
        f"{float(found[worst]):.3g} nats; compare models on held-out rows, or train to the "
        "maximum (validation=None)"
    )
    posterior.record.status = Status("ok", f"{reason}; {message}" if reason else message)
