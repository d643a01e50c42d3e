"""A Gaussian over the weights: variational inference, Laplace, SWAG."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doxa import linalg
from doxa.layout import Layout
from doxa.noise import Noise
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import Draws, WeightPosterior, concatenate


@register_posterior
class GaussianPosterior(WeightPosterior):
    """A Gaussian over the subset's parameters, one a member; the rest are points.

    mean: [K, P]; covariance: a `Structure` over the subset's elements, in layout order.
    """

    kind = "gaussian"

    def __init__(self, *args: Any, mean: Tensor, covariance: linalg.Structure, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean = mean
        self.covariance = covariance

    @property
    def members(self) -> int:
        return self.mean.shape[0]

    def _reference(self) -> Tensor:
        return self.mean

    def point(self) -> Tensor:
        return self.mean

    @property
    def subset(self) -> Layout:
        return self.layout.select(self.network.subset_names)

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        index = self.layout.index(self.network.subset_names).to(self.mean.device)
        counts = self._split(n)
        keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
        noise = Noise(seed, "draws", keys, self.device, self.dtype)
        eps = noise.normal((len(index),)).reshape(self.members, max(counts), -1).transpose(0, 1)
        away = self.covariance.sample(eps).transpose(0, 1)  # [K, S, subset]
        names = frozenset(self.layout.names) - set(self.network.subset_names)
        groups = []
        for k, count in enumerate(counts):
            if count == 0:
                continue
            chosen = self.mean[k, index] + away[k, :count]
            params = self.layout.unflatten(self.mean[k])
            params |= self.subset.unflatten(chosen)
            groups.append(Draws(params, count, names, buffers=self._own_buffers(k, count)))
        return groups if names else [_merge(groups)]

    def tensors(self) -> dict[str, Tensor]:
        state = {f"covariance.{k}": v for k, v in self.covariance.state().items()}
        return super().tensors() | {"mean": self.mean} | state

    def extra(self) -> dict[str, Any]:
        bounds = {"elbo": self.elbo, "evidence": self.log_evidence}
        return {"structure": self.covariance.name} | bounds

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> GaussianPosterior:
        prefix = "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        covariance = linalg.structure(extra["structure"], state)
        new = cls(**common, **cls._shared(tensors), mean=tensors["mean"], covariance=covariance)
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def _merge(groups: list[Draws]) -> Draws:
    if len(groups) == 1:
        return groups[0]
    cat = lambda name: concatenate([getattr(g, name) for g in groups], 0)  # noqa: E731
    return Draws(cat("params"), sum(g.count for g in groups), buffers=cat("buffers"))
