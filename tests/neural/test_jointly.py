"""Densities of several points together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from short import short

import doxa
from doxa.data import Tasks, TaskSampler
from doxa.data.simulated import gp_tasks
from doxa.errors import ShapeError


def method(name: str) -> Any:
    settings = {"mode": "autoregressive"} if name == "tnp" else {}
    return type(short(name))(**{**short(name).settings(), **settings, "min_std": 0.2})


@pytest.mark.parametrize("name", ["cnp", "np", "tnp"])
def test_a_point_is_integrated_out(name: str) -> None:
    """∫ p(y_1, y_2) dy_2 = p(y_1), which `predict` gives, by the trapezium rule on tasks that
    differ in y_2; in units that are not those of the fit. Points are tied together: by z, by the
    chain rule, and by members that disagree."""
    tasks = TaskSampler(gp_tasks(points=8), look=8)
    x, y, *_ = tasks.first
    data = Tasks([(2 * a, 3 * b + 1) for a, b in zip(x, y, strict=True)])
    options = {"steps": 30, "members": 2, "standardize": True, "progress": False}
    posterior = doxa.fit(None, data, method(name), **options)
    known = posterior.condition(2 * x[0, :3], 3 * y[0, :3] + 1)
    rows, first = torch.tensor([[0.4], [0.7]]).double(), 1.3
    grid = torch.linspace(-60, 60, 2001).double()
    count = len(grid)
    alike = {
        "context_x": 2 * x[:1, :3].expand(count, -1, -1),
        "context_y": (3 * y[:1, :3] + 1).expand(count, -1, -1),
        "context": torch.ones(count, 3).double(), "target_x": rows.expand(count, -1, -1),
    }  # fmt: skip
    both = torch.stack([torch.full_like(grid, first), grid], 1).unsqueeze(2)
    logs = posterior.joint_log_prob(alike, both, n=6, seed=3)
    p = known.predict(rows, n=6, seed=3)
    alone = p.log_prob(torch.tensor([[first], [1.0]]).double())
    assert float(torch.trapezoid(logs.exp(), grid)) == pytest.approx(float(alone[0].exp()), 1e-6)
    at = known.joint_log_prob(rows, torch.tensor([[first], [1.0]]), n=6, seed=3)
    assert abs(float(at - alone.sum())) > 1e-6
    with pytest.raises(ShapeError, match="every target"):
        known.joint_log_prob(rows, torch.zeros(3, 1))
