"""The error of sampled curvature, and that of the evidence.

Ĝ is a mean of independent draws for every row, and unbiased. With g the gradient of one row and
draw, Ĝ = Σ_i (1/k) Σ_d g_id g_idᵀ, and u = H⁻¹ ∇ log p(θ*, D) the step to the maximum, to first
order

    log |Ĥ| ≈ log |H| + Σ_i (1/k) Σ_d (q_id − E q_id),            q = gᵀ H⁻¹ g
    log p(D) ≈ … − ½ log |H| + ½ uᵀHu,  moved by −½ Σ_i (1/k) Σ_d (e_id − E e_id),   e = q + (gᵀu)²

The variance is Σ_i Var(q_i)/k, or Var(e_i). It is estimated from two draws of their own, on some
rows: (q_i1 − q_i2)²/2. To second order, the logarithm of an unbiased estimate is too small by

    ½ Σ_i tr(H⁻¹ Δ_i H⁻¹ Δ_i)/k,    Δ_i = (g_i1 g_i1ᵀ − g_i2 g_i2ᵀ)/√2

This term is added to log |Ĥ| in the evidence, unless it is more than twice the standard error: then
higher orders count, too (a full matrix from too few draws). The stated error of the evidence is the
root of the sum of two squares: its standard error, and half of that term. Each form restricts Δ to
its own entries: the diagonal, the blocks, or the factors B of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from doxa.data import Pass, batch_rows
from doxa.laplace.curvature import Draws, Outputs
from doxa.laplace.forms import Shares, Sums, some_rows
from doxa.linalg import Structure
from doxa.method import Run, State

_ROWS = 128  # rows on which it is estimated


@dataclass(frozen=True)
class SamplingError:
    """Errors of each member, [M].

    log_det: the standard error of log |Ĥ|.
    bias: how much log |Ĥ| is too small on average.
    trace: the standard error of tr Ĝ, relative to it.
    evidence: the stated error of the log evidence.
    """

    log_det: Tensor
    bias: Tensor
    trace: Tensor
    evidence: Tensor

    @property
    def added(self) -> Tensor:
        """What is added to log |Ĥ|."""
        return torch.where(self.small, self.bias, 0.0)

    @property
    def small(self) -> Tensor:
        """Whether the second order is small enough that no other is needed."""
        return self.bias <= 2.0 * self.log_det

    def described(self, draws: int) -> dict[str, Any]:
        return {
            "kind": "sampled", "draws": draws, "log_det_error": self.log_det.tolist(),
            "log_det_bias": self.bias.tolist(), "trace_error": self.trace.tolist(),
        }  # fmt: skip


def sampling_error(
    run: Run, state: State, sums: Sums, covariance: Structure, step: Tensor
) -> SamplingError:
    """The error of the sums of a state, from H⁻¹ and the step to the maximum, [M, p]."""
    data = run.rows
    rows = replace(data, rows=[_evenly(own) for own in data.rows])
    batch = Pass(rows, run.split_of).batch(0)
    source = sums.form.source(run, state)
    theta, noise = run.likelihood_theta(state["theta"]), run.noise("curvature error")
    found: list[Shares] = []
    for own in source.chunks(batch_rows(batch), 2):
        part = some_rows(batch, own)
        pair = Draws(noise, 2, own.start)
        outputs = Outputs(run.likelihood, theta, part, run.net.output, "sampled", pair)
        found.append(sums.form.shares(run, state, source, outputs, covariance, step))
    all_rows = Shares(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
    # the root of two draws is divided by √2: these are halves of q, and quarters of squares
    spread = lambda each: 2.0 * (each[..., 0] - each[..., 1]).square().sum(1)  # noqa: E731
    counts = [(len(data.rows[s]), len(rows.rows[s])) for s in run.split_of]
    more = torch.tensor([whole / some for whole, some in counts]).to(step)
    share = more / sums.draws
    bias = all_rows.second.sum(1) * share
    moved = spread(all_rows.log_det + all_rows.step) * share
    return SamplingError(
        log_det=(spread(all_rows.log_det) * share).sqrt(),
        bias=bias,
        trace=(spread(all_rows.trace) * share).sqrt() / (all_rows.trace.sum((1, 2)) * more),
        evidence=0.5 * (moved + bias.square()).sqrt(),
    )


def _evenly(rows: Tensor) -> Tensor:
    if len(rows) <= _ROWS:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, _ROWS, dtype=torch.float64).round().long()]
