"""A deep Gaussian process after seeing data.

A function is drawn layer after layer (`paths.py`), so that `functions` gives whole ones. With
Gaussian noise `predict` draws the inner layers alone, n times, and is the mixture of the last
layer's Gaussians there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.errors import Unavailable
from doxa.function.inducing import Layer
from doxa.function.sparse_posterior import DRAWS, SparsePosterior
from doxa.linalg.layout import Params
from doxa.posterior import register_posterior
from doxa.predictive import Predictive


@register_posterior
class DeepPosterior(SparsePosterior):
    """An equal mixture over members, each a stack of layers; `inner` has those before the last,
    {"inner.l.hyper": [K, H], …}."""

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
        """With Gaussian noise a mixture of n Gaussians for each row, one for each draw of the inner
        layers; otherwise of n whole functions."""
        if not self.likelihood.integrates_normal or self.method.layers == 1:
            return super()._predict(x, n, seed, keep)
        counts = self.split(n or max(DRAWS, self.members))
        f, variance = self._mixed(self.prepared(x), counts, self.sampling(n, seed, keep))
        theta = self._theta_of(counts)
        return Predictive(f.to(self.dtype), self.likelihood, theta, f_variance=variance)

    def _mixed(self, x: Tensor, counts: list[int], seed: int) -> tuple[Tensor, Tensor]:
        """The last layer's means and variances at draws of those before: [n, N, *output]."""
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
        """The moments over draws of the inner layers: f is no Gaussian."""
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
