"""Curvature of the log-likelihood in a network's weights, from per-example Jacobians.

    G = Σ_i w_i J_iᵀ C_i J_i,    J_i = ∂f(x_i)/∂θ,    C_i = E_y[−∂² log p(y | f_i)/∂f²]

This is the generalised Gauss–Newton matrix: positive semi-definite, and the exact Hessian where f
is linear in θ. Jacobians are vectorised over members and rows, with one backward pass per output.

The curvature of −log p(y | f) in the outputs f (`Outputs`) has two kinds:

ggn: C = E_y[−∂² log p(y | f)/∂f²], the Fisher information, also called type-2 Fisher.
fisher: C = s sᵀ with s = ∂ log p(y | f)/∂f at the observed y: the empirical Fisher, of rank one.
It is not the curvature: where the model fits perfectly, s is zero for any curvature (Kunstner,
Balles & Hennig 2019).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from doxa.data import Batch, free_memory
from doxa.errors import MemoryBudgetError
from doxa.likelihoods import Likelihood
from doxa.linalg import Structure
from doxa.linalg.layout import Layout, Params
from doxa.model import Model

_JITTER = 1e-13  # relative to the diagonal: softmax has a direction without curvature
_NUMBERS = 1 << 24  # numbers of curvature per block, over rows and draws
_FLAT = 1e-6  # relative to the largest entry: a last column below it is round-off


class Outputs:
    """The likelihood of some rows as a function of flat outputs [M, B, O].

    Parameters
    ----------
    shape : tuple
        The output shape of one row.
    kind : str
        "ggn" or "fisher".
    """

    def __init__(
        self, likelihood: Likelihood, theta: Params, part: Batch, shape: Any, kind: str
    ) -> None:
        self.likelihood, self.theta, self.part, self.kind = likelihood, theta, part, kind
        self.shape = shape

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
        """R with w C = R Rᵀ, [M, B, O, R], with w the weight of each row; float64. A last
        column without curvature is dropped unless `square`."""
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


log = logging.getLogger("doxa")

Contrast = Callable[[Tensor], Tensor]  # linear in the outputs: [..., O, n] to the same, in place

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes of the Jacobian per block


def chunk_bytes(device: torch.device) -> int:
    """The largest number of bytes per block of rows. It is fixed, so that results do not depend on
    the free memory."""
    return _CHUNK_BYTES.get(device.type, 64 << 20)


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


class Jacobians:
    """Outputs and Jacobians of all members at given rows.

    Parameters
    ----------
    model : Model
        The network.
    mean : Tensor
        Flat parameters [M, P].
    subset : sequence of str
        The names that are differentiated; the others are constants.
    buffers : dict of Tensor
        The buffers of each member; BatchNorm uses its running statistics.
    """

    def __init__(
        self, model: Model, mean: Tensor, subset: tuple[str, ...], buffers: Params | None = None
    ) -> None:
        params = model.layout.unflatten(mean.detach())
        weights = {k: v for k, v in params.items() if not k.startswith("likelihood.")}
        self.model = model
        self.members = mean.shape[0]
        self.layout: Layout = model.layout.select(subset)
        self.own = {k: v for k, v in weights.items() if k in self.layout.slices}
        self.rest = {k: v for k, v in weights.items() if k not in self.layout.slices}
        self.buffers = dict(buffers or {})
        self.outputs = output_size(model.output)
        self.rowwise = False  # True where the network does not run under vmap

    def chunks(self, rows: int) -> Iterator[slice]:
        """Blocks of rows with a Jacobian of limited size."""
        like = next(iter(self.own.values()))
        row = self.members * self.outputs * self.layout.size * 8
        if row > free_memory(like.device) // 4:
            raise MemoryBudgetError(
                f"the Jacobian of one row ({self.members} members × {self.outputs} outputs × "
                f"{self.layout.size} weights) takes {row / 2**30:.3g} GiB; use "
                "subset='last_layer', fewer members, or another method"
            )
        step = max(1, chunk_bytes(like.device) // row)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def member(self, k: int) -> Jacobians:
        """The Jacobians of member k alone."""
        own = copy.copy(self)
        own.members = 1
        pick = lambda tree: {name: v[k : k + 1] for name, v in tree.items()}  # noqa: E731
        own.own, own.rest, own.buffers = pick(self.own), pick(self.rest), pick(self.buffers)
        return own

    def __call__(self, x: Any, shared: bool = True) -> tuple[Tensor, Tensor]:
        """f [M, B, O] and J [M, B, O, p]; x has a member axis unless it is shared."""
        if not self.rowwise:
            try:
                return self._vectorised(x, shared)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                log.warning(
                    "curvature: the network does not run under vmap (%s); one row at a time",
                    (str(error).splitlines() or [""])[0][:120],
                )
                self.rowwise = True
        return self._one_by_one(x, shared)

    def variance(
        self, x: Any, covariance: Structure, contrast: Contrast | None = None
    ) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and the variance of each output of f + Jδ, δ ~ N(0, Σ), or of contrasts."""
        f, j = self(x)
        return f, covariance.quad(j if contrast is None else contrast(j))

    def spread(self, x: Any, covariance: Structure) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and J Σ Jᵀ, [K, B, O, O]."""
        f, j = self(x)
        return f, covariance.outer(j)

    def along(self, x: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        """f [K, B, O] and Jδ for draws δ [K, S, p]: [K, S, B, O]."""
        f, j = self(x)
        return f, torch.einsum("kbop,ksp->ksbo", j, delta)

    def _row(self, own: Params, rest: Params, buffers: Params, x: Any) -> tuple[Tensor, Tensor]:
        """One member at one row: f [O], twice, because jacrev returns only its auxiliary value."""
        row = tree_map(lambda t: t.unsqueeze(0), x)
        f = flatten_outputs(self.model.forward({**rest, **own}, row, buffers=buffers), 0)[0]
        return f, f

    def _vectorised(self, x: Any, shared: bool) -> tuple[Tensor, Tensor]:
        one = jacrev(self._row, has_aux=True)
        rows = vmap(one, in_dims=(None, None, None, 0), randomness="error")
        members = vmap(rows, in_dims=(0, 0, 0, None if shared else 0), randomness="error")
        jacobian, f = members(self.own, self.rest, self.buffers, x)
        parts = [jacobian[name].flatten(3) for name in self.layout.names]  # [M, B, O, size]
        return f.detach(), torch.cat(parts, -1).detach()

    def _one_by_one(self, x: Any, shared: bool) -> tuple[Tensor, Tensor]:
        values, slopes = [], []
        for m in range(self.members):
            pick = lambda tree, m=m: {k: v[m] for k, v in tree.items()}  # noqa: E731
            own = {k: v.clone().requires_grad_() for k, v in pick(self.own).items()}
            rows = x if shared else tree_map(lambda t, m=m: t[m], x)
            count = _first(rows).shape[0]
            for b in range(count):
                at = tree_map(lambda t, b=b: t[b], rows)
                with torch.enable_grad():
                    f, _ = self._row(own, pick(self.rest), pick(self.buffers), at)
                    slopes.append(torch.stack([_slope(value, own, self.layout) for value in f]))
                values.append(f.detach())
        shape = (self.members, len(values) // self.members, self.outputs)
        return (
            torch.stack(values).reshape(shape),
            torch.stack(slopes).reshape(*shape, self.layout.size),
        )


def _slope(value: Tensor, own: Mapping[str, Tensor], layout: Layout) -> Tensor:
    grads = torch.autograd.grad(value, list(own.values()), retain_graph=True, allow_unused=True)
    named = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(own.items(), grads, strict=True)
    }
    return layout.flatten(named)


def _first(tree: Any) -> Tensor:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def gauss_newton(
    jacobian: Tensor, curvature: Tensor, weight: Tensor | None, diagonal: bool
) -> Tensor:
    """Σ_b w_b J_bᵀ C_b J_b: [M, p, p], or its diagonal [M, p], in float64.

    The product is computed in float64 for any dtype of the network: rounded Jacobians still give a
    positive semi-definite matrix, but rounded products may not.
    """
    j = jacobian.double()  # [M, B, O, p]
    cj = curvature.double() @ j
    if weight is not None:
        cj = cj * weight.double()[..., None, None]
    if diagonal:
        return (cj * j).sum((1, 2))
    return cj.flatten(1, 2).mT @ j.flatten(1, 2)
