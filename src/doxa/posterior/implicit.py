"""Point weights under layers' noise: a posterior with no density, only draws."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from doxa.errors import Unavailable
from doxa.linalg.layout import Params
from doxa.noise import Noise
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import FunctionDraws, WeightPosterior


@register_posterior
class ImplicitPosterior(WeightPosterior):
    """A function is the network under one draw of the noise that its layers take.

    theta: [K, P], the point weights. values: what layers are given besides, of each member:
    {buffer: [K, ...]} (dropout's p). objective: what was ascended, at the answer, where the method
    says; objective_error: its standard error.
    """

    kind = "implicit"
    objective: float | None = None
    objective_error: float | None = None

    def __init__(self, *args: Any, theta: Tensor, values: Params | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.theta = theta
        self.values = values or {}

    @property
    def members(self) -> int:
        return self.theta.shape[0]

    def _reference(self) -> Tensor:
        return self.theta

    def point(self) -> Tensor:
        return self.theta

    def groups(self, n: int | None, seed: int) -> list[FunctionDraws]:
        groups = []
        for k, count in enumerate(self._split(n)):
            if count == 0:
                continue
            own = {name: v[k].expand(count, *v.shape[1:]) for name, v in self.values.items()}
            buffers = self._noise(k, count, seed) | own | self._own_buffers(k, count)
            params = self.layout.unflatten(self.theta[k]) | self._own_layers(k)
            groups.append(FunctionDraws(params, count, frozenset(params), buffers))
        return groups

    def _noise(self, k: int, count: int, seed: int) -> Params:
        """Each layer's noise, once a function: {buffer: [count, ...]}."""
        keys = [f"{self.ids[k]}/{j}" for j in range(count)]
        drawn = {}
        for name, site in self.network.sites.items():
            if site.use == "training":
                continue
            source = Noise(
                seed, f"masks/{name.removesuffix('.uniform')}", keys, self.device, self.dtype
            )
            draw = source.normal if site.kind == "normal" else source.uniform
            drawn[name] = draw(site.drawn(None))
        return drawn

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        raise Unavailable("this posterior draws layers' noise, not weights; use functions(x, n)")

    def tensors(self) -> dict[str, Tensor]:
        values = {f"value.{k}": v for k, v in self.values.items()}
        return super().tensors() | {"theta": self.theta} | values

    def extra(self) -> dict[str, Any]:
        own = {"objective": self.objective, "objective_error": self.objective_error}
        return super().extra() | own | {"elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitPosterior:
        values = {k[6:]: v for k, v in tensors.items() if k.startswith("value.")}
        # until now only dropout's rates were kept, by layer
        values |= {f"{k[5:]}.p": v for k, v in tensors.items() if k.startswith("rate.")}
        new = cls(**common, **cls._shared(tensors, extra), theta=tensors["theta"], values=values)
        new.objective, new.objective_error = (
            extra.get(name) for name in ("objective", "objective_error")
        )
        new.elbo = extra.get("elbo")
        return new
