"""Is it a log density one can sample? Asked at the start, before any work is done.

It must take the dict, give a real scalar, the same one each time, and its gradient must be that of
its value: a `detach`, a `.item()` or a detour through numpy gives a gradient that is missing or,
worse, wrong.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from doxa.density.density import Density
from doxa.density.start import check_value
from doxa.errors import DoxaError, ModelError, NumericalError, ShapeError
from doxa.linalg.layout import Params
from doxa.noise import Noise

log = logging.getLogger("doxa")


def check_density(density: Density, start: Params) -> None:
    """At one start, in natural space; the errors say what to do."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in start.items()}
    with torch.enable_grad():
        value = _call(density, leaves)
        _check_scalar(value)
        check_value(value.detach(), "the start")
        _check_reaches(value, leaves)
    with torch.no_grad():
        again = _call(density, start)
    first, second = float(value.detach()), float(again)
    if first != second:
        raise ModelError(
            f"the log density is random: it gave {first!r} and then {second!r} at the "
            "same point; draw its random numbers once, outside"
        )


def check_gradient(density: Density, starts: Tensor) -> None:
    """The gradient along a random direction against central differences, in double precision.

    A kink or a stiff density may spoil the differences at one start, so that only a gradient
    that is wrong at every start is refused.
    """
    if starts.dtype != torch.float64:
        return
    direction = Noise(0, "gradient check", [0], starts.device, starts.dtype).normal(
        (starts.shape[1],)
    )[0]
    if all(_wrong(density, theta, direction) for theta in starts):
        raise ModelError(
            "the gradient of the log density is not that of its value (compared with finite "
            "differences): something in it is cut off from autograd; look for detach, .item(), "
            ".data, torch.no_grad, numpy or rounding"
        )


def _call(density: Density, values: Params) -> Tensor:
    try:
        return density.one(values)
    except DoxaError:
        raise
    except Exception as error:  # whatever the user's density raises
        dtype = next(iter(values.values())).dtype
        raise ModelError(
            f"the log density fails at the start: {type(error).__name__}: {error} (parameters come "
            f"as {dtype}; data of another type must be converted, or pass dtype=)"
        ) from error


def _check_scalar(value: object) -> None:
    if not isinstance(value, Tensor):
        raise ModelError(
            f"the log density must return a tensor computed from the parameters, not "
            f"{type(value).__name__}: leave out .item(), float() and numpy"
        )
    if value.shape != ():
        raise ShapeError(
            f"the log density must return a scalar for one chain, got the shape "
            f"{list(value.shape)}: add up what belongs to the rows"
        )
    if not value.is_floating_point():
        raise ModelError(f"the log density must be a real number, got {value.dtype}")


def _check_reaches(value: Tensor, leaves: Params) -> None:
    if not value.requires_grad:
        raise ModelError(
            "the log density has no gradient: it does not depend on the parameters, or is cut off "
            "from them by detach, .item(), torch.no_grad or numpy"
        )
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        if grad is None:
            raise ModelError(
                f"the log density does not depend on {name!r} in a way that can be differentiated: "
                "use it, leave it out of init, or look for detach and numpy"
            )
        if not bool(torch.isfinite(grad).all()):
            raise NumericalError(
                f"the gradient of the log density with respect to {name!r} is not finite at the "
                "start"
            )


def _wrong(density: Density, theta: Tensor, direction: Tensor) -> bool:
    with torch.enable_grad():
        leaf = theta.detach().unsqueeze(0).requires_grad_()
        total = density(leaf)
        (grad,) = torch.autograd.grad(total.sum(), leaf)
    value = abs(float(total.detach()))
    slope = float((grad[0] * direction).sum())
    with torch.no_grad():

        def difference(h: float) -> float:
            up, down = (density((theta + s * h * direction).unsqueeze(0)) for s in (1.0, -1.0))
            return float(up - down) / (2 * h)

        coarse, fine = difference(2e-5), difference(1e-5)
    rounding = 1e-15 * (value + 1.0) / 1e-5
    error = abs(coarse - fine) + rounding + 1e-5 * (abs(fine) + abs(slope))
    return abs(fine - slope) > 20 * error
