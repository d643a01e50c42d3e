"""A flow over some of the weights, as a posterior: any number of draws, each with its log q."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.engine import Engine
from doxa.errors import StoreError
from doxa.model.functional import Functional, made_small
from doxa.model.layers import deviation
from doxa.noise import repeated
from doxa.posterior import CentredPosterior, register_posterior


@register_posterior
class FlowPosterior(CentredPosterior):
    """θ = μ + σ ∘ f(z) over the subset's parameters, one q a member; the rest are points.

    mean: μ, [K, P], whose entries outside the subset are those points. rho: σ = softplus(ρ),
    [K, subset]. flow: the flow's own numbers, [K, Q].
    """

    kind = "flow"
    flat = "mean"

    def __init__(self, *args: Any, mean: Tensor, rho: Tensor, flow: Tensor, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.mean, self.rho, self.flow = mean, rho, flow

    def check_restored(self) -> None:
        if self.mean.ndim != 2 or self.rho.ndim != 2:
            raise StoreError(f"the mean has the shape {list(self.mean.shape)}")
        super().check_restored()
        size = len(self.layout.index(self.network.subset_names))
        self._check_tensor("rho", self.rho, (self.members, size))
        most = self.flow.numel()
        made = made_small(lambda: Functional(self.method.module(size)), most)
        self._check_tensor("flow", self.flow, (self.members, made.layout.size))

    def centre(self) -> Tensor:
        return self.mean

    def point(self) -> Tensor:
        """Each member at z = 0: not the mean of its draws."""
        index = self.layout.index(self.network.subset_names).to(self.device)
        away = self.push(torch.zeros_like(self.rho).unsqueeze(1))[0][:, 0]
        return self.mean.index_add(1, index, away)

    def deviations(self, keys: list[str], seed: int, k: int | None = None) -> Tensor:
        return self.push(self.normals(keys, seed, k), k)[0]

    def log_q(self, n: int | None = None, seed: int | None = None) -> Tensor:
        """log q of the subset's weights at each of `draw(n, seed)`, [n], where q is that of the
        member which the draw is of."""
        seed = self.sampling(n, seed, "samples")
        counts = self._split(n)
        z = self.normals([f"{k}/{j}" for k in self.ids for j in range(max(counts))], seed, None)
        each = log_normal(z) - self.push(z)[1]  # [K, S]
        return torch.cat([own[:count] for own, count in zip(each, counts, strict=True)])

    def normals(self, keys: list[str], seed: int, k: int | None) -> Tensor:
        """z, [K, S, subset]."""
        size = (self.rho.shape[1],)
        z = repeated("normal", seed, "draws", keys, size, self.device, self.dtype)
        return z.unflatten(0, (self.members if k is None else 1, -1))

    def push(self, z: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """σ ∘ f(z), [K, S, subset], and log |det ∂θ/∂z|, [K, S]; of all members, or of one."""
        own = slice(None) if k is None else slice(k, k + 1)
        std = deviation(self.rho[own])
        y, change = Engine("stack").call(self._module, self.flow[own], z)
        return std.unsqueeze(1) * y, change + std.log().sum(1, keepdim=True)

    @cached_property
    def _module(self) -> Functional:
        return Functional(self.method.module(self.rho.shape[1])).to(self.device, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"mean": self.mean, "rho": self.rho, "flow": self.flow}

    def extra(self) -> dict[str, Any]:
        return super().extra() | {"elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> FlowPosterior:
        q = {name: tensors[name] for name in ("mean", "rho", "flow")}
        new = cls(**common, **cls._shared(tensors, extra), **q)
        new.elbo = extra.get("elbo")
        return new


def log_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I), over the last axis."""
    return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
