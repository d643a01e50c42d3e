"""Curvature of low rank: the directions that data determine most, and the prior in all others.

    H ≈ F Fᵀ + Λ,    F Fᵀ ≈ the leading eigenpairs of G

G = SᵀS has a row of S for each row of data and output, so its eigenpairs are those of the small
matrix S Sᵀ. Rows come in pieces: each is put below the directions kept so far, and the leading ones
of the two together are kept (Brand 2006), twice as many as are asked for. What is dropped is lost,
so F Fᵀ lies below G: the posterior is too wide and the evidence too high, by ½ log(1 + λ/δ) for
each direction of curvature λ that is left to a prior of precision δ. It is G where the rank is at
least rows × outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from doxa.laplace.curvature import Jacobians
from doxa.laplace.forms import Effective, Form, slope, spectral
from doxa.laplace.outputs import Outputs
from doxa.laplace.scales import Scales
from doxa.linalg import LowRankPrecision, Structure
from doxa.method import Run, State


@dataclass(frozen=True)
class LowRank(Form):
    """Directions [M, g, 2 rank, p], each as long as the root of its eigenvalue."""

    rank: int

    def empty(self, run: Run, groups: int) -> State:
        shape = (run.size, groups, self._kept(run), len(run.subset_index))
        return {"curvature": torch.zeros(shape, device=run.device, dtype=torch.float64)}

    def _kept(self, run: Run) -> int:
        return min(2 * self.rank, len(run.subset_index))

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        flat, j = source(outputs.part.x, outputs.part.shared)
        rows = outputs.root(flat, square=groups > 1).mT @ j.double()  # [M, B, R, p]
        new = rows.transpose(1, 2) if groups > 1 else rows.flatten(1, 2)[:, None]
        old = state["curvature"]
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
            """γ_g = tr [K (I + K)⁻¹]_gg with K = S Λ⁻¹ Sᵀ, rows of S over √r_g, Λ times τ; γ_k is
            the trace with the part of K that the weights of factor k have."""
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
    """The leading directions of SᵀS for S [..., n, p], by S Sᵀ: [..., count, p]. Their largest
    entries are positive, so that no library chooses their signs; those of round-off are zero."""
    values, vectors = torch.linalg.eigh(rows @ rows.mT)
    noise = torch.finfo(rows.dtype).eps * values.shape[-1] * values[..., -1:]
    found = (vectors * (values > noise)[..., None, :])[..., -count:].mT @ rows
    largest = found.gather(-1, found.abs().argmax(-1, keepdim=True))
    return torch.where(largest < 0, -found, found)
