"""Is θ* a maximum of the log joint, and is it worth while to make it one?

    λ² = gᵀ H⁻¹ g,    g = ∇ log p(θ*, D)

is the Newton decrement squared: a Newton step from θ* gains λ²/2 nats, and moves by λ posterior
standard deviations. Were θ* a draw from the posterior itself, λ² would be χ² with p degrees of
freedom. Where it is above all but a thousandth of those, the Gaussian stands in a place that it
would hardly visit, and the status says so. Training that was stopped by held-out rows ended
before the maximum on purpose; there λ is recorded and nothing is said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.laplace.curvature import output_size
from doxa.laplace.posterior import LaplacePosterior
from doxa.method import Clock, Run, State
from doxa.method.run import AT_REST
from doxa.posterior import Status

_STEPS = 10  # of Gauss–Newton, where nobody said how many
_WORK = 4e9  # multiplications that they may take: a second or so of one core
_RARE = 3.09  # standard normals: once in a thousand


def polishing(run: Run, trained: bool) -> int:
    """How many Gauss–Newton steps follow training by default: a few where they are cheap, none
    where held-out rows stopped the training or the weights were to be taken as they are."""
    if not trained or run.rows.validation is not None:
        return 0
    size, rows = len(run.subset_index), max(len(own) for own in run.rows.rows)
    matrices = 2 * rows * output_size(run.net.output) * size**2 + size**3  # two sums and a factor
    return _STEPS if _STEPS * run.size * matrices <= _WORK else 0


def log_likelihood(run: Run, params: State, batch: Batch, clock: Clock) -> tuple[Tensor, State]:
    return run.log_likelihood(params["theta"], batch, params), {}


def slope(run: Run, state: State) -> Tensor:
    """∇ log p(θ*, D) of the uncertain weights, under the prior that was found: [M, p]."""
    index, theta = run.subset_index, state["theta"]
    total = state["tau"][:, None] * run.prior.score(theta)[:, index].double()
    rows = run.passes()
    for t in range(rows.count):
        _, grads, _ = run.value_and_grad(log_likelihood, state, rows.batch(t), AT_REST)
        total = total + grads["theta"][:, index].double()
    return total


def judge(run: Run, state: State, posterior: LaplacePosterior, heat: Tensor) -> None:
    """λ of each member as a diagnostic, and in the status where θ* was to be a maximum and is far
    from one; `heat` is the temperature T [M] of the covariance T H⁻¹."""
    g = slope(run, state)
    spread = posterior.covariance.to(dtype=torch.float64)
    squares = (g * spread.matmul(g)).sum(1) / heat.double()  # [M]
    posterior.record.diagnostics["newton_decrement"] = squares.clamp_min(0.0).sqrt().tolist()
    size = spread.size
    cube = 1.0 - 2.0 / (9.0 * size) + _RARE * (2.0 / (9.0 * size)) ** 0.5
    most = size * max(cube, 0.0) ** 3  # of χ² (Wilson & Hilferty 1931)
    worst = float(squares.max())
    if posterior.record.status != "ok" or run.rows.validation is not None or worst <= most:
        return
    posterior.record.status = Status(
        "not-converged",
        f"the weights are no maximum of the log joint: it lies {worst**0.5:.3g} posterior standard "
        f"deviations away, where a draw of {size} weights is {size**0.5:.3g} away: train for "
        "longer, or give polish= Gauss–Newton steps (structure='full')",
    )
