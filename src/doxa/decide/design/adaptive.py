"""Deep adaptive design: a policy that maximises the total information of a run of experiments.

    sPCE  E log p(h_T | θ₀, π) − log (1/(L+1)) Σ_{l=0..L} p(h_T | θ_l, π)     a lower bound
    sNMC  E log p(h_T | θ₀, π) − log (1/L) Σ_{l=1..L} p(h_T | θ_l, π)         an upper bound

on the total information of T experiments, with p(h_T | θ, π) = Π_t p(y_t | θ, d_t) and
θ₀, …, θ_L ~ p(θ): Foster et al. (2021), equations 11 and 12. Training ascends sPCE, through y where
that is reparametrisable, else by the score function. All rollouts run side by side; the contrasts
of all steps are one tensor. On a GPU an update is captured once and replayed.

A policy gives the next design as a function of the history:

    d_t = π(h_{t−1}),   h_t = {(d_1, y_1), …, (d_t, y_t)}

Deep adaptive design (Foster et al., 2021) is a network over the set of outcomes,
π(h) = emit(Σ_s encode(d_s, y_s)): the order of outcomes does not matter, and choosing a design
costs one forward pass. `Fixed` designs are the same for all subjects, `Random` ones are drawn.

The total information under a policy is estimated between the two bounds in constant memory:
contrasts are processed in blocks, and their sum is kept in logarithms.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from doxa import checks
from doxa.decide.design.draws import from_uniform, source, uniform
from doxa.decide.design.experiment import Box, Experiment, Reals, Space, as_numbers
from doxa.errors import MethodError, NumericalError

_EDGE = 0.01  # of a box's width: nearer to an end, the sigmoid of a fixed design is a line
_BEND, _SLOPE = math.log((1 - _EDGE) / _EDGE), _EDGE * (1 - _EDGE)


class Policy(nn.Module, ABC):
    """A policy: `start` a history of n experiments, get a `design`, `observe` its outcome."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space = space

    @abstractmethod
    def start(self, n: int, like: Tensor) -> Any:
        """A history of n experiments without outcomes."""

    @abstractmethod
    def design(self, history: Any, t: int) -> Tensor:
        """[n, *shape]"""

    def observe(self, history: Any, design: Tensor, y: Tensor) -> Any:
        return history


def _bounds(policy: nn.Module, space: Space) -> bool:
    """Register the ends of a space as buffers of the policy; whether there are ends."""
    if isinstance(space, Reals):
        return False
    if not isinstance(space, Box):
        raise MethodError(
            f"a policy is learned by gradients: it needs a Box or Reals, and {space} is neither"
        )
    policy.register_buffer("low", space.low.clone())
    policy.register_buffer("high", space.high.clone())
    return True


