"""Curvature of −log p(y | f) in the outputs f of some rows.

ggn: C = E_y[−∂² log p(y | f)/∂f²], the Fisher information, also called type-2 Fisher.
fisher: C = s sᵀ with s = ∂ log p(y | f)/∂f at the observed y: the empirical Fisher, of rank one.
It is not the curvature: where the model fits, s vanishes whatever the curvature is (Kunstner,
Balles & Hennig 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.laplace.curvature import flatten_outputs, unflatten_outputs
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import Params

_JITTER = 1e-13  # of the diagonal: softmax has a direction without curvature
_NUMBERS = 1 << 24  # of curvature, over rows and draws at once
_FLAT = 1e-6  # of the largest entry: what a last column of round-off stays below


class Outputs:
    """The likelihood of some rows as a function of flat outputs [M, B, O].

    Parameters
    ----------
    shape: of one row's output. kind: "ggn" or "fisher".
    """

    def __init__(
        self, likelihood: Likelihood, theta: Params, part: Batch, shape: Any, kind: str
    ) -> None:
        self.likelihood, self.theta, self.part, self.kind = likelihood, theta, part, kind
        self.shape = shape

    def times(self, draws: int) -> Outputs:
        """The same rows for each of so many draws of every member's outputs."""
        part = self.part.times(draws)
        return Outputs(self.likelihood, self.theta, part, self.shape, self.kind)

    def shaped(self, flat: Tensor) -> Any:
        return unflatten_outputs(flat, self.shape)

    def log_prob(self, flat: Tensor) -> Tensor:
        """[M, B]."""
        return self.likelihood.log_prob(self.shaped(flat), self.part.y, self.theta, 1)

    def matrix(self, flat: Tensor) -> Tensor:
        """C, [M, B, O, O]."""
        if self.kind == "fisher":
            score = self.score(flat)
            return score[..., None] * score[..., None, :]
        return self.likelihood.curvature(self.shaped(flat), self.theta, 1, self.part.y)

    def root(self, flat: Tensor, square: bool = False) -> Tensor:
        """R with w C = R Rᵀ, [M, B, O, R], w the weight of a row; float64. A last column without
        curvature is left out unless R is to be square."""
        root = self._root(flat.double())
        size = float(root.abs().max())
        if not square and root.shape[-1] > 1 and float(root[..., -1].abs().max()) < _FLAT * size:
            root = root[..., :-1]  # one backward pass less
        if self.part.weight is not None:
            root = root * self.part.weight.double().sqrt()[..., None, None]
        return root

    def _root(self, flat: Tensor) -> Tensor:
        if self.kind == "fisher":
            return self.score(flat)[..., None]
        c = self.matrix(flat).double()
        diagonal = c.diagonal(dim1=-2, dim2=-1)
        lifted = c + torch.diag_embed(_JITTER * diagonal + torch.finfo(c.dtype).tiny)
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(lifted)
        if failed.any():
            values, vectors = torch.linalg.eigh(c)
            return vectors * values.clamp_min(0.0).sqrt()[..., None, :]
        return factor

    def pulls(self, flat: Tensor, groups: int) -> Tensor:
        """w ∂ log p(y | f)/∂f of each group of outputs as columns, [M, B, O, g]; float64."""
        score = self.score(flat).double()
        if self.part.weight is not None:
            score = score * self.part.weight.double()[..., None]
        return score[..., None] if groups == 1 else torch.diag_embed(score)

    def score(self, flat: Tensor) -> Tensor:
        """∂ log p(y | f)/∂f, [M, B, O]."""
        with torch.enable_grad():
            leaf = flat.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_prob(leaf).sum(), leaf)
        return slope

    def squares(self, flat: Tensor, groups: int) -> Tensor:
        """Σ w (y − f)² / σ² for each group of outputs of a Gaussian likelihood: [M, g]."""
        log_noise = self.theta["log_noise"].double()
        each = flatten_outputs((self.part.y - self.shaped(flat)).double().square(), 1)  # [M, B, O]
        if self.part.weight is not None:
            each = each * self.part.weight.double()[..., None]
        squares = each.sum(1) if groups > 1 else each.sum((1, 2)).unsqueeze(1)
        return squares * (-2.0 * log_noise.reshape(len(flat), groups)).exp()


class Averaged(Outputs):
    """Their curvature is that of outputs f + d, averaged over draws d [M, S, B, O]."""

    def __init__(self, own: Outputs, away: Tensor) -> None:
        super().__init__(own.likelihood, own.theta, own.part, own.shape, own.kind)
        self.away = away

    def matrix(self, flat: Tensor) -> Tensor:
        members, draws, rows, size = self.away.shape
        together = max(1, _NUMBERS // (members * rows * size**2))
        total = flat.new_zeros(members, rows, size, size)
        for some in self.away.split(together, 1):
            count = some.shape[1]
            drawn = (flat.unsqueeze(1) + some.to(flat.dtype)).flatten(0, 1)
            each = self.times(count).matrix(drawn)
            total += each.unflatten(0, (members, count)).sum(1)
        return total / draws
