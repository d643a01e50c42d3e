"""The Gaussian process of an infinitely wide network with random weights.

    f ~ GP(0, K),   K_{l+1}(x, x') = σ_b² + σ_w² E[φ(u)φ(v)],   (u, v) ~ N(0, K_l)

Neal (1996), Lee et al. (2018), Matthews et al. (2018), Novak et al. (2019). Exact inference for
such a network under N(0, σ_w²/n) weights and Gaussian noise, as in `gp`, without training. It is
for up to about 10,000 rows. Classes are regression targets, and are calibrated by leave-one-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from doxa import store
from doxa.function.wide.fitting import InfinitelyWide


@store.register("nngp")
@dataclass(frozen=True)
class NNGP(InfinitelyWide):
    """Exact inference in an infinitely wide network.

    Parameters
    ----------
    depth : int
        Hidden layers of a fully connected network.
    activation : str
        "relu", "erf", "gelu", "tanh", …
    net : nn.Module or Architecture or None
        An `nn.Sequential` that is read off in their place, or an `Architecture`; so is the network
        that `fit` is given.
    weight_std, bias_std : float
        σ_w and σ_b where they start: weights have variance σ_w²/n, n inputs.
    noise : float or None
        Standard deviation of the noise in units of y; None: that of the likelihood, or fitted.
    learn_kernel : bool
        Fit σ_w, σ_b and the noise by evidence; False keeps the initial ones.
    refine : int
        Evaluations of the evidence, at most. Above 2,000 rows, of 500 of them.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-2, 2, 30).double()[:, None]
    >>> posterior = doxa.fit(None, (x, x.abs()), doxa.NNGP(depth=1, noise=0.01))
    >>> bool((posterior.predict(x).mean - x.abs()).abs().max() < 0.05)
    True
    """

    name: ClassVar[str] = "nngp"
    kind: ClassVar[str] = "nngp"
