"""Sparse Gaussian processes by stochastic variational inference (SVGP), for any likelihood.

    f ~ GP(0, k),   y_i ~ p(y | f(x_i)),   q(f) = ∫ p(f | u) q(u) du,   u = f(Z)

Titsias (2009), Hensman, Fusi & Lawrence (2013), Hensman, Matthews & Ghahramani (2015); the bound
and its natural gradients are in `variational.py`. A step costs Z³ + BZ², whatever the number of
rows, and no row is kept. Classes are one GP each, with the same kernel and points.

With Gaussian noise the best q(v) is known: a last pass over the rows sets it,

    Λ = I + Σ a_i a_iᵀ/σ²,   Λm = Σ a_i y_i/σ²
    ELBO = Σ_i [log p(y_i | 0) − (k_ii − |a_i|²)/2σ²] + ½ (mᵀΛm − log |Λ|)

and further rows are added to it later without a refit. With the inducing points at the rows this is
the exact GP, and the bound its evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.function.inducing import from_precision
from doxa.function.sparse_posterior import SparsePosterior
from doxa.function.variational import VariationalProcess
from doxa.method import Clock, Info, Run, State
from doxa.posterior import Posterior


@store.register("sparse-gp")
@dataclass(frozen=True)
class SparseGP(VariationalProcess):
    """A GP with inducing points, fitted on mini-batches. Settings are those of every such process.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-3, 3, 200).double()[:, None]
    >>> y = (x[:, 0] > 0).long()
    >>> posterior = doxa.fit(None, (x, y), doxa.SparseGP(inducing=10), likelihood="categorical",
    ...                      steps=50)
    >>> bool((posterior.predict(x).probs.argmax(1) == y).double().mean() > 0.95)
    True
    """

    name: ClassVar[str] = "sparse-gp"

    def init_inner(self, points: Tensor) -> tuple[State, Tensor]:
        return {}, points

    def inner(self, run: Run, params: State, x: Tensor, clock: Clock) -> tuple[Tensor, Tensor, int]:
        return x, x.new_zeros(len(x)), 1

    def _enter_last(self, run: Run, state: State) -> State:
        state = super()._enter_last(run, state)
        if not run.likelihood.integrates_normal:
            return state
        eye = torch.eye(state["shift"].shape[2], dtype=torch.float64, device=run.device)
        none = torch.zeros_like(state["shift"])
        return state | {"precision": eye.expand_as(state["precision"]).clone(), "shift": none}

    def _last(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """With Gaussian noise: what all rows say of q(v), seen from f = 0."""
        if not run.likelihood.integrates_normal:
            return super()._last(run, state, batch, clock)
        mean, root = (torch.zeros_like(state[name]) for name in ("shift", "precision"))
        with torch.enable_grad():
            at = self.at(run, state, batch, clock, mean, root)
            slope, width = torch.autograd.grad(at.fit.sum(), [at.mean, at.variance])
        precision, shift = at.sites(slope, -2.0 * width)
        return {
            **state, "fit": state["fit"] + at.fit.detach(), "shift": state["shift"] + shift,
            "precision": state["precision"] + precision,
        }, {}  # fmt: skip

    def bound(self, run: Run, state: State) -> float | None:
        if run.tempered or not run.likelihood.integrates_normal:
            return super().bound(run, state)
        mean, _, half_logdet = from_precision(state["precision"], state["shift"])
        each = state["fit"] + 0.5 * (mean * state["shift"]).sum((1, 2)) + half_logdet
        return float((each + run.units_log_jacobian()).mean())

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        return self.recorded(run, state, SparsePosterior(**self.believed(run, state)))
