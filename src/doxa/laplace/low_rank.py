"""The leading directions of the curvature, and the prior in all others.

    H ≈ F Fᵀ + Λ,    F Fᵀ ≈ the leading eigenpairs of G

G = SᵀS, where S has one row for each data row and output, so the eigenpairs follow from the small
matrix S Sᵀ. The data come in blocks of rows. Each block is stacked below the directions kept so
far, and the leading directions of both together are kept (Brand 2006), twice as many as `rank`.
Dropped directions are lost, so that F Fᵀ ≤ G: the posterior is too wide and the evidence too high,
by ½ log(1 + λ/δ) for each dropped direction of curvature λ under a prior precision δ. F Fᵀ = G
where the rank is at least rows × outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa.laplace.curvature import Jacobians, Outputs
from doxa.laplace.forms import Effective, Form, Scales, drawn, slope, spectral
from doxa.linalg import LowRankPrecision, Structure
from doxa.method import Run, State


@dataclass(frozen=True)
class LowRank(Form):
    """Directions [M, g, 2 rank, p], each with the length √eigenvalue."""

    adds: ClassVar[bool] = False  # directions of more rows are found by a decomposition
    rank: int

    def empty(self, run: Run, groups: int) -> State:
        shape = (run.size, groups, self._kept(run), len(run.subset_index))
        return {"curvature": torch.zeros(shape, device=run.device, dtype=torch.float64)}

    def _kept(self, run: Run) -> int:
        return min(2 * self.rank, len(run.subset_index))

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        old = state["curvature"]
        if outputs.draws is not None:
            found, root, sums = drawn(source, state, outputs)
            new = found.rows(root).flatten(1, 2).double()[:, None]
            return sums | {"curvature": leading(torch.cat([old, new], 2), old.shape[2])}, found.f
        flat, j = source(outputs.part.x, outputs.part.shared)
        rows = outputs.root(flat, square=groups > 1).mT @ j.double()  # [M, B, R, p]
        new = rows.transpose(1, 2) if groups > 1 else rows.flatten(1, 2)[:, None]
        sums = {"curvature": leading(torch.cat([old, new], 2), old.shape[2])}
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        rows = leading(state["curvature"].flatten(1, 2), min(self.rank, prior.shape[1]))
        return LowRankPrecision(prior, rows.mT)

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        rows = state["curvature"]
        groups, each = rows.shape[1:3]
        white = rows.flatten(1, 2) / prior.sqrt()[:, None]
        if groups == 1 and scales.sizes is None:
            values = torch.linalg.eigvalsh(white @ white.mT)[:, -self.rank :].clamp_min(0.0)
            return spectral(values[:, None], torch.ones_like(values), scales), 2000
        if groups == 1:  # those that the covariance has
            white = leading(rows[:, 0], min(self.rank, prior.shape[1])) / prior.sqrt()[:, None]
            each = white.shape[1]
        parts = [white] if scales.sizes is None else white.split(scales.sizes, 2)
        grams = torch.stack([part @ part.mT for part in parts], 1)  # of each factor, [M, K, k, k]

        def effective(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
            """γ_g = tr [K (I + K)⁻¹]_gg with K = S Λ⁻¹ Sᵀ, where rows of S are divided by √r_g and
            Λ is multiplied by τ. γ_k is the trace with the part of K from the weights of factor
            k."""
            root = ratio.rsqrt().repeat_interleave(each, 1)
            own = root[:, None, :, None] * grams * root[:, None, None] / tau[..., None, None]
            k = own.sum(1)
            eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
            inverse = torch.linalg.inv(eye + k)
            share = (inverse * k).sum(-1)  # both are symmetric
            by_weights = (inverse[:, None] * own).sum((-2, -1))
            return share.reshape(-1, groups, each).sum(-1), by_weights

        return effective, 100

    def divided(self, state: State, ratio: Tensor) -> State:
        return {"curvature": state["curvature"] / ratio.sqrt()[..., None, None]}

    def bytes(self, run: Run, groups: int) -> int:
        return 4 * 8 * run.size * groups * self._kept(run) * len(run.subset_index)

    def product(self, run: Run) -> float | None:
        size, kept = len(run.subset_index), self._kept(run)
        return float(run.size * size * kept * max(kept, run.settings.batch_size))


def leading(rows: Tensor, count: int) -> Tensor:
    """The leading directions of SᵀS for S [..., n, p], computed from S Sᵀ: [..., count, p].

    The largest entry of each is positive, so that the signs do not depend on the linear algebra
    library. Directions that are round-off are zero.
    """
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    noise = torch.finfo(rows.dtype).eps * values.shape[-1] * values[..., -1:]
    found = (vectors * (values > noise)[..., None, :])[..., -count:].mT @ rows
    largest = found.gather(-1, found.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -found, found)
