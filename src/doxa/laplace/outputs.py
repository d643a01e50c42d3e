"""The likelihood of some rows as a function of flat outputs, and its curvature there.

The curvature of −log p(y | f) in the outputs f has three kinds:

ggn: C = E_y[−∂² log p(y | f)/∂f²], the Fisher information, also called type-2 Fisher.
sampled: a mean over k draws, C ≈ (1/k) Σ_d s_d s_dᵀ, with s = Rv, C = RRᵀ and random signs v. It is
unbiased, and independent draws at every output (every pixel) need no matrix over outputs. A label
ŷ drawn from p(y | f) has a score of the same covariance (Kunstner, Balles & Hennig 2019), but where
the network is almost certain this score is nearly always close to zero, and rarely large. Rv has
about the same size in every draw (`Likelihood.curvature_draw`).
fisher: C = s sᵀ with s = ∂ log p(y | f)/∂f at the observed y: the empirical Fisher, of rank one.
It is not the curvature: where the model fits perfectly, s is zero for any curvature (Kunstner,
Balles & Hennig 2019).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import Params
from doxa.noise import Noise

_JITTER = 1e-13  # relative to the diagonal: softmax has a direction without curvature
_NUMBERS = 1 << 24  # numbers of curvature per block, over rows and draws
_FLAT = 1e-6  # relative to the largest entry: a last column below it is round-off


def output_size(output: Any) -> int:
    """Numbers in one row's output, over all heads."""
    return sum(math.prod(shape) for shape in output_shapes(output))


def flatten_outputs(f: Any, lead: int) -> Tensor:
    """[*lead, N, *output], or a tuple of heads, to [*lead, N, O]."""
    heads = list(f) if isinstance(f, list | tuple) else [f]
    flat = [head.reshape(*head.shape[: lead + 1], -1) for head in heads]
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def unflatten_outputs(flat: Tensor, output: Any) -> Any:
    """[..., O] to the network's own shape, a tuple for several heads."""
    shapes = output_shapes(output)
    parts = flat.split([math.prod(shape) for shape in shapes], -1)
    heads = tuple(
        part.reshape(flat.shape[:-1] + shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return heads if _has_heads(output) else heads[0]


def _has_heads(output: Any) -> bool:
    return bool(output) and isinstance(output[0], tuple)


def output_shapes(output: Any) -> list[tuple[int, ...]]:
    """Output shapes of one row, one per head."""
    return [tuple(shape) for shape in output] if _has_heads(output) else [tuple(output)]


class Draws(NamedTuple):
    """The draws of sampled curvature: their noise, how many per row, and the number of rows before
    the first one. The noise of a row depends on its place among all rows, not on the batch."""

    noise: Noise
    number: int
    first: int = 0

    def after(self, rows: int) -> Draws:
        return self._replace(first=self.first + rows)

    def signs(self, rows: int, outputs: int, draw: int) -> Tensor:
        """±1, [M, rows, outputs]."""
        device = self.noise.device
        steps = torch.arange(self.first, self.first + rows, device=device, dtype=torch.int32)
        return self.noise.signs((outputs,), steps, draw).transpose(0, 1)


class Outputs:
    """The likelihood of some rows as a function of flat outputs [M, B, O].

    Parameters
    ----------
    shape : tuple
        The output shape of one row.
    kind : str
        "ggn", "fisher" or "sampled".
    draws : Draws
        Those of sampled curvature.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        theta: Params,
        part: Batch,
        shape: Any,
        kind: str,
        draws: Draws | None = None,
    ) -> None:
        self.likelihood, self.theta, self.part, self.kind = likelihood, theta, part, kind
        self.shape, self.draws = shape, draws

    def times(self, draws: int) -> Outputs:
        """The same rows, repeated for `draws` draws of the outputs of every member."""
        part = self.part.expand_particles(draws)
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
        """R with w C = R Rᵀ, [M, B, O, R], with w the weight of each row; float64, or the type of
        f for draws. A last column without curvature is dropped unless `square`."""
        if self.draws is not None:
            return self._drawn(flat)
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

    def _drawn(self, flat: Tensor) -> Tensor:
        """One column for each draw, divided by √k."""
        assert self.draws is not None
        count, size = self.draws.number, flat.shape[-1]
        columns = []
        for d in range(count):
            signs = self.shaped(self.draws.signs(flat.shape[1], size, d).to(flat.dtype))
            f = self.shaped(self._at(flat, d))
            columns.append(self.likelihood.curvature_draw(f, self.theta, signs, 1, self.part.y))
        root = torch.stack(columns, -1) * count**-0.5
        if self.part.weight is not None:
            root = root * self.part.weight.to(root.dtype).sqrt()[..., None, None]
        return root

    def _at(self, flat: Tensor, draw: int) -> Tensor:
        """The outputs at which a draw is made."""
        return flat

    def pulls(self, flat: Tensor, groups: int) -> Tensor:
        """w ∂ log p(y | f)/∂f, with one column per group of outputs, [M, B, O, g]; float64."""
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
    """`Outputs` whose curvature is averaged over outputs f + d, for draws d [M, S, B, O]."""

    def __init__(self, own: Outputs, away: Tensor) -> None:
        super().__init__(own.likelihood, own.theta, own.part, own.shape, own.kind, own.draws)
        self.away = away

    def _at(self, flat: Tensor, draw: int) -> Tensor:
        """Another d for each row and draw."""
        assert self.draws is not None
        draws, rows = self.away.shape[1:3]
        step = max(1, draws // self.draws.number)
        index = torch.arange(rows, device=flat.device) + self.draws.first + draw * step
        own = index.remainder(draws)[None, None, :, None].expand(len(flat), 1, -1, flat.shape[-1])
        return flat + self.away.gather(1, own)[:, 0].to(flat.dtype)

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
