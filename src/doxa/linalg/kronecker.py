"""Blocks with Kronecker-factored curvature: Σ⁻¹ = scale · (B ⊗ A) + δ I in each block.

For a weight [out, in], flattened by rows, B [out, out] and A [in, in] are the factors of K-FAC
(Martens and Grosse, 2015). δ is the prior precision, which is kept apart from the factors, as in
Ritter, Botev and Barber (2018). With B = U diag(b) Uᵀ and A = V diag(a) Vᵀ,

    Σ = (U ⊗ V) diag(1 / (scale · b aᵀ + δ)) (U ⊗ V)ᵀ,

so each operation is a change of basis, with two small products per block, and a division. δ is
added exactly. It is not distributed over the two factors, which would be an approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from doxa.errors import ShapeError, StoreError
from doxa.linalg.base import Structure, refuse, refuse_variances, symmetric

Factors = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """The eigendecomposition of the curvature of one block.

    Parameters
    ----------
    curvature : Tensor of shape [K, out · in]
        The eigenvalues b aᵀ.
    left, right : Tensor or None
        The eigenvectors U [K, out, out] and V [K, in, in]. None is the identity.
    """

    curvature: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @classmethod
    def from_factors(cls, factors: Factors, what: str) -> KroneckerBlock:
        if isinstance(factors, Tensor) and factors.ndim == 2:
            refuse_variances(factors, f"{what}: the curvature")
            return cls(factors)
        if isinstance(factors, Tensor):
            values, vectors = _eigen(factors, what)
            return cls(values, vectors)
        b, left = _eigen(factors[0], f"{what}: the output factor")
        a, right = _eigen(factors[1], f"{what}: the input factor")
        if len(a) != len(b):
            raise ShapeError(f"{what}: factors of {len(b)} and {len(a)} members")
        return cls((b[:, :, None] * a[:, None, :]).flatten(1), left, right)

    @property
    def size(self) -> int:
        return self.curvature.shape[1]

    def numerically_singular(self) -> Tensor:
        """Whether an eigenvalue of the curvature is zero up to rounding, [K]."""
        values = self.curvature.detach()
        if self.size == 0:
            return values.any(-1)
        if self.left is None:
            return (values == 0).any(-1)
        order = max(self.left.shape[-1], 0 if self.right is None else self.right.shape[-1])
        tolerance = torch.finfo(values.dtype).eps * order
        return values.amin(-1) <= tolerance * values.amax(-1)

    def to_eigenbasis(self, rows: Tensor) -> Tensor:
        """v (U ⊗ V), the change into the eigenbasis."""
        return _kron_matmul(rows, self.left, self.right)

    def from_eigenbasis(self, rows: Tensor) -> Tensor:
        """v (U ⊗ V)ᵀ, the change out of the eigenbasis."""
        return _kron_matmul(rows, _transposed(self.left), _transposed(self.right))

    def spread(self, values: Tensor) -> Tensor:
        """The diagonal of (U ⊗ V) diag(values) (U ⊗ V)ᵀ, [K, size], for values [K, size]."""
        left = None if self.left is None else self.left.mT.square()
        right = None if self.right is None else self.right.mT.square()
        return _kron_matmul(values[:, None], left, right)[:, 0]


@dataclass(frozen=True, eq=False)
class Kronecker(Structure):
    """A covariance of independent Kronecker-factored blocks. Build it with `from_factors`.

    Parameters
    ----------
    blocks : tuple of KroneckerBlock
        The blocks, in the order of the flat vector.
    scale, delta : Tensor of shape [K, number of blocks]
        The factor of the curvature, and the prior precision δ.
    """

    name = "kronecker"

    blocks: tuple[KroneckerBlock, ...]
    scale: Tensor
    delta: Tensor

    def __post_init__(self) -> None:
        for i, block in enumerate(self.blocks):
            scale, delta = self.scale[:, i].detach(), self.delta[:, i].detach()
            for value, name in ((scale, "scale"), (delta, "prior precision")):
                refuse(~(value.isfinite() & (value >= 0)), f"block {i}: the {name} is negative")
            singular = (delta == 0) & ((scale == 0) | block.numerically_singular())
            refuse(singular, f"block {i}: the precision is singular; give a prior precision > 0")

    @classmethod
    def from_factors(
        cls,
        factors: Sequence[Factors],
        delta: float | Tensor,
        scale: float | Tensor = 1.0,
    ) -> Kronecker:
        """Decompose the factors of every block, all members at once.

        Parameters
        ----------
        factors : sequence of Tensor or tuple of Tensor
            One entry per block, in the order of the flat vector. For a weight, `(B, A)` with
            B [K, out, out] and A [K, in, in]. For a block with a single factor, such as a bias, a
            tensor [K, n, n]. For a diagonal block, a tensor [K, n].
        delta : float or Tensor
            The prior precision: a number, [K], or [K, blocks].
        scale : float or Tensor, default 1.0
            The factor of the curvature, in the same shapes. If `factors` are sums over a batch, it
            is the number of all rows divided by the size of the batch.

        Returns
        -------
        Kronecker
            The covariance.
        """
        if not factors:
            raise ShapeError("a Kronecker structure needs at least one block")
        blocks = tuple(
            KroneckerBlock.from_factors(item, f"block {i}") for i, item in enumerate(factors)
        )
        members = {len(block.curvature) for block in blocks}
        if len(members) != 1:
            raise ShapeError(f"blocks of different numbers of members: {sorted(members)}")
        return cls(
            blocks,
            _per_block(scale, blocks, "scale"),
            _per_block(delta, blocks, "delta"),
        )

    def reweighted(
        self, delta: float | Tensor | None = None, scale: float | Tensor | None = None
    ) -> Kronecker:
        """A covariance with the same eigenvectors and another prior precision or scale. It is
        differentiable in both."""
        return Kronecker(
            self.blocks,
            self.scale if scale is None else _per_block(scale, self.blocks, "scale"),
            self.delta if delta is None else _per_block(delta, self.blocks, "delta"),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scale), sum(block.size for block in self.blocks)

    def diagonal(self) -> Tensor:
        parts = zip(self.blocks, self.precisions(), strict=True)
        return torch.cat([block.spread(1 / values) for block, values in parts], dim=-1)

    def logdet(self) -> Tensor:
        return -torch.cat(self.precisions(), dim=-1).log().sum(-1)

    def scaled(self, t: float | Tensor) -> Kronecker:
        t = _per_block(t, self.blocks, "the scale")
        refuse((t <= 0).any(-1).detach(), "the scale must be positive")
        return replace(self, scale=self.scale / t, delta=self.delta / t)

    def _root(self, rows: Tensor) -> Tensor:
        # The symmetric root. The root (U ⊗ V) diag(…) is half the work, but a draw would depend on
        # the signs and the order in which a library returns eigenvectors.
        return self._powered(rows, -0.5)

    def _half(self, rows: Tensor) -> Tensor:
        parts = torch.split(rows, [block.size for block in self.blocks], dim=-1)
        turned = [block.to_eigenbasis(part) for block, part in zip(self.blocks, parts, strict=True)]
        return torch.cat(turned, dim=-1) / torch.cat(self.precisions(), dim=-1).sqrt()[:, None]

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._powered(rows, -1)

    def _solve(self, rows: Tensor) -> Tensor:
        return self._powered(rows, 1)

    def _powered(self, rows: Tensor, power: float) -> Tensor:
        """(Σ⁻¹)^power v."""
        parts = torch.split(rows, [block.size for block in self.blocks], dim=-1)
        done = [
            block.from_eigenbasis(block.to_eigenbasis(part) * values.pow(power)[:, None])
            for block, part, values in zip(self.blocks, parts, self.precisions(), strict=True)
        ]
        return torch.cat(done, dim=-1)

    def precisions(self) -> list[Tensor]:
        """The eigenvalues of Σ⁻¹ in each block, scale · b aᵀ + δ: [K, size]."""
        weights = zip(self.blocks, self.scale.unbind(1), self.delta.unbind(1), strict=True)
        return [b.curvature * scale[:, None] + delta[:, None] for b, scale, delta in weights]

    def state(self) -> dict[str, Tensor]:
        tensors = {"scale": self.scale, "delta": self.delta}
        for i, block in enumerate(self.blocks):
            parts = {"curvature": block.curvature, "left": block.left, "right": block.right}
            tensors |= {f"{i}.{name}": v for name, v in parts.items() if v is not None}
        return tensors

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Kronecker:
        blocks: list[KroneckerBlock] = []
        while f"{len(blocks)}.curvature" in state:
            name = str(len(blocks))
            curvature, left = state[f"{name}.curvature"], state.get(f"{name}.left")
            blocks.append(KroneckerBlock(curvature, left, state.get(f"{name}.right")))
        scale, delta = state["scale"], state["delta"]
        if not blocks or scale.shape[-1] != len(blocks):
            raise StoreError(f"the state of a Kronecker structure lacks {len(blocks)}.curvature")
        return cls(tuple(blocks), scale, delta)


def _eigen(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Nonnegative eigenvalues [K, n] and the eigenvectors [K, n, n] of a positive semi-definite
    matrix."""
    values, vectors = torch.linalg.eigh(symmetric(matrix, what))
    if values.shape[-1] > 0:
        tolerance = torch.finfo(values.dtype).eps * values.shape[-1]
        bad = values.amin(-1) < -tolerance * values.abs().amax(-1)
        refuse(bad.detach(), f"{what} has a negative eigenvalue")
    return values.clamp(min=0), vectors


