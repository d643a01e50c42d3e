"""Rows as the last layer of a process sees them, and what they say of its q(v)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from doxa.likelihoods import Theta
from doxa.method import Run, State

PREFIX = "likelihood."  # of the state's entries that are the likelihood's own


@dataclass
class Rows:
    """Rows at the last layer: a [M, Z, B], f's marginals [M, B, O], Σ E log p [M], the KL of the
    layers before [M], λ with the rows' weights [M, B, O] where it is no derivative, and the
    variance of Σ E log p over the draws that it is estimated by [M]."""

    basis: Tensor
    mean: Tensor
    variance: Tensor
    fit: Tensor
    kl: Tensor
    bend: Tensor | None
    fit_variance: Tensor

    def sites(self, slope: Tensor, bend: Tensor) -> tuple[Tensor, Tensor]:
        """Σ λ_i a_i a_iᵀ, [M, O, Z, Z], and Σ (g_i + λ_i μ_i) a_i, [M, O, Z]."""
        a, mean = self.basis.detach(), self.mean.detach()
        precision = (a.unsqueeze(1) * bend.mT.unsqueeze(2)) @ a.mT.unsqueeze(1)
        return precision, (slope + bend * mean).mT @ a.mT


def learned_in(state: State) -> State:
    """The likelihood's learned parameters, by their own names."""
    return {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX)}


def given(run: Run, params: State) -> Theta:
    """The likelihood's parameters of each member, learned or given."""
    return learned_in(params) | {k: v.double() for k, v in run.constants.items()}


def matrix(x: Tensor, lead: int = 1) -> Tensor:
    """[*lead, N] as [*lead, N, 1]."""
    return x.unsqueeze(-1) if x.ndim == lead + 1 else x
