"""The Hessian of −log p(D | θ), for networks with few weights.

    G = −Σ_i w_i ∂² log p(y_i | f(x_i; θ)) / ∂θ²

It differs from Gauss–Newton by Σ_i (∂ log p_i/∂f)ᵀ ∂²f_i/∂θ², so it may have negative eigenvalues,
also at a maximum of the log joint, as long as the prior precision is larger. Columns are products
with unit vectors, in forward-over-reverse mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from doxa.errors import NumericalError
from doxa.laplace.curvature import Jacobians, Outputs, flatten_outputs
from doxa.laplace.forms import Matrix
from doxa.linalg import Structure
from doxa.method import Run, State

_TOGETHER = 64  # columns


@dataclass(frozen=True)
class Hessian(Matrix):
    """All of it, [M, 1, p, p]."""

    diagonal: bool = False
    averages = False

    def add(
        self, source: Jacobians, state: State, outputs: Outputs, groups: int
    ) -> tuple[State, Tensor]:
        part = outputs.part
        forward = lambda p, b, x: flatten_outputs(source.model.forward(p, x, buffers=b), 0)  # noqa: E731
        network = vmap(forward, in_dims=(0, 0, None if part.shared else 0))

        def flat(own: Tensor) -> Tensor:
            params = source.rest | source.layout.unflatten(own)
            return network(params, source.buffers, part.x)

        def loss(own: Tensor) -> Tensor:
            each = outputs.log_prob(flat(own))
            return -(each if part.weight is None else part.weight * each).sum()

        own = source.layout.flatten(source.own)  # [M, p]: members are independent terms of the sum
        eye = torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
        column = lambda v: jvp(grad(loss), (own,), (v.expand_as(own),))[1]  # noqa: E731
        found = vmap(column, chunk_size=_TOGETHER)(eye).transpose(0, 1)  # [M, p, p]
        sums = {
            "curvature": state["curvature"] + found.double()[:, None],
            "slope": state["slope"] - grad(loss)(own).double()[:, None],
        }
        return sums, flat(own).detach()

    def covariance(self, run: Run, state: State, prior: Tensor) -> Structure:
        total = state["curvature"].sum(1) + torch.diag_embed(prior)
        least = torch.linalg.eigvalsh((total + total.mT) / 2)[:, 0]
        if bool((least <= 0).any()):
            raise NumericalError(
                f"the Hessian of the log joint has the eigenvalue {float(least.min()):.3g}: the "
                "weights are not at a maximum; train longer, use newton_steps=, or curvature='ggn'"
            )
        return super().covariance(run, state, prior)
