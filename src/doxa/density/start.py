"""Where chains start: what people pass as `init`, checked, freed of its constraints, spread out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from doxa.data import as_tensor
from doxa.density.density import Density
from doxa.density.transforms import Real, Transform, transform
from doxa.errors import DataError, MethodError, NumericalError, ShapeError, did_you_mean
from doxa.linalg.layout import Params
from doxa.noise import Noise

log = logging.getLogger("doxa")

_HALVINGS = 12


def parse_init(init: Any, members: int, dtype: torch.dtype, device: Any) -> list[Params]:
    """One start, or one a chain: dicts of finite floating tensors of equal shapes."""
    many = isinstance(init, Sequence) and not isinstance(init, str)
    starts = [_start(each, dtype, device) for each in (init if many else [init])]
    if many and len(starts) != members:
        raise ShapeError(
            f"init has {len(starts)} starts for {members} chains; pass one dict a chain, or a "
            "single dict that all of them start near"
        )
    shapes = [{k: tuple(v.shape) for k, v in start.items()} for start in starts]
    for m, own in enumerate(shapes):
        if own != shapes[0]:
            raise ShapeError(f"init {m} has shapes {own}, but init 0 has {shapes[0]}")
    return starts


def _start(init: Any, dtype: torch.dtype, device: Any) -> Params:
    if not isinstance(init, Mapping):
        raise DataError(
            f"init must be a dict of tensors, one for each parameter (or a list of such dicts, one "
            f"a chain), not {type(init).__name__}"
        )
    if not init:
        raise DataError("init is empty: it must name every parameter and give it a value")
    values = {}
    for name, value in init.items():
        if not isinstance(name, str):
            raise DataError(f"the names in init must be strings, not {name!r}")
        value = as_tensor(value, f"init {name!r}")
        if value.dtype == torch.bool:
            raise DataError(f"init {name!r} is boolean; only continuous parameters can be sampled")
        if value.numel() == 0:
            raise DataError(f"init {name!r} is empty, of shape {list(value.shape)}")
        value = value.to(device, dtype)
        if not bool(torch.isfinite(value).all()):
            raise DataError(f"init {name!r} holds NaN or infinite values")
        values[name] = value
    return values


def parse_constraints(constraints: Any, start: Params) -> dict[str, Transform]:
    """A transform for every parameter."""
    given = dict(constraints or {})
    for name in given:
        if name not in start:
            raise MethodError(
                f"there is a constraint on {name!r}, which init does not name"
                f"{did_you_mean(str(name), start)}"
            )
    return {name: transform(given[name]) if name in given else Real() for name in start}


def free_starts(density: Density, starts: Sequence[Params]) -> Tensor:
    """The free vectors of the starts, [S, P]; an error where one lies outside its constraint."""
    for start in starts:
        for name, value in start.items():
            own = density.transforms[name]
            if not own.holds(value):
                raise DataError(
                    f"init {name!r} lies outside its constraint {own!r}: it must be {own.says}"
                )
    return torch.stack([density.free(start) for start in starts])


def spread(
    density: Density, centre: Tensor, jitter: float, seed: int, ids: Sequence[int]
) -> Tensor:
    """Starts [M, P] uniform within ±jitter of the centre [P], in free space; halved for a chain
    as often as its density there is not finite."""
    noise = Noise(seed, "start", list(ids), centre.device, centre.dtype)
    away = jitter * (2 * noise.uniform((len(centre),)) - 1)  # [M, P]
    starts = centre + away
    for m in range(len(starts)):
        for _ in range(_HALVINGS):
            if _finite(density, starts[m]):
                break
            away[m] /= 2
            starts[m] = centre + away[m]
        else:
            log.warning("chain %d starts at init itself: the density is 0 all around it", ids[m])
            starts[m] = centre
    return starts


def _finite(density: Density, flat: Tensor) -> bool:
    with torch.enable_grad():
        theta = flat.detach().unsqueeze(0).requires_grad_()
        value = density(theta)
        (grad,) = torch.autograd.grad(value.sum(), theta)
    return bool(torch.isfinite(value).all() and torch.isfinite(grad).all())


def check_value(value: Tensor, what: str) -> None:
    """The log density [] or [1] at a start."""
    number = float(value.detach())
    if number == -torch.inf:
        raise NumericalError(
            f"{what} lies outside the support: the log density there is −inf; start where it is "
            "finite, or say what bounds the parameters with constraints={...}"
        )
    if not torch.isfinite(value).all():
        raise NumericalError(f"the log density is {number} at {what}; start where it is finite")
