"""Point weights under random masks: a posterior with no density, only draws."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doxa.errors import Unavailable
from doxa.layout import Params
from doxa.noise import Noise
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import Draws, WeightPosterior


@register_posterior
class ImplicitPosterior(WeightPosterior):
    """Dropout. theta: [K, P], the point weights; rates: {layer: p of each member, [K]}."""

    kind = "implicit"
    objective: float | None = None

    def __init__(self, *args: Any, theta: Tensor, rates: Params, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.theta = theta
        self.rates = rates

    @property
    def members(self) -> int:
        return self.theta.shape[0]

    def _reference(self) -> Tensor:
        return self.theta

    def point(self) -> Tensor:
        return self.theta

    def groups(self, n: int | None, seed: int) -> list[Draws]:
        groups = []
        for k, count in enumerate(self._split(n)):
            if count == 0:
                continue
            keys = [f"{self.ids[k]}/{j}" for j in range(count)]
            masks = {}
            for site, shape in self.network.sites.items():
                p = self.rates[site][k]
                u = Noise(seed, f"masks/{site}", keys, self.device, self.dtype).uniform((1, *shape))
                masks[site] = (u > p).to(self.dtype) / (1 - p)
            params = self.layout.unflatten(self.theta[k])
            groups.append(
                Draws(params, count, frozenset(params), masks, self._own_buffers(k, count))
            )
        return groups

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        raise Unavailable("a dropout posterior draws masks, not weights; use functions(x, n)")

    def tensors(self) -> dict[str, Tensor]:
        rates = {f"rate.{k}": v for k, v in self.rates.items()}
        return super().tensors() | {"theta": self.theta} | rates

    def extra(self) -> dict[str, Any]:
        return {"objective": self.objective}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitPosterior:
        rates = {k[5:]: v for k, v in tensors.items() if k.startswith("rate.")}
        new = cls(**common, **cls._shared(tensors), theta=tensors["theta"], rates=rates)
        new.objective = extra.get("objective")
        return new
