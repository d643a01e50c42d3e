"""Kept parameter vectors: ensembles, chains, snapshots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa import chains
from doxa.errors import MethodError
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import Draws, WeightPosterior


@register_posterior
class SamplePosterior(WeightPosterior):
    """Kept parameter vectors: ensembles, chains, snapshots. samples: [K members, T draws, P]."""

    kind = "sample"

    def __init__(self, *args: Any, samples: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.samples = samples

    @property
    def members(self) -> int:
        return self.samples.shape[0]

    def _reference(self) -> Tensor:
        return self.samples

    def point(self) -> Tensor:
        return self.samples[:, -1]

    def _count(self, n: int | None) -> int:
        return self.samples.shape[0] * self.samples.shape[1] if n is None else n

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        members, kept, size = self.samples.shape
        total = members * kept
        if n is not None and n > total:
            raise MethodError(f"{n} draws asked for, {total} kept; fit with more draws or members")
        flat = self.samples.reshape(total, size)
        index = torch.arange(total, device=flat.device)
        if n is not None and n < total:  # evenly thinned within each member
            counts = torch.tensor(self._split(n))
            member = torch.repeat_interleave(torch.arange(members), counts)
            before = (counts.cumsum(0) - counts)[member]
            place = (torch.arange(n) - before) * kept // counts[member]
            index = (member * kept + place).to(flat.device)
            flat = flat[index]
        owner = index // kept
        buffers = {name: v[owner] for name, v in self.buffers.items()}
        return [Draws(self.layout.unflatten(flat), len(index), buffers=buffers)]

    def to_arviz(self) -> Any:
        return chains.to_arviz(self.layout.unflatten(self.samples), self.record.stats)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"samples": self.samples}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SamplePosterior:
        return cls(**common, **cls._shared(tensors), samples=tensors["samples"])
