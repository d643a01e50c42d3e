"""Is θ* a maximum of the log joint, and is it worth while to make it one?

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

import math
from dataclasses import replace

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.laplace import statistics
from doxa.laplace.curvature import output_size
from doxa.laplace.forms import Matrix
from doxa.laplace.posterior import LaplacePosterior
from doxa.laplace.scales import Scales, prior_curvature
from doxa.linalg import Embedded, Structure
from doxa.method import Clock, Info, Run, State, slice_state
from doxa.posterior import Status

_COUNT = 10  # Gauss–Newton steps, where nobody said how many
_SHORT = 100  # steps of training: what is polished is nearly there
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.02)  # of a step that are tried
_WORK = 4e9  # multiplications that they may take for a member: a second or so of one core
_RARE = 3.09  # standard normals: once in a thousand
_NAT = 1.0  # by which a Newton step may gain more or less than of a quadratic
_ROUNDING = 1e-3  # of that gain, beside it


def polishing(run: Run, trained: bool) -> int:
    """How many Gauss–Newton steps follow training by default: a few where they are cheap, none
    where held-out rows stopped the training, it was too short to come near a maximum, or the
    weights were to be taken as they are. A member's own: how many others run decides nothing."""
    if not trained or run.rows.validation is not None or run.steps < _SHORT:
        return 0
    size, rows = len(run.subset_index), max(len(own) for own in run.rows.rows)
    matrices = 2 * rows * output_size(run.net.output) * size**2 + size**3  # two sums and a factor
    return _COUNT if _COUNT * matrices <= _WORK else 0


def polish(run: Run, state: State, batch: Batch, clock: Clock, tunes: bool) -> tuple[State, Info]:
    """θ ← θ + t H⁻¹ ∇ log p(θ, D), with the best t; then noise, and the prior's scale where that is
    free."""
    index, theta = run.subset_index, state["theta"]
    sums = statistics.Sums(Matrix(diagonal=False))  # positive wherever it is
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
        fit[part] = run.part(part).log_likelihood(theta[part], rows, own).double()
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
                    run.part(part).log_likelihood(at[part], rows, own).double()
                    for at in (theta, moved)
                )
                gain[part] += after - before
    if not run.prior.is_gaussian:
        return gain + (run.prior.log_prob(moved) - run.prior.log_prob(theta)).double()
    before, after = (prior_curvature(run, {**state, "theta": at})[1] for at in (theta, moved))
    return gain - 0.5 * (state["tau"] * (after - before)).sum(1)


def judge(
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
