"""A posterior over functions: Gaussian processes, neural processes, functional methods.

A subclass implements the Gaussian of f for each member: per row (`marginals`), over several rows
(`joint`), and the same for the prior (`prior_joint`). `predict` uses the marginals; `functions`
draws jointly over rows.
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
        """The mean of f of member k at all rows, [N, O], and a square root of the covariance over
        the rows, [O', N, N], with O' = 1 where all outputs share it."""

    @abstractmethod
    def prior_joint(self, x: Any, k: int) -> tuple[Tensor, Tensor]:
        """The same under the prior."""

    def joints(self, x: Any) -> tuple[Tensor, Tensor]:
        """`joint` of all members: [K, N, O] and [K, O', N, N]."""
        return _stacked([self.joint(x, k) for k in range(self.members)])

    def prior_joints(self, x: Any) -> tuple[Tensor, Tensor]:
        return _stacked([self.prior_joint(x, k) for k in range(self.members)])

    @abstractmethod
    def theta(self) -> Params:
        """The likelihood parameters of each member: {name: [K, ...]}."""

    def prepared(self, x: Any) -> Any:
        """x in the form that `marginals` and `joint` take."""
        return self.check_inputs(x)

    def check_restored(self) -> None:
        super().check_restored()
        if not all(type(size) is int and size >= 0 for size in self.event):
            raise StoreError(f"the artefact has an invalid target shape: {self.event!r:.60}")
        self.check_two_rows()

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """The closed form: a Gaussian for each row, independent of n.

        Where the noise is not Gaussian, n draws for each row separately. `functions` draws jointly.
        """
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
                f"joint draws at {rows} rows take {need / 2**30:.3g} GiB; use fewer rows, or "
                "predict for marginals"
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
    for jitter in (
        1e-13,
        1e-11,
    ):  # relative to the largest variance: far below the precision of a draw
        raised = covariance.diagonal_scatter(diagonal + jitter * size, 0, -2, -1)
        factor, info = torch.linalg.cholesky_ex(raised)
        root = torch.where(failed, factor, root)
        failed = failed & (info != 0)[..., None, None]
        if not bool(failed.any()):
            return root
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    return torch.where(failed, vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2), root)
