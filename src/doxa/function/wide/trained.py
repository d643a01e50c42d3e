"""What an ensemble of wide networks says after training: the equations of `ntk.py`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from doxa.function.evidence import by_level
from doxa.function.wide.function import WideFunction
from doxa.function.wide.left_out import noise_of
from doxa.function.wide.posterior import WidePosterior
from doxa.linalg.layout import Params
from doxa.posterior import register_posterior
from doxa.posterior.process import square_root


@register_posterior
class NTKPosterior(WidePosterior):
    """Infinitely wide networks after training for a time, an equal mixture over members.

    time: t of each member [K]; None: the end of training. shown: log τ of the noise of y, as
    log_noise, where rows left out showed it; None: it is log σ.
    """

    kind = "wide-ensemble"

    def __init__(
        self, *args: Any, time: Tensor | None = None, shown: Tensor | None = None, **kw: Any
    ) -> None:
        self.time, self.shown = time, shown
        super().__init__(*args, **kw)
        self.log_evidence = None

    def theta(self) -> Params:
        if self.shown is None or self.base_likelihood.classifies:
            return super().theta()
        return {"log_noise": self.shown.to(self.dtype)}

    def show_noise(self) -> None:
        """Find the noise of y by rows left out, each in turn."""
        levels = noise_of(self._solved, self._among, self._levels)  # [K, L]
        self.shown = levels.expand(-1, self.log_noise[0].numel()).reshape(self.log_noise.shape)

    @property
    def start(self) -> Any:
        """K, of functions before training."""
        return WideFunction(self.kernel.architecture, self.kernel.shape, "nngp")

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvectors of B, [K, L, N, N], and what time has made of each: (1 − e^{−τλ})/λ."""
        factor = self._solved.factor
        values, vectors = torch.linalg.eigh(factor @ factor.mT)
        assert self.time is not None
        n = len(self.x) if self.weight is None else self.weight.sum()
        done = self.time[:, None] * (2 * self._levels).exp() / n  # σ²t/n [K, L]
        return vectors, -torch.expm1(-done.unsqueeze(-1) * values) / values

    def _between(self, a: Tensor, b: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Θ and K between rows of all, or of some members: [K, N, B] each."""
        hyper = self.hyper[some]
        return self.kernel(hyper, a, b).detach(), self.start(hyper, a, b).detach()

    @cached_property
    def _among(self) -> Tensor:
        """K of the training rows, [K, N, N]."""
        x = self.x.double()
        return self.start(self.hyper, x, x).detach()

    def _operated(self, cross: Tensor, some: slice) -> Tensor:
        """A_t Θ*ᵀ [K, L, N, B] of Θ*ᵀ [K, N, B]: R g(B) R, R = W^½/σ, B of `evidence.py`."""
        root = self._solved.root[some].unsqueeze(-1)
        seen = root * cross.unsqueeze(1)
        if self.time is None:
            return root * torch.cholesky_solve(seen, self._solved.factor[some])
        vectors, share = (part[some] for part in self._spectrum)
        return root * (vectors @ (share.unsqueeze(-1) * (vectors.mT @ seen)))

    def _trained(self, x: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The mean at x [K, B, O], A_tΘ*ᵀ [K, L, N, B] and K* [K, 1, N, B]."""
        tangent, cross = self._between(self.x.double(), x, some)
        weights = self._operated(tangent, some)
        mean = weights.mT @ by_level(self.y, weights.shape[1])  # [K, L, B, O/L]
        mean = mean[:, 0] if mean.shape[1] == 1 else mean.squeeze(-1).mT
        return mean, weights, cross.unsqueeze(1)

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, weights, cross = self._trained(x, slice(None))
        prior = self.start(self.hyper, x, x, True).detach().unsqueeze(1)  # [K, 1, B]
        spread = weights * (self._among.unsqueeze(1) @ weights - 2 * cross)
        variance = (prior + spread.sum(-2)).clamp_min(0.0)
        return mean, variance.mT.expand_as(mean)

    def joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        mean, weights, cross = self._trained(x, members)
        shared = weights.mT @ cross
        prior = self.start(self.hyper[members], x, x).detach().unsqueeze(1)
        spread = weights.mT @ self._among[members].unsqueeze(1) @ weights - shared - shared.mT
        return self._logits(mean, square_root(prior + spread), 1, members)

    def prior_joints(self, x: Tensor, members: slice = slice(None)) -> tuple[Tensor, Tensor]:
        root = square_root(self.start(self.hyper[members], x, x).detach().unsqueeze(1))
        zero = root.new_zeros(len(root), len(x), self.y.shape[1])
        return self._logits(zero, root, 1, members)

    def tensors(self) -> dict[str, Tensor]:
        own = {"time": self.time, "shown": self.shown}
        return super().tensors() | {name: part for name, part in own.items() if part is not None}
