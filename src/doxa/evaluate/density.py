"""How far a row's features lie from those of the training rows.

A network's last features z(x) are what it decides on. Three ways to ask whether z is familiar:

    mahalanobis   min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c),  Σ shared by the classes   (Lee et al. 2018)
    density       −log Σ_c π_c N(z; μ_c, Σ_c),  a Σ_c for each class  (DDU: Mukhoti et al. 2023)
    knn           distance of z/‖z‖ to its k-th nearest training row         (Sun et al. 2022)

All are larger for what is stranger. Regression, and anything else without one class a row, has one
Gaussian. ReLU features have dead units, so every covariance gets a ridge: a small share of the mean
variance, on its diagonal. Everything is computed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.checks import positive, whole
from doxa.data import rows_of
from doxa.errors import DataError, ShapeError
from doxa.posterior import Posterior

_CHUNK_BYTES = 64 << 20  # of distances held at a time
DEFAULT_K = 50


class FeatureDensity:
    """Gaussians and neighbours of training features, fitted once and asked many times.

    Parameters
    ----------
    features: [N, D]; further axes (the places of an image) are averaged.
    labels: [N] classes, or None for one Gaussian.
    k: which neighbour; default 50, or N where there are fewer rows.
    ridge: added to the diagonal of each covariance, as a share of the mean shared variance.

    Examples
    --------
    >>> density = FeatureDensity(torch.randn(500, 8))
    >>> density.mahalanobis(torch.zeros(1, 8)) < density.mahalanobis(torch.full((1, 8), 9.0))
    tensor([True])
    """

    def __init__(
        self, features: Any, labels: Any = None, *, k: int | None = None, ridge: float = 1e-6
    ) -> None:
        z = _features(features, "the training features")
        rows, width = z.shape
        self.k = min(DEFAULT_K, rows) if k is None else whole("k", k)
        if self.k > rows:
            raise DataError(f"k = {self.k} neighbours asked for, with {rows} training rows")
        ridge = positive("ridge", ridge)
        index = _index(labels, z)
        classes = int(index.max()) + 1
        count = torch.bincount(index, minlength=classes).double()
        total = z.new_zeros(classes, width).index_add_(0, index, z)
        self.means = total / count[:, None]
        away = z - self.means[index]
        shared = away.T @ away / rows
        variance = shared.diagonal().mean()
        if not float(variance) > 0.0:
            raise DataError("every training row has the same features: no distance can be judged")
        jitter = ridge * variance * torch.eye(width, dtype=z.dtype, device=z.device)
        own = torch.stack([away[index == c].T @ away[index == c] for c in range(classes)])
        self._shared = torch.linalg.cholesky(shared + jitter)
        self._own = torch.linalg.cholesky(own / count[:, None, None] + jitter)
        self._log_share = (count / rows).log()
        self._directions = _unit(z)

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        train: tuple[Any, Any],
        *,
        k: int | None = None,
        ridge: float = 1e-6,
        batch: int = 1024,
    ) -> FeatureDensity:
        """From a posterior's features at its training rows (x, y); classes are used where there
        is one a row."""
        x, y = train
        labels = torch.as_tensor(y) if posterior.base_likelihood.classifies else None
        if labels is not None and labels.numel() != labels.shape[0]:
            labels = None
        return cls(features(posterior, x, batch), labels, k=k, ridge=ridge)

    def mahalanobis(self, features: Any) -> Tensor:
        """The squared distance to the nearest class, [N]."""
        z = self._check(features)
        return torch.stack([_squared(z - mean, self._shared) for mean in self.means]).amin(0)

    def density(self, features: Any) -> Tensor:
        """Minus the log density of the mixture of class Gaussians, [N]."""
        z = self._check(features)
        logs = []
        for mean, factor, log_share in zip(self.means, self._own, self._log_share, strict=True):
            normaliser = factor.diagonal().log().sum() + 0.5 * len(mean) * math.log(2.0 * math.pi)
            logs.append(log_share - normaliser - 0.5 * _squared(z - mean, factor))
        return -torch.logsumexp(torch.stack(logs), 0)

    def knn(self, features: Any) -> Tensor:
        """The distance between directions to the k-th nearest training row, [N]."""
        z = _unit(self._check(features))
        step = max(1, _CHUNK_BYTES // (8 * len(self._directions)))
        parts = []
        for start in range(0, len(z), step):
            cosine = z[start : start + step] @ self._directions.T
            kth = cosine.topk(self.k, 1, sorted=True).values[:, -1]
            parts.append((2.0 - 2.0 * kth).clamp_min(0.0).sqrt())  # ‖a − b‖² = 2 − 2 aᵀb
        return torch.cat(parts)

    def _check(self, features: Any) -> Tensor:
        z = _features(features, "the features").to(self.means.device)
        if z.shape[1] != self.means.shape[1]:
            raise ShapeError(
                f"features of width {z.shape[1]}, but the density was fitted to "
                f"{self.means.shape[1]}"
            )
        return z


def features(posterior: Posterior, x: Any, batch: int = 1024) -> Tensor:
    """A posterior's features at x, a block of rows at a time: [N, D]; places are averaged."""
    x, batch = posterior.read(x), whole("batch", batch)
    rows = rows_of(x, "x")
    if rows == 0:
        raise DataError("x has no rows (N = 0)")
    blocks = [
        posterior.features(tree_map(lambda t, a=start: t[a : a + batch], x))
        for start in range(0, rows, batch)
    ]
    return torch.cat([_flat(block) for block in blocks])


def _flat(z: Tensor) -> Tensor:
    return z if z.ndim <= 2 else z.flatten(2).mean(2)


def _features(values: Any, name: str) -> Tensor:
    z = torch.as_tensor(values).detach()
    if z.ndim < 2 or z.numel() == 0:
        raise ShapeError(f"{name} must be [N, D] with at least one row, got {list(z.shape)}")
    z = _flat(z.double())
    if not bool(torch.isfinite(z).all()):
        row = int((~torch.isfinite(z)).any(1).nonzero()[0])
        raise DataError(f"{name} of row {row} are not finite")
    return z


def _index(labels: Any, z: Tensor) -> Tensor:
    """Classes as 0, 1, ... without gaps: [N]."""
    if labels is None:
        return torch.zeros(len(z), dtype=torch.long, device=z.device)
    labels = torch.as_tensor(labels).to(z.device)
    if labels.numel() != len(z):
        raise ShapeError(f"{labels.numel()} labels for {len(z)} rows of features")
    index: Tensor = labels.flatten().unique(return_inverse=True)[1]
    return index


def _unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)


def _squared(away: Tensor, factor: Tensor) -> Tensor:
    """δᵀ (L Lᵀ)⁻¹ δ of each row."""
    return torch.linalg.solve_triangular(factor, away.T, upper=False).square().sum(0)
