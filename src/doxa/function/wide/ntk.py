"""An ensemble of infinitely wide networks, each trained by gradient descent.

Trained on half the mean squared error, Σ(f − y)²/2n, with its weights held near their start by the
noise σ², an infinitely wide network is linear in its weights, and at time t

    f_t(x) = f_0(x) + Θ(x, X) A_t (y − f_0(X)),    A_t = (Θ + σ²I)⁻¹(I − exp(−t(Θ + σ²I)/n))

with f_0 ~ GP(0, K) its function at the start (Jacot et al. 2018). Over the starts, f_t is Gaussian
(Lee et al. 2019, eq. 13–16, where σ = 0):

    mean        Θ* A_t y
    covariance  K** + Θ* A_t K A_t Θ*ᵀ − Θ* A_t K* − (Θ* A_t K*)ᵀ

This is what a deep ensemble of very wide networks would say; it is no Bayesian posterior. σ_w, σ_b
and σ are found by the evidence of a GP whose kernel is Θ, of which it has none itself; the noise of
y, where it is learned, by rows left out (`left_out.py`). Up to about 5,000 rows: it holds K, Θ and
a factor. With kernel="empirical" it is the network that `fit` is given that is trained, of finite
width and linear in its weights around each member's start: `tangent_fit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from doxa import store
from doxa.errors import MethodError
from doxa.function.wide.belief import Belief
from doxa.function.wide.fitting import InfinitelyWide
from doxa.function.wide.posterior import WidePosterior
from doxa.function.wide.tangent_fit import Tangent
from doxa.function.wide.trained import NTKPosterior
from doxa.method import Run, State
from doxa.method.fields import one_of, positive
from doxa.posterior import Posterior

_OF_THE_LIMIT = ("depth", "activation", "net", "weight_std", "bias_std")


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
    time: how long networks are trained, steps times rate on Σ(f − y)²/2n, half the mean
        squared error (on the whole of it, give 2 × steps × rate); None: for ever.
    fit_hyper: fit σ_w, σ_b and the noise by the evidence of a GP with kernel Θ.
    refine: evaluations of the evidence, at most. Above 2,000 rows, of 500 of them.
    kernel: "analytic", of infinite width, or "empirical": s²Θ̂ of the network that `fit` is given,
        any that `Model` takes, at the weights where each member starts.
    scale: s where it starts, in fitted units: the deviation of weights about their start; None: the
        one at which functions vary as y does.

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
    kernel: str = one_of("analytic", "empirical")
    scale: float | None = positive(None)

    def check(self) -> None:
        if self.kernel != "empirical":
            if self.scale is not None:
                raise MethodError('scale is for kernel="empirical": weight_std and bias_std here')
            return
        named = {f.name: f.default for f in fields(self) if f.name in _OF_THE_LIMIT}
        given = [name for name, default in named.items() if getattr(self, name) != default]
        if given:
            raise MethodError(
                f'kernel="empirical" is of the network that fit is given, which leaves no '
                f"{given[0]}= to say: give the network to fit, and scale= for its kernel"
            )
        object.__setattr__(self, "needs_network", True)

    def belief(self, run: Run) -> Belief:
        return Tangent(self, run) if self.kernel == "empirical" else super().belief(run)

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
