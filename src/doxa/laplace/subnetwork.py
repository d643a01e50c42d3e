"""A full matrix over the few weights that are least certain, while the others are points.

Of all weights those with the largest variance 1/(G_jj + Λ_jj) under the diagonal approximation are
chosen, each member's own: of all subsets of that size, they leave the diagonal posterior nearest
to that of all weights in Wasserstein distance (Daxberger, Nalisnick, Allingham, Antorán &
Hernández-Lobato 2021). The matrix of the chosen is then exact, correlations and all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from doxa.laplace.curvature import Jacobians, output_size
from doxa.laplace.forms import Effective, Form, Matrix, added, slope
from doxa.laplace.outputs import Outputs
from doxa.laplace.scales import CHOSEN, Scales
from doxa.linalg import Dense, Embedded
from doxa.method import Run, State


@dataclass(frozen=True)
class Subnetwork(Form):
    """G [M, g, size, size] over the chosen weights."""

    size: int

    def chosen(self, run: Run, state: State, prior: Tensor) -> State:
        """The state with the chosen weights, from the diagonal in it and Λ [M, p]."""
        precision = state["curvature"].sum(1) + prior
        order = precision.argsort(dim=1, stable=True)[:, : self._size(run)]  # least: widest
        return state | {CHOSEN: order.sort(1).values}

    def _size(self, run: Run) -> int:
        return min(self.size, len(run.subset_index))

    def empty(self, run: Run, groups: int) -> State:
        size = self._size(run)
        return {"curvature": run.n.new_zeros(run.size, groups, size, size).double()}

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        flat, j = source(outputs.part.x, outputs.part.shared)
        index = state[CHOSEN][:, None, None].expand(*j.shape[:3], -1)
        sums = added(state, j.gather(3, index), flat, outputs, groups, diagonal=False)
        return sums | slope(state, j, flat, outputs, groups), flat

    def covariance(self, run: Run, state: State, prior: Tensor) -> Embedded:
        inner = _MATRIX.covariance(run, state, prior)
        assert isinstance(inner, Dense)
        return Embedded(inner, state[CHOSEN], len(run.subset_index))

    def effective(
        self, run: Run, state: State, prior: Tensor, scales: Scales
    ) -> tuple[Effective, int]:
        return _MATRIX.effective(run, state, prior, scales)

    def bytes(self, run: Run, groups: int) -> int:
        return 3 * 8 * run.size * groups * (self._size(run) ** 2 + len(run.subset_index))

    def product(self, run: Run) -> float | None:
        size, rows = self._size(run), run.settings.batch_size * output_size(run.net.output)
        return float(run.size * size**2 * max(size, rows))


_MATRIX = Matrix(diagonal=False)
