"""Deep adaptive design: a policy trained so that a whole run of experiments tells most.

    sPCE  E log p(h_T | θ₀, π) − log (1/(L+1)) Σ_{l=0..L} p(h_T | θ_l, π)     a lower bound
    sNMC  E log p(h_T | θ₀, π) − log (1/L) Σ_{l=1..L} p(h_T | θ_l, π)         an upper bound

on the total information of T experiments, with p(h_T | θ, π) = Π_t p(y_t | θ, d_t) and
θ₀, …, θ_L ~ p(θ): Foster et al. (2021), equations 11 and 12. Training ascends sPCE, through y where
that is reparametrisable, else by the score function. All rollouts run side by side; the contrasts
of all steps are one tensor. On a GPU an update is captured once and replayed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from doxa import checks
from doxa.decide.design.draws import from_uniform, source, uniform
from doxa.decide.design.experiment import Experiment
from doxa.decide.design.policy import Policy
from doxa.errors import MethodError, NumericalError

log = logging.getLogger("doxa")
Report = Callable[[int, float], bool | None]


class Rollout(NamedTuple):
    designs: Tensor  # [T, N, *shape]
    outcomes: Tensor  # [T, N, *event]
    log_p: Tensor  # log p(h_T | θ₀, π) [N]
    pathwise: bool


def rollout(experiment: Experiment, policy: Policy, theta: Tensor, noise: Tensor) -> Rollout:
    """Experiments on θ [N, ...] side by side; noise [T, N, *event] are uniforms."""
    history = policy.start(len(theta), theta)
    designs, outcomes, log_p, pathwise = [], [], theta.new_zeros(len(theta)), True
    for t, u in enumerate(noise):
        design = policy.design(history, t)
        found = experiment.outcome(theta, design)
        y = from_uniform(found, u)
        if y is None:
            raise MethodError(f"{type(found).__name__} is not drawn from uniforms: no policy yet")
        pathwise = pathwise and found.has_rsample
        log_p = log_p + found.log_prob(y)
        history = policy.observe(history, design, y)
        designs.append(design)
        outcomes.append(y)
    return Rollout(torch.stack(designs), torch.stack(outcomes), log_p, pathwise)


def log_history(experiment: Experiment, seen: Rollout, theta: Tensor) -> Tensor:
    """log p(h_T | θ_l, π) [L, N] of contrasts θ [L, ...]."""
    others = theta.unsqueeze(1).unsqueeze(1)  # [L, 1, 1, ...]
    return experiment.log_prob(seen.outcomes, others, seen.designs).sum(1)


def outcome_shape(experiment: Experiment, policy: Policy, like: Tensor) -> tuple[int, ...]:
    theta = experiment.prior.draw(1, source(like.device, "probe"), like)
    design = policy.design(policy.start(1, like), 0)
    return tuple(experiment.outcome(theta, design).event_shape)


@dataclass(frozen=True)
class Trained:
    """bound: sPCE while training, every so many updates. updates: how many were done."""

    bound: list[float]
    updates: int
    captured: bool


def train_policy(
    experiment: Experiment,
    policy: Policy,
    steps: int,
    *,
    updates: int = 2000,
    outer: int = 256,
    inner: int = 511,
    rate: float = 1e-3,
    clip: float = 1.0,
    seed: int = 0,
    compiled: bool = False,
    every: int = 100,
    report: Report | None = None,
) -> Trained:
    """Ascend sPCE over the policy's weights; the policy is changed in place.

    Parameters
    ----------
    steps: experiments in a run, T.
    updates: of Adam, with a rate that falls to zero as a cosine.
    outer, inner: rollouts of an update, and contrasts they share.
    clip: the largest norm of a gradient; a rollout near a singularity of the likelihood has one
        that is many times the others'.
    compiled: fuse the contrasts by torch.compile; plain operations where that fails.
    report: (update, sPCE) every `every` updates; training ends early where it returns True.
    """
    for name, count in (("steps", steps), ("updates", updates), ("outer", outer), ("inner", inner)):
        checks.whole(name, count)
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    if not weights:
        raise MethodError(f"{type(policy).__name__} has nothing to learn")
    like = weights[0].detach()
    generator = source(like.device, "train", seed)
    shape = outcome_shape(experiment, policy, like)
    draw = experiment.prior.draw
    theta, others = draw(outer, generator, like), draw(inner, generator, like)
    noise = uniform((steps, outer, *shape), like, generator)

    def pooled(seen: Rollout, contrasts: Tensor) -> Tensor:
        return log_history(experiment, seen, contrasts).logsumexp(0)

    pool = _compiled(pooled) if compiled else pooled

    def bound() -> Tensor:
        seen = rollout(experiment, policy, theta, noise)
        terms = seen.log_p - torch.logaddexp(seen.log_p, pool(seen, others))
        if not seen.pathwise:  # which outcomes come depends on the weights too
            fixed = terms.detach()
            terms = terms + (seen.log_p - seen.log_p.detach()) * (fixed - fixed.mean())
        return terms.mean() + math.log(inner + 1)

    on_gpu = like.is_cuda
    size = torch.tensor(rate, device=like.device) if on_gpu else rate
    adam = torch.optim.Adam(weights, lr=size, betas=(0.8, 0.998), capturable=on_gpu)

    def update() -> Tensor:
        adam.zero_grad()
        value = bound()
        (-value).backward()
        torch.nn.utils.clip_grad_norm_(weights, clip)
        adam.step()
        return value.detach()

    graph = _captured(update) if on_gpu else None
    step = graph or update
    history: list[float] = []
    done = 0
    for t in range(updates):
        now = 0.5 * rate * (1 + math.cos(math.pi * t / updates))
        for group in adam.param_groups:
            if on_gpu:
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        theta.copy_(draw(outer, generator, like))
        others.copy_(draw(inner, generator, like))
        noise.copy_(uniform(noise.shape, like, generator))
        value = step()
        done = t + 1
        if done % every == 0 or done == updates:
            history.append(float(value))
            if not math.isfinite(history[-1]):
                raise NumericalError(f"sPCE is {history[-1]} after {done} updates: lower the rate")
            if report is not None and report(done, history[-1]):
                break
    return Trained(history, done, graph is not None)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    fused = torch.compile(function)
    working = True

    def call(*args: object) -> Tensor:
        nonlocal working
        if working:
            try:
                return fused(*args)
            except Exception as error:  # the compiler's, of any kind: plain operations do the same
                log.warning("the contrasts are not compiled: %s", str(error).split("\n")[0])
                working = False
        return function(*args)

    return call


def _captured(update: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
    """An update as a CUDA graph, launched once whatever it consists of; None where it cannot be:
    a likelihood that sends a number to the GPU, or waits for one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            value = update()
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).split("\n")[0]
        log.warning("updates are not captured, and run one operation at a time: %s", reason)
        return None

    def replay() -> Tensor:
        graph.replay()
        return value

    return replay
