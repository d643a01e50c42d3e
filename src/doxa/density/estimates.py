"""Log densities that are estimated at each step: sums over rows, and stated gradient noise.

    RowSum          log p(θ) = log_prior(θ) + Σ_i log p(row_i | θ);  a batch of B of the N rows
                    estimates it by log_prior(θ) + (N/B) Σ_batch log p(row_i | θ)
    GradientNoise   log p(θ) + ξᵀθ,  ξ ~ N(0, C) anew at every step: the gradient has the noise ξ

With either, samplers on mini-batches (SGLD, SGHMC, constant SGD, minibatch MH) and optimisers have
on a bare density what they have on a network with data. Samplers with an exact acceptance test use
the whole density. The noise ξ belongs to the step, as a batch of rows does: two points that are
compared in a step have the same. So its value and its gradient agree, and an acceptance test on the
estimate has the noise ξᵀ(θ' − θ) of a batch to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data import Batch, Data, Feed, NoData, NoRows, Standardisation, cast
from doxa.errors import DataError, MethodError, ShapeError
from doxa.linalg.layout import Layout, Params
from doxa.noise import Noise

_AHEAD = 1 << 20  # the most numbers that are drawn at once
_WHOLE = ("all", "pass", "held-out")  # sources of all rows, which have no noise


class Estimated:
    """Base of log densities of which a step sees an estimate."""

    def data(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> Data | NoData:
        """What a run reads its batches from. `layout` is that of the free numbers."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowSum(Estimated):
    """A log density that is a sum over rows, of which a step may see a batch.

    Parameters
    ----------
    log_likelihood : callable
        A function of (parameters of one chain, rows) that returns one number per row, [B].
    rows : Tensor, or tree of Tensor
        The rows, [N, ...]; a tuple or dict of tensors with the same N is passed on as such.
    log_prior : callable, optional
        A function of the parameters of one chain. None: a constant.

    Examples
    --------
    >>> import doxa, torch
    >>> y = torch.linspace(-1, 3, 50).double()
    >>> density = doxa.density.RowSum(
    ...     lambda p, rows: -0.5 * (rows - p["mean"]).square(), y,
    ...     lambda p: -0.5 * p["mean"].square(),
    ... )
    >>> method = doxa.SGLD(draws=20, burn_in=20, step_size=1e-3)
    >>> draws = doxa.sample(density, {"mean": 0.0}, method, members=2, batch_size=10)
    >>> draws["mean"].shape
    torch.Size([2, 20])
    """

    log_likelihood: Callable[[Params, Any], Tensor]
    rows: Any
    log_prior: Callable[[Params], Tensor] | None = None

    def __post_init__(self) -> None:
        leaves = tree_flatten(self.rows)[0]
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise DataError("RowSum: rows must be a tensor [N, ...], or a tuple or dict of them")
        counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
        if len(counts) != 1 or counts == {0}:
            raise ShapeError(f"RowSum: rows must all have the same number of rows, not {counts}")

    @property
    def count(self) -> int:
        """N."""
        return int(tree_flatten(self.rows)[0][0].shape[0])

    def __call__(self, params: Params, rows: Any = None, scale: Tensor | None = None) -> Tensor:
        """The log density of one chain, or its estimate from some rows that stand for `scale`
        times as many."""
        if rows is None:
            like = next(iter(params.values()))
            rows = tree_map(lambda t: cast(t, like.device, like.dtype), self.rows)
        each = self.log_likelihood(dict(params), rows)
        count = tree_flatten(rows)[0][0].shape[0]
        if not isinstance(each, Tensor) or each.shape != (count,):
            shape = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ShapeError(f"RowSum: log_likelihood must return one number per row, [{count}], "
                             f"not {shape}")  # fmt: skip
        total = each.sum() if scale is None else each.sum() * scale
        return total if self.log_prior is None else total + self.log_prior(dict(params))

    def data(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> Data:
        rows = tree_map(lambda t: cast(t, device, dtype), self.rows)
        every = torch.arange(self.count)
        return Data(rows, (), [every], [Standardisation()], device, dtype, self.count)


@dataclass(frozen=True, eq=False)
class GradientNoise(Estimated):
    """A log density whose gradient has stated Gaussian noise at each step of a stochastic method.

    The noise is that of the gradient in free (unconstrained) space: without constraints, of the
    parameters as given.

    Parameters
    ----------
    log_density : callable
        As in `doxa.sample`.
    std : float, Tensor or dict, optional
        The standard deviation of the noise: one number, one per free number [P], or a dict of one
        entry per parameter.
    covariance : Tensor, optional
        The covariance C, [P, P], in place of `std`.

    Examples
    --------
    >>> import doxa, torch
    >>> density = doxa.density.GradientNoise(lambda p: -0.5 * p["x"].square().sum(), std=3.0)
    >>> method = doxa.SGLD(draws=20, burn_in=20, step_size=0.1, decay=0)
    >>> doxa.sample(density, {"x": torch.zeros(2)}, method, members=2)["x"].shape
    torch.Size([2, 20, 2])
    """

    log_density: Callable[[Params], Tensor]
    std: Any = None
    covariance: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.std is None) == (self.covariance is None):
            raise MethodError("GradientNoise: give std or covariance, and not both")

    def __call__(self, params: Params) -> Tensor:
        return self.log_density(params)

    def data(self, layout: Layout, device: torch.device, dtype: torch.dtype) -> NoData:
        return NoisyGradients(device, dtype, self._factor(layout).to(device, dtype))

    def _factor(self, layout: Layout) -> Tensor:
        """The standard deviations [P], or L [P, P] with L Lᵀ = C."""
        size = layout.size
        if self.covariance is not None:
            matrix = torch.as_tensor(self.covariance).double()
            if matrix.shape != (size, size):
                raise ShapeError(
                    f"GradientNoise: covariance must be [{size}, {size}], for {size} free numbers, "
                    f"not {list(matrix.shape)}"
                )
            factor: Tensor
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if int(failed) or not torch.allclose(matrix, matrix.T):
                raise DataError("GradientNoise: covariance must be symmetric and positive definite")
            return factor
        std = self.std
        if isinstance(std, Mapping):
            if set(std) != set(layout.names):
                raise MethodError(
                    f"GradientNoise: std must have one entry for each of {list(layout.names)}, not "
                    f"{list(std)}"
                )
            each = {e.name: torch.as_tensor(std[e.name]).double() for e in layout.entries}
            std = torch.cat([each[e.name].expand(e.shape).flatten() for e in layout.entries])
        found = torch.as_tensor(std).double()
        if found.ndim > 1 or (found.ndim == 1 and len(found) != size):
            raise ShapeError(
                f"GradientNoise: std must be a number, or one for each of {size} free numbers, not "
                f"of shape {list(found.shape)}"
            )
        if not bool((torch.isfinite(found) & (found >= 0)).all()):
            raise DataError(f"GradientNoise: std must be finite and at least 0, not {self.std!r}")
        return found.expand(size)

    def add_noise(self, value: Tensor, flat: Tensor, batch: Batch) -> Tensor:
        """log p(θ) + ξᵀθ, [M]; without noise where the batch stands for the whole density."""
        if not isinstance(batch.x, Tensor):
            return value
        return value + (batch.x.squeeze(1) * flat).sum(1)


