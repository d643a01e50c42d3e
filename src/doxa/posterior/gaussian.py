"""A Gaussian over the weights: variational inference, Laplace, SWAG."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doxa import linalg
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
