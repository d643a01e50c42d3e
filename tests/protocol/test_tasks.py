"""A set encoder on tasks of uneven size: padded, masked, scaled together, cut into context and
targets anew at each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from trial import held_to_the_protocol

import doxa
from doxa import store
from doxa.data.tasks import Tasks
from doxa.method import Method, Run, Stage, State, log_joint, optimise
from doxa.posterior import SamplePosterior


class SetEncoder(nn.Module):
    """f(x*) = decoder(mean of encoder(x, y) over the context, x*)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 8))
        self.decoder = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(
        self, context_x: Tensor, context_y: Tensor, context: Tensor, target_x: Tensor
    ) -> Tensor:
        each = self.encoder(torch.cat([context_x, context_y], -1)) * context.unsqueeze(-1)
        code = each.sum(-2) / context.sum(-1, keepdim=True)
        code = code.unsqueeze(-2).expand(*target_x.shape[:-1], -1)
        return self.decoder(torch.cat([code, target_x], -1))


@store.register("test-set-encoder")
@dataclass(frozen=True)
class Meta(Method):
    name: ClassVar[str] = "test-set-encoder"

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(log_joint, run.steps, source="tasks")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
        common = run.common(self) | run.shared(state)
        return SamplePosterior(samples=state["theta"].unsqueeze(1), **common)


def tasks(count: int = 30) -> list[tuple[Tensor, Tensor]]:
    """Constants: a task's level is all there is to infer from its context."""
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        n = int(torch.randint(3, 9, (1,), generator=g))
        x = torch.rand(n, generator=g, dtype=torch.float64)
        level = 5 + 2 * torch.randn(1, generator=g, dtype=torch.float64)
        found.append((x, level + 0.1 * torch.randn(n, generator=g, dtype=torch.float64)))
    return found


@pytest.mark.slow
def test_it_trains_stacked_and_is_resumed(tmp_path: Path) -> None:
    data = Tasks(tasks())
    posterior = held_to_the_protocol(
        SetEncoder().double(), data, Meta(), tmp_path, standardize=True, steps=150
    )
    x, y = data.padded()
    half = (x["context"].cumsum(1) <= 2).double() * x["context"]
    seen = half.unsqueeze(-1)
    given = {**x, "context": half, "context_x": x["context_x"] * seen,
             "context_y": x["context_y"] * seen}  # fmt: skip
    error = (posterior.predict(given).mean - y).abs().squeeze(-1)
    targets = (x["context"] - half) > 0
    assert float(error[targets].mean()) < 0.6  # levels differ by 2: it reads them off the context


def test_a_task_does_not_depend_on_how_far_it_was_padded() -> None:
    """The log-likelihood of short tasks beside a long one, and without it."""
    net, few = SetEncoder().double(), tasks(4)
    long = (torch.rand(30).double(), torch.rand(30).double())
    seen = []
    for given in (few, [*few, long]):
        posterior = doxa.fit(
            net, Tasks(given), Meta(), init="given", lr=1e-12, steps=2, batch_size=len(given),
            likelihood=doxa.Gaussian(noise=1.0), schedule="constant",
        )  # fmt: skip
        x, _ = Tasks(given).padded()
        p = posterior.predict({k: v[:4] for k, v in x.items()})
        real = x["context"][:4] > 0
        seen.append(p.mean[:, : real.shape[1]].squeeze(-1)[real])
    assert torch.allclose(seen[0], seen[1], rtol=1e-10)


def test_contexts_leave_something_to_predict_and_change_with_the_step() -> None:
    from doxa.data import BatchRequest, Data, Standardisation
    from doxa.data.tasks import RandomTasks

    x, y = Tasks(tasks()).padded()
    cpu = torch.device("cpu")
    data = Data(x, y, [torch.arange(30)], [Standardisation()], cpu, torch.float64, 30, tasks=True)
    feed = RandomTasks().open(BatchRequest(data, [0, 0], ["a", "b"], 10, "train"))
    first, later = feed.batch(0), feed.batch(1)
    for batch in (first, later):
        assert (batch.x["context"].sum(-1) >= 1).all()
        assert (batch.points.sum(-1) >= 1).all()
        assert ((batch.points + batch.x["context"]) <= 1).all()
        assert (batch.x["context_y"][batch.x["context"] == 0] == 0).all()
    assert not torch.equal(first.points, later.points)
    again = RandomTasks().open(BatchRequest(data, [0], ["b"], 10, "train")).batch(0)
    assert torch.equal(again.points, first.points[1])
