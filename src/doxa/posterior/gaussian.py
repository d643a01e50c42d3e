"""A Gaussian over the weights: variational inference, Laplace, SWAG."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from doxa import linalg
from doxa.linalg.layout import Layout
from doxa.noise import Noise
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import FunctionDraws, WeightPosterior, concatenate

_DRAWN_BYTES = 256 << 20  # of draws made together: a share of what is free would decide bits


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

    def groups(self, n: int | None, seed: int) -> Iterator[FunctionDraws]:
        counts = self._split(n)
        budget = self.memory_budget or _DRAWN_BYTES
        most = budget // (4 * self.subset.size * self.dtype.itemsize) or 1
        if self.members * max(counts) <= most:
            keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
            away = self._away(self.covariance, keys, seed)  # [K, S, subset]
            groups = [self._group(k, away[k, :c]) for k, c in enumerate(counts) if c]
            yield from groups if groups[0].constant else [_merge(groups)]
            return
        for k, count in enumerate(counts):
            covariance = self.covariance.member(k)
            for start in range(0, count, most):
                keys = [f"{self.ids[k]}/{j}" for j in range(start, min(start + most, count))]
                yield self._group(k, self._away(covariance, keys, seed)[0])

    def _away(self, covariance: linalg.Structure, keys: list[str], seed: int) -> Tensor:
        """Deviations from the mean, [K, S, subset], for keys that run over members, then draws."""
        noise = Noise(seed, "draws", keys, self.device, self.dtype)
        eps = noise.normal((covariance.numbers,))
        each = eps.reshape(covariance.members, -1, covariance.numbers)  # [K, S, numbers]
        return covariance.sample(each.transpose(0, 1)).transpose(0, 1)

    def _group(self, k: int, away: Tensor) -> FunctionDraws:
        """Draws of member k; what is outside the subset is common to them."""
        names = self.network.subset_names
        params = self.layout.unflatten(self.mean[k])
        centre = self.subset.flatten(params)
        params |= self.subset.unflatten(centre + away)
        own = self._own_layers(k)
        params |= own
        constant = (frozenset(self.layout.names) - set(names)) | set(own)
        return FunctionDraws(params, len(away), constant, buffers=self._own_buffers(k, len(away)))

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


def _merge(groups: list[FunctionDraws]) -> FunctionDraws:
    if len(groups) == 1:
        return groups[0]
    cat = lambda name: concatenate([getattr(g, name) for g in groups], 0)  # noqa: E731
    return FunctionDraws(cat("params"), sum(g.count for g in groups), buffers=cat("buffers"))
