"""Dense, diagonal, block-diagonal and embedded covariances.

`Dense` is a full matrix. It stores a Cholesky factor of Σ, or of Σ⁻¹:

    from a covariance  Σ = L Lᵀ:      R = L
    from a precision   Σ⁻¹ = L Lᵀ:    R = L⁻ᵀ, and Σ is never formed

`Diagonal` is Σ = diag(v): all parameters are independent.

`BlockDiagonal` is Σ = Π diag(Σ_1, …, Σ_B) Πᵀ: blocks of parameters are independent of each other,
and each has its own covariance. The permutation Π maps the elements of the blocks, one block after
the other, to their positions in the flat vector.

`Embedded` is Σ = E Σ_S Eᵀ: a few chosen parameters have the covariance Σ_S, and the others are
fixed, with zero variance. E maps the chosen parameters to their positions, which may differ between
members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from doxa.errors import NumericalError, ShapeError, StoreError
from doxa.linalg.base import Structure, cholesky, per_member, refuse, refuse_variances


@dataclass(frozen=True, eq=False)
class Diagonal(Structure):
    """A diagonal covariance.

    Parameters
    ----------
    variance : Tensor of shape [K, P]
        The variances. A parameter with variance 0 is fixed; `solve` and `logdet` then raise an
        error.
    """

    name = "diagonal"

    variance: Tensor

    def __post_init__(self) -> None:
        if self.variance.ndim != 2:
            raise ShapeError(f"the variance must be [K, P], got {list(self.variance.shape)}")
        refuse_variances(self.variance, "the variance")

    @property
    def shape(self) -> tuple[int, int]:
        return self.variance.shape[0], self.variance.shape[1]

    def diagonal(self) -> Tensor:
        return self.variance

    def logdet(self) -> Tensor:
        return self._positive().log().sum(-1)

    def scaled(self, t: float | Tensor) -> Diagonal:
        return Diagonal(self.variance * per_member(t, self.variance, "the scale")[:, None])

    def _root(self, rows: Tensor) -> Tensor:
        return rows * self.variance.sqrt()[:, None]

    def _half(self, rows: Tensor) -> Tensor:
        return self._root(rows)

    def _matmul(self, rows: Tensor) -> Tensor:
        return rows * self.variance[:, None]

    def _solve(self, rows: Tensor) -> Tensor:
        return rows / self._positive()[:, None]

    def _positive(self) -> Tensor:
        refuse((self.variance.detach() == 0).any(-1), "a variance is zero, so Σ is singular")
        return self.variance

    def state(self) -> dict[str, Tensor]:
        return {"variance": self.variance}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Diagonal:
        return cls(state["variance"])


@dataclass(frozen=True, eq=False)
class Dense(Structure):
    """A full covariance. Build it with `from_covariance` or `from_precision`.

    These make the factor contiguous, as it is after loading. The order of numbers in memory affects
    the last bits of a product, and loading must not change them.

    Parameters
    ----------
    factor : Tensor of shape [K, P, P]
        A lower Cholesky factor.
    of_precision : bool
        Whether it is the factor of Σ⁻¹, and not of Σ.
    """

    name = "dense"

    factor: Tensor
    of_precision: bool

    @classmethod
    def from_covariance(cls, covariance: Tensor) -> Dense:
        return cls(cholesky(covariance, "the covariance").contiguous(), of_precision=False)

    @classmethod
    def from_precision(cls, precision: Tensor) -> Dense:
        return cls(cholesky(precision, "the precision").contiguous(), of_precision=True)

    @classmethod
    def from_precision_root(cls, root: Tensor) -> Dense:
        """From a root A [K, N, P] of the precision, Σ⁻¹ = AᵀA, by the QR decomposition of A.

        AᵀA is not formed, because its condition number is the square of that of A. The rows of A
        must be ordered from small to large. They are reversed for QR, which keeps more digits.
        """
        upper = torch.linalg.qr(root.flip(-2), mode="r").R
        sign = upper.diagonal(dim1=-2, dim2=-1).sign()
        return cls((sign[..., None] * upper).mT.contiguous(), of_precision=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.factor.shape[0], self.factor.shape[1]

    def diagonal(self) -> Tensor:
        if not self.of_precision:
            return self.factor.square().sum(-1)
        eye = torch.eye(self.size, dtype=self.factor.dtype, device=self.factor.device)
        return _lower_solve(self.factor, eye).square().sum(-2)

    def logdet(self) -> Tensor:
        logdet = 2 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -logdet if self.of_precision else logdet

    def scaled(self, t: float | Tensor) -> Dense:
        root = per_member(t, self.factor, "the scale").sqrt()[:, None, None]
        factor = self.factor / root if self.of_precision else self.factor * root
        return Dense(factor, self.of_precision)

    def _root(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return _lower_solve(self.factor, rows, left=False)
        return rows @ self.factor.mT

    def _half(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return _lower_solve(self.factor, rows.mT).mT
        return rows @ self.factor

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._root(self._half(rows))

    def _solve(self, rows: Tensor) -> Tensor:
        if self.of_precision:
            return rows @ self.factor @ self.factor.mT
        return torch.cholesky_solve(rows.mT, self.factor).mT

    def state(self) -> dict[str, Tensor]:
        return {"precision" if self.of_precision else "covariance": self.factor}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Dense:
        of_precision = "precision" in state
        return cls(state["precision" if of_precision else "covariance"], of_precision)


def _lower_solve(factor: Tensor, right: Tensor, left: bool = True) -> Tensor:
    """L⁻¹ X, or X L⁻¹."""
    solution: Tensor = torch.linalg.solve_triangular(factor, right, upper=False, left=left)
    return solution


@dataclass(frozen=True, eq=False)
class BlockDiagonal(Structure):
    """Independent blocks of parameters. Build it with `from_covariances` or `from_precisions`.

    Parameters
    ----------
    blocks : tuple of Dense
        The covariance of each block.
    order : Tensor of shape [P]
        The positions of the first block's elements in the flat vector, then those of the second
        block, and so on. They are the same for all members.
    """

    name = "block-diagonal"

    blocks: tuple[Dense, ...]
    order: Tensor

    def __post_init__(self) -> None:
        total = sum(block.size for block in self.blocks)
        if not torch.equal(self.order.sort().values.cpu(), torch.arange(total)):
            raise ShapeError(
                f"the blocks have {total} parameters in all, and their index sets must have each "
                f"of 0 … {total - 1} once"
            )

    @classmethod
    def from_covariances(cls, each: Sequence[Tensor], index: Sequence[Tensor]) -> BlockDiagonal:
        """From the covariance [K, S_b, S_b] of each block, and the positions [S_b] of its
        elements."""
        return cls(tuple(map(Dense.from_covariance, each)), torch.cat(list(index)))

    @classmethod
    def from_precisions(cls, each: Sequence[Tensor], index: Sequence[Tensor]) -> BlockDiagonal:
        """From the inverse covariance [K, S_b, S_b] of each block, and the positions [S_b] of its
        elements."""
        return cls(tuple(map(Dense.from_precision, each)), torch.cat(list(index)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks[0].members, len(self.order)

    def diagonal(self) -> Tensor:
        return self._placed([block.diagonal() for block in self.blocks])

    def logdet(self) -> Tensor:
        return torch.stack([block.logdet() for block in self.blocks]).sum(0)

    def scaled(self, t: float | Tensor) -> BlockDiagonal:
        return BlockDiagonal(tuple(block.scaled(t) for block in self.blocks), self.order)

    def _root(self, rows: Tensor) -> Tensor:
        return self._placed(self._each(lambda block, own: block._root(own), rows))

    def _half(self, rows: Tensor) -> Tensor:
        return torch.cat(self._each(lambda block, own: block._half(own), rows), -1)

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._placed(self._each(lambda block, own: block._matmul(own), rows))

    def _solve(self, rows: Tensor) -> Tensor:
        return self._placed(self._each(lambda block, own: block._solve(own), rows))

    def _each(self, act: Callable[[Dense, Tensor], Tensor], rows: Tensor) -> list[Tensor]:
        """Apply `act` to each block and its elements of rows [K, T, P]."""
        parts = rows[..., self.order].split([block.size for block in self.blocks], -1)
        return [act(block, own) for block, own in zip(self.blocks, parts, strict=True)]

    def _placed(self, parts: list[Tensor]) -> Tensor:
        """Concatenate values [..., S_b] of the blocks, and put them into the order of the flat
        vector."""
        return torch.cat(parts, -1)[..., self._place]

    @cached_property
    def _place(self) -> Tensor:
        return self.order.argsort()

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> BlockDiagonal:
        moved = tuple(block.to(device, dtype) for block in self.blocks)
        return BlockDiagonal(moved, self.order.to(device))

    def state(self) -> dict[str, Tensor]:
        each = {
            f"{b}.{name}": value
            for b, block in enumerate(self.blocks) for name, value in block.state().items()
        }  # fmt: skip
        return {"order": self.order.expand(self.shape), **each}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> BlockDiagonal:
        order = state["order"][0]
        numbers = {name.partition(".")[0] for name in state if name != "order"}
        blocks = []
        for b in map(str, range(len(numbers))):
            own = {n.partition(".")[2]: v for n, v in state.items() if n.partition(".")[0] == b}
            blocks.append(Dense.from_state(own))
        if not blocks or sum(block.size for block in blocks) != len(order):
            raise StoreError("the state of a block-diagonal structure lacks blocks")
        return cls(tuple(blocks), order)


@dataclass(frozen=True, eq=False)
class Embedded(Structure):
    """A covariance of some parameters; the others are fixed.

    Parameters
    ----------
    inner : Dense
        Σ_S, the covariance of the chosen parameters.
    index : Tensor of shape [K, S]
        Their positions in the flat vector.
    total : int
        P, the number of all parameters.
    """

    name = "embedded"

    inner: Dense
    index: Tensor
    total: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.inner.members, self.total

    @property
    def numbers(self) -> int:
        return self.inner.size

    def sample(self, eps: Tensor) -> Tensor:
        """Draws from N(0, Σ), [..., K, P], from normal numbers [..., K, S] or [..., K, P]."""
        if eps.shape[-1] != self.inner.size:
            return super().sample(eps)
        return self.put(self.inner.sample(eps))

    def diagonal(self) -> Tensor:
        return self.put(self.inner.diagonal())

    def logdet(self) -> Tensor:
        """log |Σ_S|, over the chosen parameters only."""
        return self.inner.logdet()

    def scaled(self, t: float | Tensor) -> Embedded:
        return Embedded(self.inner.scaled(t), self.index, self.total)

    def picked(self, values: Tensor) -> Tensor:
        """The chosen elements of values [K, P]: [K, S]."""
        return values.gather(1, self.index)

    def _pick(self, rows: Tensor) -> Tensor:
        """The chosen elements of rows [K, T, P]: [K, T, S]."""
        return rows.gather(2, self.index.unsqueeze(1).expand(-1, rows.shape[1], -1))

    def put(self, values: Tensor) -> Tensor:
        """Put values [..., K, S] of the chosen elements into zeros [..., K, P]."""
        index = self.index.expand(*values.shape[:-1], -1)
        return values.new_zeros(*values.shape[:-1], self.total).scatter(-1, index, values)

    def _put_rows(self, rows: Tensor) -> Tensor:
        """Put rows [K, T, S] of the chosen elements into zeros [K, T, P]."""
        return self.put(rows.transpose(0, 1)).transpose(0, 1)

    def _root(self, rows: Tensor) -> Tensor:
        return self._put_rows(self.inner._root(self._pick(rows)))

    def _half(self, rows: Tensor) -> Tensor:
        return self.inner._half(self._pick(rows))

    def _matmul(self, rows: Tensor) -> Tensor:
        return self._put_rows(self.inner._matmul(self._pick(rows)))

    def _solve(self, rows: Tensor) -> Tensor:
        raise NumericalError("parameters outside the chosen ones have no variance to divide by")

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Embedded:
        return Embedded(self.inner.to(device, dtype), self.index.to(device), self.total)

    def state(self) -> dict[str, Tensor]:
        total = torch.full((self.inner.members,), self.total)
        return {**self.inner.state(), "index": self.index, "total": total}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Embedded:
        return cls(Dense.from_state(state), state["index"], int(state["total"][0]))
