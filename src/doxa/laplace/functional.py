"""Laplace in function space: the Gaussian process of a linearised network.

    f ~ GP(f(x; θ*), k),    k(x, x') = J Λ⁻¹ J'ᵀ

conditioned on the training rows, each observed with the noise C⁻¹ of the likelihood at θ* (Khan et
al. 2019; Immer, Korzepa & Bauer 2021). Variances, draws and evidence equal those of the full matrix
over the weights, at the cost of a matrix over rows × outputs. So it is for networks with more
weights than rows. A subset of the rows can replace all rows: its precision is multiplied so that
the trace of the kernel in units of the noise (the sum of its eigenvalues) equals that of all rows.

`Dual` is this posterior over the weights. With Ψ = C^½ J Λ^−½, which has one row for each output at
each training row, and ΨΨᵀ = U diag(λ) Uᵀ, the kernel k(x, x') = J Λ⁻¹ J'ᵀ on those rows in units of
their noise,

    H⁻¹ = (JᵀCJ + τΛ)⁻¹ = S Sᵀ/τ,    S = Λ^−½ (I − Ψᵀ U diag(c) Uᵀ Ψ),    c = (1 − s)/λ
    log |H| = log |τΛ| + Σ log(1 + λ/τ),    s = (1 + λ/τ)^−½

(Woodbury's identity, as a square, which cannot become negative.) No p × p matrix is formed, only a
matrix over rows × outputs, and Ψ. Ψ is stored where it is small, and otherwise recomputed in blocks
of rows. The result is the same as `Dense` from J.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.data import Batch, Pass, batch_rows, free_memory
from doxa.errors import MemoryBudgetError, MethodError, StoreError
from doxa.laplace import posterior
from doxa.laplace.curvature import Averaged, Jacobians, Outputs, output_size
from doxa.laplace.forms import Effective, Form, Matrix, Scales, some_rows, spectral
from doxa.laplace.posterior import LaplacePosterior
from doxa.linalg import Structure
from doxa.linalg.base import per_member
from doxa.method import Run, State
from doxa.posterior import register_posterior

_HELD = 512 << 20  # bytes of Ψ that are stored, or computed at once
_TOGETHER = 256  # directions whose squares are summed at once


@dataclass(eq=False)
class Features:
    """Ψ [K, m·O, p] in float64, in blocks of training rows.

    jacobians: of the network at θ*.
    x: the rows, [m, ...] shared by all members, or [K, m, ...].
    root: C^½ of each row, [K, m, O, O].
    scale: Λ^−½, [K, p].
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
        """Pairs (slice of m·O, Ψ of that slice): a single pair where Ψ is stored."""
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
        """Blocks of Ψ of the largest allowed size."""
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
    """T H⁻¹ expressed by the kernel: λ [K, q], U [K, q, q], and τ and T of each member, [K]."""

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
        directions = self.vectors.mT * weight[..., None]  # [K, q, q], one direction per row
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
        """Unchanged: it stays in float64, on the device of its network."""
        return self

    def state(self) -> dict[str, Tensor]:
        """The tensors, with the rows of the kernel under "rows" (shared) or "own_rows"."""
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
        raise StoreError("a kernel needs its network to be rebuilt: use Dual.restored")

    @classmethod
    def restored(cls, jacobians: Jacobians, state: Mapping[str, Tensor], inputs: Any) -> Dual:
        """Rebuild from `state`; `inputs` are the shapes of one row, as in the posterior."""
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
    """The tensors of rows that consist of several tensors, by name or number."""
    pairs = x.items() if isinstance(x, dict) else enumerate(x)
    for name, value in pairs:
        yield f".{name}", value


@register_posterior
class FunctionalPosterior(LaplacePosterior):
    """A `LaplacePosterior` whose covariance is a `Dual`. It stores training rows."""

    kind = "functional-laplace"

    def check_restored(self) -> None:
        super().check_restored()
        dual: Any = self.covariance
        k, p = dual.shape
        q = dual.values.shape[-1]
        want = {"values": (k, q), "vectors": (k, q, q), "tau": (k,), "heat": (k,), "scale": (k, p)}
        state = dual.state()
        for name, shape in want.items():
            if state[name].shape != shape:
                raise StoreError(f"{name} is {list(state[name].shape)}, not {list(shape)}")
        features = dual.features
        rows = len(features.x) if isinstance(features.x, Tensor) and features.shared else None
        outputs = features.root.shape[-1]
        if features.root.shape != (k, rows or features.root.shape[1], outputs, outputs):
            raise StoreError(f"root is {list(features.root.shape)}")
        if rows is not None and list(features.x.shape[1:]) != list(self.inputs or ()):
            raise StoreError(f"rows of {list(features.x.shape)}, not of {self.inputs}")
        if features.count != q:
            raise StoreError(f"{features.count} features for {q} directions")

    def _check_covariance(self) -> None:
        """Only shapes are checked, because a draw would need the Jacobian of every row."""

    @classmethod
    def restore(
        cls, common: dict[str, Any], tensors: dict[str, Tensor], extra: dict[str, Any]
    ) -> FunctionalPosterior:
        shared, model, prefix = cls._shared(tensors, extra), common["model"], "covariance."
        state = {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}
        own = (model.subset_names, shared["buffers"])
        at = tensors.get("at")
        jacobians = Jacobians(model, tensors["mean"] if at is None else at, *own)
        covariance = Dual.restored(jacobians, state, common["inputs"])
        common = common | {"method": posterior.link_as_saved(common["method"], extra)}
        new = cls(**common, **shared, mean=tensors["mean"], covariance=covariance, at=at)
        new.elbo, new.log_evidence = extra.get("elbo"), extra.get("evidence")
        return new


