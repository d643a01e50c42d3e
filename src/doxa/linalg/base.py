"""The operations that all covariance structures have.

A structure contains K covariances Σ_k = R_k R_kᵀ over P flat parameters, one per member. Vectors
are rows `[..., K, P]`, and Jacobians are `[K, ..., P]`. All members are computed at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from doxa.errors import NumericalError, ShapeError, StoreError


class Structure(ABC):
    """K covariance matrices over P parameters.

    Subclasses implement products with rows `[K, T, P]`, without a loop over K. Every tensor of
    their state has the leading axis K.
    """

    name: ClassVar[str]
    _named: ClassVar[dict[str, type[Structure]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Structure._named[cls.name] = cls

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """The numbers of members and of parameters, (K, P)."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The variances, which are the diagonal of Σ: [K, P]."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """log |Σ|: [K]."""

    @abstractmethod
    def scaled(self, t: float | Tensor) -> Self:
        """t Σ, for t > 0: a number, or one number per member, [K]."""

    @abstractmethod
    def _root(self, rows: Tensor) -> Tensor:
        """R ε, for rows ε of standard normal numbers: [K, T, P]."""

    @abstractmethod
    def _half(self, rows: Tensor) -> Tensor:
        """v R, [K, T, Q], so that v Σ wᵀ = (v R)(w R)ᵀ. Q may be larger than P."""

    @abstractmethod
    def _matmul(self, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def _solve(self, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors from which `from_state` rebuilds the structure. Each has the leading axis
        K."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Self:
        """Rebuild a structure from its `state`."""

    @property
    def members(self) -> int:
        return self.shape[0]

    @property
    def numbers(self) -> int:
        """The number of standard normal numbers per draw for the cheapest form of `sample`."""
        return self.size

    @property
    def size(self) -> int:
        return self.shape[1]

    def sample(self, eps: Tensor) -> Tensor:
        """Draws from N(0, Σ), [..., K, P], computed from standard normal numbers `eps` of the same
        shape."""
        return self._on_rows(self._root, eps)

    def matmul(self, v: Tensor) -> Tensor:
        """Σ v, for v of shape [..., K, P]; the result has the same shape."""
        return self._on_rows(self._matmul, v)

    def solve(self, v: Tensor) -> Tensor:
        """Σ⁻¹ v, for v of shape [..., K, P]; the result has the same shape."""
        return self._on_rows(self._solve, v)

    def quad(self, j: Tensor) -> Tensor:
        """j Σ jᵀ per row of j, for j of shape [K, ..., P]: [K, ...], never negative."""
        return self._half_of(j).square().sum(-1)

    def outer(self, j: Tensor) -> Tensor:
        """J Σ Jᵀ, for J of shape [K, ..., O, P]. The result [K, ..., O, O] is symmetric."""
        half = self._half_of(j)
        return half @ half.mT

    def dense(self) -> Tensor:
        """Σ as a matrix, [K, P, P]."""
        parameter = self.diagonal()
        eye = torch.eye(self.size, dtype=parameter.dtype, device=parameter.device)
        covariance = self._matmul(eye.expand(self.members, -1, -1))
        return (covariance + covariance.mT) / 2

    def member(self, k: int) -> Self:
        """The covariance of member k alone, as a structure with K = 1."""
        if not -self.members <= k < self.members:
            raise IndexError(f"member {k} of {self.members}")
        tensors = {name: value[k % self.members, None] for name, value in self.state().items()}
        return self.from_state(tensors)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """A copy on another device, or in another precision."""
        moved = {name: value.to(device, dtype) for name, value in self.state().items()}
        return self.from_state(moved)

    def _on_rows(self, act: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        if v.ndim < 2 or (v.shape[-2], v.shape[-1]) != self.shape:
            raise ShapeError(f"expected [..., {self.members}, {self.size}], got {list(v.shape)}")
        lead = v.shape[:-2]
        rows = v.reshape(lead.numel(), *self.shape).transpose(0, 1)  # [K, T, P]
        return act(rows).transpose(0, 1).reshape(*lead, *self.shape)

    def _half_of(self, j: Tensor) -> Tensor:
        if j.ndim < 2 or (j.shape[0], j.shape[-1]) != self.shape:
            raise ShapeError(f"expected [{self.members}, ..., {self.size}], got {list(j.shape)}")
        inner = j.shape[1:-1]
        half = self._half(j.reshape(self.members, inner.numel(), self.size))
        return half.reshape(self.members, *inner, half.shape[-1])


def structure(name: str, state: Mapping[str, Tensor]) -> Structure:
    """Rebuild a structure of any class from its state.

    Parameters
    ----------
    name : str
        The name of the class: "diagonal", "low-rank", "low-rank-precision", "kronecker",
        "block-diagonal", "dense" or "embedded".
    state : dict of str to Tensor
        What its method `state` returned.

    Returns
    -------
    Structure
        The structure.
    """
    if name not in Structure._named:
        raise StoreError(f"unknown structure {name!r}; known: {sorted(Structure._named)}")
    try:
        return Structure._named[name].from_state(state)
    except KeyError as error:
        raise StoreError(f"the state of a {name} structure lacks {error}") from error


def refuse(bad: Tensor, what: str) -> None:
    """Raise an error that names the members for which `bad` [K] is true. `what` is its message."""
    if bad.any():
        which = ", ".join(str(k) for k in bad.nonzero().flatten().tolist())
        raise NumericalError(f"member{'s' if ',' in which else ''} {which}: {what}")


def refuse_variances(variance: Tensor, what: str) -> None:
    """Raise an error unless `variance` [K, P] is finite and not negative."""
    value = variance.detach()
    refuse(~value.isfinite().all(-1), f"{what} is not finite")
    refuse((value < 0).any(-1), f"{what} is negative")


def per_member(value: float | Tensor, like: Tensor, what: str) -> Tensor:
    """A positive number, or one per member, as a tensor [K] with the type and device of `like`,
    which has the shape [K, ...]. `what` names the number in error messages."""
    given = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if given.shape not in ((), (len(like),)):
        raise ShapeError(f"{what} must be a number or [{len(like)}], got {list(given.shape)}")
    spread = given.expand(len(like))
    refuse(~(spread.isfinite() & (spread > 0)).detach(), f"{what} must be positive and finite")
    return spread


def symmetric(matrix: Tensor, what: str) -> Tensor:
    """The symmetric part of a matrix [K, P, P]. Raises an error if the antisymmetric part is larger
    than round-off."""
    if matrix.ndim != 3 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(f"{what} must be [K, P, P], got {list(matrix.shape)}")
    value = matrix.detach()
    refuse(~value.isfinite().flatten(1).all(-1), f"{what} is not finite")
    if matrix.shape[-1] > 0:
        skew = (value - value.mT).abs().amax((-2, -1))
        tolerance = torch.finfo(matrix.dtype).eps ** 0.5
        refuse(skew > tolerance * value.abs().amax((-2, -1)), f"{what} is not symmetric")
    return (matrix + matrix.mT) / 2


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """The lower Cholesky factor of a matrix [K, P, P]. Raises an error that names the members whose
    matrix is not positive definite."""
    matrix = symmetric(matrix, what)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    failed = info != 0
    if not failed.any():
        failed = _digits_lost(matrix.detach(), factor.detach())
    refuse(
        failed,
        f"the Cholesky decomposition failed: {what} is not positive definite in {matrix.dtype}; "
        "use float64, a larger prior precision, or a simpler structure",
    )
    return factor


def _digits_lost(matrix: Tensor, factor: Tensor) -> Tensor:
    """Whether a solve with the matrix would have less than one correct digit, [K].

    The decomposition succeeds for about half of all exactly singular matrices, because round-off
    makes their last pivot positive. Let C be the matrix scaled to a unit diagonal. The relative
    error of a solve is about ε ‖C⁻¹‖. Eight vectors of random signs are enough to estimate this
    norm.
    """
    size = matrix.shape[-1]
    if size == 0:
        return torch.zeros(len(matrix), dtype=torch.bool, device=matrix.device)
    coins = torch.randint(2, (size, 8), generator=torch.Generator().manual_seed(0))
    signs = (2 * coins - 1).to(matrix)
    scale = matrix.diagonal(dim1=-2, dim2=-1).sqrt()[..., None]
    inverse = torch.cholesky_solve(scale * signs, factor) * scale  # C⁻¹ times the signs, [K, P, 8]
    # the negation of "<", so that the result is also true after an overflow to NaN or infinity
    return ~(inverse.abs().amax((-2, -1)) * torch.finfo(matrix.dtype).eps < 0.1)