def _kron_matmul(rows: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """v (left ⊗ right) for rows v [K, T, out · in], by one batched product per factor."""
    members, count, size = rows.shape
    if right is not None:
        n = right.shape[-1]
        rows = (rows.reshape(members, count * (size // n), n) @ right).reshape(rows.shape)
    if left is not None:
        n = left.shape[-1]
        rest = size // n
        columns = rows.reshape(members, count, n, rest).mT.reshape(members, count * rest, n)
        turned = (columns @ left).reshape(members, count, rest, n)
        rows = turned.mT.reshape(members, count, size)
    return rows


def _transposed(matrix: Tensor | None) -> Tensor | None:
    return None if matrix is None else matrix.mT


def _per_block(value: float | Tensor, blocks: Sequence[KroneckerBlock], what: str) -> Tensor:
    """Expand a number, [K] or [K, blocks] to [K, blocks]."""
    like = blocks[0].curvature
    members, count = len(like), len(blocks)
    given = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if given.ndim == 1:
        given = given[:, None]
    if given.ndim > 0 and (given.shape[0] != members or given.shape[1:] not in ((1,), (count,))):
        raise ShapeError(
            f"{what} must be a number, [{members}] or [{members}, {count}], "
            f"got {list(torch.as_tensor(value).shape)}"
        )
    return given.expand(members, count)
