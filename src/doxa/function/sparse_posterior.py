"""A sparse Gaussian process after seeing data: what it believes at its inducing points, and no row.

`predict` gives marginals, `functions` draws jointly over rows. With Gaussian noise `condition` adds
rows to q(v) as to the last pass of the fit: Λ ← Λ + Σ a aᵀ/σ², Λm ← Λm + Σ a y/σ².
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from doxa.data import rows_of
from doxa.errors import Unavailable
from doxa.exact.targets import Shape, new_targets
from doxa.function.covariances import Covariance
from doxa.function.inducing import Layer, from_precision, whitened
from doxa.linalg.layout import Params
from doxa.posterior import ProcessPosterior, register_posterior
from doxa.posterior.process import square_root

_CHUNK_BYTES = 64 << 20  # of whitened cross-covariances at a time
_OWN = ("hyper", "points", "mean", "root", "reference")


@register_posterior
class SparsePosterior(ProcessPosterior):
    """An equal mixture over members, each a GP through its inducing points.

    Parameters
    ----------
    hyper: the kernel's logarithms [K, H]. points: [K, Z, D]. mean, root: q(v), [K, O, Z] and
        [K, O, Z, Z], all in float64. output: the shape of f at a row.
    learned: the likelihood's parameters {name: [K, ...]}. reference: a tensor of the fit's type.
    """

    kind = "sparse-process"

    def __init__(
        self,
        *args: Any,
        hyper: Tensor,
        points: Tensor,
        mean: Tensor,
        root: Tensor,
        output: Shape,
        learned: Params,
        reference: Tensor,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.hyper, self.points, self.mean, self.root = hyper, points, mean, root
        self.event, self.learned, self.reference = tuple(output), learned, reference

    @property
    def members(self) -> int:
        return self.hyper.shape[0]

    def _reference(self) -> Tensor:
        return self.reference

    @property
    def kernel(self) -> Covariance:
        return self.method.covariance(self.points.shape[2])

    def layer(self, member: slice = slice(None)) -> Layer:
        own = (part[member] for part in (self.hyper, self.points, self.mean, self.root))
        return Layer(self.kernel, *own)

    def prepared(self, x: Any) -> Tensor:
        x = self.check_inputs(x)
        return (x.unsqueeze(-1) if x.ndim == 1 else x).double()

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer, (_, outputs, points) = self.layer(), self.mean.shape
        step = max(1, _CHUNK_BYTES // (8 * self.members * points * (1 + outputs)))
        parts = [
            layer.marginals(x[at : at + step].expand(self.members, -1, -1))
            for at in range(0, len(x), step)
        ]
        shape = (self.members, len(x), *self.event)
        f, variance = (torch.cat(part, 1).reshape(shape) for part in zip(*parts, strict=True))
        return f, variance

    def joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, covariance = self.layer(slice(k, k + 1)).joint(x.unsqueeze(0))
        return mean[0], torch.stack([square_root(own) for own in covariance[0]])

    def prior_joint(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at = x.unsqueeze(0)
        root = square_root(self.kernel(self.hyper[k : k + 1], at, at)[0])
        return root.new_zeros(len(x), math.prod(self.event)), root[None]

    def theta(self) -> Params:
        return {name: value.to(self.dtype) for name, value in self.learned.items()}

    def condition(self, x: Any, y: Any) -> SparsePosterior:
        """The process with further rows, at the same kernel, points and noise."""
        likelihood = self.base_likelihood
        if not likelihood.integrates_normal:
            raise Unavailable(
                f"rows are added in closed form with Gaussian noise only, not {likelihood.name}: "
                "fit again with all rows"
            )
        x, y = new_targets(self, x, y, self.event)
        x = x.unsqueeze(-1) if x.ndim == 1 else x
        x = x.double().expand(self.members, *x.shape)
        a = whitened(self.kernel, self.hyper, self.points, x)  # [K, Z, N]
        given = likelihood.constants(self.event, self.scales.y_scale)
        theta = self.learned | {k: v.to(self.hyper) for k, v in given.items()}
        at = torch.zeros(self.members, len(y), *self.event).to(self.hyper)
        bend = likelihood.curvature(at, theta, 1).diagonal(dim1=-2, dim2=-1)  # 1/σ² [K, N, O]
        half = torch.linalg.inv(self.root)
        precision = half.mT @ half
        shift = (precision @ self.mean.unsqueeze(-1)).squeeze(-1)
        precision = precision + (a.unsqueeze(1) * bend.mT.unsqueeze(2)) @ a.mT.unsqueeze(1)
        mean, root, _ = from_precision(precision, shift + (bend * y.double()).mT @ a.mT)
        new = SparsePosterior(
            self.model, self.method, likelihood, self.scales, self.inputs, ids=self.ids,
            hyper=self.hyper, points=self.points, mean=mean, root=root, output=self.event,
            learned=self.learned, reference=self.reference,
        )  # fmt: skip
        new.record.seed, new.record.status = self.record.seed, self.record.status
        new.record.diagnostics["rows added"] = rows_of(y, "y")
        return new

    def tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in _OWN}
        return own | {f"likelihood.{name}": value for name, value in self.learned.items()}

    def extra(self) -> dict[str, Any]:
        return {"output": self.event, "ids": self.ids, "elbo": self.elbo}

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> SparsePosterior:
        prefix = "likelihood."
        learned = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        own = {name: tensors[name] for name in _OWN}
        new = cls(**common, output=extra["output"], ids=extra["ids"], learned=learned, **own)
        new.elbo = extra["elbo"]
        return new
