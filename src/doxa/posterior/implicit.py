"""Point weights with noise in the layers (dropout): a posterior with draws, but no density."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.errors import StoreError, Unavailable
from doxa.linalg.layout import Params
from doxa.noise import repeated
from doxa.posterior.base import register_posterior
from doxa.posterior.weights import FunctionDraws, WeightPosterior


@register_posterior
class ImplicitPosterior(WeightPosterior):
    """A function is the network under one draw of the noise of its layers.

    theta: the point weights, [K, P].
    values: further buffers of layers for each member, {buffer: [K, ...]} (such as dropout's p).
    components: if given, each member is an equal mixture of this number of components, which share
        its weights. Buffers and layers' own parameters are then per component, [K, C, ...].
    objective: the maximised objective at the result, if the method reports it.
    objective_error: its standard error.
    """

    kind = "implicit"
    flat = "theta"
    objective: float | None = None
    objective_error: float | None = None

    def __init__(
        self, *args: Any, theta: Tensor, values: Params | None = None,
        components: int | None = None, **kw: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kw)
        self.theta = theta
        self.components = components
        self.same_weights = components is None
        self.values = values or {}

    @property
    def members(self) -> int:
        return self.theta.shape[0]

    def check_restored(self) -> None:
        if self.theta.ndim != 2:
            raise StoreError(f"theta has the shape {list(self.theta.shape)}")
        if self.components is not None and not 0 < self.components < 1 << 31:
            raise StoreError(f"{self.components} components")
        super().check_restored()
        own = {name: value.shape for name, value in self.network.net.named_buffers()}
        for name, value in self.values.items():
            if name not in own or value.shape != (self.members, *own[name]):
                raise StoreError(f"value {name!r} of shape {list(value.shape)} belongs to no layer")

    def _lead(self) -> tuple[int, ...]:
        return (self.members,) if self.components is None else (self.members, self.components)

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
            params, layers = self.layout.unflatten(self.theta[k]), self._own_layers(k)
            constant = frozenset(params if self.components else params | layers)
            if self.components and self.layers is not None:
                layers = self.network.layers.unflatten(self.layers[k, self._dealt(count)])
            groups.append(FunctionDraws(params | layers, count, constant, buffers))
        return groups

    def _dealt(self, count: int) -> Tensor:
        """The component of each of `count` draws; components take turns."""
        return torch.arange(count, device=self.device) % (self.components or 1)

    def _own_buffers(self, k: int, count: int) -> Params:
        if self.components is None:
            return super()._own_buffers(k, count)
        return {name: v[k, self._dealt(count)] for name, v in self.buffers.items()}

    def _own_layers(self, k: int) -> Params:
        """The layers' own parameters of member k; those of its first component, where there are
        several."""
        if self.components is None or self.layers is None:
            return super()._own_layers(k)
        return self.network.layers.unflatten(self.layers[k, 0])

    def _noise(self, k: int, count: int, seed: int) -> Params:
        """The noise of each layer, one draw per function: {buffer: [count, ...]}."""
        keys = [f"{self.ids[k]}/{j}" for j in range(count)]
        drawn = {}
        for name, site in self.network.sites.items():
            if site.use == "training":
                continue
            drawn[name] = repeated(
                site.kind, seed, f"masks/{name.removesuffix('.uniform')}", keys, site.drawn(None),
                self.device, self.dtype,
            )  # fmt: skip
        return drawn

    def draw(self, n: int | None = None, seed: int | None = None) -> Params:
        raise Unavailable(
            "this posterior draws the noise of layers, not weights; use functions(x, n)"
        )

    def tensors(self) -> dict[str, Tensor]:
        values = {f"value.{k}": v for k, v in self.values.items()}
        return super().tensors() | {"theta": self.theta} | values

    def extra(self) -> dict[str, Any]:
        own = {"objective": self.objective, "objective_error": self.objective_error}
        return super().extra() | own | {"components": self.components, "elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> ImplicitPosterior:
        values = {k[6:]: v for k, v in tensors.items() if k.startswith("value.")}
        # older artefacts hold only dropout rates, by layer
        values |= {f"{k[5:]}.p": v for k, v in tensors.items() if k.startswith("rate.")}
        new = cls(
            **common, **cls._shared(tensors, extra), theta=tensors["theta"], values=values,
            components=extra.get("components"),
        )  # fmt: skip
        new.objective, new.objective_error, new.elbo = (
            extra.get(name) for name in ("objective", "objective_error", "elbo")
        )
        return new
