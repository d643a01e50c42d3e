"""An ensemble of infinitely wide networks, each trained by gradient descent.

Trained on the mean squared error, with its weights held near their start by the noise σ², an
infinitely wide network is linear in its weights, and at time t

    f_t(x) = f_0(x) + Θ(x, X) A_t (y − f_0(X)),    A_t = (Θ + σ²I)⁻¹(I − exp(−t(Θ + σ²I)/n))

with f_0 ~ GP(0, K) its function at the start (Jacot et al. 2018). Over the starts, f_t is Gaussian
(Lee et al. 2019, eq. 13–16, where σ = 0):

    mean        Θ* A_t y
    covariance  K** + Θ* A_t K A_t Θ*ᵀ − Θ* A_t K* − (Θ* A_t K*)ᵀ

This is what a deep ensemble of very wide networks would say; it is no Bayesian posterior. σ_w, σ_b
and σ are found by the evidence of a GP whose kernel is Θ, of which it has none itself; the noise of
y, where it is learned, by rows left out (`left_out.py`). Up to about 5,000 rows: it holds K, Θ and
a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.function.evidence import by_level
from doxa.function.wide.fitting import InfinitelyWide
from doxa.function.wide.function import WideFunction
from doxa.function.wide.left_out import noise_of
from doxa.function.wide.posterior import WidePosterior
from doxa.linalg.layout import Params
from doxa.method import Run, State
from doxa.method.fields import positive
from doxa.posterior import Posterior, register_posterior
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
    def start(self) -> WideFunction:
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
        old, hyper = self.x.double(), self.hyper[some]
        weights = self._operated(self.kernel(hyper, old, x).detach(), some)
        mean = weights.mT @ by_level(self.y, weights.shape[1])  # [K, L, B, O/L]
        mean = mean[:, 0] if mean.shape[1] == 1 else mean.squeeze(-1).mT
        return mean, weights, self.start(hyper, old, x).detach().unsqueeze(1)

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


@store.register("ntk")
@dataclass(frozen=True)
class NTK(InfinitelyWide):
    """Ensembles of infinitely wide networks after gradient descent.

    Parameters
    ----------
    depth: hidden layers of a fully connected network. activation: "relu", "erf", "gelu", "tanh", …
    net: an `nn.Sequential` that is read off in their place, or an `Architecture`; so is the network
        that `fit` is given.
    weight_std, bias_std: σ_w and σ_b where they start: f = σ_w/√n Wφ + σ_b b, with N(0, 1) weights.
    noise: σ in units of y; it also holds weights near their start. None: as the likelihood says,
        else fitted, and what y has besides found by rows left out, after training for ever.
    time: how long networks are trained, steps times rate on the mean squared error; None: for ever.
    fit_hyper: fit σ_w, σ_b and the noise by the evidence of a GP with kernel Θ.
    refine: evaluations of the evidence, at most. Above 2,000 rows, of 500 of them.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-2, 2, 30).double()[:, None]
    >>> posterior = doxa.fit(None, (x, x.abs()), doxa.NTK(depth=1, noise=0.01))
    >>> bool((posterior.predict(x).mean - x.abs()).abs().max() < 0.05)
    True
    """

    name: ClassVar[str] = "ntk"
    kind: ClassVar[str] = "ntk"
    posterior: ClassVar[type[WidePosterior]] = NTKPosterior
    matrices: ClassVar[int] = 2

    time: float | None = positive(None, per_run=True)

    def settled(self, run: Run) -> dict[str, Tensor]:
        if self.time is None and "time" not in run.hyper:
            return {}
        return {"time": run.field(self, "time").double()}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = super().finish(run, state, kept)
        assert isinstance(posterior, NTKPosterior)
        if self._learned(run) and posterior.time is None and not run.likelihood.classifies:
            posterior.show_noise()
        return posterior