def _squashed(raw: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return low + (high - low) * raw.sigmoid()


class Adaptive(Policy):
    """A network over the set of designs and outcomes so far.

    Parameters
    ----------
    space: a `Box`, which designs never leave, or `Reals`.
    outcome: the shape of one outcome.
    hidden: widths of the encoder's hidden layers. encoding: the size of the sum.
    emitter: widths of the emitter's hidden layers.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        space: Space,
        outcome: Sequence[int] = (),
        hidden: Sequence[int] = (128,),
        encoding: int = 16,
        emitter: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(space)
        self.bounded = _bounds(self, space)
        size = max(1, math.prod(space.shape))
        self.encoding = checks.whole("encoding", encoding)
        self.encode = _layers([size + max(1, math.prod(outcome)), *hidden, encoding])
        self.emit = _layers([encoding, *emitter, size])
        generator = source("cpu", "policy", seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def start(self, n: int, like: Tensor) -> Tensor:
        return like.new_zeros(n, self.encoding)

    def design(self, history: Tensor, t: int) -> Tensor:
        raw = self.emit(history).reshape(len(history), *self.space.shape)
        return _squashed(raw, self.low, self.high) if self.bounded else raw

    def observe(self, history: Tensor, design: Tensor, y: Tensor) -> Tensor:
        flat = [design.reshape(len(design), -1), y.reshape(len(y), -1).to(design)]
        return history + self.encode(torch.cat(flat, 1))


def _layers(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


class Fixed(Policy):
    """T designs for all subjects, optimised together from `designs` or from a random start. The
    ends of a box are possible designs: they can be given, and the optimisation can reach and leave
    them."""

    low: Tensor
    high: Tensor

    def __init__(
        self, space: Space, steps: int, designs: Tensor | None = None, seed: int = 0
    ) -> None:
        super().__init__(space)
        self.bounded = _bounds(self, space)
        if designs is None:
            like = torch.zeros((), dtype=space.dtype)
            designs = space.draw(checks.whole("steps", steps), source("cpu", "fixed", seed), like)
        designs = space.check(as_numbers(designs, "designs", space.dtype))
        if self.bounded:
            share = (designs - self.low) / (self.high - self.low)
            inner = share.clamp(_EDGE, 1 - _EDGE)
            outer = (share - inner) / _SLOPE
            outer = outer + 0.1 * ((share >= 1).to(outer) - (share <= 0).to(outer))  # ends for sure
            designs = inner.logit() + outer
        self.raw = nn.Parameter(designs.clone())

    def start(self, n: int, like: Tensor) -> int:
        return n

    def design(self, history: int, t: int) -> Tensor:
        found = self.raw[t]
        if (
            self.bounded
        ):  # a sigmoid with straight ends, cut at those of the box; its gradient is not
            inner = found.clamp(-_BEND, _BEND)
            beyond = (found - inner.detach()) * _SLOPE * (self.high - self.low)
            inner = _squashed(inner, self.low, self.high)
            found = torch.where(found.abs() > _BEND, inner.detach() + beyond, inner)
            found = found + (found.maximum(self.low).minimum(self.high) - found).detach()
        return found.expand(history, *found.shape)


class Random(Policy):
    """Designs drawn from the space, new for each experiment."""

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__(space)
        self.seed = seed
        self.register_buffer(
            "like", torch.zeros((), dtype=space.dtype)
        )  # the type and device of its draws

    def start(self, n: int, like: Tensor) -> tuple[int, torch.Generator, Tensor]:
        return n, source(like.device, "random policy", self.seed), like

    def design(self, history: tuple[int, torch.Generator, Tensor], t: int) -> Tensor:
        n, generator, like = history
        return self.space.draw(n, generator, like)


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
    """Ascend sPCE over the weights of the policy, which is changed in place.

    Parameters
    ----------
    experiment : Experiment
        The experiment.
    policy : Policy
        The policy.
    steps : int
        T, the number of experiments in a run.
    updates : int
        Number of Adam updates; their rate falls to zero as a cosine.
    outer, inner : int
        Rollouts per update, and contrasts that they share.
    rate : float
        The initial rate.
    clip : float
        The largest norm of a gradient. A rollout near a singularity of the likelihood can have a
        gradient many times larger than the others.
    seed : int
        The random seed.
    compiled : bool
        Fuse the contrasts by torch.compile; if that fails, plain operations are used.
    every : int
        Updates between reports.
    report : callable, optional
        Called with (update, sPCE) every `every` updates. Training ends if it returns True.

    Returns
    -------
    Trained
        The bound during training, and the number of updates.
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
        if not seen.pathwise:  # the distribution of outcomes depends on the weights too
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
            except Exception as error:  # plain operations compute the same
                log.warning("the contrasts are not compiled: %s", str(error).split("\n")[0])
                working = False
        return function(*args)

    return call


def _captured(update: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
    """An update as a CUDA graph. None if it cannot be captured: if a likelihood copies a number to
    the GPU, or waits for one."""
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


_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # log densities held at a time


@dataclass(frozen=True)
class Information:
    """The total information of a policy, in nats: bounds with standard errors."""

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
    """sPCE and sNMC of a policy, from groups of rollouts with separate contrasts; in constant
    memory for any `inner`."""
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
