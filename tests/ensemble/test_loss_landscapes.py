"""The picture of many modes: its scaling, its distances, and the trajectories it is drawn from."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from examples import load


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("loss_landscapes")


def test_points_of_a_plane_are_found_from_their_distances(example: ModuleType) -> None:
    """Turned or mirrored, but for their distances, which are exact."""
    points = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = torch.cdist(points, points)
    places = example.scaled(distance)
    torch.testing.assert_close(torch.cdist(places, places), distance, rtol=1e-9, atol=1e-9)
    assert places[:, 0].var() > places[:, 1].var()  # the leading direction first


def test_distances_between_functions(example: ModuleType) -> None:
    """Sure and opposite: 1. Sure against an even chance: √(1 − √½), on one row of two."""
    p = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]])
    found = example.hellinger(p)
    assert float(found[0, 1]) == pytest.approx(1.0)
    assert float(found[0, 2]) == pytest.approx(((1 - 0.5**0.5) / 2) ** 0.5)
    share = example.disagreement(torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]]))
    assert share.tolist() == [[0.0, 0.5], [0.5, 0.0]]


def test_a_short_fit_is_the_beginning_of_a_longer_one(example: ModuleType) -> None:
    x, y, *_ = example.digits()
    short, long = [losses(example, x[:60], y[:60], steps) for steps in (10, 20)]
    common = sorted(short.keys() & long.keys())  # steps that both reported
    assert len(common) > 1
    assert [short[t] for t in common] == [long[t] for t in common]


def losses(example: ModuleType, x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[int, Any]:
    """By the number of steps done."""
    seen: dict[int, Any] = {}
    keep = lambda t, info: seen.update({t: info["loss"]})  # noqa: E731
    example.fitted("deep-ensemble", x, y, members=2, steps=steps, callbacks=[keep])
    return seen