@dataclass(frozen=True, eq=False)
class NoisyGradients(NoData):
    """No rows: each batch of a stochastic stage is the noise ξ of its step."""

    factor: Tensor

    def open(self, rows: Any, stage: str, keys: Sequence[str]) -> Feed:
        if rows in _WHOLE:
            return super().open(rows, stage, keys)
        return _NoiseFeed(self, stage, keys)


class _NoiseFeed(NoRows):
    """ξ of every step, [M, 1, P]: a function of (seed, stage, member, t)."""

    def __init__(self, data: NoisyGradients, stage: str, keys: Sequence[str]) -> None:
        super().__init__(len(keys), data.device, data.dtype)
        self._noise = Noise(0, f"gradient noise/{stage}", list(keys), data.device, data.dtype)
        self._factor = data.factor
        self._block = max(1, min(64, _AHEAD // (len(keys) * len(data.factor))))
        self._ahead: tuple[int, Tensor] | None = None  # ξ of the next steps, [steps, M, P]

    def batch(self, t: int) -> Batch:
        start = t - t % self._block
        if self._ahead is None or self._ahead[0] != start:
            steps = torch.arange(start, start + self._block, device=self._factor.device)
            drawn = self._noise.normal((len(self._factor),), steps.to(torch.int32))
            whole = self._factor.ndim == 2
            self._ahead = start, drawn @ self._factor.T if whole else drawn * self._factor
        noise = self._ahead[1][t - start].unsqueeze(1)  # [M, 1, P]
        return Batch(noise, (), self._batch.scale, shared=False)
