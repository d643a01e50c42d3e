"""MAP: the maximum of the log joint.

    θ* = argmax Σ_i log p(y_i | f(x_i; θ)) + log p(θ)

With a Gaussian prior of standard deviation s this is weight decay 1/(s² n) on the mean loss
(MacKay, 1992). One point has no epistemic uncertainty: use it as the baseline, and as
the start of other methods.

Noise of averaged members. The noise level of a member is estimated on its held-out rows. There its
mean squared error is σ² + c + o: the noise, the error that all members share, and the error of this
member alone. The mean of M members has the error σ² + c + o/M, and their mixture has the variance
o(1 − 1/M) in addition to its noise. With o the variance between members at those rows,

    σ_m² ← σ_m² (1 − (1 − 1/M) o/σ̄²),   σ̄² the mean of the σ_m²

is on average the error of the mixture's mean. The total variance of the mixture is then that of a
single member: o is counted once. Without this correction o would be counted twice, and intervals
would be too wide where members differ by as much as the noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data.rows import weighted_mean
from doxa.method import (
    Method,
    Run,
    Stage,
    State,
    log_joint,
    network_part,
    noise_on_held_out,
    optimise,
)
from doxa.method.method import Alternatives, Workload
from doxa.posterior import Posterior, SamplePosterior

_LOG_NOISE = "likelihood.log_noise"
_ROWS = 1024  # largest number of held-out rows per split
_LEAST = 0.1  # smallest share of σ² that remains, as few rows are unreliable


def without_spread(run: Run, state: State, theta: Tensor) -> Tensor:
    """The weights [M, P] of a run's members with that noise, if it is learned and rows were held
    out; otherwise, and for a single member, they do not change."""
    learned = run.likelihood.learns_noise and _LOG_NOISE in run.layout.names
    if run.size == 1 or run.data.validation is None or not learned:
        return theta
    data, splits = run.rows, list(dict.fromkeys(run.split_of))
    assert data.validation is not None
    rows = [_some(data.validation[split]) for split in splits]
    x, _ = data.take(torch.cat(rows), torch.tensor(data.run_of(splits[0])))
    with torch.no_grad():
        f = run.outputs(theta, x, network_part(state))  # [M, rows, ...]
    each = f.double().var(0).split([len(own) for own in rows])
    parts = zip(each, rows, strict=True)
    spread = torch.stack(  # [splits, O]
        [weighted_mean(part, data.weight_of(own)).flatten() for part, own in parts]
    )
    spread = spread[[splits.index(split) for split in run.split_of]].mean(0)  # as often as members
    index = run.layout.index([_LOG_NOISE]).to(theta.device)
    spread = spread.mean(0, keepdim=True) if len(index) == 1 else spread
    log_noise = theta[:, index].double()
    share = 1.0 - (1.0 - 1.0 / run.size) * spread / (2.0 * log_noise).exp().mean(0)
    log_noise = log_noise + 0.5 * share.clamp_min(_LEAST).log()
    return theta.index_copy(1, index, log_noise.to(theta.dtype))


def _some(rows: Tensor) -> Tensor:
    """At most this many rows, evenly spaced."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), _ROWS)).round().long()]


@store.register("map")
@dataclass(frozen=True)
class MAP(Method):
    """Maximum a posteriori by stochastic gradients."""

    rate_by_network: ClassVar[bool] = True
    name: ClassVar[str] = "map"
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    alternatives: ClassVar[Alternatives] = Alternatives()
    copies: ClassVar[float] = 15.0
    large_copies: ClassVar[tuple[float, float] | None] = (4.0, 1.0)  # θ, m, v, the last good θ; ∇

    def planned_bytes(self, work: Workload) -> int:
        """With the predictions of all members, and the models that they are compared with, as
        measured (`python -m benchmarks.memory_plan`)."""
        checks = min(64 << 20, (7 + 6 * work.members) << 20)
        if not work.held_out:
            checks = min(checks, 24 * work.copy)
        if work.by_tensor and work.in_turn:  # θ; the posteriors of all members, and of each alone
            return max(super().planned_bytes(work), 3 * work.copy + checks)
        if work.by_tensor:
            checks = min(40 << 20, 4 * work.copy)
        return super().planned_bytes(work) + checks

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(log_joint, run.steps)
        yield from noise_on_held_out(self.score, run)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        theta = without_spread(run, state, state["theta"])
        return SamplePosterior(samples=theta.unsqueeze(1), **run.common(self), **run.shared(state))
