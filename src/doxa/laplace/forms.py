"""In which form curvature is added up, and what is asked of it afterwards.

A form keeps nothing: sums are entries of the state, each with leading axis M, that begin with
"curvature", and "slope", the gradient of the log-likelihood. Groups g are of outputs with a noise
level of their own; r divides a group's curvature and slope.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa.laplace.curvature import Jacobians, gauss_newton, output_size
from doxa.laplace.outputs import Outputs
from doxa.laplace.scales import Scales
from doxa.linalg import Dense, Diagonal, Structure
from doxa.method import Run, State

# γ of outputs [M, g] and of weights [M, K], by r [M, g] and τ [M, K]
Effective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_WORK = 1e9  # multiplications that inverses of one member may take


class Form(ABC):
    """Full, diagonal, Kronecker-factored or of low rank."""

    @abstractmethod
    def empty(self, run: Run, groups: int) -> State:
        """Sums over no rows."""

    @abstractmethod
    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        """The sums and the slope [M, g, p] with some rows added, and the outputs f [M, B, O]."""

    @abstractmethod
    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        """H⁻¹ with τΛ [M, p] added."""

    @abstractmethod
    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        """γ as a function of r and τ, which multiplies τΛ [M, p], and how many rounds of it are
        worth their price."""

    @abstractmethod
    def bytes(self, run: Run, groups: int) -> int:
        """What sums, copies and factors take at once."""

    def product(self, run: Run) -> float | None:
        """Multiplications in the largest product; None where the network's are larger."""
        return None

    def whole(self, run: Run) -> bool:
        """Whether it is made of all rows: that of a part has no evidence."""
        return True

    @property
    def averages(self) -> bool:
        """Whether it can be made of curvature averaged over outputs."""
        return True

    def averaged(self, run: Run, state: State, away: Tensor) -> State:
        """What it keeps beside sums of averages, over outputs f + d by d [M, S, B, O]."""
        return {}

    def source(self, run: Run, state: State) -> Jacobians:
        return Jacobians(run.net, state["theta"], run.net.subset_names, run.buffers(state))

    def complete(self, run: Run, state: State) -> State:
        """What is worked out once, when all rows are in."""
        return state

    def divided(self, state: State, ratio: Tensor) -> State:
        """Curvature over r [M, g]."""
        entry = state["curvature"]
        return {"curvature": entry / ratio.reshape(*ratio.shape, *(1,) * (entry.ndim - 2))}


def spectral(values: Tensor, floor: Tensor, scales: Scales) -> Effective:
    """γ_g = Σ_j (v_gj/r_g) / (Σ_g v_gj/r_g + τ_j l_j) from v [M, g, p] and l [M, p]; γ_k is the sum
    over g, of the weights j that have factor k."""

    def effective(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        each = values / ratio[..., None]
        share = each / (each.sum(1, keepdim=True) + (scales.each(tau) * floor)[:, None])
        gamma = share.sum(-1)
        if tau.shape[1] == 1:
            return gamma, gamma.sum(1, keepdim=True)
        return gamma, scales.sums(share.sum(1))

    return effective


def slope(state: State, j: Tensor, flat: Tensor, outputs: Outputs, groups: int) -> State:
    """Σ w Jᵀ ∂ log p/∂f of each group with J [M, B, O, p] of some rows added."""
    pulls = outputs.pulls(flat, groups).flatten(1, 2)  # [M, B O, g]
    return {"slope": state["slope"] + pulls.mT @ j.double().flatten(1, 2)}


def added(
    state: State, j: Tensor, flat: Tensor, outputs: Outputs, groups: int, diagonal: bool
) -> State:
    """Σ w JᵀCJ of each group, or its diagonal, with J [M, B, O, p] of some rows added."""
    c, weight = outputs.matrix(flat), outputs.part.weight
    if groups == 1:
        each = [gauss_newton(j, c, weight, diagonal)]
    else:  # every output has its own noise level
        own = [(j[:, :, o : o + 1], c[:, :, o : o + 1, o : o + 1]) for o in range(groups)]
        each = [gauss_newton(*one, weight, diagonal) for one in own]
    return {"curvature": state["curvature"] + torch.stack(each, 1)}


@dataclass(frozen=True)
class Matrix(Form):
    """All of G [M, g, p, p], or its diagonal [M, g, p]."""

    diagonal: bool
    rounds: ClassVar[int] = 2000

    def empty(self, run: Run, groups: int) -> State:
        size = len(run.subset_index)
        shape = (size,) if self.diagonal else (size, size)
        zeros = torch.zeros(run.size, groups, *shape, device=run.device, dtype=torch.float64)
        return {"curvature": zeros}

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        flat, j = source(outputs.part.x, outputs.part.shared)
        sums = added(state, j, flat, outputs, groups, self.diagonal)
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        total = state["curvature"].sum(1)
        if self.diagonal:
            return Diagonal(1.0 / (total + prior))
        return Dense.from_precision(_symmetric(total + torch.diag_embed(prior)))

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        curvature = state["curvature"]
        if self.diagonal:
            return spectral(curvature, prior, scales), self.rounds
        if curvature.shape[1] == 1 and scales.sizes is None and run.prior.is_gaussian:
            # in the basis where Λ is 1 and G diagonal, a round costs nothing
            root = prior.rsqrt()
            whitened = root[:, :, None] * curvature[:, 0] * root[:, None, :]
            values = torch.linalg.eigvalsh(_symmetric(whitened)).clamp_min(0.0)[:, None]
            return spectral(values, torch.ones_like(prior), scales), self.rounds

        def dense(ratio: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
            each = curvature / ratio[..., None, None]
            h = _symmetric(each.sum(1) + torch.diag_embed(scales.each(tau) * prior))
            share = (torch.linalg.inv(h).unsqueeze(1) * each).sum(-1)  # [M, g, p]
            return share.sum(-1), scales.sums(share.sum(1))

        return dense, max(10, min(100, int(_WORK / prior.shape[1] ** 3)))

    def bytes(self, run: Run, groups: int) -> int:
        size = len(run.subset_index)
        return 3 * 8 * run.size * groups * (size if self.diagonal else size**2)

    def product(self, run: Run) -> float | None:
        """Of JᵀCJ, or of factoring it."""
        if self.diagonal:
            return None
        size, rows = len(run.subset_index), run.settings.batch_size * output_size(run.net.output)
        return float(run.size * size**2 * max(size, rows))


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
