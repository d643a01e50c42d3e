"""A stage that climbs a smooth function of few variables to its top: BFGS, a member at a time.

    d = B∇L,   θ ← θ + td,   with t halved until L gains enough (Armijo)
    B ← (I − ρsyᵀ)B(I − ρysᵀ) + ρssᵀ,   s = td,  y = ∇L_old − ∇L_new,  ρ = 1/sᵀy

Nocedal & Wright (2006), ch. 6. A step costs one evaluation, rarely more; a member that has arrived
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.method import Clock, Info, Run, Stage, State

Evaluate = Callable[[Run, Batch, int, Tensor], tuple[Tensor, Tensor]]

_HALVINGS = 12
_SUFFICIENT = 1e-4  # of the gain that the gradient promises
_ARRIVED = 1e-12  # the gradient of L/n
_ROUNDING = 1e-10  # gains below this share of L cannot be seen in it


def quasi_newton(evaluate: Evaluate, steps: int, name: str = "refine") -> Stage:
    """Ascend `evaluate(run, batch, member, θ [H]) -> (value, gradient)` from state["theta"]."""

    def enter(run: Run, state: State) -> State:
        theta = state["theta"]
        eye = torch.eye(theta.shape[1], dtype=theta.dtype, device=theta.device)
        return state | {
            "ascent.inverse": eye.expand(run.size, -1, -1).clone(),
            "ascent.grad": torch.zeros_like(theta),
            "ascent.value": torch.full_like(theta[:, 0], -torch.inf),
        }

    def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        names = ("theta", "ascent.value", "ascent.grad", "ascent.inverse")
        rows = []
        for m in range(run.size):
            at = lambda theta, m=m: evaluate(run, batch, m, theta)  # noqa: E731
            rows.append(_advance(at, float(run.n[m]), *(state[key][m] for key in names)))
        new = {
            key: torch.stack(part) for key, part in zip(names, zip(*rows, strict=True), strict=True)
        }
        return state | new, {"loss": new["ascent.value"] / -run.n}

    return Stage(name, step, steps, "all", enter=enter, capturable=False)


def _advance(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
    n: float,
    theta: Tensor,
    value: Tensor,
    grad: Tensor,
    inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One BFGS step of one member."""
    first = not bool(torch.isfinite(value))
    if first:
        value, grad = evaluate(theta)
        inverse = inverse / grad.norm().clamp_min(1.0)  # a first step of at most one
    if not bool(torch.isfinite(grad).all()) or float(grad.abs().max()) < _ARRIVED * n:
        return theta, value, grad, inverse
    direction = inverse @ grad
    slope = float(direction @ grad)
    share = 1.0
    for _ in range(_HALVINGS):
        tried = theta + share * direction
        reached, there = evaluate(tried)
        if float(reached) >= float(value) + _SUFFICIENT * share * slope:
            break
        unseen = share * slope < _ROUNDING * max(1.0, abs(float(value)))
        if unseen and float(there.norm()) < float(grad.norm()):
            break  # near the top only the gradient tells
        share /= 2
    else:  # no gain along it: forget the curvature, and climb by the gradient next time
        eye = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
        return theta, value, grad, eye / (100 * grad.norm())
    s, y = tried - theta, grad - there
    if float(s @ y) > 1e-12 * float(s.norm() * y.norm()):
        inverse = _update(inverse, s, y, first)
    return tried, reached, there, inverse


def _update(inverse: Tensor, s: Tensor, y: Tensor, first: bool) -> Tensor:
    eye = torch.eye(len(s), dtype=s.dtype, device=s.device)
    if first:
        inverse = (s @ y) / (y @ y) * eye  # the size of the curvature, before its shape
    rho = 1.0 / (s @ y)
    left = eye - rho * torch.outer(s, y)
    return left @ inverse @ left.T + rho * torch.outer(s, s)
