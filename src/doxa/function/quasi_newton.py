"""A stage that climbs the evidence to its top: BFGS for all members, one evaluation a step.

    d = H∇L,   θ ← θ + td,   with t made smaller until L gains enough (Armijo)
    H ← (I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ,   s = td,  y = ∇L_old − ∇L_new,  ρ = 1/sᵀy

Nocedal & Wright (2006), ch. 6. A step tries one θ + td; where it is not taken, the next tries a
smaller t. The gradient is computed only where some member takes its step. A member has arrived
where the gain that its gradient promises, ½∇LᵀH∇L, is below 1e-9 nats a row; it then costs nothing.
θ stays between state["low"] and state["high"] where there are such: what has reached one and would
cross it rests (Bertsekas, 1982).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.function.evidence import Problem
from doxa.method import Clock, Info, Run, Stage, State

_SUFFICIENT = 1e-4  # of the gain that the gradient promises
_ARRIVED = 1e-9  # the promised gain, in nats a row
_SMALLEST = 2.0**-12  # of t
_FURTHEST = 2.0  # a step of a logarithm
_GROUP_BYTES = 256 << 20  # of matrices [N, N] at a time
_NAMES = (
    "theta",
    "value",
    "grad",
    "inverse",
    "direction",
    "share",
    "guess",
    "arrived",
    "low",
    "high",
)
_KEYS = ("theta", *(f"ascent.{name}" for name in _NAMES[1:]))

Part = dict[str, Tensor]


def quasi_newton(
    problem_of: Callable[[Run, Batch], Problem], steps: int, name: str, rows: int | None = None
) -> Stage:
    """Ascend the evidence from state["theta"], of all rows, or of `rows` of them evenly spaced."""

    def enter(run: Run, state: State) -> State:
        theta = state["theta"]
        one, eye = torch.ones_like(theta[:, 0]), torch.eye(theta.shape[1], device=theta.device)
        eye = eye.to(theta).expand(run.size, -1, -1).clone()
        start = dict(zip(_KEYS, (
            theta, -torch.inf * one, torch.zeros_like(theta), eye, torch.zeros_like(theta), one,
            one, 0 * one, state.get("low", theta - torch.inf), state.get("high", theta + torch.inf),
        ), strict=True))  # fmt: skip
        own = run.n.to(theta) if rows is None else one * rows
        if "ascent.inverse" in state:  # of fewer rows, hence of less curvature
            less = state["ascent.rows"] / own
            start["ascent.inverse"] = state["ascent.inverse"] * less[:, None, None]
            start["ascent.guess"] = state["ascent.guess"]
        return state | start | {"ascent.rows": own}

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        problem = problem_of(run, batch)
        if rows is not None:
            problem = problem.thinned(rows)
        whole = {name: state[key].clone() for name, key in zip(_NAMES, _KEYS, strict=True)}
        still = (whole["arrived"] == 0).nonzero()[:, 0]
        levels = 1 if problem.log_noise is None else problem.log_noise.shape[-1]
        size = max(1, _GROUP_BYTES // (16 * levels * problem.x.shape[-2] ** 2))
        for part in still.split(size) if len(still) else ():
            at = {name: value[part] for name, value in whole.items()}
            there = advanced(problem.members(part), at)
            for key, value in there.items():
                whole[key][part] = value
        found = {key: whole[name] for name, key in zip(_NAMES, _KEYS, strict=True)}
        return state | found, {"loss": whole["value"] / -problem.n}

    return Stage(name, step, steps, "all", enter=enter, capturable=False)


def advanced(problem: Problem, at: Part) -> Part:
    """One evaluation of each member, and where that leads."""
    theta, value, grad, share = (at[name] for name in ("theta", "value", "grad", "share"))
    first = torch.isinf(value)
    slope = (at["direction"] * grad).sum(1)
    tried = (theta + share[:, None] * at["direction"]).clamp(at["low"], at["high"])
    solved = problem.solve(tried)
    reached = problem.value(tried, solved)
    taken = reached >= value + _SUFFICIENT * share * slope
    there = problem.gradient(tried, solved) if bool(taken.any()) else grad
    taken = taken & torch.isfinite(there).all(1)
    lost = first & ~taken  # there is no evidence where it starts
    s, y = tried - theta, grad - there
    inverse, guess = _curvature(at, s, y, taken & ~first)
    steep = there.norm(dim=1).clamp_min(1.0)
    inverse = torch.where(
        (first & (guess > 0))[:, None, None], inverse / steep[:, None, None], inverse
    )
    new_theta, new_grad = (
        torch.where(taken[:, None], a, b) for a, b in ((tried, theta), (there, grad))
    )
    # not taken: the top of the parabola through both values, if that is not too near either
    promised = (share * slope).clamp_min(1e-300)
    bend = 0.5 * promised / (promised - (reached - value)).clamp_min(1e-300)
    smaller = share * bend.nan_to_num(0.1).clamp(0.1, 0.5)
    stuck = ~taken & (smaller < _SMALLEST)  # forget the curvature, and climb by the gradient
    eye = torch.eye(theta.shape[1], dtype=theta.dtype, device=theta.device)
    gentle = (100 * new_grad.norm(dim=1)).clamp_min(1e-300)[:, None, None]
    inverse = torch.where(stuck[:, None, None], eye / gentle, inverse)
    below, above = new_theta <= at["low"], new_theta >= at["high"]
    free = (~((below & (new_grad < 0)) | (above & (new_grad > 0)))).to(theta)
    full = free * (inverse @ (free * new_grad).unsqueeze(-1)).squeeze(-1)
    promise = 0.5 * (full * new_grad).sum(1)
    shorter = (_FURTHEST / full.abs().amax(1).clamp_min(1e-300)).clamp_max(1.0)
    over = (promise < _ARRIVED * problem.n) & taken | (stuck & (at["guess"] > 0)) | lost
    return {
        "theta": new_theta,
        "value": torch.where(taken, reached, value),
        "grad": new_grad,
        "inverse": inverse,
        "direction": full * shorter[:, None],
        "share": torch.where(taken | stuck, torch.ones_like(share), smaller),
        "guess": torch.where(stuck, torch.ones_like(guess), guess),
        "arrived": over.to(share),
        "low": at["low"],
        "high": at["high"],
    }


def _curvature(at: Part, s: Tensor, y: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """H after a step, and whether it is still a guess."""
    inner = (s * y).sum(1)
    useful = moved & (inner > 1e-12 * s.norm(dim=1) * y.norm(dim=1))
    inner = torch.where(useful, inner, torch.ones_like(inner))
    eye = torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
    size = inner / y.square().sum(1).clamp_min(1e-300)  # of the curvature, before its shape
    guessed = (at["guess"] > 0)[:, None, None]
    inverse = torch.where(guessed, size[:, None, None] * eye, at["inverse"])
    left = eye - s.unsqueeze(2) * y.unsqueeze(1) / inner[:, None, None]
    inverse = left @ inverse @ left.mT + s.unsqueeze(2) * s.unsqueeze(1) / inner[:, None, None]
    kept = torch.where(useful[:, None, None], inverse, at["inverse"])
    return kept, torch.where(useful, torch.zeros_like(inner), at["guess"])
