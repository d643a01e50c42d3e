"""Parameters of several functions, as a network's forward pass takes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from doxa.linalg.layout import Params
from doxa.model import likelihood_parameters


@dataclass
class FunctionDraws:
    """Parameters of `count` functions; those named in `constant` are common to all of them.

    `buffers` are layers' noise and values, and BatchNorm's statistics. Parameters that are
    elsewhere, such as on disk, come to the `device` with their part."""

    params: Params
    count: int
    constant: frozenset[str] = frozenset()
    buffers: Params = field(default_factory=dict)  # {name: [count, ...]}
    device: torch.device | None = None  # None: where the parameters are

    def part(self, s: slice) -> FunctionDraws:
        """Some of the draws; a single one comes without its axis, so that layers run as in the
        plain network."""
        if s.stop - s.start == 1:
            one = {k: v if k in self.constant else v[s.start] for k, v in self.params.items()}
            params = self._here(one)
            return FunctionDraws(
                params, 1, frozenset(params), {k: v[s] for k, v in self.buffers.items()}
            )
        if s == slice(0, self.count):
            return FunctionDraws(self._here(self.params), self.count, self.constant, self.buffers)
        some = {k: v if k in self.constant else v[s] for k, v in self.params.items()}
        params = self._here(some)
        count = len(range(*s.indices(self.count)))
        return FunctionDraws(
            params, count, self.constant, {k: v[s] for k, v in self.buffers.items()}
        )

    def _here(self, params: Params) -> Params:
        return params if self.device is None else {k: v.to(self.device) for k, v in params.items()}

    def theta(self) -> Params:
        """Likelihood parameters of each draw; copies, so that who has them does not hold all the
        other parameters."""
        own = {k: v.clone() for k, v in self._here(likelihood_parameters(self.params)).items()}
        return {
            k: v.expand(self.count, *v.shape) if f"likelihood.{k}" in self.constant else v
            for k, v in own.items()
        }
