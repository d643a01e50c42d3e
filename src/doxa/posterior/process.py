"""A posterior over functions themselves: Gaussian processes, neural processes, functional methods.

A subclass says what a member believes of f at some rows, one by one (`marginals`) and together
(`joint`), and what it believed before the data (`prior_joint`); `predict` gives marginals,
`functions` draws jointly over rows.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from doxa.data import free_memory, rows_of
from doxa.errors import MemoryBudgetError, StoreError
from doxa.linalg.layout import Params
from doxa.noise import Noise
from doxa.posterior.base import Posterior
from doxa.predictive import Predictive


class ProcessPosterior(Posterior):
    """An equal mixture over members, each a Gaussian process over functions.

    event: the shape of one target.
    """

    event: tuple[int, ...]

    @abstractmethod
    def marginals(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at each row of fitted x, [K, N, *event] each."""

    @abstractmethod
    def joint(self, x: Any, k: int) -> tuple[Tensor, Tensor]:
        """Member k's mean of f at all rows, [N, O], and a square root of its covariance over them,
        [O', N, N], with O' = 1 where all outputs share it."""

    @abstractmethod
    def prior_joint(self, x: Any, k: int) -> tuple[Tensor, Tensor]:
        """The same before the data."""

    def joints(self, x: Any) -> tuple[Tensor, Tensor]:
        """`joint` of all members: [K, N, O] and [K, O', N, N]."""
        return _stacked([self.joint(x, k) for k in range(self.members)])

    def prior_joints(self, x: Any) -> tuple[Tensor, Tensor]:
        return _stacked([self.prior_joint(x, k) for k in range(self.members)])

    @abstractmethod
    def theta(self) -> Params:
        """The likelihood's parameters, of each member: {name: [K, ...]}."""

    def prepared(self, x: Any) -> Any:
        """x as the functions above take it."""
        return self.check_inputs(x)

    def check_restored(self) -> None:
        super().check_restored()
        if not all(type(size) is int and size >= 0 for size in self.event):
            raise StoreError(f"a target is said to have the shape {self.event!r:.60}")
        self.check_two_rows()

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """The closed form: a Gaussian for each row, whatever n; `functions` draws jointly. Where
        the noise is not Gaussian, n draws for each row by itself."""
        seed = self.sampling(n, seed, keep)
        f, variance = (part.to(self.dtype) for part in self.marginals(self.prepared(x)))
        draws = 100 if n is None else max(1, n // self.members)
        return Predictive(
            f, self.likelihood, self.theta(), f_variance=variance, seed=seed, draws=draws
        )

    def _draw_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        """Draws of f, jointly over the rows of x: [n, N, ...], in units of y."""
        return self._jointly(self.joints, x, n, seed, "draws")

    def _draw_prior_functions(self, x: Any, n: int, seed: int | None) -> Tensor:
        return self._jointly(self.prior_joints, x, n, seed, "prior")

    def _jointly(self, of: Any, x: Any, n: int, seed: int | None, purpose: str) -> Tensor:
        seed = self.sampling(n, seed, "samples")
        x = self.prepared(x)
        rows = rows_of(x, "x")
        counts = self.split(n)
        most = max(counts)
        size = 4 * rows * self.members + n * max(1, torch.Size(self.event).numel())
        need = 8 * rows * size
        if need > free_memory(self.device) // 2:
            raise MemoryBudgetError(
                f"joint draws at {rows} rows take {need / 2**30:.3g} GiB; ask for fewer rows, or "
                "for marginals with predict"
            )
        mean, root = of(x)  # [K, N, O], [K, O', N, N]
        keys = [f"{name}/{j}" for name in self.ids for j in range(most)]
        noise = Noise(seed, purpose, keys, mean.device, mean.dtype)
        eps = noise.normal(tuple(mean.shape[1:])).unflatten(0, (-1, most))  # [K, most, N, O]
        if root.shape[1] == 1:
            each = mean.unsqueeze(1) + root @ eps
        else:
            each = mean.unsqueeze(1) + torch.einsum("konm,kcmo->kcno", root, eps)
        drawn = [own[:count] for own, count in zip(each, counts, strict=True)]
        f = torch.cat(drawn).reshape(n, rows, *self.event).to(self.dtype)
        return self.likelihood.location(f, 1)


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    means, roots = zip(*pairs, strict=True)
    return torch.stack(means), torch.stack(roots)


def square_root(covariance: Tensor) -> Tensor:
    """R with RRᵀ = the covariance [..., N, N], which may be singular where rows are close."""
    diagonal = covariance.diagonal(0, -2, -1)
    size = diagonal.amax(-1, keepdim=True)
    root, failed = covariance, torch.ones_like(size[..., None], dtype=torch.bool)
    for jitter in (1e-13, 1e-11):  # of the largest variance: far below what a draw could show
        raised = covariance.diagonal_scatter(diagonal + jitter * size, 0, -2, -1)
        factor, info = torch.linalg.cholesky_ex(raised)
        root = torch.where(failed, factor, root)
        failed = failed & (info != 0)[..., None, None]
        if not bool(failed.any()):
            return root
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    return torch.where(failed, vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2), root)