def check(run: Run, need: int, groups: int) -> None:
    """Raise for runs that this form does not support, before any computation."""
    if not run.prior.is_gaussian:
        raise MethodError(
            "structure='functional' needs a Gaussian prior, Normal or FanInNormal: the kernel "
            "uses the variances of the prior"
        )
    if groups > 1:
        raise MethodError(
            "structure='functional' supports one learned noise level: use per_output=False, or "
            "structure='full'"
        )
    if need > 0.8 * free_memory(run.device):
        raise MemoryBudgetError(
            f"{run.size} kernels over rows × outputs take "
            f"{need / 2**30:.3g} GiB; use kernel_rows= for the kernel of fewer rows, "
            "structure='diagonal', or fewer members at once"
        )


@dataclass(frozen=True)
class Kernel(Form):
    """ΨΨᵀ over some rows × outputs; for all rows, the diagonal over weights, which has the same
    trace.

    rows: the number of rows of the kernel; None: all.
    kind: the kind of curvature in the outputs.
    """

    rows: int | None = None
    kind: str = "ggn"
    diagonal: ClassVar[Matrix] = Matrix(diagonal=True)

    def empty(self, run: Run, groups: int) -> State:
        return self.diagonal.empty(run, groups)

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        return self.diagonal.add(source, state, outputs, groups)

    def complete(self, run: Run, state: State) -> State:
        """The state with the eigenvalues and eigenvectors of the kernel, for τ = 1."""
        if "curvature.values" in state:
            return state
        features = self._features(run, state)
        gram = features.gram()
        if not self.whole(run):
            total = (state["curvature"] * features.scale.square()[:, None]).sum((1, 2))
            more = total / gram.diagonal(dim1=-2, dim2=-1).sum(1)
            gram = gram * more[:, None, None]
            features.root = features.root * more.sqrt()[:, None, None, None]
        values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
        return state | {
            "curvature.values": values.clamp_min(0.0), "curvature.vectors": vectors.contiguous(),
            "curvature.root": features.root,
        }  # fmt: skip

    @property
    def averages(self) -> bool:
        """Draws are at all rows."""
        return self.rows is None

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        batch = Pass(run.rows, run.split_of).batch(0)
        return {"curvature.root": self._root(run, state, batch, away)}

    def covariance(self, run: Run, state: State, prior: Tensor) -> Dual:
        tau = state["tau"][:, 0]
        own = (state["curvature.values"], state["curvature.vectors"], tau, torch.ones_like(tau))
        return Dual(self._features(run, state), *own)

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        values = state["curvature.values"]  # those of G in the basis where Λ is 1
        floor = state["tau"] * torch.ones_like(values)
        return spectral(values.unsqueeze(1), floor, scales), self.diagonal.rounds

    def divided(self, state: State, ratio: Tensor) -> State:
        new = self.diagonal.divided(state, ratio)
        if "curvature.values" in state:
            new["curvature.values"] = state["curvature.values"] / ratio
            new["curvature.root"] = state["curvature.root"] / ratio.sqrt()[..., None, None]
        return new

    def bytes(self, run: Run, groups: int) -> int:
        """Bytes of the kernel, its factors, and workspace."""
        count = self._used(run) * output_size(run.net.output)
        return 5 * 8 * run.size * count**2

    def product(self, run: Run) -> float | None:
        count = self._used(run) * output_size(run.net.output)
        return float(run.size * count**2 * max(count, len(run.subset_index)))

    def whole(self, run: Run) -> bool:
        return self.rows is None or self.rows >= _longest(run)

    def _used(self, run: Run) -> int:
        return _longest(run) if self.rows is None else min(self.rows, _longest(run))

    def _features(self, run: Run, state: State) -> Features:
        batch = self._chosen(run)
        prior = run.prior.curvature(state["theta"]).expand_as(state["theta"])[:, run.subset_index]
        jacobians, x = self.source(run, state), batch.x
        root = state.get("curvature.root")
        if root is None:
            root = self._root(run, state, batch)
        missing = root.shape[1] - batch_rows(batch)
        if missing:  # members with fewer rows than others are padded with rows of weight zero
            axis = 0 if batch.shared else 1
            last = lambda t: t.narrow(axis, t.shape[axis] - 1, 1)  # noqa: E731
            x = tree_map(lambda t: torch.cat([t, *[last(t)] * missing], axis), x)
        return Features(jacobians, x, batch.shared, root.contiguous(), prior.double().rsqrt())

    def _root(self, run: Run, state: State, batch: Batch, away: Tensor | None = None) -> Tensor:
        """C^½ at some rows, [M, m, O, O]; with d, C is averaged over outputs f + d."""
        theta = run.likelihood_theta(state["theta"])
        outputs = Outputs(run.likelihood, theta, batch, run.net.output, self.kind)
        outputs = outputs if away is None else Averaged(outputs, away)
        return outputs.root(_values(self.source(run, state), batch), square=True).mT

    def _chosen(self, run: Run) -> Batch:
        """The rows of the kernel, evenly spaced over the rows of each member."""
        data = run.rows
        if self.rows is not None:
            data = replace(data, rows=[_evenly(own, self.rows) for own in data.rows])
        return Pass(data, run.split_of).batch(0)


def _values(jacobians: Jacobians, batch: Batch) -> Tensor:
    """f at all rows, [M, m, O]."""
    parts = [some_rows(batch, rows) for rows in jacobians.chunks(batch_rows(batch))]
    return torch.cat([jacobians(part.x, part.shared)[0] for part in parts], 1)


def _longest(run: Run) -> int:
    return max(len(run.rows.rows[s]) for s in run.split_of)


def _evenly(rows: Tensor, count: int) -> Tensor:
    if len(rows) <= count:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).round().long()]
