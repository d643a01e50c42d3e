"""A log density over a dict of natural parameters, as a function of stacked free vectors.

    log π(u) = log p(f(u)) + log |det ∂f/∂u|,    u [M, P], one row per chain

`log_density` is written for one chain. All chains are evaluated at once with vmap of the forward
pass, and differentiated by plain autograd on the sum over chains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch
from doxa.density.estimates import Estimated, GradientNoise, RowSum
from doxa.density.transforms import Shape, Transform
from doxa.linalg.layout import Entry, Layout, Params

log = logging.getLogger("doxa")

Written = Callable[..., Tensor]


class Density:
    """The log density that samplers use, from free vectors [M, P] to [M].

    Parameters
    ----------
    log_density : callable
        From the parameters of one chain in natural space to a scalar.
    shapes : dict
        Shapes of the natural parameters.
    transforms : dict of Transform
        The transform of each parameter, from free (unconstrained) to natural space.
    """

    def __init__(
        self,
        log_density: Written,
        shapes: Mapping[str, Shape],
        transforms: Mapping[str, Transform],
    ) -> None:
        self.log_density = log_density
        self.shapes = dict(shapes)
        self.transforms = dict(transforms)
        self.layout = free_layout(shapes, transforms)
        self.apart = True  # where all chains at once fail, try them one by one
        self.refused = 0  # evaluations in which the density raised: outside its support

    def natural(self, flat: Tensor) -> tuple[Params, Tensor]:
        """Natural values {name: [..., *shape]} of free ones [..., P], and log |det| [...]."""
        return natural(self.layout, self.transforms, flat)

    def free(self, values: Mapping[str, Tensor]) -> Tensor:
        """The reverse of `natural`: [..., P]."""
        return self.layout.flatten({k: self.transforms[k].inverse(v) for k, v in values.items()})

    @property
    def estimated(self) -> bool:
        """Whether batches give an estimate of it (`doxa.density.estimates`)."""
        return isinstance(self.log_density, Estimated)

    def one(self, values: Params, *batch: Any) -> Tensor:
        return self.log_density(dict(values), *batch)  # a copy, which the function may change

    def __call__(self, flat: Tensor, batch: Batch | None = None) -> Tensor:
        if batch is not None and isinstance(self.log_density, RowSum):
            return self._at(flat, (batch.x, batch.scale), batch.shared)
        value = self._at(flat)
        if batch is not None and isinstance(self.log_density, GradientNoise):
            return self.log_density.add_noise(value, flat, batch)
        return value

    def _at(self, flat: Tensor, rows: tuple[Any, ...] = (), shared: bool = True) -> Tensor:
        """The log density [M], or its estimate from rows (and their scale, [M])."""
        values, log_det = self.natural(flat)
        try:
            if len(flat) == 1:  # squeeze, not select: its backward pass is a view
                own = rows
                if rows:
                    x = rows[0] if shared else tree_map(_only, rows[0])
                    own = (x, rows[1].squeeze(0))
                value = self.one({k: v.squeeze(0) for k, v in values.items()}, *own).unsqueeze(0)
            elif rows:
                places = (0, None if shared else 0, 0)
                value = vmap(self.one, places, randomness="error")(values, *rows)
            else:
                value = vmap(self.one, randomness="error")(values)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if len(flat) > 1 and self.apart:
                return self._one_by_one(flat, rows, shared)
            if not isinstance(error, torch.linalg.LinAlgError):
                raise
            return self._outside(flat, error)
        except (ValueError, ArithmeticError) as error:
            if len(flat) == 1:
                return self._outside(flat, error)
            return self._one_by_one(flat, rows, shared)
        return value.to(flat.dtype) + log_det

    def _one_by_one(self, flat: Tensor, rows: tuple[Any, ...], shared: bool) -> Tensor:
        each = []
        for m in range(len(flat)):
            here = slice(m, m + 1)
            own = rows
            if rows:
                x = rows[0] if shared else tree_map(itemgetter(here), rows[0])
                own = (x, rows[1][here])
            each.append(self._at(flat[here], own, shared))
        return torch.cat(each)

    def _outside(self, flat: Tensor, error: Exception) -> Tensor:
        """Where the density of a chain raises (a matrix that is not positive definite, invalid
        parameters of a distribution), its density is 0."""
        if not self.refused:
            log.warning(
                "the log density raised %s at a proposal (%s): counted as outside the support",
                type(error).__name__, (str(error).splitlines() or [""])[0][:120],
            )  # fmt: skip
        self.refused += 1
        return flat.sum(1) * 0.0 - torch.inf


def _only(rows: Tensor) -> Tensor:
    return rows.squeeze(0)


def free_layout(shapes: Mapping[str, Shape], transforms: Mapping[str, Transform]) -> Layout:
    """The layout of the free values in a flat vector."""
    return Layout(tuple(Entry(k, transforms[k].free_shape(s)) for k, s in shapes.items()))


def natural(
    layout: Layout, transforms: Mapping[str, Transform], flat: Tensor
) -> tuple[Params, Tensor]:
    """Natural values and log |det| of free vectors [..., P]."""
    lead = flat.shape[:-1]
    values, total = {}, torch.zeros(lead, device=flat.device, dtype=flat.dtype)
    for name, u in layout.unflatten(flat).items():
        values[name], log_det = transforms[name].forward(u)
        if log_det is not None:
            total = total + log_det.reshape(*lead, -1).sum(-1)
    return values, total
