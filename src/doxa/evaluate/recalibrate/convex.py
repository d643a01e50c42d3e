"""The minimum of a smooth convex function: Newton's method, its steps by conjugate gradients.

    H d = -g (to a tolerance that tightens as g shrinks),   θ ← θ + t d,  t halved until f falls

Nocedal and Wright (2006), ch. 7. No matrix is formed, every step goes downhill, and nothing is
random: the same rows give the same parameters, never worse than the start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_STEPS, _HALVINGS = 300, 40
_SUFFICIENT = 1e-4  # of the fall that the gradient promises


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = 1e-10) -> Tensor:
    """θ of any shape; ends where the gradient is below `tolerance`, or the loss falls no more."""
    theta, value = start.detach(), float(loss(start))
    for _ in range(_STEPS):
        with torch.enable_grad():
            variable = theta.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(variable), variable, create_graph=True)
        g = gradient.detach()
        size = float(g.norm())
        if size <= tolerance:
            break

        def curvature(v: Tensor, of: Tensor = gradient, at: Tensor = variable) -> Tensor:
            return torch.autograd.grad(of, at, v, retain_graph=True)[0]

        step = _conjugate_gradients(curvature, -g, min(0.1, size**0.5) * size)
        promised = float((g * step).sum())
        t = 1.0
        for _ in range(_HALVINGS):
            new = theta + t * step
            new_value = float(loss(new))
            if new_value <= value + _SUFFICIENT * t * promised:
                break
            t *= 0.5
        if not new_value < value:
            break
        theta, value = new, new_value
    return theta


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, tolerance: float) -> Tensor:
    """x with A x = b, A positive semi-definite; stops where A is flat."""
    x, r = torch.zeros_like(b), b
    d, square = r, float((r * r).sum())
    for _ in range(2 * b.numel()):
        if square**0.5 <= tolerance:
            break
        image = apply(d)
        bend = float((d * image).sum())
        if bend <= 1e-14 * float((d * d).sum()):
            return x if bool((x != 0).any()) else b
        step = square / bend
        x, r = x + step * d, r - step * image
        new = float((r * r).sum())
        d, square = r + (new / square) * d, new
    return x
