"""Linearised networks as a belief about functions, and what they say after training.

    f(x) = J(x)δ,   δ ~ N(0, s²I):    f ~ GP(0, s²Θ̂)

is a network less its function at the start, linear in its weights around there (Chizat et al. 2019
leave that function out, too). Θ = K = s²Θ̂ in the equations of `ntk.py`: weights are drawn around a
start, and trained. s and the noise are found by evidence times N(·, 1) priors on their logarithms,
around the s at which s²Θ̂ has y's variance on average, and around 1 in fitted units.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.function.evidence import Problem, Solved, evenly, solve
from doxa.function.wide.belief import Belief, Scales
from doxa.function.wide.classes import spread_of
from doxa.function.wide.posterior import WidePosterior
from doxa.function.wide.tangent import Packed, TangentFunction
from doxa.function.wide.trained import NTKPosterior
from doxa.linalg.layout import Entry, Layout
from doxa.method import Run
from doxa.posterior import register_posterior

if TYPE_CHECKING:
    from doxa.function.wide.fitting import InfinitelyWide


class _Known:
    """e^{2θ} times a matrix that is known: its rows are x."""

    layout = Layout((Entry("scale", (1,)),))

    def __call__(self, flat: Tensor, a: Tensor, b: Tensor, diag: bool = False) -> Tensor:
        return (2 * flat[..., 0]).exp()[..., None, None] * a


class KnownKernel(Scales):
    """The evidence where K is a matrix x [M, N, N] times a scale, and a prior on θ around 0."""

    def _away(self, theta: Tensor) -> Tensor:
        return theta

    def thinned(self, count: int) -> Problem:
        columns = evenly(self.x.shape[-2], count).to(self.x.device)
        thin = super().thinned(count)
        return thin._replace(x=thin.x[..., columns])


class Tangent(Belief):
    """Of a network's tangents at its start."""

    def __init__(self, method: InfinitelyWide, run: Run) -> None:
        super().__init__(method, run)
        self.function = TangentFunction(run.net, Packed.of(run.rows.x))

    @property
    def posterior(self) -> type[WidePosterior]:
        return TangentPosterior

    @cached_property
    def _kernel(self) -> tuple[Tensor, Tensor]:
        """log s at the start [M], and s²Θ̂ of all rows there, [M, N, N]."""
        run = self.run
        batch = run.all_rows()
        x = self.rows(batch.x, 1 if batch.shared else 2)
        plain = torch.cat([x.new_zeros(run.size, 1), run.start().double()], 1)
        kernel = self.function(plain, x, x)
        scale = getattr(self.method, "scale", None)
        if scale is not None:
            unit = torch.full_like(kernel[:, 0, 0], math.log(scale))
        else:
            own = kernel.diagonal(0, -2, -1)  # [M, N]
            weight = torch.ones_like(own) if batch.weight is None else batch.weight.to(own)
            size = (own * weight).sum(1) / weight.sum(1)
            unit = spread_of(run).log() - 0.5 * size.clamp_min(1e-300).log()
        return unit, kernel.mul_((2 * unit).exp()[:, None, None])

    def start(self) -> Tensor:
        return torch.zeros_like(self._kernel[0]).unsqueeze(1)

    def problem(self, batch: Batch, log_noise: Tensor | None) -> Problem:
        known: Any = _Known()
        return KnownKernel(known, self._kernel[1], *self._seen(batch), log_noise)

    def rows(self, x: Any, lead: int = 1) -> Tensor:
        return self.function.packed.pack(x, lead)

    def hyper(self, scales: Tensor) -> Tensor:
        return torch.cat([self._kernel[0][:, None] + scales, self.run.start().double()], 1)

    def settled(self, scales: Tensor) -> dict[str, Any]:
        return {"among": (2 * scales.double()).exp().unsqueeze(2) * self._kernel[1]}


@register_posterior
class TangentPosterior(NTKPosterior):
    """Linearised networks after training for a time, an equal mixture over members.

    among: s²Θ̂ of the training rows, [K, N, N], where it is known.
    """

    kind = "tangent-ensemble"

    def __init__(self, *args: Any, among: Tensor | None = None, **kw: Any) -> None:
        if among is not None:
            self.__dict__["_among"] = among
        super().__init__(*args, **kw)

    @property
    def start(self) -> Any:
        return self.kernel

    def _between(self, a: Tensor, b: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        cross = self.kernel(self.hyper[some], a, b)
        return cross, cross

    @cached_property
    def _solved(self) -> Solved:
        return self._checked(solve(self._among, self.y, self._levels, self.weight))

    def vectors(self, x: Any) -> Tensor:
        packed: Tensor = self.kernel.packed.pack(x)
        return packed.to(self.dtype)

    def extra(self) -> dict[str, Any]:
        return {"event": self.event, "ids": self.ids, "packed": self.kernel.packed}

    @classmethod
    def kernel_of(cls, common: dict[str, Any], extra: dict[str, Any]) -> Any:
        return TangentFunction(common["model"], extra["packed"])
