"""A Gaussian over the weights: variational inference, Laplace, SWAG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa import linalg
from doxa.errors import StoreError
from doxa.noise import repeated
from doxa.posterior.centred import CentredPosterior
from doxa.posterior.kinds import register_posterior


@register_posterior
class GaussianPosterior(CentredPosterior):
    """A Gaussian over the subset's parameters, one a member; the rest are points.

    mean: [K, P]; covariance: a `Structure` over the subset's elements, in layout order.
    """

    kind = "gaussian"
    flat = "mean"

    def __init__(self, *args: Any, mean: Tensor, covariance: linalg.Structure, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean = mean
        self.covariance = covariance

    def check_restored(self) -> None:
        if self.mean.ndim != 2:
            raise StoreError(f"the mean has the shape {list(self.mean.shape)}")
        super().check_restored()
        size = len(self.layout.index(self.network.subset_names))
        found = self.covariance.shape
        if found != (self.members, size):
            raise StoreError(f"a covariance of {found}, for {self.members} members, {size} weights")
        if len({v.dtype for v in self.covariance.state().values() if v.is_floating_point()}) > 1:
            raise StoreError("the covariance has numbers of several types")
        self._check_covariance()

    def _check_covariance(self) -> None:
        """Its parts fit together: a draw and a variance along a direction can be computed."""
        k, covariance = self.members, self.covariance
        drawn = covariance.sample(self.mean.new_zeros(1, k, covariance.numbers))
        along = covariance.quad(self.mean.new_zeros(k, 1, covariance.size))
        if not (bool(torch.isfinite(drawn).all()) and bool(torch.isfinite(along).all())):
            raise StoreError("the covariance is not finite")

    def centre(self) -> Tensor:
        return self.mean

    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        covariance = self.covariance if k is None else self.covariance.member(k)
        return self._away(covariance, keys, seed)

    def _away(self, covariance: linalg.Structure, keys: list[str], seed: int) -> Tensor:
        """Deviations from the mean, [K, S, subset], for keys that run over members, then draws."""
        size = (covariance.numbers,)
        eps = repeated("normal", seed, "draws", keys, size, self.device, self.dtype)
        each = eps.reshape(covariance.members, -1, covariance.numbers)  # [K, S, numbers]
        return covariance.sample(each.transpose(0, 1)).transpose(0, 1)

    def tensors(self) -> dict[str, Tensor]:
        state = {f"covariance.{k}": v for k, v in self.covariance.state().items()}
        return super().tensors() | {"mean": self.mean} | state

    def extra(self) -> dict[str, Any]:
        bounds = {"elbo": self.elbo, "evidence": self.log_evidence}
        return super().extra() | {"structure": self.covariance.name} | bounds

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        prefix = "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        covariance = linalg.structure(extra["structure"], state)
        new = cls(
            **common, **cls._shared(tensors, extra), mean=tensors["mean"], covariance=covariance
        )
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new
