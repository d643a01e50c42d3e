"""A prior over weights tuned so that its functions are those of a prior over functions.

    min_ψ D(p_ψ(f(X)), p(f(X))),   X some measurement points, new in every step

for weights w = m + σ_g ε of each tensor g, with ψ = log σ_g, or for scales that are unknown
themselves, σ_g = exp(ψ_g + e^(ψ'_g) z), or for a flow, w = m + σ_g sinh(t_g ε)/t_g with ψ' = log t.
D is estimated on S functions of each side at N points:

    energy   2 E|f − g| − E|f − f'| − E|g − g'| (Székely & Rizzo, 2013): zero if and only if
             both are one distribution, with gradients that are unbiased at any S
    sliced   the 1-Wasserstein distance of θᵀf and θᵀg, the mean over random unit θ, by sorting
             (Bonneel et al., 2015)

with |·| the root mean square over points and outputs: both are in the units of f. Tran et al.
(2022) bound the 1-Wasserstein distance of f(X) itself by a network of slope 1 that is trained in an
inner loop; tried here with 20 steps of it for each step of ψ, it took ten to twenty times as long
and left the functions narrower than the target's (docs/functional_priors.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.engine.engine import choose, works
from doxa.errors import DataError, ModelError
from doxa.model import Model
from doxa.noise import Noise
from doxa.optim import schedule
from doxa.priors import FlowPrior, Hierarchical, Normal, Prior
from doxa.priors.functions import FunctionPrior

_SLICES = 128  # directions in a step
_FIRST_SHAPE = 0.3  # of log σ where it is unknown, and the first tail of a flow


class Matched(NamedTuple):
    """What was found for each of R runs."""

    names: tuple[str, ...]  # of the tensors
    log_scale: Tensor  # [R, tensors]
    log_shape: Tensor | None
    distances: Tensor  # [R, steps]
    kind: str

    def priors(self, run: int) -> dict[str, Prior]:
        """The prior of every tensor of one run, by name."""
        scale = self.log_scale[run].double().exp().tolist()
        if self.log_shape is None:
            return {n: Normal(s) for n, s in zip(self.names, scale, strict=True)}
        shape = self.log_shape[run].double().exp().tolist()
        each = zip(self.names, scale, shape, strict=True)
        if self.kind == "flow":
            return {n: FlowPrior(s, a) for n, s, a in each}
        return {n: Hierarchical("log-normal", s, a) for n, s, a in each}


@dataclass(frozen=True)
class Matching:
    """How to tune: see `doxa.functional_prior`."""

    target: FunctionPrior
    kind: str = "gaussian"
    distance: str = "energy"
    steps: int = 300
    functions: int = 128
    points: int = 48
    rate: float = 0.05

    def __call__(self, model: Model, rows: Sequence[Tensor], seeds: Sequence[int]) -> Matched:
        """Tuned at rows [L_r, ...] of each run r, with random numbers of its seed."""
        sides = Sides(self, model, rows, seeds)
        psi = sides.start()
        optimiser = torch.optim.Adam([psi], self.rate)
        rates = schedule("cosine", self.steps)
        mean, distances = torch.zeros_like(psi), []
        late = max(1, self.steps // 4)
        for t in range(self.steps):
            with torch.enable_grad():
                f, g = sides.draw(psi.requires_grad_(), t)
                if self.distance == "energy":
                    apart = energy(f, g)  # [R]
                else:
                    apart = sliced(f, g, sides.noise.normal((f.shape[-1], _SLICES), t, 5))
                (psi.grad,) = torch.autograd.grad(apart.sum(), psi)
            optimiser.param_groups[0]["lr"] = self.rate * float(rates[t])
            optimiser.step()
            distances.append(apart.detach())
            if t >= self.steps - late:
                mean += psi.detach() / late
        scale, *more = mean.split(len(sides.names), 1)
        shape = more[0] if more else None
        return Matched(sides.names, scale, shape, torch.stack(distances, 1), self.kind)


class Sides:
    """Functions of both priors at new points in every step."""

    def __init__(
        self, how: Matching, model: Model, rows: Sequence[Tensor], seeds: Sequence[int]
    ) -> None:
        if any(not isinstance(x, Tensor) or not x.is_floating_point() for x in rows):
            raise DataError("a functional prior needs x as one array of real numbers")
        if model.output is None or not all(isinstance(size, int) for size in model.output):
            raise ModelError("a functional prior is for a network with one output")
        self.how, self.model, self.outputs = how, model, math.prod(model.output)
        entries = [e for e in model.layout.entries if not e.name.startswith("likelihood.")]
        self.entries, self.names = entries, tuple(e.name for e in entries)
        device, dtype = model.device, model.dtype
        sizes = torch.tensor([e.size for e in entries])
        spread = lambda values: torch.repeat_interleave(torch.as_tensor(values), sizes).to(device)  # noqa: E731
        self.place = spread(torch.arange(len(entries)))  # the tensor of each weight, [P]
        self.centre = spread([e.centre for e in entries]).to(dtype)
        longest = max(len(x) for x in rows)
        self.rows = torch.stack(  # [R, L, ...]; those that only fill a run up are never drawn
            [x[torch.arange(longest) % len(x)].to(device, dtype) for x in rows]
        )
        self.lengths = torch.tensor([len(x) for x in rows], device=device, dtype=dtype)
        self.low, self.high = self.rows.amin(1, True), self.rows.amax(1, True)
        self.noise = Noise(0, "functional prior", [*seeds], device, dtype)
        self.engine = choose(model, len(rows) * how.functions, device)

        def trial(tried: object) -> None:
            self.engine = tried  # type: ignore[assignment]
            self.draw(self.start(), 0)

        self.engine = works(self.engine, trial)

    def start(self) -> Tensor:
        """Scales that keep a unit's input at any width, [R, tensors] or twice as many."""
        log_scale = torch.tensor([-0.5 * math.log(e.fan_in) for e in self.entries])
        if self.how.kind != "gaussian":
            shape = torch.full_like(log_scale, math.log(_FIRST_SHAPE))
            log_scale = torch.cat([log_scale, shape])
        return log_scale.to(self.rows).repeat(len(self.rows), 1)

    def measure(self, t: int) -> Tensor:
        """Half of the points are rows of the data, half are uniform in their range: [R, N, ...]."""
        half, shape = self.how.points // 2, self.rows.shape[2:]
        u = self.noise.uniform((half,), t, 0) * self.lengths[:, None]  # (0, L]
        index = (u.ceil().long() - 1).clamp(min=0).clamp(max=self.rows.shape[1] - 1)
        each = torch.arange(len(self.rows), device=index.device)[:, None]
        free = self.noise.uniform((self.how.points - half, *shape), t, 1)
        return torch.cat([self.rows[each, index], torch.lerp(self.low, self.high, free)], 1)

    def draw(self, psi: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Functions of the network and of the target, [R, S, N·outputs]."""
        x, s = self.measure(t), self.how.functions
        runs, tensors = len(x), len(self.names)
        eps = self.noise.normal((s, len(self.place)), t, 2)
        log_scale = psi[:, None, :tensors]
        if self.how.kind == "flow":
            tail = psi[:, None, tensors:].exp()[..., self.place]
            eps = torch.sinh(tail * eps) / tail
        elif self.how.kind == "hierarchical":
            z = self.noise.normal((s, tensors), t, 3)
            log_scale = log_scale + psi[:, None, tensors:].exp() * z
        flat = self.centre + log_scale.exp()[..., self.place] * eps  # [R, S, P]
        each = flat.flatten(0, 1).split([e.size for e in self.entries], -1)
        weights = {e.name: w.reshape(-1, *e.shape) for e, w in zip(self.entries, each, strict=True)}
        shared = runs == 1
        inputs = x[0] if shared else x.repeat_interleave(s, 0)
        f = self.engine.apply(self.model, weights, inputs, shared=shared).f
        drawn = self.noise.normal((s, *self.how.target.noise_shape(x.shape[1], self.outputs)), t, 4)
        g = self.how.target.functions(x, drawn, self.outputs)
        return f.reshape(runs, s, -1), g.reshape(runs, s, -1)


def energy(f: Tensor, g: Tensor) -> Tensor:
    """The energy distance of draws [R, S, D] and [R, S', D], without bias: [R]. It may come out
    below zero where both are alike."""

    def within(a: Tensor) -> Tensor:
        return _mean_distance(a, a) * (a.shape[1] / (a.shape[1] - 1))  # without i = j

    return 2 * _mean_distance(f, g) - within(f) - within(g)


def _mean_distance(a: Tensor, b: Tensor) -> Tensor:
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :]
    apart = (squares - 2 * a @ b.mT) / a.shape[-1]
    apart = torch.where(apart > 1e-9, apart, torch.zeros_like(apart))  # and no slope at 0
    return (apart.clamp_min(1e-18).sqrt() * (apart > 0)).mean((-2, -1))


def sliced(f: Tensor, g: Tensor, directions: Tensor) -> Tensor:
    """The mean 1-Wasserstein distance of draws [R, S, D] along directions [R, D, L], [R]: on a line
    the best plan pairs the smallest with the smallest."""
    unit = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    along = [(side @ unit).sort(1).values for side in (f, g)]  # [R, S, L]
    return (along[0] - along[1]).abs().mean((1, 2))
