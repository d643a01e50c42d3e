"""Kept parameter vectors: ensembles, chains, snapshots.

They may lie on disk (`store.DrawsFile`, or a saved posterior that is larger than the memory for
it): `samples` is then a mapped tensor on the CPU, and a prediction reads a tile's draws when it
comes to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from doxa import chains
from doxa.errors import MethodError
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import Draws, WeightPosterior

_GATHERED = 16 << 20  # bytes of draws that are copied at a time


@register_posterior
class SamplePosterior(WeightPosterior):
    """Kept parameter vectors: ensembles, chains, snapshots. samples: [K members, T draws, P], in
    memory on the posterior's device, or on disk."""

    kind = "sample"

    def __init__(self, *args: Any, samples: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.samples = samples

    @property
    def members(self) -> int:
        return self.samples.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it predicts, which is not where draws on disk are."""
        return self.samples.device if self.model is None else self.model.device

    def _reference(self) -> Tensor:
        return self.samples

    def point(self) -> Tensor:
        return self.samples[:, -1].to(self.device)

    def _count(self, n: int | None) -> int:
        return self.samples.shape[0] * self.samples.shape[1] if n is None else n

    def groups(self, n: int | None, seed: int) -> Iterator[Draws]:
        members, kept, size = self.samples.shape
        total = members * kept
        if n is not None and n > total:
            raise MethodError(f"{n} draws asked for, {total} kept; fit with more draws or members")
        flat = self.samples.reshape(total, size)
        if n is None or n == total:
            yield self._group(flat, torch.arange(total) // kept)
            return
        counts = torch.tensor(self._split(n))  # evenly thinned within each member
        member = torch.repeat_interleave(torch.arange(members), counts)
        before = (counts.cumsum(0) - counts)[member]
        place = (torch.arange(n) - before) * kept // counts[member]
        for index in (member * kept + place).split(max(1, _GATHERED // flat[0].nbytes)):
            yield self._group(flat[index.to(flat.device)], index // kept)

    def _group(self, flat: Tensor, owner: Tensor) -> Draws:
        """Draws [S, P] of these members [S]."""
        owner = owner.to(self.device)
        buffers = {name: v[owner] for name, v in self.buffers.items()}
        return Draws(self.layout.unflatten(flat), len(flat), buffers=buffers, device=self.device)

    def to_arviz(self) -> Any:
        return chains.to_arviz(self.layout.unflatten(self.samples), self.record.stats)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"samples": self.samples}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SamplePosterior:
        return cls(**common, **cls._shared(tensors), samples=tensors["samples"])
