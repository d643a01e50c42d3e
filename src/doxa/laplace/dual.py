"""The posterior of a linearised network, written in the space of its outputs.

With Ψ = C^½ J Λ^−½, whose rows are the outputs at the training rows, and ΨΨᵀ = U diag(λ) Uᵀ, the
kernel k(x, x') = J Λ⁻¹ J'ᵀ on those rows in units of their noise,

    H⁻¹ = (JᵀCJ + τΛ)⁻¹ = S Sᵀ/τ,    S = Λ^−½ (I − Ψᵀ U diag(c) Uᵀ Ψ),    c = (1 − s)/λ
    log |H| = log |τΛ| + Σ log(1 + λ/τ),    s = (1 + λ/τ)^−½

(Woodbury's identity, in the form that squares and cannot become negative.) Nothing of size p × p is
made: a matrix over rows × outputs, and Ψ, which is held where it is small and else recomputed, some
rows at a time. The same as `Dense` from J, for networks with more weights than rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.errors import StoreError
from doxa.laplace.curvature import Jacobians
from doxa.linalg import Structure
from doxa.linalg.base import per_member

_HELD = 512 << 20  # bytes of Ψ that are kept, or made at once
_TOGETHER = 256  # directions whose squares are summed at once


@dataclass(eq=False)
class Features:
    """Ψ [K, m·O, p] in float64, a few training rows at a time.

    jacobians: of the network at θ*. x: the rows, [m, ...] shared by all members, or [K, m, ...].
    root: C^½ of each row, [K, m, O, O]. scale: Λ^−½, [K, p].
    """

    jacobians: Jacobians
    x: Any
    shared: bool
    root: Tensor
    scale: Tensor

    @property
    def count(self) -> int:
        return self.root.shape[1] * self.root.shape[2]

    @cached_property
    def _held(self) -> Tensor | None:
        members, weights = self.scale.shape
        if 8 * members * self.count * weights > _HELD:
            return None
        return torch.cat([part for _, part in self._made()], 1)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(which of the m·O, Ψ there): all at once where Ψ is held."""
        held = self._held
        if held is None:
            yield from self._made()
        else:
            yield slice(0, self.count), held

    def _made(self, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        rows, outputs = self.root.shape[1:3]
        for part in self.jacobians.chunks(rows - first):
            own = slice(first + part.start, first + part.stop)
            at = (own,) if self.shared else (slice(None), own)
            _, j = self.jacobians(tree_map(lambda t, at=at: t[at], self.x), self.shared)
            each = self.root[:, own] @ j.double()  # [K, b, O, p]
            yield (
                slice(own.start * outputs, own.stop * outputs),
                each.flatten(1, 2) * self.scale[:, None],
            )

    def times(self, rows: Tensor) -> Tensor:
        """Ψ v for rows v [K, T, p]: [K, T, m·O]."""
        return torch.cat([rows @ part.mT for _, part in self.parts()], -1)

    def back(self, rows: Tensor) -> Tensor:
        """Ψᵀ u for rows u [K, T, m·O]: [K, T, p]."""
        total = rows.new_zeros(*rows.shape[:2], self.scale.shape[1])
        for own, part in self.parts():
            total = total + rows[..., own] @ part
        return total

    def gram(self) -> Tensor:
        """ΨΨᵀ, [K, m·O, m·O]: blocks of it, each from two pieces of Ψ."""
        held = self._held
        if held is not None:
            return held @ held.mT
        kernel = self.scale.new_zeros(len(self.scale), self.count, self.count)
        outputs = self.root.shape[2]
        for panel, left in self._panels():
            for own, part in self._made(panel.start // outputs):
                block = left @ part.mT
                kernel[:, panel, own] = block
                kernel[:, own, panel] = block.mT
        return kernel

    def _panels(self) -> Iterator[tuple[slice, Tensor]]:
        """Pieces of Ψ that are as large as may be."""
        most = max(1, _HELD // (8 * self.scale.numel()))  # of m·O
        parts: list[Tensor] = []
        start = stop = 0
        for own, part in self._made():
            if parts and own.stop - start > most:
                yield slice(start, stop), torch.cat(parts, 1)
                parts, start = [], stop
            parts.append(part)
            stop = own.stop
        yield slice(start, stop), torch.cat(parts, 1)

    def member(self, k: int) -> Features:
        one = slice(k, k + 1)
        x = self.x if self.shared else tree_map(lambda t: t[one], self.x)
        return Features(
            self.jacobians.member(k), x, self.shared, self.root[one], self.scale[one]
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Dual(Structure):
    """T H⁻¹ by way of the kernel: λ [K, q], U [K, q, q], and τ and T of each member, [K]."""

    name = "dual"

    features: Features
    values: Tensor
    vectors: Tensor
    tau: Tensor
    heat: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.features.scale.shape[0], self.features.scale.shape[1]

    @property
    def _ratio(self) -> Tensor:
        """λ/τ, [K, q]."""
        return self.values / self.tau[:, None]

    @property
    def _scale(self) -> Tensor:
        """(T/τΛ)^½, [K, 1, p]."""
        return (self.features.scale * (self.heat / self.tau).sqrt()[:, None])[:, None]

    def logdet(self) -> Tensor:
        return 2.0 * self._scale[:, 0].log().sum(1) - self._ratio.log1p().sum(1)

    def diagonal(self) -> Tensor:
        seen = torch.zeros_like(self.features.scale)
        weight = (1.0 / (self.tau[:, None] * (1.0 + self._ratio))).sqrt()
        directions = self.vectors.mT * weight[..., None]  # [K, q, q], a row a direction
        for some in directions.split(_TOGETHER, 1):
            seen = seen + self.features.back(some).square().sum(1)
        return self._scale[:, 0].square() * (1.0 - seen).clamp_min(0.0)

    def scaled(self, t: float | Tensor) -> Dual:
        return replace(self, heat=self.heat * per_member(t, self.heat, "the scale"))

    def _without(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(I − Ψᵀ U diag(weight) Uᵀ Ψ / τ) v."""
        inside = self.features.times(rows) @ self.vectors
        again = (inside * (weight / self.tau[:, None])[:, None]) @ self.vectors.mT
        return rows - self.features.back(again)

    def _symmetric_root(self, rows: Tensor) -> Tensor:
        s = (1.0 + self._ratio).rsqrt()
        return self._without(rows, s.square() / (1.0 + s))  # (1 − s)/λ, without the difference

    def _root(self, rows: Tensor) -> Tensor:
        return (self._scale * self._symmetric_root(rows.double())).to(rows.dtype)

    def _half(self, rows: Tensor) -> Tensor:
        return self._symmetric_root(rows.double() * self._scale).to(rows.dtype)

    def _matmul(self, rows: Tensor) -> Tensor:
        inner = self._without(rows.double() * self._scale, 1.0 / (1.0 + self._ratio))
        return (self._scale * inner).to(rows.dtype)

    def _solve(self, rows: Tensor) -> Tensor:
        inner = rows.double() / self._scale
        seen = self.features.back(self.features.times(inner) / self.tau[:, None, None])
        return ((inner + seen) / self._scale).to(rows.dtype)

    def member(self, k: int) -> Dual:
        one = slice(k, k + 1)
        own = (self.values[one], self.vectors[one], self.tau[one], self.heat[one])
        return Dual(self.features.member(k), *own)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Dual:
        """As it is: float64, where its network lies."""
        return self

    def state(self) -> dict[str, Tensor]:
        """With the rows that the kernel is made of, under "rows" (shared) or "own_rows"."""
        x = self.features.x
        named = {"": x} if isinstance(x, Tensor) else dict(_entries(x))
        kind = "rows" if self.features.shared else "own_rows"
        rows = {f"{kind}{name}": value.contiguous() for name, value in named.items()}
        return {
            "values": self.values, "vectors": self.vectors.contiguous(), "tau": self.tau,
            "heat": self.heat, "root": self.features.root, "scale": self.features.scale, **rows,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Dual:
        raise StoreError("a kernel is rebuilt with its network: Dual.restored")

    @classmethod
    def restored(cls, jacobians: Jacobians, state: Mapping[str, Tensor], inputs: Any) -> Dual:
        """From what `state` gave; `inputs` are the shapes of one row, as the posterior has them."""
        shared = any(name.startswith("rows") for name in state)
        kind = "rows" if shared else "own_rows"
        x: Any = state.get(kind)
        if isinstance(inputs, dict):
            x = {name: state[f"{kind}.{name}"] for name in inputs}
        elif x is None:
            x = tuple(state[f"{kind}.{i}"] for i in range(len(inputs)))
        features = Features(jacobians, x, shared, state["root"], state["scale"])
        return cls(features, *(state[name] for name in ("values", "vectors", "tau", "heat")))


def _entries(x: Any) -> Iterator[tuple[str, Tensor]]:
    """Rows that are several tensors, by name or by number."""
    pairs = x.items() if isinstance(x, dict) else enumerate(x)
    for name, value in pairs:
        yield f".{name}", value
