"""Errors from sampled curvature: of the curvature itself, and of the log evidence.

Sampled curvature is an unbiased mean over k independent draws d for every row i,

    Ĝ = Σ_i (1/k) Σ_d g_id g_idᵀ,

where g_id is the gradient of one row and draw. H is the precision of the posterior, and
u = H⁻¹ ∇ log p(θ*, D) is the step to the maximum. To first order in the error of Ĝ,

    log |Ĥ| ≈ log |H| + Σ_i (1/k) Σ_d (q_id − E q_id),            q = gᵀ H⁻¹ g

and the log evidence, log p(D) ≈ … − ½ log |H| + ½ uᵀHu, changes by

    −½ Σ_i (1/k) Σ_d (e_id − E e_id),                             e = q + (gᵀu)²

The variance of log |Ĥ| is Σ_i Var(q_i)/k. That of the evidence is ¼ Σ_i Var(e_i)/k. Both are
estimated on some of the rows, from two further draws per row: Var(q_i) ≈ (q_i1 − q_i2)²/2. To
second order, log |Ĥ| is on average too small by

    ½ Σ_i tr(H⁻¹ Δ_i H⁻¹ Δ_i)/k,    Δ_i = (g_i1 g_i1ᵀ − g_i2 g_i2ᵀ)/√2

The evidence uses log |Ĥ| plus this bias, if the bias is at most twice the standard error. A larger
bias means that higher orders matter too, as with a full matrix from too few draws; then nothing is
added. The stated error of the evidence is √(a² + b²), with a its standard error and b half of the
bias. Each form of curvature restricts Δ to the entries that it stores: the diagonal, the blocks, or
the factors B of the layers.
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

_ROWS = 128  # largest number of rows from which the error is estimated


@dataclass(frozen=True)
class SamplingError:
    """Errors of each member.

    Parameters
    ----------
    log_det : Tensor of shape [M]
        The standard error of log |Ĥ|.
    bias : Tensor of shape [M]
        The amount by which log |Ĥ| is too small on average.
    trace : Tensor of shape [M]
        The relative standard error of tr Ĝ.
    evidence : Tensor of shape [M]
        The stated error of the log evidence.
    """

    log_det: Tensor
    bias: Tensor
    trace: Tensor
    evidence: Tensor

    @property
    def added(self) -> Tensor:
        """The correction that is added to log |Ĥ|: the bias, or 0 if it is not small."""
        return torch.where(self.small, self.bias, 0.0)

    @property
    def small(self) -> Tensor:
        """Whether the bias is small enough that higher orders can be neglected."""
        return self.bias <= 2.0 * self.log_det

    def described(self, draws: int) -> dict[str, Any]:
        return {
            "kind": "sampled", "draws": draws, "log_det_error": self.log_det.tolist(),
            "log_det_bias": self.bias.tolist(), "trace_error": self.trace.tolist(),
        }  # fmt: skip


def sampling_error(
    run: Run, state: State, sums: Sums, covariance: Structure, step: Tensor
) -> SamplingError:
    """Estimate the errors of sampled curvature.

    Parameters
    ----------
    run : Run
        The run, with its rows.
    state : State
        The state at which the curvature was sampled.
    sums : Sums
        The sampled curvature, with its form and its number of draws.
    covariance : Structure
        H⁻¹.
    step : Tensor of shape [M, p]
        u, the step to the maximum.

    Returns
    -------
    SamplingError
        The errors of each member.
    """
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
    # `Outputs.root` divides two draws by √2, so the values here are q/2, and their squares q²/4
    spread = lambda each: 2.0 * (each[..., 0] - each[..., 1]).square().sum(1)  # noqa: E731
    counts = [(data.counts[s], len(rows.rows[s])) for s in run.split_of]
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
