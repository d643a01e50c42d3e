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

from doxa.errors import MethodError, StoreError
from doxa.linalg.layout import Params
from doxa.posterior import chains
from doxa.posterior.function_draws import FunctionDraws
from doxa.posterior.kinds import register_posterior
from doxa.posterior.weights import WeightPosterior

_GATHERED = 8 << 20  # bytes of draws that are copied at a time


@register_posterior
class SamplePosterior(WeightPosterior):
    """Kept parameter vectors: ensembles, chains, snapshots, particles.

    samples: [K members, T draws, P], in memory on the posterior's device, or on disk.
    chain: a member's draws follow each other, so that it makes sense to ask whether they mix;
        False where they are exchangeable (particles, snapshots). Default: where there are several.
    per_draw: buffers and what layers learned are of each draw, [K, T, ...], not of each member.
    """

    kind = "sample"
    flat = "samples"

    def __init__(
        self, *args: Any, samples: Tensor, chain: bool | None = None, per_draw: bool = False,
        **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kw)
        self.samples = samples
        self.chain = samples.shape[1] > 1 if chain is None else chain
        self.per_draw = per_draw

    @property
    def members(self) -> int:
        return self.samples.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it predicts, which is not where draws on disk are."""
        return self.samples.device if self.model is None else self.model.device

    def check_restored(self) -> None:
        if self.samples.ndim != 3 or not self.samples.shape[1]:
            raise StoreError(f"samples have the shape {list(self.samples.shape)}")
        if not (isinstance(self.chain, bool) and isinstance(self.per_draw, bool)):
            raise StoreError("chain and per_draw are True or False")
        super().check_restored()

    def _lead(self) -> tuple[int, ...]:
        return tuple(self.samples.shape[:2]) if self.per_draw else (self.members,)

    def _reference(self) -> Tensor:
        return self.samples

    def point(self) -> Tensor:
        return self.samples[:, -1].to(self.device)

    def _count(self, n: int | None) -> int:
        return self.samples.shape[0] * self.samples.shape[1] if n is None else n

    def groups(self, n: int | None, seed: int) -> Iterator[FunctionDraws]:
        members, kept, size = self.samples.shape
        total = members * kept
        if n is not None and n > total:
            raise MethodError(f"{n} draws asked for, {total} kept; fit with more draws or members")
        flat = self.samples.reshape(total, size)
        if n is None or n == total:
            yield self._group(flat, None)
            return
        counts = torch.tensor(self._split(n))  # evenly thinned within each member
        member = torch.repeat_interleave(torch.arange(members), counts)
        before = (counts.cumsum(0) - counts)[member]
        place = (torch.arange(n) - before) * kept // counts[member]
        for index in (member * kept + place).split(max(1, _GATHERED // flat[0].nbytes)):
            yield self._group(flat[index.to(flat.device)], index)

    def _group(self, flat: Tensor, index: Tensor | None) -> FunctionDraws:
        """Draws [S, P] that have these numbers [S] of all; None: they are all."""
        if not self.buffers and self.layers is None:
            return FunctionDraws(self.layout.unflatten(flat), len(flat), device=self.device)
        index = torch.arange(len(flat)) if index is None else index
        kept = self.samples.shape[1]
        place = (index if self.per_draw else index // kept).to(self.device)
        each = (lambda v: v.flatten(0, 1)) if self.per_draw else (lambda v: v)
        buffers = {name: each(v)[place] for name, v in self.buffers.items()}
        params = self.layout.unflatten(flat)
        if self.layers is not None:
            params |= self.network.layers.unflatten(each(self.layers)[place])
        return FunctionDraws(params, len(flat), buffers=buffers, device=self.device)

    def _own_buffers(self, k: int, count: int) -> Params:
        if not self.per_draw:
            return super()._own_buffers(k, count)
        return {name: v[k, -1].expand(count, *v.shape[2:]) for name, v in self.buffers.items()}

    def _own_layers(self, k: int) -> Params:
        if self.layers is None or not self.per_draw:
            return super()._own_layers(k)
        return self.network.layers.unflatten(self.layers[k, -1])

    def to_arviz(self) -> Any:
        return chains.to_arviz(self.layout.unflatten(self.samples), self.record.stats)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"samples": self.samples}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"chain": self.chain, "per_draw": self.per_draw}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SamplePosterior:
        facts = {name: extra[name] for name in ("chain", "per_draw") if name in extra}
        return cls(**common, **cls._shared(tensors, extra), samples=tensors["samples"], **facts)
