"""Deep Gaussian processes by doubly stochastic variational inference.

    h⁰ = x,   h^l = h^{l−1}P_l + g_l(h^{l−1}),   g_l ~ GP(0, k_l),   y_i ~ p(y | f(h_i^{L−1}))
    ELBO = Σ_i E log p(y_i | f(h_i)) − Σ_l KL[q(u_l) ‖ p(u_l)]

Salimbeni & Deisenroth (2017). Each row goes through the layers by itself: h_i^l is drawn from its
marginal under q given h_i^{l−1}, by reparametrisation. P_l keeps the input: the identity, or the
first principal directions where a layer has fewer outputs than inputs. Inner layers move by the
optimiser of `fit`, their q(v) too; the last layer is that of `SparseGP`, with its natural
gradients. One layer is `SparseGP` without its last pass.

Inner layers start at their prior, of a small variance: the bound starts as that of a sparse GP, and
a layer bends its input as far as that pays. (Started without noise, as in the paper, q(v) owes the
KL log 10⁵ nats a value, whatever the variance, which then grows: few rows are learned by heart.)
What is maximised has many maxima: rows are held out by default, to judge by. It does not stop on
them: inner layers bend late, long after the score of few rows has come to rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.function.deep_posterior import DeepPosterior
from doxa.function.inducing import Layer, kl
from doxa.function.variational import VariationalProcess
from doxa.method import Clock, Run, State
from doxa.method.fields import whole
from doxa.posterior import Posterior

_PARTS = ("hyper", "points", "mean", "root", "project")
_WIDEST = 30
_FIRST_POWER = 0.01  # of an inner layer's function, beside what enters it


@store.register("deep-gp")
@dataclass(frozen=True)
class DeepGP(VariationalProcess):
    """Gaussian processes of Gaussian processes. Further settings are those of `SparseGP`.

    Parameters
    ----------
    layers: how many, the last one included.
    hidden: outputs of each inner layer; None: as many as x has columns, at most 30.
    paths: draws of the inner layers, a row and step.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-1, 1, 60).double()[:, None]
    >>> y = (x > 0).double()
    >>> method = doxa.DeepGP(inducing=10)
    >>> posterior = doxa.fit(None, (x, y), method, likelihood="gaussian", steps=100)
    >>> posterior.functions(x, 3).shape
    torch.Size([3, 60, 1])
    """

    name: ClassVar[str] = "deep-gp"
    default_steps: ClassVar[int] = 2000

    layers: int = whole(2, least=1)
    hidden: int | None = whole(None, least=1)
    paths: int = whole(1, least=1)

    @property
    def holds_out(self) -> bool:
        """To be judged by; the bound protects it from learning rows by heart."""
        return True

    @property
    def depth(self) -> int:
        return 1 + (self.layers - 1) * (self.hidden or _WIDEST)

    def init_inner(self, points: Tensor) -> tuple[State, Tensor]:
        state: State = {}
        for number in range(self.layers - 1):
            members, count, inputs = points.shape
            width = self.hidden or min(inputs, _WIDEST)
            power = _FIRST_POWER * points.var(1, correction=0).mean(1)  # [M]
            eye = torch.eye(count, dtype=points.dtype, device=points.device)
            own = {
                "hyper": self.first_hyper(points, power, None, None),
                "points": points,
                "mean": points.new_zeros(members, width, count),
                "root": eye.expand(members, width, -1, -1).clone(),
                "project": directions(points, width),
            }
            state |= {f"inner.{number}.{name}": value for name, value in own.items()}
            points = points @ own["project"]
        return state, points

    def inner(self, run: Run, params: State, x: Tensor, clock: Clock) -> tuple[Tensor, Tensor, int]:
        divergence, rows = x.new_zeros(len(x)), x.shape[1]
        copies = self.paths if self.layers > 1 else 1
        for number in range(self.layers - 1):
            hyper, points, mean, raw, project = (
                params[f"inner.{number}.{name}"] for name in _PARTS
            )
            root = raw.tril()
            half_logdet = root.diagonal(dim1=-2, dim2=-1).abs().log().sum((1, 2))
            divergence = divergence + kl(mean, root, half_logdet)
            layer = Layer(self.covariance(x.shape[2]), hyper, points, mean, root)
            f, variance = layer.marginals(x)
            f = f + x @ project
            if number == 0 and copies > 1:  # rows part here
                f, variance = (part.repeat_interleave(copies, 1) for part in (f, variance))
            eps = clock.rows("normal", rows, copies * f.shape[2]).double()
            x = f + variance.sqrt() * eps.reshape(f.shape)
        return x, divergence, copies

    def random_bound(self, run: Run) -> bool:
        return self.layers > 1 or super().random_bound(run)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        inner = {k: v for k, v in state.items() if k.startswith("inner.")}
        inner = {k: v.tril() if k.endswith("root") else v for k, v in inner.items()}
        posterior = DeepPosterior(**self.believed(run, state), inner=inner)
        return self.recorded(run, state, posterior)


def directions(x: Tensor, width: int) -> Tensor:
    """A linear map [M, D, W] that keeps rows x [M, N, D] as well as W columns can: the identity,
    with columns of zeros where W is larger, the principal directions where it is smaller."""
    members, _, inputs = x.shape
    if width >= inputs:
        eye = torch.eye(inputs, width, dtype=x.dtype, device=x.device)
        return eye.expand(members, -1, -1).clone()
    centred = x - x.mean(1, keepdim=True)
    return torch.linalg.eigh(centred.mT @ centred).eigenvectors[:, :, -width:].flip(2)
