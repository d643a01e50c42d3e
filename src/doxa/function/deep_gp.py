"""Deep Gaussian processes by doubly stochastic variational inference.

    h⁰ = x,   h^l = h^{l−1}P_l + g_l(h^{l−1}),   g_l ~ GP(0, k_l),   y_i ~ p(y | f(h_i^{L−1}))
    ELBO = Σ_i E log p(y_i | f(h_i)) − Σ_l KL[q(u_l) ‖ p(u_l)]

Salimbeni & Deisenroth (2017). Each row goes through the layers by itself: h_i^l is drawn from its
marginal under q given h_i^{l−1}, by reparametrisation. P_l keeps the input: the identity, or the
first principal directions where a layer has fewer outputs than inputs. Inner layers move by the
optimiser of `fit`, their q(v) too; the last layer is that of `SparseGP`, with its natural
gradients. One layer is `SparseGP` without its last pass.

Inner layers start at their prior, of a small variance: the bound starts as that of a sparse GP, and
a layer changes its input as far as that increases the bound. (If q(v) starts without noise, as in
the paper, its KL is log 10⁵ nats per value, for any variance; the variance then grows, and small
data sets are overfitted.) The bound has many maxima, so rows are held out by default for
validation. The fit does not stop early on them: inner layers change late, long after the score of a
few rows is constant.

A function is drawn layer by layer (`inducing.py`), so `functions` returns whole functions. With
Gaussian noise `predict` draws only the inner layers, n times, and returns the mixture of the
Gaussians of the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.errors import Unavailable
from doxa.function.inducing import Layer, kl
from doxa.function.sparse import DRAWS, SparsePosterior
from doxa.function.variational import VariationalProcess
from doxa.linalg.layout import Params
from doxa.method import Clock, Run, State
from doxa.method.method import whole
from doxa.posterior import Posterior, register_posterior
from doxa.predictive import Predictive


@register_posterior
class DeepPosterior(SparsePosterior):
    """An equal mixture over members, each a stack of layers. `inner` has the layers before the
    last, {"inner.l.hyper": [K, H], …}."""

    kind = "deep-process"

    def __init__(self, *args: Any, inner: Params, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.inner = inner

    def layers(self, k: int) -> list[tuple[Layer, Tensor | None]]:
        found: list[tuple[Layer, Tensor | None]] = []
        names = ("hyper", "points", "mean", "root", "project")
        for number in range(self.method.layers - 1):
            hyper, points, mean, root, project = (
                self.inner[f"inner.{number}.{name}"][k : k + 1] for name in names
            )
            kernel = self.method.covariance(points.shape[2])
            found.append((Layer(kernel, hyper, points, mean, root), project))
        return found + super().layers(k)

    def _predict(self, x: Any, n: int | None, seed: int | None, keep: str) -> Predictive:
        """With Gaussian noise, a mixture of n Gaussians per row, one per draw of the inner layers;
        otherwise n whole functions."""
        if not self.likelihood.integrates_normal or self.method.layers == 1:
            return super()._predict(x, n, seed, keep)
        counts = self.split(n or max(DRAWS, self.members))
        f, variance = self._mixed(self.prepared(x), counts, self.sampling(n, seed, keep))
        theta = self._theta_of(counts)
        return Predictive(f.to(self.dtype), self.likelihood, theta, f_variance=variance)

    def _mixed(self, x: Tensor, counts: list[int], seed: int) -> tuple[Tensor, Tensor]:
        """Means and variances of the last layer at draws of the inner layers: [n, N, *output]."""
        found = []
        for k, count in enumerate(counts):
            if not count:
                continue
            *inner, (last, _) = self.layers(k)
            h = self._through(inner, x, self._noise(k, count, seed), False)  # [S, N, W]
            found.append(self.in_parts(last, h.reshape(1, -1, h.shape[2])))
        shape = (sum(counts), len(x), *self.event)
        f, variance = (
            torch.cat([part[0].reshape(-1, len(x), part.shape[2]) for part in each]).reshape(shape)
            for each in zip(*found, strict=True)
        )
        return f, variance

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The moments over draws of the inner layers: f is not Gaussian."""
        if self.method.layers == 1:
            return super().marginals(x)
        f, variance = self._mixed(x, [DRAWS] * self.members, self.record.seed)
        f, variance = (part.unflatten(0, (self.members, DRAWS)) for part in (f, variance))
        return f.mean(1), variance.mean(1) + f.var(1, correction=0)

    def _condition(self, x: Any, y: Any) -> SparsePosterior:
        raise Unavailable(
            "rows cannot be added to a deep process in closed form: fit again with all rows"
        )

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | self.inner

    @classmethod
    def own(cls, tensors: dict[str, Tensor]) -> dict[str, Any]:
        inner = {k: v for k, v in tensors.items() if k.startswith("inner.")}
        return super().own(tensors) | {"inner": inner}


_PARTS = ("hyper", "points", "mean", "root", "project")
_WIDEST = 30
_FIRST_POWER = 0.01  # of an inner layer's function, beside what enters it


@store.register("deep-gp")
@dataclass(frozen=True)
class DeepGP(VariationalProcess):
    """Gaussian processes of Gaussian processes. The other settings are those of `SparseGP`.

    Parameters
    ----------
    layers : int
        Number of layers, including the last one.
    hidden : int, optional
        Outputs of each inner layer. By default the number of columns of x, at most 30.
    paths : int
        Draws of the inner layers, per row and step.

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
        """Rows are held out for validation only; the bound protects against overfitting."""
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
        posterior = DeepPosterior(**self.posterior_parts(run, state), inner=inner)
        return self.recorded(run, state, posterior)


def directions(x: Tensor, width: int) -> Tensor:
    """A linear map [M, D, W] that preserves rows x [M, N, D] as well as W columns can: the
    identity, with columns of zeros if W is larger, or the principal directions if W is smaller."""
    members, _, inputs = x.shape
    if width >= inputs:
        eye = torch.eye(inputs, width, dtype=x.dtype, device=x.device)
        return eye.expand(members, -1, -1).clone()
    centred = x - x.mean(1, keepdim=True)
    return torch.linalg.eigh(centred.mT @ centred).eigenvectors[:, :, -width:].flip(2)
