"""Stages that validate stop in time, and each member keeps its best state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import doxa

# What happens after the stage that validates moves the weights on purpose.
MOVES_ON = dict.fromkeys(("swa", "swag"), "averages the points of later steps") | {
    "snapshot": "starts anew in every cycle",
    "vip": "is judged by its process, not by one network: tests/function has it",
}


def noise_to_fit(case: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training rows and held-out ones that have nothing to do with each other: whatever is
    learned is overfitting."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(24, 2, generator=g, dtype=torch.float64)
    if case.regression:
        y: Tensor = torch.randn(24, generator=g, dtype=torch.float64)
    else:
        y = torch.randint(0, 3, (24,), generator=g)
        y[:3] = y[12:15] = torch.arange(3)
    return (x[:12], y[:12]), (x[12:], y[12:])


def held_out_score(posterior: Any, k: int, x: Tensor, y: Tensor) -> float:
    """Σ log p(y | x) of member k's weights without what the method adds to them (masks, a
    covariance); particles are averaged."""
    points = posterior.samples[k] if posterior.kind == "sample" else posterior.point()[k : k + 1]
    points = points.expand(getattr(posterior, "components", None) or len(points), -1)
    x, y = x.to(posterior.device), y.to(posterior.device)
    y = y[:, None] if y.is_floating_point() else y
    model, own = posterior.model, getattr(posterior, "layers", None)
    params = [posterior.layout.unflatten(p) for p in points]
    if own is not None:  # what layers learned, of each particle, or of the member
        each_own = own[k].expand(len(params), -1)
        params = [p | model.layers.unflatten(q) for p, q in zip(params, each_own, strict=True)]
    each = [
        model.log_likelihood(p, x, y, {name: v[k] for name, v in buffers_of(posterior, j).items()})
        for j, p in enumerate(params)
    ]
    return float((torch.logsumexp(torch.stack(each), 0) - math.log(len(each))).sum())


def buffers_of(posterior: Any, draw: int) -> dict[str, Tensor]:
    """What the layers of a draw learned besides parameters, [K, ...]."""
    own = posterior.buffers
    return {n: v[:, draw] for n, v in own.items()} if getattr(posterior, "per_draw", False) else own


@pytest.mark.by_family
def test_each_member_ends_with_its_best_score(trained: Any) -> None:
    if trained.row.family == "mcmc":
        pytest.skip("its draws are no optimum")
    if trained.name in MOVES_ON:
        pytest.skip(MOVES_ON[trained.name])
    train, held = noise_to_fit(trained)
    settings = {"average": 0.0} if "average" in trained.cls().settings() else {}
    likelihood = (
        doxa.Gaussian(noise=0.5) if trained.regression else doxa.Categorical(temperature=1.0)
    )
    posterior = trained.fit(
        train, members=2, validation=held, steps=200, lr=0.05, batch_size=12, patience=200,
        schedule="constant", standardize=False, dtype=torch.float64, likelihood=likelihood,
        settings=settings, prior=doxa.Normal(3.0),
    )  # fmt: skip
    for k in range(2):
        scores = [each[k] for _, each in posterior.history["validation"]]
        assert max(scores) > scores[-1] + 0.1, "it never overfitted, so that nothing was tested"
        assert held_out_score(posterior, k, *held) == pytest.approx(max(scores), rel=1e-9)


@pytest.mark.by_family
def test_it_stops_when_no_member_gains(trained: Any) -> None:
    """After `patience` validations; the history has them all, of every member."""
    if trained.name in ("snapshot", "swa", "swag"):
        pytest.skip("has a patience in every stage that validates")
    train, held = noise_to_fit(trained)
    posterior = trained.fit(
        train, members=2, validation=held, steps=400, lr=0.05, batch_size=12, patience=5,
        schedule="constant", standardize=False, prior=doxa.Normal(3.0),
    )  # fmt: skip
    seen = posterior.history.get("validation")
    if seen is None:
        assert trained.row.family == "mcmc", "a method that optimises validates"
        return
    assert all(len(scores) == 2 for _, scores in seen)
    assert len(seen) < 400
    ends = []
    for m in range(2):  # a member whose patience is over does not begin again
        best = 0
        for i, (_, scores) in enumerate(seen):
            if i > best + 5:
                break
            best = i if scores[m] > seen[best][1][m] else best
        ends.append(best + 5)
    assert len(seen) - 1 == max(ends)
