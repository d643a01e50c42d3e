"""A flow over weights with an auxiliary network: an objective over five named trainables, two of
them modules of the method's own (multiplicative normalizing flows in small)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from trial import curve, held_to_the_protocol

import doxa
from doxa import store
from doxa.method import Clock, Method, Problem, Run, Stage, State, optimise
from doxa.posterior import SamplePosterior

SIZE = 4  # of z


class Coupling(nn.Module):
    """z = [a, b ∘ exp(s(a)) + t(a)] with log |det| = Σ s(a)."""

    def __init__(self) -> None:
        super().__init__()
        half = SIZE // 2
        self.net = nn.Sequential(nn.Linear(half, 8), nn.Tanh(), nn.Linear(8, 2 * half))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a, b = z.chunk(2, -1)
        s, t = self.net(a).chunk(2, -1)
        s = s.tanh()
        return torch.cat([a, b * s.exp() + t], -1), s.sum(-1)


@store.register("test-flow")
@dataclass(frozen=True)
class FlowVI(Method):
    """q(θ) = ∫ N(θ; μ + Az, σ²) q(z) dz, with q(z) a flow and r(z | θ) for the bound."""

    name: ClassVar[str] = "test-flow"

    def prepare(self, problem: Problem) -> Problem:
        auxiliary = nn.Sequential(nn.Linear(problem.layout.size, 8), nn.Tanh(), nn.Linear(8, SIZE))
        return problem.add_modules(flow=Coupling(), auxiliary=auxiliary)

    def init(self, run: Run) -> State:
        state = {**run.init_network(), **run.init_modules()}
        mean = state.pop("theta")
        mix = 0.1 * run.noise("mix").normal((mean.shape[1], SIZE))
        return {**state, "mean": mean, "rho": torch.full_like(mean, -3.0), "mix": mix}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._bound, run.steps, over=("mean", "rho", "mix", "flow", "auxiliary"))

    def _draw(self, run: Run, params: State, z0: Tensor, eps: Tensor) -> tuple[Tensor, ...]:
        z, log_det = run.call("flow", params, z0)
        centre = params["mean"] + (params["mix"] @ z.unsqueeze(2)).squeeze(2)
        return centre + params["rho"].exp() * eps, z, log_det

    def _bound(self, run: Run, params: State, batch: Any, clock: Clock) -> Any:
        z0, eps = clock.noise(SIZE), clock.noise(run.layout.size)
        theta, z, log_det = self._draw(run, params, z0, eps)
        fit = run.train(theta, params, batch, None)
        log_r = _log_normal(z - run.call("auxiliary", params, theta))
        log_q = _log_normal(z0) - log_det + _log_normal(eps) - params["rho"].sum(1)
        return fit.value + run.prior.log_prob(theta) + log_r - log_q, fit.changed

    def parameters(self, run: Run, state: State) -> Tensor:
        return state["mean"]

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
        source, draws = run.noise("draws"), []
        with torch.no_grad():
            for s in range(10):
                z0, eps = source.normal((SIZE,), s, 1), source.normal((run.layout.size,), s, 2)
                draws.append(self._draw(run, state, z0, eps)[0])
        common = run.common(self) | run.shared(state)
        return SamplePosterior(samples=torch.stack(draws, 1), chain=False, **common)


def _log_normal(x: Tensor) -> Tensor:
    return (-0.5 * x.square() - 0.5 * math.log(2 * math.pi)).sum(1)


@pytest.mark.slow
def test_it_trains_stacked_and_is_resumed(tmp_path: Path) -> None:
    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    posterior = held_to_the_protocol(net, curve(), FlowVI(), tmp_path, steps=100)
    assert posterior.samples.std(1).min() > 0


def test_the_flow_and_the_auxiliary_network_are_trained() -> None:
    """Each of the five names has moved, and members started apart."""
    seen: dict[str, Tensor] = {}

    @dataclass(frozen=True)
    class Watched(FlowVI):
        name: ClassVar[str] = "test-watched-flow"

        def init(self, run: Run) -> State:
            seen.update({f"start.{k}": v.clone() for k, v in super().init(run).items()})
            return super().init(run)

        def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
            seen.update(state)
            return super().finish(run, state, kept)

    net = doxa.nets.mlp(1, 1, (5,), "tanh").double()
    doxa.fit(net, curve(), Watched(), members=2, steps=30)
    for name in ("mean", "rho", "mix", "flow", "auxiliary"):
        assert not torch.allclose(seen[name], seen[f"start.{name}"]), name
    for name in ("flow", "auxiliary"):
        assert not torch.allclose(seen[f"start.{name}"][0], seen[f"start.{name}"][1]), name
