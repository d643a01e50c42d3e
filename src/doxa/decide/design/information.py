"""What a whole run of experiments under a policy tells, between two bounds.

sPCE and sNMC of `adaptive.py`, in constant memory: contrasts pass in blocks, and their sum is
kept in logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import torch

from doxa import checks
from doxa.decide.design.adaptive import Rollout, log_history, outcome_shape, rollout
from doxa.decide.design.draws import source, uniform
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.policy import Policy

_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # log densities held at a time


@dataclass(frozen=True)
class Information:
    """Of a policy's whole run, in nats: bounds with standard errors."""

    lower: float
    lower_error: float
    upper: float
    upper_error: float
    rollouts: int
    inner: int

    def __str__(self) -> str:
        return (
            f"{self.lower:.3f} ± {self.lower_error:.3f} (sPCE) to {self.upper:.3f} ± "
            f"{self.upper_error:.3f} (sNMC), {self.rollouts} runs, {self.inner} contrasts"
        )


@torch.no_grad()
def information(
    experiment: Experiment,
    policy: Policy,
    steps: int,
    *,
    rollouts: int = 512,
    inner: int = 10_000,
    groups: int = 16,
    seed: int = 0,
) -> Information:
    """sPCE and sNMC of a policy, from groups of rollouts with contrasts of their own; in constant
    memory whatever `inner` is."""
    groups = min(
        checks.whole("groups", groups, least=2), checks.whole("rollouts", rollouts, least=2)
    )
    checks.whole("inner", inner)
    like = next(chain(policy.parameters(), policy.buffers()))
    n = math.ceil(rollouts / groups)
    generator = source(like.device, "information", seed)
    theta = experiment.prior.draw(groups * n, generator, like)
    noise = uniform((steps, groups * n, *outcome_shape(experiment, policy, like)), like, generator)
    seen = rollout(experiment, policy, theta, noise)
    block = _BLOCK.get(like.device.type, 1 << 17)
    step = max(1, block // (steps * n * max(1, math.prod(theta.shape[1:]))))
    pools = []
    for g in range(groups):
        rows = slice(g * n, (g + 1) * n)
        part = Rollout(seen.designs[:, rows], seen.outcomes[:, rows], seen.log_p[rows], True)
        pool = torch.full_like(part.log_p, -torch.inf)
        for start in range(0, inner, step):
            few = experiment.prior.draw(min(step, inner - start), generator, like)
            pool = torch.logaddexp(pool, log_history(experiment, part, few).logsumexp(0))
        pools.append(pool)
    pool, own = torch.stack(pools), seen.log_p.unflatten(0, (groups, n))
    lower = own - torch.logaddexp(own, pool) + math.log(inner + 1)
    upper = own - pool + math.log(inner)
    error = lambda terms: float(terms.flatten().std()) / (groups * n) ** 0.5  # noqa: E731
    return Information(
        float(lower.mean()), error(lower), float(upper.mean()), error(upper), groups * n, inner
    )
