"""A batch ensemble: one weight matrix, K rank-one factors a layer, each component trained on its
own part of every batch and with BatchNorm statistics of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trial import curve, held_to_the_protocol

import doxa
from doxa import store
from doxa.method import (
    Method,
    Problem,
    Run,
    Stage,
    State,
    flatten_particles,
    network_part,
    optimise,
    unflatten_particles,
)
from doxa.model.layers import MethodLayer
from doxa.model.model import Network
from doxa.posterior import SamplePosterior


class RankOne(MethodLayer, nn.Linear):
    """((x ∘ s) Wᵀ) ∘ r + b: a linear layer with weights W ∘ (r sᵀ)."""

    own = ("r", "s")

    def __init__(self, inputs: int, outputs: int) -> None:
        self.r = self.s = None  # reset_parameters runs before they exist
        super().__init__(inputs, outputs)
        self.r, self.s = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.ones(inputs))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for factor in (self.r, self.s):
            if factor is not None:
                nn.init.normal_(factor, 1.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.s, self.weight) * self.r + self.bias


@store.register("test-batch-ensemble")
@dataclass(frozen=True)
class BatchEnsemble(Method):
    name: ClassVar[str] = "test-batch-ensemble"
    size: int = 4

    def __post_init__(self) -> None: ...

    @property
    def width(self) -> int:
        return self.size

    def prepare(self, problem: Problem) -> Problem:
        def rule(name: str, layer: nn.Module) -> nn.Module | None:
            plain = type(layer) is nn.Linear
            return RankOne(layer.in_features, layer.out_features) if plain else None

        assert isinstance(problem, Network)
        return problem.rewrite(rule)

    def init(self, run: Run) -> State:
        state = unflatten_particles(run.expand_particles(self.size).init_network(), self.size)
        return {**state, "theta": run.start()}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._objective, run.steps, over=("theta", "layers"))

    def _objective(self, run: Run, params: State, batch: Any, clock: Any) -> Any:
        k = self.size
        theta = params["theta"].repeat_interleave(k, 0)  # [M·K, P]
        inner = flatten_particles(network_part(params), k)
        fit = run.expand_particles(k).train(theta, inner, batch.split(k), clock.expand_particles(k))
        value = fit.value.unflatten(0, (-1, k)).mean(1)
        return value, unflatten_particles(fit.changed, k), run.known_prior(params["theta"])

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
        samples = state["theta"].unsqueeze(1).expand(-1, self.size, -1).contiguous()
        common = run.common(self) | run.shared(state)
        return SamplePosterior(samples=samples, chain=False, per_draw=True, **common)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def test_it_trains_stacked_and_is_resumed(tmp_path: Path) -> None:
    x, _ = data = curve()
    posterior = held_to_the_protocol(net(), data, BatchEnsemble(), tmp_path, batch_size=16)
    statistics = posterior.buffers["1.running_mean"]
    assert statistics.shape == (3, 4, 6)
    assert len({tuple(row) for row in statistics.flatten(0, 1).tolist()}) == 12
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run", net=net())
    assert torch.equal(again.predict(x).samples, posterior.predict(x).samples)


def test_it_is_so_many_networks_with_rank_one_factors(tmp_path: Path) -> None:
    """W ∘ (r sᵀ), written out for every component; and what layers brought is no weight."""
    x, _ = data = curve()
    posterior = doxa.fit(net(), data, BatchEnsemble(), members=2, steps=20, batch_size=16)
    assert not any(name.endswith((".r", ".s")) for name in posterior.layout.names)
    assert set(posterior.network.layers.names) == {"0.r", "0.s", "3.r", "3.s"}
    f = posterior.functions(x, 8).reshape(2, 4, *x.shape)
    for m in range(2):
        for k in range(4):
            w = posterior.layout.unflatten(posterior.samples[m, k])
            own = posterior.network.layers.unflatten(posterior.layers[m, k])
            explicit = net().eval()
            with torch.no_grad():
                for i in (0, 3):
                    outer = torch.outer(own[f"{i}.r"], own[f"{i}.s"])
                    explicit[i].weight.copy_(w[f"{i}.weight"] * outer)
                    explicit[i].bias.copy_(w[f"{i}.bias"])
                for name in ("running_mean", "running_var"):
                    getattr(explicit[1], name).copy_(posterior.buffers[f"1.{name}"][m, k])
                explicit[1].weight.copy_(w["1.weight"])
                explicit[1].bias.copy_(w["1.bias"])
                assert torch.allclose(f[m, k], explicit(x), rtol=1e-10)
