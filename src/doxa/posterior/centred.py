"""A point for each member, and draws of the subset's weights around it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from doxa.linalg.layout import Layout
from doxa.posterior.function_draws import FunctionDraws
from doxa.posterior.weights import WeightPosterior, concatenate

_DRAWN_BYTES = 256 << 20  # of draws made together: a share of what is free would decide bits


class CentredPosterior(WeightPosterior):
    """A draw is a member's centre plus a deviation of the weights of the subset: a Gaussian, or a
    flow. What is outside the subset is common to a member's draws."""

    @abstractmethod
    def centre(self) -> Tensor:
        """From where deviations are counted, [K, P]."""

    @abstractmethod
    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        """Of all members, or of member k alone, [K, S, subset], for keys that run over members,
        then draws."""

    @property
    def members(self) -> int:
        return self.centre().shape[0]

    def _reference(self) -> Tensor:
        return self.centre()

    def point(self) -> Tensor:
        return self.centre()

    @property
    def subset(self) -> Layout:
        return self.layout.select(self.network.subset_names)

    def groups(self, n: int | None, seed: int) -> Iterator[FunctionDraws]:
        counts = self._split(n)
        budget = self.memory_budget or _DRAWN_BYTES
        most = budget // (4 * self.subset.size * self.dtype.itemsize) or 1
        if self.members * max(counts) <= most:
            keys = [f"{k}/{j}" for k in self.ids for j in range(max(counts))]
            away = self.deviations(keys, seed)  # [K, S, subset]
            groups = [self._group(k, away[k, :c]) for k, c in enumerate(counts) if c]
            yield from groups if groups[0].constant else [_merge(groups)]
            return
        for k, count in enumerate(counts):
            for start in range(0, count, most):
                keys = [f"{self.ids[k]}/{j}" for j in range(start, min(start + most, count))]
                yield self._group(k, self.deviations(keys, seed, k)[0])

    def _group(self, k: int, away: Tensor) -> FunctionDraws:
        """Draws of member k; what is outside the subset is common to them."""
        names = self.network.subset_names
        params = self.layout.unflatten(self.centre()[k])
        centre = self.subset.flatten(params)
        params |= self.subset.unflatten(centre + away)
        own = self._own_layers(k)
        params |= own
        constant = (frozenset(self.layout.names) - set(names)) | set(own)
        return FunctionDraws(params, len(away), constant, buffers=self._own_buffers(k, len(away)))


def _merge(groups: list[FunctionDraws]) -> FunctionDraws:
    if len(groups) == 1:
        return groups[0]
    cat = lambda name: concatenate([getattr(g, name) for g in groups], 0)  # noqa: E731
    return FunctionDraws(cat("params"), sum(g.count for g in groups), buffers=cat("buffers"))
