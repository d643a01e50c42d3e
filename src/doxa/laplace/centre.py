"""Where a Gaussian over the weights of a classifier belongs: at its mean, or at the mode.

Rows that are told apart with hardly a doubt stop pushing: their posterior is skewed, away from
doubt, and a Gaussian at the maximum θ* reaches as far to the other side. Its average gradient is
not zero there. Of the linearised network, f + J(m + δ) with δ ~ N(0, Σ), it is at the minimum of

    F(m) = Σ_i E[−log p(y_i | f_i + J_i(m + δ))] + sᵀJm + ½ mᵀΛm,    s = ∂ log p(y | f)/∂f at θ*

which is the Kullback–Leibler divergence to that network's posterior as a function of the Gaussian's
mean (Khan et al. 2019; Immer, Korzepa & Bauer 2021 refine all of it), but for s, which leaves θ*
where there is no spread, whether or not it is a maximum. F is convex. The average is over fixed
draws ±δ, and conjugate gradients preconditioned by Σ go down: a product with J and one with Jᵀ a
round, each about two passes of the network, and a line search on outputs alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows
from doxa.errors import MethodError
from doxa.laplace.curvature import Jacobians, chunk_bytes, flatten_outputs
from doxa.laplace.outputs import Outputs
from doxa.laplace.posterior import LaplacePosterior
from doxa.laplace.statistics import some_rows
from doxa.linalg.layout import Params
from doxa.method import Run
from doxa.model import Model

log = logging.getLogger("doxa")

_DRAWS = 128  # half of them the other half's negatives
_NUMBERS = 1 << 24  # of outputs over rows and draws, at the most
_ROUNDS = 30
_HALVINGS = 12  # of a bracket in which a step's length lies
_LONGEST = 4.0  # in steps of Newton's method at θ*
_ARRIVED = 1e-4  # of gᵀΣg, of that at the start


def move(run: Run, posterior: LaplacePosterior, prior: Tensor, asked: bool) -> None:
    """Moves its Gaussians. Where nobody asked, and the network has no forward derivatives, they
    stay."""
    try:
        own = moved(run, posterior, prior).to(run.dtype)
    except MethodError as error:
        if asked:
            raise
        log.info("laplace: the Gaussian stays at the mode: %s", error)
        return
    posterior.at = posterior.mean
    posterior.mean = posterior.mean.index_add(1, run.subset_index, own)


def moved(run: Run, posterior: LaplacePosterior, prior: Tensor) -> Tensor:
    """m of each member, [M, p] over the uncertain weights; `prior` are Λ's entries."""
    batch = Pass(run.rows, run.split_of).batch(0)
    line = _Linearised(posterior._jacobians(), batch)
    outputs = Outputs(run.likelihood, run.constants, batch, run.net.output, "ggn")
    count = batch_rows(batch) * line.jacobians.outputs
    half = max(1, min(_DRAWS, _NUMBERS // (count * run.size)) // 2)
    keys = [f"{k}/{j}" for k in posterior.ids for j in range(half)]
    delta = posterior._away(posterior.covariance, keys, seed=0)  # [M, S/2, p]
    f, away = line.along(delta)
    average = _Average(outputs, f, torch.cat([away, -away], 1))

    def scaled(gradient: Tensor) -> Tensor:
        return posterior.covariance.matmul(gradient.to(f.dtype)).double()

    m = torch.zeros_like(prior, dtype=torch.float64)
    at = torch.zeros_like(f)  # Jm
    downhill, step = torch.zeros_like(m), torch.zeros_like(m)
    last, first = torch.zeros_like(m[:, 0]), torch.zeros_like(m[:, 0])
    for i in range(_ROUNDS):
        before = downhill
        downhill = line.back(average.pull(at)).double() - prior * m
        natural = scaled(downhill)
        size = (downhill * natural).sum(1)  # gᵀΣg
        first = size if i == 0 else first
        if bool((size <= _ARRIVED * first).all()):
            break
        kept = ((size - (before * natural).sum(1)) / last.clamp_min(1e-300)).clamp_min(0.0)
        step = natural + (kept[:, None] * step if i else 0.0)
        last = size
        turn = line.push(step)
        length = _length(average, at, turn, prior, m, step)
        m, at = m + length[:, None] * step, at + length[:, None, None].to(at.dtype) * turn
    return m


def _length(
    average: _Average, at: Tensor, turn: Tensor, prior: Tensor, m: Tensor, step: Tensor
) -> Tensor:
    """[M]: how far to go, by halving the bracket in which F stops falling along the step."""
    low = torch.zeros_like(m[:, 0])
    high = torch.full_like(low, _LONGEST)
    linear, square = (prior * m * step).sum(1), (prior * step.square()).sum(1)
    for _ in range(_HALVINGS):
        t = (low + high) / 2
        here = at + t[:, None, None].to(at.dtype) * turn
        falls = (average.pull(here) * turn).double().sum((1, 2)) > linear + t * square
        low, high = torch.where(falls, t, low), torch.where(falls, high, t)
    return low


@dataclass(frozen=True)
class _Average:
    """Scores averaged over the draws Jδ, `away` [M, S, B, O], about f [M, B, O]."""

    outputs: Outputs
    f: Tensor
    away: Tensor

    def pull(self, at: Tensor) -> Tensor:
        """w E[s(f + Jm + Jδ)] − w s(f) for Jm [M, B, O]: [M, B, O]."""
        members, draws = self.away.shape[:2]
        own = self.outputs
        several = Outputs(
            own.likelihood, own.theta, own.part.times(draws), own.shape, own.kind
        ).score(((self.f + at).unsqueeze(1) + self.away).flatten(0, 1))
        change = several.unflatten(0, (members, draws)).mean(1) - own.score(self.f)
        weight = own.part.weight
        return change if weight is None else change * weight[..., None].to(change.dtype)


@dataclass(frozen=True)
class _Linearised:
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
